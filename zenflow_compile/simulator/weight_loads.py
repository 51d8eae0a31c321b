"""The simulated loads of offloaded weights: their order, the ring that they are loaded into, and what has arrived.

Loads keep the order of use, over micro-batches and steps. Each passes through a staging buffer, which it leaves when
the ring has space for the weight. A weight leaves the ring behind its last use in a forward or backward.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zenflow_compile.performance.workload import Load, Workload


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
        self._staging_buffers = work.staging_buffers
        self._in_staging = 0  # copied, or under way
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
        most = self._staging_buffers - shared
        if request is None or self._in_staging >= most or self._in_staging + uploads >= self._staging_buffers:
            return None
        if request.position is not None:
            final = self._is_final(request.step, request.position) and not self.being_written[request.load.name]
            return request if final else None
        return request

    def begin(self) -> None:
        """The copy of the next load begins."""
        self._in_staging += 1
        self._next = next(self._order, None)

    @property
    def expects_loads(self) -> bool:
        """Whether a load follows at any time."""
        return self._next is not None

    @property
    def in_staging(self) -> int:
        """Staging buffers that loads take."""
        return self._in_staging

    def copied(self, load: Load) -> None:
        """A copy has ended."""
        self._staged.append(load)
        self._fill_ring()

    def _fill_ring(self) -> None:
        while self._staged and self._staged[0].weight <= self._free:
            self._free -= self._staged.popleft().weight
            self._in_staging -= 1
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
