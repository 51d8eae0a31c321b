"""The host's side of one parameter: state of the slices that are not selected, and the window of waiting gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.gradients.compression import EXPANDED_ELEMENTS, expanded
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes, touch_pages
from zenflow_compile.runtime.host.host_adam import HostAdam
from zenflow_compile.runtime.host.state_store import InMemoryState, State, StateLock, StateStore
from zenflow_compile.runtime.host.workers import Job, preferred_worker
from zenflow_compile.runtime.recorder import Moment
from zenflow_compile.runtime.transfer.copy_lanes import Ticket
from zenflow_compile.runtime.transfer.stream_flags import Flag, HostFlags

TASK_ELEMENTS = 1 << 20
"""Elements per task of a worker at most: large enough that a call's overhead vanishes, small enough that the other
workers find something to take, and that an earlier deadline does not wait long."""

# Below this a call's overhead shows: it is 20 us, and so many elements take ten times as long.
_SMALLEST_TASK_ELEMENTS = 1 << 16
CUT_ELEMENTS = 64  # whole CPU vectors: only the last part needs a ``PaddedTail``


def task_ranges(elements: int, workers: int, unit: int = CUT_ELEMENTS) -> list[slice]:
    """Cuts a block for ``workers``: into parts of equal size, as many for each worker where that leaves them large.

    Results do not depend on the cut.

    Args:
        unit: every part but the last is a multiple of so many elements.
    """
    parts = -(-elements // TASK_ELEMENTS)
    parts = min(-(-parts // workers) * workers, max(parts, elements // _SMALLEST_TASK_ELEMENTS))
    size = max(unit, -(-elements // max(1, parts * unit)) * unit)
    return [slice(begin, min(begin + size, elements)) for begin in range(0, elements, size)]


def touched_bytes(plan: ParamPlan, gradients: int) -> float:
    """Bytes of host memory that closing a window reads and writes per element, caches aside: fp32 state both ways,
    each gradient once, and the upload. Each step of a moment reads and writes it once, whatever the number of slots.

    Args:
        gradients: slots of the window that hold a gradient; those of a summed window share one.
    """
    places = min(gradients, 1) if plan.summed else gradients
    return 2 * 3 * 4 + plan.dtype.itemsize + places * plan.buffer_bytes / max(1, plan.deferred * plan.length)


@dataclass(slots=True)
class GradientBuffer:
    """One step's deferred gradient in the window. Those of a summed window share one place, with their mean."""

    index: int
    coefficients: StepCoefficients
    copied: Ticket


@dataclass(slots=True)
class FlushedWindow:
    """A window that closed: its job, and what becomes visible when it lands."""

    job: Job
    upload: Tensor
    flushed_at: int
    visible_at: int
    final: Moment | None = None
    """When it closed, for the profiler; None while nobody records."""
    selection: Tensor | None = None
    """i32[k] on the device: the slices selected from here on; None where the selection stays."""


