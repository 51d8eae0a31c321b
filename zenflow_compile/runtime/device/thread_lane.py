"""The copy lane where the device is the CPU: a thread that copies memory to memory without the GIL."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.native.library import COUNTER, DONE, FAILED, PENDING, STATE
from zenflow_compile.runtime.device.copy_lanes import CopyError, Gate, HostWork, Ticket, Users
from zenflow_compile.runtime.errors import refuse_threads
from zenflow_compile.runtime.recorder import Recorder

INLINE_BYTES = 1 << 16
"""Copies up to this size run at once in the calling thread: handing one over costs its ticket, its place in the queue
and two switches of the GIL, some 20 us, in which a core copies as much."""


class ThreadTicket:
    """A copy by a host thread. A lock and two words: making a ``threading.Event`` takes ten times as long.

    ``is_set``: the copy has ended; reading it takes no lock.
    """

    __slots__ = ("_gate", "_state", "completed", "error", "is_set")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.is_set = self.completed = False
        self.error: BaseException | None = None
        self._state = ctypes.c_uint32(PENDING)

    @classmethod
    def ended(cls, error: BaseException | None = None) -> ThreadTicket:
        """The ticket of a copy that has succeeded, or failed with ``error``."""
        ticket = cls()
        ticket.set(error)
        return ticket

    def set(self, error: BaseException | None = None) -> None:
        """Release all waiting threads. Idempotent; two threads must not call it at the same time."""
        if not self.is_set:
            # No call between these lines: an interrupt cannot leave a copy that has ended, whose waiters sleep.
            self.error, self.is_set, self.completed = error, True, error is None
            self._gate.release()
        # Orders the copied bytes before the state, as in ``Flag.raise_it``.
        with self._gate:
            self._state.value = DONE if self.error is None else FAILED

    def gate(self) -> Gate:
        return Gate(ctypes.addressof(self._state), DONE, STATE, self._state)

    def settled_gate(self) -> Gate:
        # Or beyond: a copy that failed has ended, too.
        return Gate(ctypes.addressof(self._state), DONE, COUNTER, self._state)

    @property
    def is_settled(self) -> bool:
        return self.is_set

    def done(self) -> bool:
        return self.completed

    def wait(self) -> None:
        self.settle()
        if self.error is not None:
            raise CopyError(
                "an asynchronous copy between device and host failed; load the last saved state, or start anew"
            ) from self.error

    wait_on_device = wait

    def settle(self) -> None:
        if not self.is_set:
            with self._gate:  # each waiting thread lets the next one pass
                pass


class _Copy(NamedTuple):
    """A copy that the lane's thread has not made yet. The references keep both tensors alive until it has."""

    target: Tensor
    source: Tensor
    step: int
    param: str
    kind: str
    first: Sequence[HostWork | Ticket]


