"""The host's side of one parameter: state of the lines that are not selected, and the window of waiting gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam import SlotCoefficients
from zenflow_compile.runtime.arena import HostArena, carved_bytes
from zenflow_compile.runtime.copies import Ticket
from zenflow_compile.runtime.host_adam import HostAdam
from zenflow_compile.runtime.workers import Job

# Elements per task of a worker: large enough that a call's overhead vanishes, small enough to share among workers.
TASK_ELEMENTS = 1 << 20


@dataclass(slots=True)
class Slot:
    """One step's remaining gradient in the window."""

    index: int
    coefficients: SlotCoefficients
    copied: Ticket


@dataclass(slots=True)
class Close:
    """A window that closed: its job, and what becomes visible when it lands."""

    job: Job
    upload: Tensor
    closed_at: int
    visible_at: int
    final: int | torch.cuda.Event | None = None
    """When it closed, for the profiler; None while nobody records."""
    selection: Tensor | None = None
    """i32[k] on the device: the lines selected from here on; None where the selection stays."""


@dataclass(slots=True)
class HostSide:
    """fp32 state ``[rest, length]``, gradient slots, upload buffers; all views of one arena, and the open window.

    Attributes:
        taken: gradients that the moments have taken so far.
        open: slots of the window that is open, oldest first; void slots never enter.
        closes: windows that closed and have not landed, oldest first.
        landed: the last upload's copy. Its buffer is written again only after it, which the copies of gradients do not
            guarantee if the upload landed late.
    """

    plan: ParamPlan
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    gradients: list[Tensor]
    uploads: list[Tensor]
    kernel: HostAdam
    taken: int = 0
    open: list[Slot] = field(default_factory=list)
    closes: list[Close] = field(default_factory=list)
    landed: Ticket | None = None
    _slot_users: list[Job | None] = field(default_factory=list)
    _next_slot: int = 0
    _next_upload: int = 0

    @classmethod
    def allocate(cls, plan: ParamPlan, arena: HostArena, kernel: HostAdam) -> HostSide:
        """Carve the parameter's host memory, all zero, out of ``arena``: ``arena_bytes`` of it."""
        block = (plan.rest, plan.length)
        return cls(
            plan=plan,
            master=arena.take(block, torch.float32),
            exp_avg=arena.take(block, torch.float32),
            exp_avg_sq=arena.take(block, torch.float32),
            gradients=[arena.take(block, plan.dtype) for _ in range(plan.slots)],
            uploads=[arena.take(block, plan.dtype) for _ in range(plan.uploads)],
            kernel=kernel,
            _slot_users=[None] * plan.slots,
        )

    @staticmethod
    def arena_bytes(plan: ParamPlan) -> int:
        """What ``allocate`` takes: ``plan.host_bytes`` and the alignment of each tensor."""
        block = (plan.rest, plan.length)
        return carved_bytes([(block, torch.float32)] * 3 + [(block, plan.dtype)] * (plan.slots + plan.uploads))

    @property
    def slot_busy(self) -> bool:
        """Whether ``free_slot`` would wait."""
        user = self._slot_users[self._next_slot]
        return user is not None and not user.done()

    def free_slot(self) -> tuple[int, Tensor]:
        """The next gradient slot ``[rest, length]``; waits for the close that still reads it."""
        index = self._next_slot
        if (user := self._slot_users[index]) is not None:
            user.wait()
            self._slot_users[index] = None
        return index, self.gradients[index]

    def commit(self, slot: Slot) -> None:
        """The gradient in ``slot`` is final and not void: it belongs to the open window."""
        self.open.append(slot)
        self._next_slot = (slot.index + 1) % len(self.gradients)

    def close_window(self, *, at: int, eps: float, deadline: int) -> Close:
        """Close the open window, which must have a slot; the job is not submitted yet."""
        slots, self.open = self.open, []
        self.taken += len(slots)
        upload = self.next_upload()
        # With staleness the close before may still run: it goes first, both in the queue and in fact.
        before = self.closes[-1].job if self.closes else None
        inputs = [slot.copied for slot in slots]
        if self.landed is not None:
            inputs.append(self.landed)
        job = Job(
            self._tasks(slots, upload, step=self.taken, eps=eps),
            deadline=deadline if before is None else max(deadline, before.deadline),
            step=at,
            param=self.plan.name,
            ready=_after(inputs, before),
        )
        for slot in slots:
            self._slot_users[slot.index] = job
        close = Close(job=job, upload=upload, closed_at=at, visible_at=at + 1 + self.plan.staleness)
        self.closes.append(close)
        return close

    def next_upload(self) -> Tensor:
        """The upload buffer whose turn it is; its last content has landed."""
        index, self._next_upload = self._next_upload, (self._next_upload + 1) % len(self.uploads)
        return self.uploads[index]

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 master and moments."""
        return self.master, self.exp_avg, self.exp_avg_sq

    def clear_windows(self) -> None:
        """Forget the open window and closes that have not landed, once nothing reads or writes their memory."""
        for job in (*self._slot_users, *(close.job for close in self.closes)):
            if job is not None:
                job.settle()
        for slot in self.open:
            slot.copied.settle()
        self.open, self.closes = [], []
        self._slot_users = [None] * len(self.gradients)
        self._next_slot = 0

    def wait(self) -> None:
        """Wait until no job writes this state.

        Raises:
            RuntimeError: a job failed.
        """
        for close in self.closes:
            close.job.wait()

    def wait_for_copies(self) -> None:
        """Wait until the gradients of the open window are in it.

        Raises:
            RuntimeError: a copy failed.
        """
        for slot in self.open:
            slot.copied.wait()

    def raise_failures(self) -> None:
        """Raise the failure of a job or a copy, if there is one by now; waits for nothing."""
        for close in self.closes:
            if close.job.error is not None:
                close.job.wait()
        for slot in self.open:
            if slot.copied.error is not None:
                slot.copied.wait()

    def _tasks(self, slots: list[Slot], upload: Tensor, *, step: int, eps: float) -> list[Callable[[], int]]:
        gradients = [self.gradients[slot.index] for slot in slots]
        coefficients = [slot.coefficients for slot in slots]
        kernel = self.kernel
        # Each step of a moment reads and writes three fp32 tensors once, whatever the number of slots.
        bytes_per_element = 2 * 3 * 4 + (len(slots) + 1) * self.plan.dtype.itemsize

        def task(begin: int) -> Callable[[], int]:
            def part(block: Tensor) -> Tensor:
                return block.view(-1)[begin : begin + TASK_ELEMENTS]

            def run() -> int:
                out = part(upload)
                kernel(
                    part(self.master),
                    part(self.exp_avg),
                    part(self.exp_avg_sq),
                    [part(gradient) for gradient in gradients],
                    coefficients,
                    step=step,
                    eps=eps,
                    out=out,
                )
                return out.numel() * bytes_per_element

            return run

        return [task(begin) for begin in range(0, upload.numel(), TASK_ELEMENTS)]


def _after(copies: list[Ticket], before: Job | None) -> Callable[[], None]:
    def ready() -> None:
        for ticket in copies:
            ticket.wait()
        if before is not None:
            before.wait()

    return ready