@dataclass(slots=True)
class HostState:
    """fp32 state and upload buffers ``[deferred, length]``, gradient buffers, and the open window, in one arena.

    Attributes:
        home: where the state is: in the arena, too, or in a file.
        workers: how many share a close.
        taken: gradients that the moments have taken so far.
        open: slots of the window that is open, oldest first; a missing gradient has none.
        closes: windows that closed and have not landed, oldest first.
        landed: the last upload's copy. Its buffer is written again only after it, which the copies of gradients do not
            guarantee if the upload landed late.
        landing: the job behind it, which may still run where the device waits for it instead of the training thread.
        flags: counters for streams that wait for jobs, and which of them is this parameter's; None without any.
    """

    plan: ParamPlan
    home: StateStore
    gradients: list[Tensor]
    uploads: list[Tensor]
    kernel: HostAdam
    workers: int = 1
    taken: int = 0
    open: list[GradientBuffer] = field(default_factory=list)
    flushed: list[FlushedWindow] = field(default_factory=list)
    landed: Ticket | None = None
    landing: Job | None = None
    flags: tuple[HostFlags, int] | None = None
    _closed: int = 0
    _slot_users: list[Job | None] = field(default_factory=list)
    _next_slot: int = 0
    _next_upload: int = 0

    @classmethod
    def allocate(
        cls, plan: ParamPlan, arena: HostArena, kernel: HostAdam, workers: int = 1, home: StateStore | None = None
    ) -> HostState:
        """Carve the parameter's host memory, all zero, out of ``arena``: ``arena_bytes`` of it.

        Args:
            home: of state that is in a file.
        """
        assert (home is not None) == plan.in_file
        block = (plan.deferred, plan.length)
        return cls(
            plan=plan,
            home=InMemoryState(plan, arena) if home is None else home,
            gradients=[arena.take(plan.buffer_shape, plan.buffer_dtype) for _ in range(plan.gradient_buffers)],
            uploads=[arena.take(block, plan.dtype) for _ in range(plan.uploads)],
            kernel=kernel,
            workers=workers,
            _slot_users=[None] * plan.gradient_buffers,
        )

    @staticmethod
    def arena_bytes(plan: ParamPlan) -> int:
        """What ``allocate`` takes: ``plan.host_bytes`` and the alignment of each tensor."""
        block = (plan.deferred, plan.length)
        gradients = [(plan.buffer_shape, plan.buffer_dtype)] * plan.gradient_buffers
        state = 0 if plan.in_file else InMemoryState.arena_bytes(plan)
        return state + carved_bytes(gradients + [(block, plan.dtype)] * plan.uploads)

    def touch(self, worker: int) -> None:
        """Make resident, near the calling thread's core, the pages that worker ``worker`` will serve in every close."""
        ranges = self.task_ranges()
        elements = self.plan.deferred * self.plan.length
        state = () if self.plan.in_file else self.state()
        for number, part in enumerate(ranges):
            if preferred_worker(number, len(ranges), self.workers) == worker:
                for tensor in (*state, *self.gradients, *self.uploads):
                    size = tensor.numel()  # of a compressed gradient another one
                    touch_pages(tensor.view(-1)[part.start * size // elements : part.stop * size // elements])

    @property
    def slot_busy(self) -> bool:
        """Whether ``free_slot`` would wait."""
        user = self._slot_users[self._next_slot]
        return user is not None and not user.done()

    def free_slot(self) -> tuple[int, Tensor]:
        """The next gradient slot, of the plan's ``buffer_shape``; waits for the close that still reads it."""
        index = self._next_slot
        if (user := self._slot_users[index]) is not None:
            user.wait()
            self._slot_users[index] = None
        return index, self.gradients[index]

    def commit(self, slot: GradientBuffer) -> None:
        """The gradient in ``slot`` is final: it belongs to the open window."""
        self.open.append(slot)
        self._next_slot = (slot.index + 1) % len(self.gradients)

    def flush_window(self, *, at: int, eps: float, deadline: int) -> FlushedWindow:
        """Close the open window, which must have a slot; the job is not submitted yet."""
        slots, self.open = self.open, []
        self.taken += len(slots)
        upload = self.next_upload()
        # With staleness the close before may still run: it goes first, both in the queue and in fact.
        before = self.flushed[-1].job if self.flushed else None
        self._closed += 1
        inputs = [slot.copied for slot in slots]
        if self.landed is not None:
            inputs.append(self.landed)
        deadline = deadline if before is None else max(deadline, before.deadline)
        lease = self.home.lock(step=at, deadline=deadline)
        try:
            job = Job(
                self._tasks(slots, upload, step=self.taken, eps=eps),
                deadline=deadline,
                step=at,
                param=self.plan.name,
                ready=_after(inputs, before, lease),
                arrived=_arrived(inputs, before, lease),
                flag=Flag(*self.flags, self._closed) if self.flags else None,
                settled=lease.release,
            )
            for slot in slots:
                self._slot_users[slot.index] = job
            close = FlushedWindow(job=job, upload=upload, flushed_at=at, visible_at=at + 1 + self.plan.staleness)
            self.flushed.append(close)
        except BaseException:  # an interrupt: perhaps no job will end it
            lease.release()
            raise
        return close

    def next_upload(self) -> Tensor:
        """The upload buffer whose turn it is; its last content has landed."""
        index, self._next_upload = self._next_upload, (self._next_upload + 1) % len(self.uploads)
        return self.uploads[index]

    def state(self) -> State:
        """fp32 master and moments; of state in a file only while it is borrowed, or a job's."""
        return self.home.state()

    def acquire(self, *, write: bool = False, fresh: bool = False) -> AbstractContextManager[State]:
        """See :meth:`StateStore.borrowed`."""
        return self.home.acquire(write=write, fresh=fresh)

    @property
    def jobs(self) -> list[Job]:
        """Those that may still use this memory."""
        users = (*self._slot_users, *(close.job for close in self.flushed), self.landing)
        return [job for job in users if job is not None]

    def drop_window(self) -> None:
        """Empty the open window; its buffers are free as soon as the copies into them are over."""
        for slot in self.open:
            slot.copied.settle()
        self.open = []

    def clear_windows(self) -> None:
        """Forget the open window and closes that have not landed, once nothing reads or writes their memory.

        Jobs that were never queued have been withdrawn.
        """
        for job in self.jobs:
            job.settle()
        self.drop_window()
        self.flushed, self.landing = [], None
        self._slot_users = [None] * len(self.gradients)
        self._next_slot = 0

    def wait(self) -> None:
        """Wait until no job writes this state.

        Raises:
            RuntimeError: a job failed.
        """
        if self.landing is not None:
            self.landing.wait()
        for close in self.flushed:
            close.job.wait()

    def wait_for_copies(self) -> None:
        """Wait until the gradients of the open window are in it.

        Raises:
            RuntimeError: a copy failed.
        """
        for slot in self.open:
            slot.copied.wait()

    def raise_failures(self) -> None:
        """Raise the failure of a job, a copy or a file, if there is one by now; waits for nothing."""
        for job in (self.landing, *(close.job for close in self.flushed)):
            if job is not None and job.error is not None:
                job.wait()
        for slot in self.open:
            if slot.copied.error is not None:
                slot.copied.wait()
        if (error := self.home.error) is not None:
            raise RuntimeError(str(error)) from error.__cause__

    def _tasks(self, slots: list[GradientBuffer], upload: Tensor, *, step: int, eps: float) -> list[Callable[[], int]]:
        gradients = [self.gradients[slot.index] for slot in slots]
        coefficients = [slot.coefficients for slot in slots]
        kernel, plan = self.kernel, self.plan
        read = expanded if plan.compressed else _flat
        # What is expanded should stay in the cache until the kernel has read it, and begin with a slice.
        piece = max(1, EXPANDED_ELEMENTS // plan.length) * plan.length if plan.compressed else TASK_ELEMENTS
        touched = touched_bytes(plan, len(slots))

        def task(begin: int, end: int) -> Callable[[], int]:
            def run() -> int:
                state = self.state()
                for first in range(begin, end, piece):
                    part = slice(first, min(first + piece, end))
                    master, exp_avg, exp_avg_sq, out = (block.view(-1)[part] for block in (*state, upload))
                    kernel(
                        master,
                        exp_avg,
                        exp_avg_sq,
                        read(gradients, part, plan.length),
                        coefficients,
                        step=step,
                        eps=eps,
                        out=out,
                    )
                return round(touched * (end - begin))

            return run

        return [task(part.start, part.stop) for part in self.task_ranges()]

    def task_ranges(self) -> list[slice]:
        """The elements of every task of a close; compressed gradients are cut between slices."""
        unit = self.plan.length if self.plan.compressed else CUT_ELEMENTS
        return task_ranges(self.plan.deferred * self.plan.length, self.workers, unit)


def _flat(gradients: Sequence[Tensor], part: slice, length: int) -> list[Tensor]:
    """The elements ``part`` of gradient slots that are not compressed."""
    return [gradient.view(-1)[part] for gradient in gradients]


def _arrived(copies: list[Ticket], before: Job | None, lease: StateLock) -> Callable[[], bool]:
    def arrived() -> bool:
        copied = all(ticket.done() or ticket.error is not None for ticket in copies)
        # The lease comes last: who holds it must be able to run.
        return copied and (before is None or before.done()) and lease.try_acquire()

    return arrived


def _after(copies: list[Ticket], before: Job | None, lease: StateLock) -> Callable[[], None]:
    def ready() -> None:
        for ticket in copies:
            ticket.wait()
        if before is not None:
            before.wait()
        lease.check()

    return ready