class ThreadLane:
    """A lane of the CPU: one thread, which ends with ``close`` or with the process."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.failed = False
        self.inline_bytes = INLINE_BYTES  # up to which copies run at once in the calling thread
        self._name = name
        self._recorder = recorder
        self._done = ThreadTicket.ended()  # of every copy that was made at once
        self._queue: queue.SimpleQueue[tuple[_Copy, ThreadTicket] | None]  # made with the thread
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is not None:
            return
        # A new queue: a thread whose start was interrupted may run, and must not take copies from the next one.
        items: queue.SimpleQueue[tuple[_Copy, ThreadTicket] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(items,), name=f"zenflow-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            refuse_threads(error)
        except BaseException:
            items.put(None)  # ends a thread that runs after an interrupt
            raise
        self._queue, self._thread = items, thread

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
        users: Users | None = None,
    ) -> Ticket:
        assert after is None or behind is None
        first = [each for each in (after, behind) if each is not None]
        if users is not None:
            first += (*users.jobs, *users.copies)
        # A small copy may overtake those in the queue: an earlier copy to the same place has the same size, or has
        # ended.
        if source.nbytes <= self.inline_bytes and all(each.done() for each in first):
            try:
                if self._recorder.timeline is None and not first:
                    copy_without_gil(target, source)
                else:
                    self._make(_Copy(target, source, step, param, kind, first))
            except Exception as error:  # not an interrupt, which the calling thread gets
                self.failed = True
                return ThreadTicket.ended(error)
            return self._done
        return self._hand_over(_Copy(target, source, step, param, kind, first))

    def can_wait_for(self, work: HostWork) -> bool:
        """Always True: the lane is a thread."""
        return True

    def settle(self) -> None:
        if self._thread is not None:
            # An empty copy: the queue keeps the order, so all copies before it have ended with it.
            nothing = torch.empty(0, device="cpu")
            self._hand_over(_Copy(nothing, nothing, 0, "", "", ())).settle()

    def close(self) -> None:
        if (thread := self._thread) is not None:
            self._queue.put(None)
            thread.join()
            # Last: an interrupted ``close`` is repeated and waits again; no thread reads a second None.
            self._thread = None

    def runs(self, thread: threading.Thread) -> bool:
        return thread is self._thread

    def _hand_over(self, copy: _Copy) -> ThreadTicket:
        self.start()
        ticket = ThreadTicket()
        self._queue.put((copy, ticket))
        if self._thread is None:  # it has ended by an error since, and may have emptied the queue before
            _fail_all(self._queue, RuntimeError("the thread that makes copies has ended"))
        return ticket

    def _run(self, items: queue.SimpleQueue[tuple[_Copy, ThreadTicket] | None]) -> None:
        ticket: ThreadTicket | None = None
        try:
            while (item := items.get()) is not None:
                copy, ticket = item
                try:
                    self._make(copy)
                except BaseException as error:
                    # Before the ticket ends: a step that then begins looks for failures only if ``failed`` is set.
                    self.failed = True
                    ticket.set(error)
                else:
                    ticket.set()
        except BaseException as error:  # no thread may wait forever for a copy
            self.failed = True
            if self._thread is threading.current_thread():
                self._thread = None  # before the queue is emptied: see ``_hand_over``
            if ticket is not None:
                ticket.set(error)
            _fail_all(items, error)

    def _make(self, copy: _Copy) -> None:
        for each in copy.first:
            each.wait()
        timeline = self._recorder.timeline
        begin = 0 if timeline is None else time.perf_counter_ns()
        copy_without_gil(copy.target, copy.source)
        if timeline is not None and (size := copy.source.nbytes):
            end = time.perf_counter_ns()
            timeline.add(self._name, copy.kind, begin, end, step=copy.step, param=copy.param, bytes=size)


def _fail_all(items: queue.SimpleQueue[tuple[_Copy, ThreadTicket] | None], error: BaseException) -> None:
    while True:
        try:
            item = items.get_nowait()
        except queue.Empty:
            return
        if item is not None:
            item[1].set(error)


def copy_without_gil(target: Tensor, source: Tensor) -> None:
    """Copy contiguous CPU tensors of one dtype with one thread.

    ``Tensor.copy_`` would use the intra-op pool, whose threads belong to the training thread.

    Raises:
        ValueError: shapes or dtypes differ, or a tensor is not contiguous or not on the CPU.
    """
    if target.dtype != source.dtype or target.shape != source.shape:
        raise ValueError(f"cannot copy {source.dtype}{tuple(source.shape)} into {target.dtype}{tuple(target.shape)}")
    if not (target.is_cpu and source.is_cpu and target.is_contiguous() and source.is_contiguous()):
        ends = ", ".join(f"a tensor on {each.device} with strides {each.stride()}" for each in (source, target))
        raise ValueError(f"cannot copy {ends}")
    # Addresses keep no memory alive: the two arguments do, also while other threads have the GIL.
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)  # ctypes releases the GIL around the call
