"""One parameter's state in a file: a block, what is known of it, and the turns that are taken with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zenflow_compile.planning.plan import FP32_BYTES, STATE_TENSORS, ParamPlan
from zenflow_compile.runtime.host.arena import carved_bytes
from zenflow_compile.runtime.host.state_store import State
from zenflow_compile.runtime.nvme.state_file import StateFile, StateFileError, whole_pages

if TYPE_CHECKING:
    from zenflow_compile.runtime.nvme.cache import NvmeCache  # which moves the blocks

_WANTED, _AHEAD = 0, 1  # whom the reader serves first
Key = tuple[int, int, int]
_NOW: Key = (_WANTED, -1, -1)


def block_bytes(plan: ParamPlan) -> int:
    """What the parameter's state takes in the window and in a file: whole pages."""
    return whole_pages(carved_bytes([((plan.deferred, plan.length), torch.float32)] * STATE_TENSORS))


class Place(Enum):
    """Where a block is."""

    FILE = auto()  # not in the window
    READING = auto()
    WINDOW = auto()
    WRITING = auto()  # in the window; may be looked at, not changed


class CachedState:
    """The state of one parameter in a file: a block. What follows is under the window's lock.

    Attributes:
        name: of the parameter.
        size: bytes of the block. offset: where it begins in the file.
        place: where it is; ``begin`` is its offset in the window while it is there.
        changed: what is in the window is newer than what is in the file.
        checksum: of what was written last; None: nothing was, and it is all zero.
        holder: whose turn it is. leases: all who have had none yet, and the holder.
        key: when it is needed next. next_use: the same if nobody waits for it.
        error: what lost it.
    """

    def __init__(self, window: NvmeCache, plan: ParamPlan, file: StateFile, offset: int) -> None:
        self.name = plan.name
        self.size = block_bytes(plan)
        self.file = file
        self.offset = offset
        self.place = Place.FILE
        self.begin = 0
        self.changed = False
        self.checksum: int | None = None
        self.holder: CachedStateLock | None = None
        self.leases: list[CachedStateLock] = []
        self.error: StateFileError | None = None
        self.key = self.next_use = (_AHEAD, plan.phase, plan.index)
        self._window = window
        self._plan = plan
        self._state: State | None = None

    def order(self) -> None:
        """Find out when it is needed next: by a lease, or else as its window's phase says."""
        self.key = min((lease.key for lease in self.leases), default=self.next_use)

    def state(self) -> State:
        """See :meth:`StateStore.state`."""
        assert self._state is not None, f"the state of {self.name} is not in memory"
        return self._state

    def show(self, memory: Tensor) -> None:
        """It is in ``memory`` from here on, u8[size]."""
        part, count = whole_slices(self._plan), self._plan.deferred * self._plan.length
        flat = (memory[i * part : i * part + FP32_BYTES * count].view(torch.float32) for i in range(STATE_TENSORS))
        self._state = State(*(each.view(self._plan.deferred, self._plan.length) for each in flat))

    def hide(self) -> None:
        """It is in no memory."""
        self._state = None

    def lease(self, *, step: int, deadline: int) -> CachedStateLock:
        """See :meth:`StateStore.lease`."""
        plan = self._plan
        following = step + 1 + (plan.phase - step - 1) % plan.interval
        lease = CachedStateLock(self._window, self, (_WANTED, step, deadline), next_use=(_AHEAD, following, deadline))
        try:
            self._window.queue(lease)
        except BaseException:  # an interrupt: nobody would end it
            lease.end()
            raise
        return lease

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[State]:
        """See :meth:`StateStore.borrowed`."""
        lease = CachedStateLock(self._window, self, _NOW, next_use=None, writes=write, fresh=fresh)
        try:
            self._window.queue(lease)
            self._window.wait_for(lease)
            lease.ready()
            yield self.state()
        finally:
            try:
                lease.end()
            except BaseException:  # an interrupt on the way: a block that stays held stops its jobs, and others'
                lease.end()
                raise

    def raise_error(self) -> None:
        """
        Raises:
            StateFileError: it is lost; chained to what lost it.
        """
        if (error := self.error) is not None:
            raise StateFileError(str(error)) from error.__cause__


class CachedStateLock:
    """One turn with a block; see ``state_home.StateLock``."""

    def __init__(
        self,
        window: NvmeCache,
        block: CachedState,
        key: Key,
        *,
        next_use: Key | None,
        writes: bool = True,
        fresh: bool = False,
    ) -> None:
        self.block = block
        self.key = key
        self.next_use = next_use
        self.writes = writes
        self.fresh = fresh
        self._window = window

    def arrived(self) -> bool:
        """See :meth:`StateLock.arrived`. The block is held from here on."""
        return self._window.hold(self)

    def ready(self) -> None:
        """See :meth:`StateLock.ready`."""
        if self.block.holder is not self:
            self.block.raise_error()

    def end(self) -> None:
        """See :meth:`StateLock.end`."""
        self._window.end(self)


def whole_slices(plan: ParamPlan) -> int:
    """Bytes from the beginning of one tensor of a block to the next: aligned as in any arena."""
    return carved_bytes([((plan.deferred, plan.length), torch.float32)])
