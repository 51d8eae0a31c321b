"""Where the host's state and the new weights of one parameter are kept, while jobs and copies use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes
from zenflow_compile.runtime.host.workers import Job, MemoryUser
from zenflow_compile.runtime.state_forms import State, StateForm


class Waits(NamedTuple):
    """What a job on host memory waits for.

    Attributes:
        after: jobs; it needs what they do, and fails if one of them does.
        behind: jobs and copies that use the same memory.
    """

    after: Sequence[Job] = ()
    behind: Sequence[MemoryUser] = ()

    def and_of(self, other: Waits) -> Waits:
        """What a job waits for that uses two memories."""
        return Waits((*self.after, *other.after), (*self.behind, *other.behind))


class StateStore(Protocol):
    """The state of one parameter."""

    @property
    def error(self) -> BaseException | None:
        """The failure that lost this state, until it is overwritten; None while it is intact."""
        ...

    def state(self) -> State:
        """The stored tensors; of state in a file only after ``prepare``, for that job, or while it is acquired."""
        ...

    def acquire(self, *, write: bool = False, fresh: bool = False) -> AbstractContextManager[State]:
        """The state for the training thread; waits for all queued jobs on it. Queue none inside the block.

        Args:
            write: it will be changed.
            fresh: all of it will be overwritten, so that its old content is not read, and may be lost.

        Raises:
            RuntimeError: it could not be read, or an earlier update of it could not be written.
        """
        ...


class InMemoryState:
    """State in an arena, all zero to begin with."""

    error: BaseException | None = None

    def __init__(self, plan: ParamPlan, arena: HostArena) -> None:
        self._state = State(*(arena.take(*each) for each in StateForm.of_deferred(plan).tensors(plan.deferred)))

    @staticmethod
    def arena_bytes(plan: ParamPlan) -> int:
        """Bytes that it takes of the arena."""
        return carved_bytes(StateForm.of_deferred(plan).tensors(plan.deferred))

    def state(self) -> State:
        return self._state

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[State]:
        # Callers have waited for the jobs, or withdrawn them.
        yield self._state


class UploadBuffer(Protocol):
    """One buffer of new weights of one parameter: [deferred, length] in the model's dtype."""

    @property
    def error(self) -> BaseException | None:
        """The failure that lost its content, until it is overwritten; None while it is intact."""
        ...

    def tensor(self) -> Tensor:
        """The memory; of a buffer in a file only after ``prepare`` or ``bring``, for that job or copy."""
        ...

    def prepare(self, *, step: int, deadline: int, fresh: bool) -> Waits:
        """Bring the buffer into memory for a job that writes it, and is made next.

        Args:
            step, deadline: of the job.
            fresh: the job overwrites all of it, so that the old content is not read.

        Raises:
            RuntimeError: the system does not start a thread.
        """
        ...

    def used_by(self, job: Job, *, last: bool = True) -> None:
        """Keep the buffer in memory for ``job``, which ``prepare`` was called for, and write it back after it."""
        ...

    def bring(self, writer: Job | None, *, step: int) -> Job | None:
        """Bring the buffer into memory for a copy, which is queued next.

        Args:
            writer: the job that wrote the buffer last; None: no job has.

        Returns:
            The job that the copy waits for, which may have failed; None: the memory has the content.

        Raises:
            RuntimeError: the system does not start a thread.
        """
        ...

    def read_by(self, copy: Ticket) -> None:
        """Keep the buffer in memory for ``copy``, which ``bring`` was called for."""
        ...

    def acquire(self, *, write: bool = False, fresh: bool = False) -> AbstractContextManager[Tensor]:
        """The memory for the training thread; see ``StateStore.acquire``."""
        ...

    def forget(self) -> None:
        """Drop the content, which may be lost. No job and no copy that was queued may use it."""
        ...


class InMemoryUpload:
    """A buffer that is always in memory. Its callers order jobs and copies; see ``HostState.applied``."""

    error: BaseException | None = None

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def tensor(self) -> Tensor:
        return self._memory

    def prepare(self, *, step: int, deadline: int, fresh: bool) -> Waits:
        return Waits()

    def used_by(self, job: Job, *, last: bool = True) -> None:
        """Nothing to do: it stays in memory."""

    def bring(self, writer: Job | None, *, step: int) -> Job | None:
        return None if writer is None or writer.succeeded else writer

    def read_by(self, copy: Ticket) -> None:
        """Nothing to do: it stays in memory."""

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[Tensor]:
        yield self._memory

    def forget(self) -> None:
        """Nothing to do: it cannot be lost."""
