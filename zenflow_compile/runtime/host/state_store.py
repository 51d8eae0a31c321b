"""Where the host's fp32 state of one parameter is kept, and the locks on it."""

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
    """One job's exclusive use of state in a file. State in memory needs none: its jobs run one after the other."""

    def try_acquire(self) -> bool:
        """Acquire the lock if the state is in memory and free. Also True if the state is lost: ``check`` raises then.

        Stays True until ``release``.
        """
        ...

    def check(self) -> None:
        """Raise if the acquired state is lost.

        Raises:
            RuntimeError: it could not be read, or an earlier update of it could not be written.
        """
        ...

    def release(self) -> None:
        """Give the state back after the job, or without it. Idempotent."""
        ...


class StateStore(Protocol):
    """The state of one parameter."""

    @property
    def error(self) -> BaseException | None:
        """The failure that lost this state, until it is overwritten; None while it is intact."""
        ...

    def state(self) -> State:
        """The tensors; of state in a file only under an acquired lock."""
        ...

    def lock(self, *, step: int, deadline: int) -> StateLock | None:
        """A lock, which the job of an update window that is flushed at ``step`` acquires; None: it needs none."""
        ...

    def acquire(self, *, write: bool = False, fresh: bool = False) -> AbstractContextManager[State]:
        """The state for the training thread; waits for the job that has it, and goes before waiting jobs.

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
        shape = (plan.deferred, plan.length)
        self._state = State(*(arena.take(shape, torch.float32) for _ in range(STATE_TENSORS)))

    @staticmethod
    def arena_bytes(plan: ParamPlan) -> int:
        """Bytes that it takes of the arena."""
        return carved_bytes([((plan.deferred, plan.length), torch.float32)] * STATE_TENSORS)

    def state(self) -> State:
        """See :meth:`StateStore.state`."""
        return self._state

    def lock(self, *, step: int, deadline: int) -> None:
        """See :meth:`StateStore.lock`."""

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[State]:
        """See :meth:`StateStore.acquire`."""
        # No lock: callers have waited for the jobs, or withdrawn them, and queue none inside the block.
        yield self._state
