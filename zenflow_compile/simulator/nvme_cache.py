"""The simulated files: which block of state is in host memory, and which one the disk moves next.

The rules are those of ``runtime/nvme/cache.py``: what is needed first comes in first, ahead of its need where there is
space; what is needed last makes room, unless it was changed and is not written yet, or a job works on it.
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
    FILE = auto()
    READING = auto()
    WINDOW = auto()  # as the file has it
    HELD = auto()
    CHANGED = auto()
    WRITING = auto()


@dataclass(slots=True, eq=False)
class FileBlock:
    """State of the parameters of a block of the model that close together.

    Attributes:
        position: of the block in the forward.
        size: bytes.
        uses: steps of a cycle in which it closes.
        next_use: the step of its next close that did not begin.
        waiting: closes that began: their step, and what to do when the state is there.
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
        """Earliest step first, then earliest use; as long as no job takes it, it stays what it is."""
        return (self.waiting[0][0] if self.waiting else self.next_use, self.position)

    def __lt__(self, other: FileBlock) -> bool:
        return self.key < other.key


class StateFiles:
    """Decides what moves; the machine moves it, one transfer at a time."""

    def __init__(self, work: Workload) -> None:
        self._by_params = _file_blocks(work.blocks)
        blocks = list(self._by_params.values())
        self._cycle = work.cycle
        self._free = max([work.file_window, *(block.size for block in blocks)])
        self._away = sorted(blocks)  # heap: in files
        self._clean: list[FileBlock] = []  # sorted: in the window as the file has them, and free to leave it
        self._changed: deque[FileBlock] = deque()
        self._wrote = False  # the last transfer was a write: directions take turns
        self._moved_on = True  # since there was nothing to read

    def need(self, step: int, position: int, params: tuple[str, ...], begin: Callable[[], None]) -> FileBlock:
        """A job of ``step`` has everything but its state; ``begin`` is called once it is there."""
        block = self._by_params[position, params]
        block.waiting.append((step, begin))
        block.next_use = self._use_after(block, step)
        if block.place is _Place.WINDOW:
            self._clean.remove(block)
            self._give(block)
        return block

    def changed(self, block: FileBlock) -> None:
        """The job that held ``block`` is done."""
        block.place = _Place.CHANGED
        self._changed.append(block)

    def next_transfer(self) -> tuple[str, FileBlock] | None:
        """``"read"`` or ``"write"``, and which block; None if there is nothing to move now."""
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

    def moved(self, block: FileBlock) -> None:
        """A transfer is over, in either direction."""
        block.place = _Place.WINDOW
        if block.waiting:
            self._give(block)
        else:
            insort(self._clean, block)
        self._moved_on = True

    def places(self) -> tuple[str, ...]:
        """Where every block is, in the order of the forward."""
        return tuple(block.place.name for block in self._by_params.values())

    def _give(self, block: FileBlock) -> None:
        block.place = _Place.HELD
        _, begin = block.waiting.popleft()
        begin()

    def _next_read(self) -> FileBlock | None:
        """The block in a file that is needed first, if there is space for it."""
        if not self._away or not self._moved_on:
            return None
        block = self._away[0]
        free, leaving = self._free, len(self._clean)
        while free < block.size and leaving and block < self._clean[leaving - 1]:
            leaving -= 1
            free += self._clean[leaving].size
        if free < block.size:
            self._moved_on = False
            return None
        heapq.heappop(self._away)
        for each in self._clean[leaving:]:
            each.place = _Place.FILE
            heapq.heappush(self._away, each)
        del self._clean[leaving:]
        self._free = free - block.size
        return block

    def _use_after(self, block: FileBlock, step: int) -> int:
        cycles, within = divmod(step, self._cycle)
        later = next((use for use in block.uses if use > within), None)
        return cycles * self._cycle + later if later is not None else (cycles + 1) * self._cycle + block.uses[0]


def _file_blocks(blocks: Sequence[Block]) -> dict[tuple[int, tuple[str, ...]], FileBlock]:
    """By position in the model and parameters."""
    found: dict[tuple[int, tuple[str, ...]], FileBlock] = {}
    for position, block in enumerate(blocks):
        for part in block.parts:
            for step, close in enumerate(part.closes):
                if close is None or not close.file:
                    continue
                known = found.setdefault(
                    (position, close.params), FileBlock(block.name, position, close.file, [], next_use=step)
                )
                known.uses.append(step)
    return found
