"""Asynchronous copies between device and host: one lane per direction.

A lane keeps the order of copies to one place, and touches engine memory only, which was allocated once: so there is no
``record_stream`` and no race with the allocator. In-flight copies hold references to both ends.

On CUDA a lane is a stream. Where the device is the CPU itself, a lane is a thread that copies with the GIL released,
so that copies are as asynchronous there as anywhere.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from zenflow_compile.runtime.flags import Flag, make_flags
from zenflow_compile.runtime.recorder import Recorder

if TYPE_CHECKING:
    from zenflow_compile.runtime.workers import Job  # which knows of copies, too

INLINE_BYTES = 1 << 16
"""Copies up to this size are made at once where a lane is a thread: handing one over costs its ticket, its place in the
queue and two turns of the GIL, some 20 us, in which a core copies as much."""


_STREAM_ALIVE_SECONDS = 1.0


class CopyError(RuntimeError):
    """An asynchronous copy failed; chained to what made it fail."""


class Ticket(Protocol):
    """One copy in flight.

    Attributes:
        error: what made the copy fail; None while it runs and after a success.
    """

    @property
    def error(self) -> BaseException | None: ...

    def done(self) -> bool:
        """Whether the copy is complete."""
        ...

    def wait(self) -> None:
        """Block the calling thread until the copy is complete.

        Raises:
            CopyError: it failed; chained to the original error.
        """
        ...

    def settle(self) -> None:
        """Block the calling thread until the copy touches neither end any more, whether it failed or not."""
        ...

    def wait_on_device(self) -> None:
        """Make the device's current stream wait for the copy (on the CPU: the calling thread)."""
        ...


