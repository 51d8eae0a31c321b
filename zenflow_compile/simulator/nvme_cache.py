"""The simulated cache of state in files: which state is in host memory, and which one the disk moves next.

The rules are those of ``runtime/nvme/cache.py``. State is read in the order of its next use, ahead of time where there
is space. The state with the latest use is evicted, unless it was changed and is not written yet, or a job uses it.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from zenflow_compile.performance.workload import Block, Workload


class _Place(Enum):
    FILE = auto()  # in the file only
    READING = auto()  # on the way to host memory
    WINDOW = auto()  # in host memory, equal to the file
    LOCKED = auto()  # in host memory, used by a job
    CHANGED = auto()  # in host memory, newer than the file
    WRITING = auto()  # on the way to the file


@dataclass(slots=True, eq=False)
class CachedState:
    """State of the parameters of a block of the model that are flushed together.

    Attributes:
        position: of the block in the forward.
        size: bytes.
        uses: steps of a cycle in which it is flushed.
        next_use: the step of the next flush that has not begun.
        waiting: flushes that have begun: their step, and the call that goes on with the state in host memory.
    """

    name: str
    position: int
    size: int
    uses: list[int]
    next_use: int = 0
    place: _Place = _Place.FILE
    waiting: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)

    @property
    def key(self) -> tuple[int, int]:
        """Earliest step first, then earliest use in the forward. It changes only when a job asks for the state."""
        return (self.waiting[0][0] if self.waiting else self.next_use, self.position)

    def __lt__(self, other: CachedState) -> bool:
        return self.key < other.key


class NvmeCache:
    """Decides what moves; the machine moves it, one transfer at a time."""

    def __init__(self, work: Workload) -> None:
        self._by_params = _cached_states(work.blocks)
        blocks = list(self._by_params.values())
        self._cycle = work.cycle
        self._free = max([work.file_window, *(block.size for block in blocks)])
        self._in_files = sorted(blocks)  # heap
        self._clean: list[CachedState] = []  # sorted: in host memory, equal to the file and used by no job
        self._changed: deque[CachedState] = deque()
        self._wrote = False  # the last transfer was a write: reads and writes alternate
        self._space_changed = True  # since the last attempt to read found no space

    def need(self, step: int, position: int, params: tuple[str, ...], begin: Callable[[], None]) -> CachedState:
        """Call ``begin``, which starts a job of ``step``, as soon as its state is in host memory."""
        block = self._by_params[position, params]
        block.waiting.append((step, begin))
        block.next_use = self._use_after(block, step)
        if block.place is _Place.WINDOW:
            self._clean.remove(block)
            self._lock(block)
        return block

    def changed(self, block: CachedState) -> None:
        """The job that used ``block`` is done."""
        block.place = _Place.CHANGED
        self._changed.append(block)

    def next_transfer(self) -> tuple[str, CachedState] | None:
        """``"read"`` or ``"write"``, and the block; None if there is nothing to move now."""
        reading = None if self._changed and not self._wrote else self._next_read()
        if reading is not None:
            self._wrote = False
            reading.place = _Place.READING
            return "read", reading
        if self._changed:
            self._wrote = True
            writing = self._changed.popleft()
            writing.place = _Place.WRITING
            return "write", writing
        return None

    def moved(self, block: CachedState) -> None:
        """A transfer is over, in either direction."""
        block.place = _Place.WINDOW
        if block.waiting:
            self._lock(block)
        else:
            insort(self._clean, block)
        self._space_changed = True

    def places(self) -> tuple[str, ...]:
        """The place of every block, in the order of the forward."""
        return tuple(block.place.name for block in self._by_params.values())

    def _lock(self, block: CachedState) -> None:
        block.place = _Place.LOCKED
        _, begin = block.waiting.popleft()
        begin()

    def _next_read(self) -> CachedState | None:
        """The block in a file with the earliest use, if there is space for it."""
        if not self._in_files or not self._space_changed:
            return None
        block = self._in_files[0]
        free, kept = self._free, len(self._clean)
        while free < block.size and kept and block < self._clean[kept - 1]:
            kept -= 1
            free += self._clean[kept].size
        if free < block.size:
            self._space_changed = False
            return None
        heapq.heappop(self._in_files)
        for each in self._clean[kept:]:
            each.place = _Place.FILE
            heapq.heappush(self._in_files, each)
        del self._clean[kept:]
        self._free = free - block.size
        return block

    def _use_after(self, block: CachedState, step: int) -> int:
        cycles, within = divmod(step, self._cycle)
        later = next((use for use in block.uses if use > within), None)
        return cycles * self._cycle + later if later is not None else (cycles + 1) * self._cycle + block.uses[0]


def _cached_states(blocks: Sequence[Block]) -> dict[tuple[int, tuple[str, ...]], CachedState]:
    """By position in the model and parameters."""
    found: dict[tuple[int, tuple[str, ...]], CachedState] = {}
    for position, block in enumerate(blocks):
        for part in block.parts:
            for step, window in enumerate(part.flushes):
                if window is None or not window.file:
                    continue
                state = CachedState(block.name, position, window.file, [], next_use=step)
                found.setdefault((position, window.params), state).uses.append(step)
    return found
