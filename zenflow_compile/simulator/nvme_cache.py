"""The simulated cache of state in files: which state the disk moves next.

The rules are those of ``runtime/nvme/cache.py``. State that stays in host memory is never moved. The rest takes turns
in a ring, in the order of use: it is read when the turns before it have left enough of the ring, used by a job, and
written back. It leaves the ring when the turns before it have left, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zenflow_compile.performance.workload import Block, Workload


@dataclass(slots=True, eq=False)
class Turn:
    """One use of the state of parameters of a block of the model that are flushed together.

    Attributes:
        number: from the first step on.
        size: bytes.
        begin: starts its job; None before the job asks for the state.
    """

    number: int
    name: str
    size: int
    begin: Callable[[], None] | None = None
    is_read: bool = False
    is_written: bool = False


class NvmeCache:
    """Decides what moves; the machine moves it, one transfer at a time.

    Args:
        backward: jobs of a step come in the order of the backward, not of the forward.
    """

    def __init__(self, work: Workload, *, backward: bool) -> None:
        uses = _uses(work.blocks, work.cycle, backward=backward)
        self._cycle = work.cycle
        self._uses = list(uses.values())
        self._numbers = {use: number for number, use in enumerate(uses)}
        # A block may be larger than the ring: its parameters take turns, too.
        self._free = max([work.file_ring, *(size for _, size in self._uses)])
        self._turns: dict[int, Turn] = {}  # by number: those that a job asked for, or that are in the ring
        self._ring: deque[Turn] = deque()
        self._changed: deque[Turn] = deque()
        self._reads = self._writes = 0  # begun: the next read is that of the turn with this number
        self._asked = 0  # turns that a job has asked for

    def need(self, step: int, position: int, params: tuple[str, ...], begin: Callable[[], None]) -> Turn:
        """Call ``begin``, which starts a job of ``step``, as soon as its state is in host memory."""
        cycles, within = divmod(step, self._cycle)
        turn = self._turn(cycles * len(self._uses) + self._numbers[within, position, params])
        turn.begin = begin
        self._asked += 1
        if turn.is_read:
            begin()
        return turn

    def changed(self, turn: Turn) -> None:
        """The job that used the state is done."""
        self._changed.append(turn)

    def next_transfer(self) -> tuple[str, Turn] | None:
        """``"read"`` or ``"write"``, and whose state; None if there is nothing to move now.

        A read goes first: the ring has space for few of them, and each write makes space for the next.
        """
        if (reading := self._next_read()) is not None:
            return "read", reading
        if self._changed:
            self._writes += 1
            return "write", self._changed.popleft()
        return None

    def was_read(self, turn: Turn) -> None:
        """A read is over."""
        turn.is_read = True
        if turn.begin is not None:
            turn.begin()

    def was_written(self, turn: Turn) -> None:
        """A write is over."""
        turn.is_written = True
        while self._ring and self._ring[0].is_written:
            turn = self._ring.popleft()
            self._free += turn.size
            del self._turns[turn.number]

    def progress(self) -> tuple[int, int]:
        """How far reads are ahead of the jobs that asked for state, and how far writes are behind, in turns begun."""
        return self._reads - self._asked, self._asked - self._writes

    def _next_read(self) -> Turn | None:
        """The next turn, if there is space for its state."""
        if not self._uses or self._uses[self._reads % len(self._uses)][1] > self._free:
            return None
        turn = self._turn(self._reads)
        self._reads += 1
        self._free -= turn.size
        self._ring.append(turn)
        return turn

    def _turn(self, number: int) -> Turn:
        name, size = self._uses[number % len(self._uses)]
        return self._turns.setdefault(number, Turn(number, name, size))


def _uses(
    blocks: Sequence[Block], cycle: int, *, backward: bool
) -> dict[tuple[int, int, tuple[str, ...]], tuple[str, int]]:
    """Names and bytes of the state that a cycle uses, in order, by step within the cycle, position and parameters."""
    found = {}
    for step in range(cycle):
        positions = range(len(blocks))
        for position in reversed(positions) if backward else positions:
            for part in blocks[position].parts:
                window = part.flushes[step]
                if window is not None and window.file:
                    found[step, position, window.params] = blocks[position].name, window.file
    return found