class CopyLane(Protocol):
    """Copies in one direction, those to one place in order of submission."""

    def submit(
        self,
        target: Tensor,
        source: Tensor,
        *,
        step: int,
        param: str,
        kind: str = "copy",
        after: Job | None = None,
        behind: Ticket | None = None,
    ) -> Ticket:
        """Copy ``source`` to ``target`` (same shape and dtype, contiguous) after the work queued on the device.

        Args:
            after: what writes ``source``. If it is not done the lane waits for it, which it must be able to.
            behind: a copy of the other lane, submitted before, that writes ``source`` or reads ``target``: the lane
                waits for it, and what made it fail makes this one fail. Not beside ``after``.
        """
        ...

    def can_wait_for(self, job: Job) -> bool:
        """Whether the lane itself can wait until ``job`` is done, so that no thread has to."""
        ...

    def close(self) -> None:
        """Finish what was submitted, then stop."""
        ...

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` belongs to the lane, so that it cannot wait for the lane's work."""
        ...


def make_lane(name: str, device: torch.device, recorder: Recorder) -> CopyLane:
    """The lane ``name`` ("D2H" or "H2D") of ``device``."""
    if device.type == "cuda":
        return StreamLane(name, device, recorder)
    return ThreadLane(name, recorder)


_FAILED = "an asynchronous copy between device and host failed; load the last saved state, or start anew"


class ThreadTicket:
    """A copy handed to a :class:`ThreadLane`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        return self._error

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set() and self._error is None

    def wait(self) -> None:
        self._event.wait()
        if self._error is not None:
            raise CopyError(_FAILED) from self._error

    def settle(self) -> None:
        self._event.wait()

    def wait_on_device(self) -> None:
        self.wait()


class DoneTicket:
    """A copy that was made at once."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def done(self) -> bool:
        return self.error is None

    def wait(self) -> None:
        if self.error is not None:
            raise CopyError(_FAILED) from self.error

    def settle(self) -> None:
        pass

    def wait_on_device(self) -> None:
        self.wait()


_DONE = DoneTicket()
_ThreadCopy = tuple[Tensor, Tensor, ThreadTicket, int, str, str, "Job | Ticket | None"]


class ThreadLane:
    """A lane of the CPU device: one thread, which ends with its owner's ``close`` or with the process."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name = name
        self._recorder = recorder
        self._queue: queue.SimpleQueue[_ThreadCopy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(
        self,
        target: Tensor,
        source: Tensor,
        *,
        step: int,
        param: str,
        kind: str = "copy",
        after: Job | None = None,
        behind: Ticket | None = None,
    ) -> Ticket:
        assert after is None or behind is None
        first = after if behind is None else behind
        if source.nbytes <= INLINE_BYTES and (first is None or first.done()):
            return self._copy(target, source, step, param, kind, first)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"zenflow-{self._name}", daemon=True)
            thread.start()
            self._thread = thread
        ticket = ThreadTicket()
        self._queue.put((target, source, ticket, step, param, kind, first))
        return ticket

    def can_wait_for(self, job: Job) -> bool:
        """Always: the lane is a thread."""
        return True

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is the lane's own."""
        return thread is self._thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            target, source, ticket, step, param, kind, first = item
            ticket.finish(self._copy(target, source, step, param, kind, first).error)

    def _copy(
        self, target: Tensor, source: Tensor, step: int, param: str, kind: str, first: Job | Ticket | None
    ) -> DoneTicket:
        try:
            if first is not None:
                first.wait()
            timeline = self._recorder.timeline
            begin = 0 if timeline is None else time.perf_counter_ns()
            copy_without_gil(target, source)
        except BaseException as error:
            return DoneTicket(error)
        if timeline is not None:
            end = time.perf_counter_ns()
            timeline.add(self._name, kind, begin, end, step=step, param=param, bytes=source.nbytes)
        return _DONE


def copy_without_gil(target: Tensor, source: Tensor) -> None:
    """Copy contiguous CPU tensors of one dtype with one thread.

    ``Tensor.copy_`` would use the intra-op pool, whose threads belong to the training thread.

    Raises:
        ValueError: shapes or dtypes differ, or a tensor is not contiguous or not on the CPU.
    """
    if target.dtype != source.dtype or target.shape != source.shape:
        raise ValueError(f"cannot copy {source.dtype}{tuple(source.shape)} into {target.dtype}{tuple(target.shape)}")
    for tensor in (target, source):
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise ValueError(f"cannot copy a tensor on {tensor.device} with strides {tensor.stride()}")
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)  # a foreign call: it runs without the GIL


class StreamTicket:
    """A copy on a CUDA stream."""

    def __init__(
        self,
        start: torch.cuda.Event | None,
        end: torch.cuda.Event,
        ends: tuple[Tensor, Tensor],
        flag: Flag | None,
    ) -> None:
        self.start = start
        self.end = end
        self._ends = ends  # the references keep both buffers alive while the copy is in flight
        self._flag = flag

    @property
    def error(self) -> BaseException | None:
        return None  # CUDA reports a failed copy itself, from the next call that waits

    def done(self) -> bool:
        return self._flag.reached() if self._flag else bool(self.end.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._flag is None:
            self.end.synchronize()
            return
        while not self._flag.wait(_STREAM_ALIVE_SECONDS):
            self.end.query()  # type: ignore[no-untyped-call]  # raises if the device died, and the counter never comes

    def settle(self) -> None:
        self.end.synchronize()

    def wait_on_device(self) -> None:
        torch.cuda.current_stream(self.end.device).wait_event(self.end)


class StreamLane:
    """A lane of a CUDA device: one stream that lives as long as the engine.

    With the driver's stream memory operations it raises a counter after every copy, which workers look at instead of
    calling CUDA, and waits itself for the counters of jobs ([Note: progress] in ``flags``: hence its priority).
    """

    def __init__(self, name: str, device: torch.device, recorder: Recorder) -> None:
        self._name = name
        self._device = device
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
        after: Job | None = None,
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
                behind.wait_on_device()  # the current stream, which waits, is the lane's own here
            if start is not None:
                start.record(self._stream)
            target.copy_(source, non_blocking=True)
            end.record(self._stream)
        if timeline is not None and start is not None:
            timeline.add_device(self._name, kind, start, end, step=step, param=param, bytes=source.nbytes)
        return StreamTicket(start, end, (target, source), self._raise_flag())

    def can_wait_for(self, job: Job) -> bool:
        """Whether the job raises a counter when it is done."""
        return job.flag is not None

    def _raise_flag(self) -> Flag | None:
        if self._flags is None:
            return None
        self._copies += 1
        flag = Flag(self._flags, 0, self._copies)
        flag.write_from(self._stream)
        return flag

    def close(self) -> None:
        self._stream.synchronize()

    def runs(self, thread: threading.Thread) -> bool:
        return False


class StagedBlock(NamedTuple):
    """A buffer of a ring, in use."""

    number: int
    tensor: Tensor


class StagingRing:
    """A few equal device buffers that copies pass through.

    Compiler-owned memory never takes part in an asynchronous copy, since the compiler reuses it while the copy runs.
    A buffer that was read by a copy is handed out again only once the device has waited for that copy.
    """

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        self._buffers = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._free: deque[tuple[int, Ticket | None]] = deque((number, None) for number in range(slots))
        # Three operators make a view; the same few blocks come again and again.
        self._views: dict[tuple[int, tuple[int, int], torch.dtype], Tensor] = {}

    def fit(self, slots: int, slot_bytes: int) -> None:
        """Be ``slots`` buffers of at least ``slot_bytes``; none may be in use."""
        slot_bytes = max(slot_bytes, self._buffers[0].numel())
        if slots != len(self._buffers) or slot_bytes > self._buffers[0].numel():
            self.settle()
            self._views.clear()
            device = self._buffers[0].device
            self._buffers = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
            self._free = deque((number, None) for number in range(slots))

    @property
    def free(self) -> int:
        """Buffers that can be taken now."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Device memory of the ring."""
        return sum(buffer.numel() for buffer in self._buffers)

    @property
    def busy(self) -> bool:
        """Whether ``take`` would wait."""
        ticket = self._free[0][1]
        return ticket is not None and not ticket.done()

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> StagedBlock:
        """The buffer that was free longest, as ``[line, length]``."""
        number, ticket = self._free[0]
        if ticket is not None:
            ticket.wait_on_device()  # if the copy failed this raises, and the buffer stays where it is
        self._free.popleft()
        view = self._views.get((number, shape, dtype))
        if view is None:
            size = shape[0] * shape[1] * dtype.itemsize
            view = self._views[number, shape, dtype] = self._buffers[number][:size].view(dtype).view(shape)
        return StagedBlock(number, view)

    def give_back(self, block: StagedBlock, after: Ticket | None = None) -> None:
        """The block is free, once ``after`` (a copy that reads it) is done."""
        self._free.append((block.number, after))

    def settle(self) -> None:
        """Wait for the copies that read free buffers, and forget how they ended."""
        for _, ticket in self._free:
            if ticket is not None:
                ticket.settle()
        self._free = deque((number, None) for number, _ in self._free)
