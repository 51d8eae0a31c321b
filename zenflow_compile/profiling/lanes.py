"""Divides the time of each lane among the events on it: what every picture of a recording shows."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from zenflow_compile.profiling.recording import Intervals, Recording
from zenflow_compile.timeline import COMPUTE, D2H, DISK, H2D, Event

BLOCKS, DIGITS = "▁▂▃▄▅▆▇█", "12345678"
"""The levels of a lane's busy share, from one eighth to all of a slice, in each alphabet."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How one kind of work looks: a character in each alphabet, a rich style, which only adds to it, a page's color."""

    meaning: str
    block: str
    ascii: str
    style: str
    color: str


FORWARD = Mark("forward", "░", "f", "cyan", "forward")
BACKWARD = Mark("backward", "▒", "b", "blue", "backward")
UPDATE = Mark("device update", "▓", "u", "magenta", "device-update")
EVALUATION = Mark("evaluation (no_grad)", "o", "o", "dim cyan", "evaluation")
WAIT = Mark("waiting", "!", "!", "bold red", "waiting")
RANK_WAIT = Mark("waiting for ranks", "?", "?", "dim red", "waiting-for-ranks")
COMPILE = Mark("compilation", "c", "c", "dim", "compilation")
COPY = Mark("copy", BLOCKS[-1], DIGITS[-1], "green", "copy")
STATE = Mark("state move", BLOCKS[-1], DIGITS[-1], "yellow", "state-move")
HOST = Mark("host update, hidden", BLOCKS[-1], DIGITS[-1], "yellow", "hidden")
EXPOSED = Mark("host update, exposed", BLOCKS[-1], DIGITS[-1], "bold red", "exposed")
NOT_WAITED_FOR = Mark("host update, not waited for", BLOCKS[-1], DIGITS[-1], "yellow", "hidden")
WAITED_FOR = Mark("host update, waited for", BLOCKS[-1], DIGITS[-1], "bold red", "exposed")
OTHER = Mark("other", "+", "+", "dim", "other")
IDLE = Mark("idle", "·", ".", "dim", "lane")
_OF_HOST = (HOST, EXPOSED, NOT_WAITED_FOR, WAITED_FOR)
MARKS = (FORWARD, BACKWARD, UPDATE, EVALUATION, COMPILE, WAIT, RANK_WAIT, COPY, STATE, *_OF_HOST, OTHER, IDLE)

INNERMOST_FIRST = (EVALUATION, COMPILE, WAIT, RANK_WAIT, UPDATE, BACKWARD, FORWARD, OTHER, STATE, COPY, *_OF_HOST)
"""Nested work is cut out of the work around it. Waits inside an evaluation belong to it, as in ``summary``."""

_COMPUTE_MARKS = {"wait": WAIT, "rank_wait": RANK_WAIT, "update": UPDATE, "merge": UPDATE, "select": UPDATE}
_COMPUTE_MARKS |= {"backward": BACKWARD, "forward": FORWARD, "inference": EVALUATION, "evaluation": EVALUATION}
_COMPUTE_MARKS |= {"compile": COMPILE}


class Span(NamedTuple):
    """Time from ``start`` to ``end``, in nanoseconds, that one event has on its lane."""

    start: int
    end: int
    mark: Mark
    event: Event


def lanes_of(recording: Recording, start_ns: int, end_ns: int) -> dict[str, list[Span]]:
    """The spans of each lane between two moments: disjoint and by time, the lanes in the order of a picture.

    A moment in which several events of a lane run belongs to the innermost kind, and of one kind to the event that
    began last. A host update is hidden or exposed, see ``Recording.hides``; of a model that is not compiled it is only
    known whether something waited for it.
    """
    disk = [DISK] if any(event.lane == DISK for event in recording.events) else []
    lanes: dict[str, list[Event]] = {name: [] for name in (COMPUTE, D2H, H2D, *recording.worker_lanes, *disk)}
    for event in (*recording.events, *recording.evaluation_events()):
        if event.lane in lanes and event.start_ns < end_ns and event.end_ns > start_ns:
            lanes[event.lane].append(event)
    hides, marks = recording.hides, (HOST, EXPOSED) if recording.forward_recorded else (NOT_WAITED_FOR, WAITED_FOR)
    return {name: list(_split(_innermost(events, start_ns, end_ns), hides, *marks)) for name, events in lanes.items()}


def _mark_of(event: Event) -> Mark:
    if event.lane == COMPUTE:
        return _COMPUTE_MARKS.get(event.kind, OTHER)
    if event.is_worker:
        return HOST
    return STATE if event.kind == "state" else COPY


def _innermost(events: Iterable[Event], start_ns: int, end_ns: int) -> Iterator[Span]:
    """Give every moment to one of the events that run in it."""
    waiting = sorted(events, key=lambda event: event.start_ns, reverse=True)
    found = {moment for event in waiting for moment in (event.start_ns, event.end_ns)}
    moments = sorted({min(max(moment, start_ns), end_ns) for moment in found})
    running: list[tuple[int, int, int, Mark, Event]] = []
    order = 0  # so that no two marks or events are ever compared
    last: Span | None = None
    for moment, following in pairwise(moments):
        while waiting and waiting[-1].start_ns <= moment:
            event = waiting.pop()
            mark, order = _mark_of(event), order + 1
            heapq.heappush(running, (INNERMOST_FIRST.index(mark), -event.start_ns, order, mark, event))
        while running and running[0][-1].end_ns <= moment:
            heapq.heappop(running)
        if not running:
            continue
        mark, event = running[0][-2:]
        if last is not None and last.event is event and last.end == moment:
            last = last._replace(end=following)
            continue
        if last is not None:
            yield last
        last = Span(moment, following, mark, event)
    if last is not None:
        yield last


def _split(spans: Iterable[Span], hides: Intervals, hidden: Mark, exposed: Mark) -> Iterator[Span]:
    """Cut host updates where device work that hides them begins and ends, and mark the two kinds of parts."""
    starts = [start for start, _ in hides]
    for span in spans:
        if span.mark is not HOST:
            yield span
            continue
        cursor, index = span.start, max(0, bisect_right(starts, span.start) - 1)
        while cursor < span.end:
            begin, end = hides[index] if index < len(hides) else (span.end, span.end)
            begin, end = min(max(begin, cursor), span.end), min(max(end, cursor), span.end)
            if cursor < begin:
                yield span._replace(start=cursor, end=begin, mark=exposed)
            if begin < end:
                yield span._replace(start=begin, end=end, mark=hidden)
            cursor, index = end, index + 1
