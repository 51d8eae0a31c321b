"""The copy lane of a CUDA device: a stream that lives as long as the engine."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.transfer.copy_lanes import HostWork, Ticket
from zenflow_compile.runtime.transfer.stream_flags import Flag, make_flags

_POLL_EVENT_SECONDS = 1.0


class StreamTicket:
    """A copy on a CUDA stream."""

    def __init__(self, end: torch.cuda.Event, tensors: tuple[Tensor, Tensor], flag: Flag | None) -> None:
        self._end = end
        self._tensors = tensors  # the references keep both buffers alive while the copy is in flight
        self._flag = flag

    @property
    def error(self) -> BaseException | None:
        """None: CUDA reports a failed copy itself, from the next call that waits."""
        return None

    def done(self) -> bool:
        """See :meth:`Ticket.done`."""
        return self._flag.reached() if self._flag else bool(self._end.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See :meth:`Ticket.wait`."""
        if self._flag is None:
            self._end.synchronize()
            return
        while not self._flag.wait(_POLL_EVENT_SECONDS):
            # Raises if the device died: then the flag is never raised.
            self._end.query()  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """See :meth:`Ticket.settle`."""
        self._end.synchronize()

    def wait_on_device(self) -> None:
        """See :meth:`Ticket.wait_on_device`."""
        torch.cuda.current_stream(self._end.device).wait_event(self._end)


class StreamLane:
    """A lane of a CUDA device: one stream.

    Where the driver has stream memory operations, the stream raises a flag after every copy, so that workers need no
    CUDA call to see that it is done, and the stream itself waits for the flags of jobs.
    """

    def __init__(self, name: str, device: torch.device, recorder: Recorder) -> None:
        self._name = name
        self._device = device
        # Uploads wait for jobs, which wait for downloads: the two need different priorities, or the waiting stream may
        # stall the other one. See [Note: progress] in stream_flags.
        self._stream = torch.cuda.Stream(device, priority=-1 if name == "H2D" else 0)  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._flags = make_flags(1, device)
        self._copies = 0

    def submit(
        self,
        target: Tensor,
        source: Tensor,
        *,
        step: int,
        param: str,
        kind: str = "copy",
        after: HostWork | None = None,
        behind: Ticket | None = None,
    ) -> StreamTicket:
        timeline = self._recorder.timeline
        timed = timeline is not None
        start = torch.cuda.Event(enable_timing=True) if timed else None  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        # Backwards run on autograd's own thread: the producing stream is the current one here, not the creator's.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None and not after.done():
            assert after.flag is not None, "ask can_wait_for first"
            after.flag.wait_on(self._stream)
        with torch.cuda.stream(self._stream):
            if behind is not None:
                behind.wait_on_device()  # the current stream is the lane's here
            if start is not None:
                start.record(self._stream)
            target.copy_(source, non_blocking=True)
            end.record(self._stream)
        if timeline is not None and start is not None:
            timeline.add_device(self._name, kind, start, end, step=step, param=param, bytes=source.nbytes)
        return StreamTicket(end, (target, source), self._raise_flag())

    @property
    def failed(self) -> bool:
        """False: CUDA reports a failed copy itself, from the next call that waits."""
        return False

    def can_wait_for(self, work: HostWork) -> bool:
        """Whether the work raises a flag when it is done."""
        return work.flag is not None

    def settle(self) -> None:
        """See :meth:`CopyLane.settle`."""
        self._stream.synchronize()

    close = settle

    def runs(self, thread: threading.Thread) -> bool:
        """Always False: a stream is no thread."""
        return False

    def _raise_flag(self) -> Flag | None:
        if self._flags is None:
            return None
        self._copies += 1
        flag = Flag(self._flags, 0, self._copies)
        # Queued after the copy, and the stream keeps the order: a thread that sees the value sees the copied bytes.
        flag.write_from(self._stream)
        return flag
