"""Draws lanes over time as text: one row per lane, one character per slice of time.

The compute lane shows what filled most of a slice. Copies and host updates are short beside a slice: their lanes show
the share of it in which they were busy, in eighths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zenflow_compile.profiling.diagnose import milliseconds
from zenflow_compile.profiling.recording import (
    Interval,
    Intervals,
    Recording,
    exclusive,
    intersect,
    length_ns,
    subtract,
    union,
)
from zenflow_compile.timeline import COMPUTE, D2H, DISK, H2D, STEP, Event

_MIN_CELLS = 16
_SHARE_COLUMNS = 5
LEVELS = 8
BLOCKS, DIGITS = "▁▂▃▄▅▆▇█", "12345678"
"""The levels of a lane's busy share, from one eighth to all of a slice, in each alphabet."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How one kind of work looks: a character in each alphabet and a rich style, which only adds to it."""

    meaning: str
    block: str
    ascii: str
    style: str


FORWARD = Mark("forward", "░", "f", "cyan")
BACKWARD = Mark("backward", "▒", "b", "blue")
UPDATE = Mark("device update", "▓", "u", "magenta")
EVALUATION = Mark("evaluation (no_grad)", "o", "o", "dim cyan")
WAIT = Mark("waiting", "!", "!", "bold red")
COMPILE = Mark("compilation", "c", "c", "dim")
COPY = Mark("copy", BLOCKS[-1], DIGITS[-1], "green")
STATE = Mark("state move", BLOCKS[-1], DIGITS[-1], "yellow")
HOST = Mark("host update, hidden", BLOCKS[-1], DIGITS[-1], "yellow")
EXPOSED = Mark("host update, exposed", BLOCKS[-1], DIGITS[-1], "bold red")
OTHER = Mark("other", "+", "+", "dim")
IDLE = Mark("idle", "·", ".", "dim")
MARKS = (FORWARD, BACKWARD, UPDATE, EVALUATION, COMPILE, WAIT, COPY, STATE, HOST, EXPOSED, OTHER, IDLE)

# Nested work is cut out of the work around it. Waits inside an evaluation belong to it, as in ``summary``.
INNERMOST_FIRST = (EVALUATION, COMPILE, WAIT, UPDATE, BACKWARD, FORWARD, OTHER)

_COMPUTE_MARKS = {"wait": WAIT, "update": UPDATE, "merge": UPDATE, "select": UPDATE}
_COMPUTE_MARKS |= {"backward": BACKWARD, "forward": FORWARD, "inference": EVALUATION, "evaluation": EVALUATION}
_COMPUTE_MARKS |= {"compile": COMPILE}


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
        evaluation_ms: of ``span_ms``, time of evaluation, which ``summary`` does not count in the steps.
    """

    ruler: str
    rows: dict[str, tuple[Cell, ...]]
    busy: dict[str, float]
    label_width: int
    span_ms: float
    evaluation_ms: float
    steps: int

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The marks in use, for the legend."""
        used = {cell.mark for cells in self.rows.values() for cell in cells}
        return tuple(mark for mark in MARKS if mark in used)


def draw(recording: Recording, *, width: int, steps: int = 4) -> Gantt | None:
    """The last ``steps`` optimizer steps, ``width`` characters wide with labels; None if there is no step to show."""
    all_steps = (event for event in recording.events if event.lane == STEP)
    shown = sorted(all_steps, key=lambda event: event.end_ns)[-steps:]
    if not shown or shown[-1].end_ns <= shown[0].start_ns:
        return None
    start, end = shown[0].start_ns, shown[-1].end_ns
    disk = [DISK] if any(event.lane == DISK for event in recording.events) else []
    lanes = [D2H, H2D, *recording.worker_lanes, *disk]
    label_width = max(map(len, [COMPUTE, *lanes])) + 2
    slices = _Slices(start, end, max(_MIN_CELLS, width - label_width - _SHARE_COLUMNS))
    compute = [*recording.events, *recording.evaluation_events()]
    rows = {COMPUTE: _kinds([each for each in compute if each.lane == COMPUTE], slices)}
    busy, hides = {}, recording.hides
    for lane in lanes:
        spans = _busy_spans([each for each in recording.events if each.lane == lane], hides, slices)
        rows[lane] = _levels(spans, slices)
        busy[lane] = length_ns(union(pair for pairs in spans.values() for pair in pairs)) / (end - start)
    return Gantt(
        ruler=_ruler(shown, slices),
        rows=rows,
        busy=busy,
        label_width=label_width,
        span_ms=(end - start) / 1e6,
        evaluation_ms=length_ns(intersect(recording.evaluation, [(start, end)])) / 1e6,
        steps=len(shown),
    )


