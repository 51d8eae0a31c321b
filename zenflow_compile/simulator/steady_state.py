"""Which of the simulated steps count: those of a steady state.

Without files a step leaves to the next ones the updates that are under way, and they land within the steps of their
staleness, so that a few steps are run in. A window of files starts empty and fills over whole cycles: these are run
until the last of them repeat those before them, in the time that they take and in where they leave every block.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.workload import Workload
from zenflow_compile.simulator.device import Device
from zenflow_compile.simulator.machine import Row
from zenflow_compile.timeline.events import DISK

_RUN_IN = 4  # steps
_ALIKE = 1e-4  # two cycles take the same time if they differ by no more than this share of it
_PATIENCE = 24  # steps, of three cycles at least, after which the second half counts even if nothing repeats


class SteadyRun:
    """A device after enough steps, and which of them count.

    Attributes:
        device: that was run.
        steps: so many count; seconds: that they took.
    """

    def __init__(
        self, work: Workload, hardware: Hardware, workers: int, final_at_step: bool, *, steps: int, whole: bool
    ) -> None:
        """
        Args:
            workers: threads that update on the host.
            final_at_step: as in ``simulate``.
            steps: that are to count.
            whole: as many more as make up a whole period of the steady state.
        """
        self._cycle = work.cycle
        parts = [part for block in work.blocks for part in block.parts]
        self._in_files = any(close.file for part in parts for close in part.closes if close is not None)
        self._staleness = max((part.staleness for part in parts), default=0)
        self._begin = 0 if self._in_files else max(0, work.cycle - _RUN_IN)
        self._first = work.cycle + self._staleness
        self._cycles = 0  # of state in files: that were run in
        self.device = Device(work, hardware, workers, final_at_step, first_step=self._begin)
        self.steps = steps
        self.device.run(self._until_enough(whole))
        self._origin, self._end = self._end_of(self._first - 1), self._end_of(self._first + self.steps - 1)
        self.seconds = self._end - self._origin

    def rows(self) -> Iterator[Row]:
        """What the steps that count did; of the disk, which works ahead and behind, what begins within them.

        Times are from the start of the first of them, which has the number that it has after a single cycle.
        """
        shift = self._first - self._cycle - self._staleness
        for row in self.device.machine.rows:
            step = row.step
            if row.lane == DISK:
                if not self._origin <= row.begin < self._end:
                    continue
                step = min(max(step, self._first), self._first + self.steps - 1)
            elif not self._first <= step < self._first + self.steps:
                continue
            yield Row(
                row.lane, row.kind, row.begin - self._origin, row.end - self._origin, step - shift, row.param, row.size
            )

    def _until_enough(self, whole: bool) -> Iterator[int]:
        """The steps to run; whoever runs them comes back for the next one when one is over."""
        period = self._cycle
        if self._in_files:
            repeats = yield from self._until_repeated()
            period *= repeats
            self._first += (self._cycles - repeats - 1) * self._cycle
        if whole:
            self.steps = -(-self.steps // period) * period
        yield from range(self._begin + self._cycles * self._cycle, self._first + self.steps)

    def _until_repeated(self) -> Generator[int, None, int]:
        """Whole cycles until the last of them repeat those before; returns how many they are."""
        found: list[tuple[float, tuple[str, ...]]] = []
        begin = 0.0
        while True:
            yield from range(self._cycles * self._cycle, (self._cycles + 1) * self._cycle)
            self._cycles += 1
            end = self.device.step_ends[-1]
            found.append((end - begin, self.device.machine.files.places()))
            begin = end
            if (period := _period(found)) is not None:
                return period
            if self._cycles >= max(3, _PATIENCE // self._cycle):
                return self._cycles // 2

    def _end_of(self, step: int) -> float:
        return self.device.step_ends[step - self._begin]


def _period(cycles: list[tuple[float, tuple[str, ...]]]) -> int | None:
    """After how many cycles the last ones repeat, the fewest; None if they do not."""
    for period in range(1, len(cycles) // 2 + 1):
        pairs = zip(cycles[-period:], cycles[-2 * period : -period], strict=True)
        if all(abs(a - b) <= _ALIKE * b and here == there for (a, here), (b, there) in pairs):
            return period
    return None
