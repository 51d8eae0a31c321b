"""Draws lanes over time as text: one row per lane, one character per slice of time.

The compute lane shows what filled most of a slice. Copies and host updates are short beside a slice: their lanes show
the share of it in which they were busy, in eighths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from zenflow_compile.profiling.diagnose import milliseconds
from zenflow_compile.profiling.lanes import BLOCKS, IDLE, INNERMOST_FIRST, MARKS, Mark, Span, lanes_of
from zenflow_compile.profiling.recording import Recording, intersect, length_ns
from zenflow_compile.timeline import COMPUTE, D2H, H2D, STEP, Event

_MIN_CELLS = 16
LEVELS = len(BLOCKS)
SHARE_COLUMNS = 5
"""At the end of a row: the busy share of the lane."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A slice of time on a lane: what it shows, and on lanes of copies and workers its busy share in eighths."""

    mark: Mark
    level: int | None = None


@dataclass(frozen=True, slots=True)
class Gantt:
    """The picture.

    Attributes:
        rows: the cells of each lane.
        busy: the share of the time shown in which a lane of copies or host updates was busy.
        slices: columns of the whole scale, which longer runs on it fill.
        evaluation_ms: of ``span_ms``, time of evaluation, which ``summary`` does not count in the steps.
    """

    ruler: str
    rows: dict[str, tuple[Cell, ...]]
    busy: dict[str, float]
    label_width: int
    slices: int
    span_ms: float
    evaluation_ms: float
    steps: int

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The marks in use, for the legend."""
        used = {cell.mark for cells in self.rows.values() for cell in cells}
        return tuple(mark for mark in MARKS if mark in used)


def draw(
    recording: Recording,
    *,
    width: int,
    steps: int = 4,
    scale_ns: int | None = None,
    label_width: int = 0,
    compact: bool = False,
) -> Gantt | None:
    """The last ``steps`` optimizer steps, ``width`` characters wide with labels; None if there is no step to show.

    Args:
        scale_ns: the time that the whole width stands for, at least that of the steps, which is the default.
        label_width: of the names of lanes, at least; pictures on one scale have equal ones.
        compact: three lanes: compute, and the mean busy shares of the copies' lanes and of the workers'.
    """
    if (shown := last_steps(recording, steps)) is None:
        return None
    start, end = shown[0].start_ns, shown[-1].end_ns
    lanes = lanes_of(recording, start, end)
    groups = {lane: [lane] for lane in lanes}
    if compact:
        groups = {COMPUTE: [COMPUTE], "copies": [D2H, H2D], "workers": recording.worker_lanes}
    label_width = max(label_width, label_width_of(groups))
    scale_ns = max(scale_ns or 0, end - start)
    slices = _Slices(start, scale_ns, max(_MIN_CELLS, width - label_width - SHARE_COLUMNS))
    cells = slices.until(end)
    rows, busy = {}, {}
    for name, members in groups.items():
        spans = [span for member in members for span in lanes[member]]
        times = slices.times(spans)[:cells]
        if name == COMPUTE:
            rows[name] = _kinds(times)
        else:
            rows[name] = _levels(times, len(members) * slices.length)
            busy[name] = sum(span.end - span.start for span in spans) / max(1, len(members)) / (end - start)
    return Gantt(
        ruler=_ruler(shown, slices, cells),
        rows=rows,
        busy=busy,
        label_width=label_width,
        slices=slices.count,
        span_ms=(end - start) / 1e6,
        evaluation_ms=length_ns(intersect(recording.evaluation, [(start, end)])) / 1e6,
        steps=len(shown),
    )


def draw_together(recordings: Mapping[str, Recording], *, width: int, steps: int = 4) -> Gantt | None:
    """The compute lanes of recordings of one clock, with their names, during the last ``steps`` steps of all.

    None if one of them has no step to show.
    """
    shown = [last_steps(recording, steps) for recording in recordings.values()]
    found = [each for each in shown if each is not None]
    if not found or len(found) < len(shown):
        return None
    start, end = min(each[0].start_ns for each in found), max(each[-1].end_ns for each in found)
    label_width = label_width_of(recordings)
    slices = _Slices(start, end - start, max(_MIN_CELLS, width - label_width))
    return Gantt(
        ruler=_ruler(found[0], slices, slices.count),
        rows={
            name: _kinds(slices.times(lanes_of(recording, start, end)[COMPUTE]))
            for name, recording in recordings.items()
        },
        busy={},
        label_width=label_width,
        slices=slices.count,
        span_ms=(end - start) / 1e6,
        evaluation_ms=0.0,
        steps=len(found[0]),
    )


def last_steps(recording: Recording, count: int) -> list[Event] | None:
    """The last ``count`` optimizer steps; None if they took no time."""
    all_steps = (event for event in recording.events if event.lane == STEP)
    shown = sorted(all_steps, key=lambda event: event.end_ns)[-count:]
    return shown if shown and shown[-1].end_ns > shown[0].start_ns else None


def label_width_of(lanes: Iterable[str]) -> int:
    """Columns of the names of lanes, with the gap behind them."""
    return max(map(len, lanes)) + 2


@dataclass(frozen=True, slots=True)
class _Slices:
    """``count`` equal slices of ``duration`` nanoseconds from ``start`` on."""

    start: int
    duration: int
    count: int

    @property
    def length(self) -> float:
        return self.duration / self.count

    def until(self, end: int) -> int:
        """How many slices the time to ``end`` fills or begins."""
        return min(self.count, math.ceil((end - self.start) / self.length - 1e-6))

    def times(self, spans: Iterable[Span]) -> list[dict[Mark, float]]:
        """The nanoseconds of each mark in each slice, for disjoint spans."""
        found: list[dict[Mark, float]] = [{} for _ in range(self.count)]
        for start, end, mark, _ in spans:
            first, last = int((start - self.start) / self.length), int((end - self.start) / self.length)
            for cell in range(first, min(last, self.count - 1) + 1):
                cell_start = self.start + cell * self.length
                overlap = min(end, cell_start + self.length) - max(start, cell_start)
                if overlap > 0:
                    found[cell][mark] = found[cell].get(mark, 0.0) + overlap
        return found


def _kinds(times: Iterable[dict[Mark, float]]) -> tuple[Cell, ...]:
    """What filled most of each slice of the compute lane."""
    return tuple(Cell(_longest(found) if found else IDLE) for found in times)


def _levels(times: Iterable[dict[Mark, float]], length: float) -> tuple[Cell, ...]:
    """The busy share of ``length`` nanoseconds in each slice. A slice with any work shows at least one eighth."""
    cells = []
    for found in times:
        if not found:  # always so for no lanes, whose ``length`` is 0
            cells.append(Cell(IDLE))
            continue
        level = max(1, min(LEVELS, round(LEVELS * sum(found.values()) / length)))
        cells.append(Cell(_longest(found), level))
    return tuple(cells)


def _longest(found: Mapping[Mark, float]) -> Mark:
    # max keeps the first of equals, which is the innermost.
    return max((mark for mark in INNERMOST_FIRST if mark in found), key=lambda mark: found[mark])


def _ruler(steps: list[Event], slices: _Slices, cells: int) -> str:
    """Step numbers at the slices where they begin; a number that would run into the next is left out."""
    ruler = [" "] * cells
    positions = [(step.start_ns - slices.start) * slices.count // slices.duration for step in steps] + [cells]
    for step, (position, following) in zip(steps, pairwise(positions), strict=True):
        for label in (f"|step {step.step}", f"|{step.step}", "|"):
            if position + len(label) < following + (following == cells):
                ruler[position : position + len(label)] = label
                break
    return "".join(ruler)


def duration_label(gantt: Gantt) -> str:
    """What the picture covers, in words."""
    what = "The last step" if gantt.steps == 1 else f"The last {gantt.steps} steps"
    apart = f", {milliseconds(gantt.evaluation_ms)} of it evaluation" if gantt.evaluation_ms else ""
    return f"{what}, {milliseconds(gantt.span_ms)}{apart}"
