"""Where the host's state of one parameter is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes
from zenflow_compile.runtime.host.workers import Job, MemoryUser
from zenflow_compile.runtime.state_forms import State, StateForm


class Needs(NamedTuple):
    """What a job on host memory waits for.

    Attributes:
        after: jobs; it needs what they do, and fails if one of them does.
        behind: jobs and copies that use the same memory.
    """

    after: Sequence[Job] = ()
    behind: Sequence[MemoryUser] = ()

    def and_of(self, other: Needs) -> Needs:
        """What a job waits for that uses two memories."""
        return Needs((*self.after, *other.after), (*self.behind, *other.behind))


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


class StateInFile(StateStore, Protocol):
    """The state of one parameter that is in memory only while it is used."""

    def prepare(self, *, step: int, deadline: int) -> Needs:
        """Bring the state into memory for a job, which changes it and is made next.

        Args:
            step, deadline: of the job.

        Raises:
            RuntimeError: the system does not start a thread.
        """
        ...

    def used_by(self, job: Job, *, last: bool = True) -> None:
        """Keep the state in memory for ``job``, which ``prepare`` was called for, and write it back behind it.

        Args:
            last: no further job that belongs to this one is made next; until then it is not written.
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
        """See :meth:`StateStore.state`."""
        return self._state

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[State]:
        """See :meth:`StateStore.acquire`."""
        # Callers have waited for the jobs, or withdrawn them.
        yield self._state
