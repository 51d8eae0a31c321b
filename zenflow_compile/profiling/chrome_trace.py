"""Writes a recording in the trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: Google's "Trace Event Format": a JSON object with ``traceEvents``; times and durations in
microseconds; "M" names processes and threads, "X" is a span, "i" an instant, "C" a counter. Spans of one
thread must nest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from zenflow_compile.profiling.recording import Recording
from zenflow_compile.timeline import COMPUTE, D2H, GRADIENTS, H2D, MEMORY, RANKS, STEP, WINDOWS, Event

_LANE_ORDER = (STEP, COMPUTE, GRADIENTS, WINDOWS, RANKS, D2H, H2D)
_NS_PER_US = 1e3

TraceEvent = dict[str, Any]


def write_chrome_trace(recordings: Iterable[Recording], path: str | PathLike[str]) -> None:
    """Write one trace with a process per recording."""
    Path(path).write_text(json.dumps(chrome_trace(recordings)), encoding="utf-8")


def chrome_trace(recordings: Iterable[Recording]) -> dict[str, Any]:
    """Make the trace as a JSON object. Time 0 is the start of the first event of all recordings."""
    recordings = tuple(recordings)
    origin = min((event.start_ns for recording in recordings for event in recording.events), default=0)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            trace_event
            for pid, recording in enumerate(recordings, start=1)
            for trace_event in _process(recording, pid, origin)
        ],
    }


def _process(recording: Recording, pid: int, origin: int) -> Iterator[TraceEvent]:
    title = recording.title or f"zenflow {recording.policy}".strip()
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": title}}
    lanes: dict[str, list[Event]] = {}
    for event in (*recording.events, *recording.evaluation_events()):
        if event.lane == MEMORY:
            name = "device bytes, peak" if event.kind == "peak" else "device bytes"
            yield _counter(name, event.start_ns - origin, pid, event.bytes)
            continue
        lanes.setdefault(event.lane, []).append(event)
    # Worker lanes, in numeric order, and any that a simulation adds.
    others = sorted((lane for lane in lanes if lane not in _LANE_ORDER), key=lambda lane: (len(lane), lane))
    tid = 0
    for lane in (*(lane for lane in _LANE_ORDER if lane in lanes), *others):
        for track, events in enumerate(_nesting_tracks(lanes[lane])):
            tid += 1
            name = lane if track == 0 else f"{lane} ({track + 1})"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            yield from (_span(event, pid, tid, origin) for event in events)
        if any(event.bytes and event.duration_ns for event in lanes[lane]):
            yield from _bytes_in_flight(lane, lanes[lane], pid, origin)


def _nesting_tracks(events: list[Event]) -> list[list[Event]]:
    """Spread a lane's events over the fewest tracks on which spans nest or follow each other."""
    tracks: list[list[Event]] = []
    open_spans: list[list[int]] = []  # per track, the ends of the spans around the current moment
    for event in sorted(events, key=lambda event: (event.start_ns, -event.end_ns)):
        for track, ends in zip(tracks, open_spans, strict=True):
            while ends and ends[-1] <= event.start_ns:
                ends.pop()
            if not ends or event.end_ns <= ends[-1]:
                ends.append(event.end_ns)
                track.append(event)
                break
        else:
            tracks.append([event])
            open_spans.append([event.end_ns])
    return tracks


def _span(event: Event, pid: int, tid: int, origin: int) -> TraceEvent:
    args: dict[str, Any] = {"step": event.step}
    if event.param:
        args["param"] = event.param
    if event.bytes:
        args["bytes"] = event.bytes
    begin_us = (event.start_ns - origin) / _NS_PER_US
    common = {"name": event.kind, "cat": event.lane, "pid": pid, "tid": tid, "ts": begin_us}
    if event.lane in (WINDOWS, GRADIENTS) or (event.lane == RANKS and not event.duration_ns):
        return common | {"ph": "i", "s": "t", "args": args}
    return common | {"ph": "X", "dur": event.duration_ns / _NS_PER_US, "args": args}


def _bytes_in_flight(lane: str, events: list[Event], pid: int, origin: int) -> Iterator[TraceEvent]:
    """Count the bytes being moved or updated at each moment."""
    changes: Counter[int] = Counter()
    for event in events:
        changes[event.start_ns] += event.bytes
        changes[event.end_ns] -= event.bytes
    now = 0
    for moment, change in sorted(changes.items()):
        now += change
        yield _counter(f"{lane} bytes in flight", moment - origin, pid, now)


def _counter(name: str, at_ns: int, pid: int, count: int) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at_ns / _NS_PER_US, "args": {"bytes": count}}
