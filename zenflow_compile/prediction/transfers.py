"""What moves next in a simulation: loads of offloaded weights, and state in files."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zenflow_compile.planning.plan import UPLOAD_RING
from zenflow_compile.prediction.workload import Block, Load, Workload


@dataclass(frozen=True, slots=True)
class Request:
    """A load that will be needed.

    Attributes:
        step: of its use. position: of the block in the forward that reads what the last step wrote; None: a later use.
    """

    load: Load
    step: int
    position: int | None

    @property
    def deadline(self) -> tuple[int, float]:
        """When it is needed, comparable to the step and the position of an upload."""
        return self.step, math.inf if self.position is None else self.position


class WeightLoads:
    """Decides what is loaded next; the machine copies it.

    Args:
        first_step: the number of the step to begin with.
        is_final: whether the host's values that a first forward reads are there: (step, position).

    Attributes:
        being_written: weights that are on their way back to the host, by name.
    """

    def __init__(self, work: Workload, first_step: int, is_final: Callable[[int, int], bool]) -> None:
        self.being_written: Counter[str] = Counter()
        self._order = _order(work, first_step) if work.loads_weights else iter(())
        self._next = next(self._order, None)
        self._is_final = is_final
        self._free = work.ring
        self._staged: deque[Load] = deque()
        self.in_staging = 0  # staging buffers that loads take: copied, or under way
        self._arrived = 0
        self._used = 0

    @property
    def is_missing(self) -> bool:
        """Whether the next weight to be used is not in the ring yet."""
        return self._arrived <= self._used

    def use(self) -> None:
        """The device reads the next weight."""
        assert not self.is_missing
        self._used += 1

    def release(self, size: int) -> None:
        """Weights of this size are unloaded."""
        self._free += size
        self._fill_ring()

    def next_request(self, uploads: int, *, shared: bool) -> Request | None:
        """The next load if it can begin.

        Args:
            uploads: in staging buffers. shared: whether there are uploads at all. One buffer is left to them then: the
                device may wait for an upload that is needed before the weights that have arrived.
        """
        request = self._next
        most = UPLOAD_RING - shared
        if request is None or self.in_staging >= most or self.in_staging + uploads >= UPLOAD_RING:
            return None
        if request.position is not None:
            final = self._is_final(request.step, request.position) and not self.being_written[request.load.name]
            return request if final else None
        return request

    def begin(self) -> None:
        """The copy of the next load begins."""
        self.in_staging += 1
        self._next = next(self._order, None)

    @property
    def expects_loads(self) -> bool:
        """Whether a load follows at any time."""
        return self._next is not None

    def copied(self, load: Load) -> None:
        """A copy has ended."""
        self._staged.append(load)
        self._fill_ring()

    def _fill_ring(self) -> None:
        while self._staged and self._staged[0].weight <= self._free:
            self._free -= self._staged.popleft().weight
            self.in_staging -= 1
            self._arrived += 1


def _order(work: Workload, first_step: int) -> Iterator[Request]:
    """All loads from a step on, without end."""
    forward = [
        (stage.load, position)
        for position, block in enumerate(work.blocks)
        for stage in block.forward
        if stage.load is not None
    ]
    backward = [stage.load for block in reversed(work.blocks) for stage in block.backward if stage.load is not None]
    if not forward:
        return
    step = first_step
    while True:
        for number in range(work.micro_batches):
            for load, position in forward:
                yield Request(load, step, None if number else position)
            for load in backward:
                yield Request(load, step, None)
        for rewrite in work.rewrites:
            yield Request(rewrite.load, step, None)
        step += 1


@dataclass(slots=True, eq=False)
class FileTurn:
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


class FileTurns:
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
        self._turns: dict[int, FileTurn] = {}  # by number: those that a job asked for, or that are in the ring
        self._ring: deque[FileTurn] = deque()
        self._changed: deque[FileTurn] = deque()
        self._reads = self._writes = 0  # begun: the next read is that of the turn with this number
        self._asked = 0  # turns that a job has asked for

    def need(self, step: int, position: int, params: tuple[str, ...], begin: Callable[[], None]) -> FileTurn:
        """Call ``begin``, which starts a job of ``step``, as soon as its state is in host memory."""
        cycles, within = divmod(step, self._cycle)
        turn = self._turn(cycles * len(self._uses) + self._numbers[within, position, params])
        turn.begin = begin
        self._asked += 1
        if turn.is_read:
            begin()
        return turn

    def changed(self, turn: FileTurn) -> None:
        """The job that used the state is done."""
        self._changed.append(turn)

    def next_transfer(self) -> tuple[str, FileTurn] | None:
        """``"read"`` or ``"write"``, and whose state; None if there is nothing to move now.

        A read goes first: the ring has space for few of them, and each write makes space for the next.
        """
        if (reading := self._next_read()) is not None:
            return "read", reading
        if self._changed:
            self._writes += 1
            return "write", self._changed.popleft()
        return None

    def was_read(self, turn: FileTurn) -> None:
        """A read is over."""
        turn.is_read = True
        if turn.begin is not None:
            turn.begin()

    def was_written(self, turn: FileTurn) -> None:
        """A write is over."""
        turn.is_written = True
        while self._ring and self._ring[0].is_written:
            turn = self._ring.popleft()
            self._free += turn.size
            del self._turns[turn.number]

    def progress(self) -> tuple[int, int]:
        """How far reads are ahead of the jobs that asked for state, and how far writes are behind, in turns begun."""
        return self._reads - self._asked, self._asked - self._writes

    def _next_read(self) -> FileTurn | None:
        """The next turn, if there is space for its state."""
        if not self._uses or self._uses[self._reads % len(self._uses)][1] > self._free:
            return None
        turn = self._turn(self._reads)
        self._reads += 1
        self._free -= turn.size
        self._ring.append(turn)
        return turn

    def _turn(self, number: int) -> FileTurn:
        name, size = self._uses[number % len(self._uses)]
        return self._turns.setdefault(number, FileTurn(number, name, size))


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
