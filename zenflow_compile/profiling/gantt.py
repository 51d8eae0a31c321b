"""Draws lanes over time as text: one row per lane, one character per slice of time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from zenflow_compile.profiling.diagnose import milliseconds
from zenflow_compile.profiling.recording import Interval, Recording, exclusive, intersect, length_ns, union
from zenflow_compile.timeline import COMPUTE, D2H, DISK, H2D, STEP, Event

_MIN_CELLS = 16


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
COPY = Mark("copy", "═", "=", "green")
STATE = Mark("state move", "s", "s", "yellow")
HOST = Mark("host update", "█", "#", "yellow")
OTHER = Mark("other", "+", "+", "dim")
IDLE = Mark("idle", "·", ".", "dim")
MARKS = (FORWARD, BACKWARD, UPDATE, EVALUATION, WAIT, COPY, STATE, HOST, OTHER, IDLE)

# Nested work is cut out of the work around it. Waits inside an evaluation belong to it, as in ``summary``.
INNERMOST_FIRST = (EVALUATION, WAIT, UPDATE, BACKWARD, FORWARD, STATE, COPY, HOST, OTHER)

_COMPUTE_MARKS = {"wait": WAIT, "update": UPDATE, "merge": UPDATE, "select": UPDATE}
_COMPUTE_MARKS |= {"backward": BACKWARD, "forward": FORWARD, "inference": EVALUATION, "evaluation": EVALUATION}


@dataclass(frozen=True, slots=True)
class Gantt:
    """The picture. ``evaluation_ms`` of ``span_ms`` is evaluation, which ``summary`` does not count in the steps."""

    ruler: str
    rows: dict[str, tuple[Mark, ...]]
    label_width: int
    span_ms: float
    evaluation_ms: float
    steps: int

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The marks in use, for the legend."""
        used = {cell for cells in self.rows.values() for cell in cells}
        return tuple(mark for mark in MARKS if mark in used)


def draw(recording: Recording, *, width: int, steps: int = 4) -> Gantt | None:
    """The last ``steps`` optimizer steps, ``width`` characters wide with labels; None if there is no step to show.

    A slice of time shows the kind that filled most of it; a lane that was busy for less than half of a slice
    still shows there, since short copies would otherwise vanish.
    """
    all_steps = (event for event in recording.events if event.lane == STEP)
    shown = sorted(all_steps, key=lambda event: event.end_ns)[-steps:]
    if not shown or shown[-1].end_ns <= shown[0].start_ns:
        return None
    start, end = shown[0].start_ns, shown[-1].end_ns
    disk = [DISK] if any(event.lane == DISK for event in recording.events) else []
    lanes = [COMPUTE, D2H, H2D, *recording.worker_lanes, *disk]
    events = [*recording.events, *recording.evaluation_events()]
    label_width = max(len(lane) for lane in lanes) + 2
    cells = max(_MIN_CELLS, width - label_width)
    return Gantt(
        ruler=_ruler(shown, start, end, cells),
        rows={lane: _cells([each for each in events if each.lane == lane], start, end, cells) for lane in lanes},
        label_width=label_width,
        span_ms=(end - start) / 1e6,
        evaluation_ms=length_ns(intersect(recording.evaluation, [(start, end)])) / 1e6,
        steps=len(shown),
    )


def _cells(events: Iterable[Event], start: int, end: int, count: int) -> tuple[Mark, ...]:
    """The mark of each of ``count`` equal slices of time."""
    spans: dict[Mark, list[Interval]] = {}
    for event in events:
        if event.end_ns > start and event.start_ns < end:
            spans.setdefault(_mark(event), []).append((max(event.start_ns, start), min(event.end_ns, end)))
    layers = [(mark, union(spans[mark])) for mark in INNERMOST_FIRST if mark in spans]
    time_in: list[dict[Mark, float]] = [{} for _ in range(count)]
    slice_ns = (end - start) / count
    for mark, intervals in exclusive(layers).items():
        for interval_start, interval_end in intervals:
            first, last = int((interval_start - start) / slice_ns), int((interval_end - start) / slice_ns)
            for cell in range(first, min(last, count - 1) + 1):
                cell_start = start + cell * slice_ns
                overlap = min(interval_end, cell_start + slice_ns) - max(interval_start, cell_start)
                if overlap > 0:
                    time_in[cell][mark] = time_in[cell].get(mark, 0.0) + overlap
    # max keeps the first of equals, which is the innermost.
    return tuple(max(cell, key=lambda mark: cell[mark]) if cell else IDLE for cell in time_in)


def _mark(event: Event) -> Mark:
    if event.is_worker:
        return HOST
    if event.lane == COMPUTE:
        return _COMPUTE_MARKS.get(event.kind, OTHER)
    return STATE if event.kind == "state" else COPY


def _ruler(steps: list[Event], start: int, end: int, cells: int) -> str:
    """Step numbers at the slices where they begin; a number that would run into the next is left out."""
    ruler = [" "] * cells
    positions = [(step.start_ns - start) * cells // (end - start) for step in steps] + [cells]
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