@dataclass(frozen=True, slots=True)
class _Slices:
    """``count`` equal slices of the time from ``start`` to ``end``, in nanoseconds."""

    start: int
    end: int
    count: int

    @property
    def length(self) -> float:
        return (self.end - self.start) / self.count

    def cut(self, event: Event) -> Interval:
        """The part of an event that is shown; empty if none is."""
        return max(event.start_ns, self.start), min(event.end_ns, self.end)

    def times(self, spans: dict[Mark, Intervals]) -> list[dict[Mark, float]]:
        """The nanoseconds of each mark in each slice, for disjoint spans."""
        found: list[dict[Mark, float]] = [{} for _ in range(self.count)]
        for mark, intervals in spans.items():
            for start, end in intervals:
                first, last = int((start - self.start) / self.length), int((end - self.start) / self.length)
                for cell in range(first, min(last, self.count - 1) + 1):
                    cell_start = self.start + cell * self.length
                    overlap = min(end, cell_start + self.length) - max(start, cell_start)
                    if overlap > 0:
                        found[cell][mark] = found[cell].get(mark, 0.0) + overlap
        return found


def _kinds(events: Iterable[Event], slices: _Slices) -> tuple[Cell, ...]:
    """What filled most of each slice of the compute lane."""
    spans: dict[Mark, list[Interval]] = {}
    for event in events:
        spans.setdefault(_COMPUTE_MARKS.get(event.kind, OTHER), []).append(slices.cut(event))
    layers = exclusive((mark, union(spans[mark])) for mark in INNERMOST_FIRST if mark in spans)
    # max keeps the first of equals, which is the innermost.
    return tuple(Cell(max(cell, key=lambda mark: cell[mark]) if cell else IDLE) for cell in slices.times(layers))


def _busy_spans(events: Sequence[Event], hides: Intervals, slices: _Slices) -> dict[Mark, Intervals]:
    """When a lane of copies or host updates was busy, by mark; a host update is hidden or exposed."""
    if any(event.is_worker for event in events):
        busy = union(map(slices.cut, events))
        hidden = intersect(busy, hides)
        return {HOST: hidden, EXPOSED: subtract(busy, hidden)}
    state = union(slices.cut(event) for event in events if event.kind == "state")
    return exclusive([(STATE, state), (COPY, union(map(slices.cut, events)))])


def _levels(spans: dict[Mark, Intervals], slices: _Slices) -> tuple[Cell, ...]:
    """The busy share of each slice. A slice with any work shows at least one eighth."""
    cells = []
    for cell in slices.times(spans):
        share = sum(cell.values()) / slices.length
        level = max(1, min(LEVELS, round(LEVELS * share)))
        cells.append(Cell(max(cell, key=lambda mark: cell[mark]), level) if cell else Cell(IDLE))
    return tuple(cells)


def _ruler(steps: list[Event], slices: _Slices) -> str:
    """Step numbers at the slices where they begin; a number that would run into the next is left out."""
    cells = slices.count
    ruler = [" "] * cells
    positions = [(step.start_ns - slices.start) * cells // (slices.end - slices.start) for step in steps] + [cells]
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
