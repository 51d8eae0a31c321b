"""Where the host's fp32 state of one parameter lives, and how whoever needs it gets hold of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zenflow_compile.planning.plan import STATE_TENSORS, ParamPlan
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes


class State(NamedTuple):
    """f32[deferred, length] tensors in host memory."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class StateLock(Protocol):
    """One job's turn with the state. Between the moment when it has arrived and its end nobody else has it."""

    def arrived(self) -> bool:
        """Whether ``ready`` would return, or raise, at once; True for good once it was."""
        ...

    def ready(self) -> None:
        """The state is in memory, and this lease's alone.

        Raises:
            RuntimeError: it could not be read, or an earlier update of it not be written.
        """
        ...

    def end(self) -> None:
        """The job is over, whether it ran or not. Once more is harmless."""
        ...


class StateStore(Protocol):
    """The state of one parameter."""

    @property
    def error(self) -> BaseException | None:
        """What lost this state, until it is written anew; None while it is whole."""
        ...

    def state(self) -> State:
        """The tensors; of state in a file only under a lease."""
        ...

    def lease(self, *, step: int, deadline: int) -> StateLock:
        """A turn for the job of a window that closes at ``step``."""
        ...

    def acquire(self, *, write: bool = False, fresh: bool = False) -> AbstractContextManager[State]:
        """The state for the training thread, while no job needs it; waits for whoever has it.

        Args:
            write: it will be changed.
            fresh: all of it will be overwritten, so that what there was need not be read, and need not be whole.

        Raises:
            RuntimeError: it could not be read, or an earlier update of it not be written.
        """
        ...


class _NoLock:
    """Of state that is always there: jobs on it are kept in order by their windows."""

    def arrived(self) -> bool:
        return True

    def ready(self) -> None:
        pass

    def end(self) -> None:
        pass


_NO_LEASE = _NoLock()


class InMemoryState:
    """State in an arena, all zero to begin with."""

    error: BaseException | None = None

    def __init__(self, plan: ParamPlan, arena: HostArena) -> None:
        block = (plan.deferred, plan.length)
        self._state = State(*(arena.take(block, torch.float32) for _ in range(STATE_TENSORS)))

    @staticmethod
    def arena_bytes(plan: ParamPlan) -> int:
        """What it takes of the arena."""
        return carved_bytes([((plan.deferred, plan.length), torch.float32)] * STATE_TENSORS)

    def state(self) -> State:
        """See :meth:`StateStore.state`."""
        return self._state

    def lease(self, *, step: int, deadline: int) -> StateLock:
        """See :meth:`StateStore.lease`."""
        return _NO_LEASE

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[State]:
        """See :meth:`StateStore.borrowed`."""
        yield self._state
