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
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from zenflow_compile.runtime.errors import refuse_threads
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.transfer.stream_flags import Flag, make_flags

if TYPE_CHECKING:
    from zenflow_compile.runtime.host.workers import Job  # which knows of copies, too

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

    def settle(self) -> None:
        """Block until every copy that was submitted has ended, whether it failed or not."""
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
        self._queue: queue.SimpleQueue[_ThreadCopy | None]  # made with the thread
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
            try:
                self._copy(target, source, step, param, kind, first)
            except Exception as error:  # not an interrupt, which is the calling thread's
                return DoneTicket(error)
            return _DONE
        if self._thread is None:
            self._start()
        ticket = ThreadTicket()
        self._queue.put((target, source, ticket, step, param, kind, first))
        return ticket

    def can_wait_for(self, job: Job) -> bool:
        """Always: the lane is a thread."""
        return True

    def settle(self) -> None:
        if self._thread is not None:
            ticket = ThreadTicket()
            nothing = torch.empty(0)
            self._queue.put((nothing, nothing, ticket, 0, "", "", None))
            ticket.settle()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is the lane's own."""
        return thread is self._thread

    def _start(self) -> None:
        # A queue of its own: a thread whose start was interrupted may run, and must not serve beside another one.
        items: queue.SimpleQueue[_ThreadCopy | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(items,), name=f"zenflow-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            refuse_threads(error)
        except BaseException:
            items.put(None)
            raise
        self._queue, self._thread = items, thread

    def _run(self, items: queue.SimpleQueue[_ThreadCopy | None]) -> None:
        while (item := items.get()) is not None:
            target, source, ticket, step, param, kind, first = item
            try:
                self._copy(target, source, step, param, kind, first)
            except BaseException as error:
                ticket.finish(error)
            else:
                ticket.finish()

    def _copy(
        self, target: Tensor, source: Tensor, step: int, param: str, kind: str, first: Job | Ticket | None
    ) -> None:
        if first is not None:
            first.wait()
        timeline = self._recorder.timeline
        begin = 0 if timeline is None else time.perf_counter_ns()
        copy_without_gil(target, source)
        if timeline is not None and source.nbytes:
            end = time.perf_counter_ns()
            timeline.add(self._name, kind, begin, end, step=step, param=param, bytes=source.nbytes)


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

    def settle(self) -> None:
        self._stream.synchronize()

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
