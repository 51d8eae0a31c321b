"""Spans of lanes: disjoint, innermost first, and equal to the sets of time that the summary measures."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.profiling.synthetic import MS, event, known_run, recording
from zenflow_compile.profiling.lanes import EXPOSED, FORWARD, HOST, STATE, UPDATE, WAIT, lanes_of
from zenflow_compile.profiling.recording import INNERMOST_FIRST, intersect, length_ns, subtract, union


def shown(lane: str, *events: object, **changes: object) -> list[tuple[float, float, str, str]]:
    """The spans of a lane: start and end in ms, mark and parameter."""
    made = recording([*events], **changes)  # type: ignore[list-item]
    spans = lanes_of(made, 0, 100 * MS)[lane]
    return [(span.start / MS, span.end / MS, span.mark.meaning, span.event.param) for span in spans]


def test_nested_work_is_cut_out() -> None:
    spans = shown(
        "compute",
        event("compute", "forward", 0, 10),
        event("compute", "wait", 2, 4, param="a"),
        event("compute", "merge", 4, 5, param="b"),
    )
    assert spans == [
        (0, 2, FORWARD.meaning, ""),
        (2, 4, WAIT.meaning, "a"),
        (4, 5, UPDATE.meaning, "b"),
        (5, 10, FORWARD.meaning, ""),
    ]


def test_of_one_kind_the_later_is_shown() -> None:
    copies = [event("D2H", "copy", 0, 6, param="a"), event("D2H", "copy", 4, 9, param="b"), event("D2H", "copy", 5, 7)]
    assert [(start, end, param) for start, end, _, param in shown("D2H", *copies)] == [
        (0, 4, "a"), (4, 5, "b"), (5, 7, ""), (7, 9, "b")
    ]  # fmt: skip


def test_state_is_shown_before_copies_and_lanes_are_cut() -> None:
    spans = shown("H2D", event("H2D", "copy", -5, 4), event("H2D", "state", 2, 3), event("H2D", "copy", 98, 120))
    assert [(start, end) for start, end, *_ in spans] == [(0, 2), (2, 3), (3, 4), (98, 100)]
    assert spans[1][2] == STATE.meaning


def test_host_updates_are_cut_where_they_are_exposed() -> None:
    work = [event("compute", "forward", 2, 4), event("compute", "backward", 6, 8)]
    assert [(*span[:2], span[2]) for span in shown("worker 0", *work, event("worker 0", "host_update", 0, 10))] == [
        (0, 2, EXPOSED.meaning),
        (2, 4, HOST.meaning),
        (4, 6, EXPOSED.meaning),
        (6, 8, HOST.meaning),
        (8, 10, EXPOSED.meaning),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_spans_cover_the_time_that_is_measured(seed: int) -> None:
    draw = random.Random(seed)
    kinds = {"compute": [*INNERMOST_FIRST], "D2H": ["copy", "state"], "worker 0": ["host_update"]}
    events = [
        event(lane, draw.choice(kinds[lane]), start, start + draw.expovariate(0.5), param=str(number))
        for lane in kinds
        for number, start in enumerate(draw.uniform(0, 100) for _ in range(50))
    ]
    made = recording([*known_run().events, *events])
    for lane, spans in lanes_of(made, 0, 100 * MS).items():
        assert all(before.end <= after.start for before, after in pairwise(spans))
        covered = union((span.start, span.end) for span in spans)
        of_lane = union((each.start_ns, each.end_ns) for each in made.events if each.lane == lane)
        assert covered == intersect(of_lane, [(0, 100 * MS)])
        assert all(span.event.start_ns <= span.start < span.end <= span.event.end_ns for span in spans)
        if lane == "worker 0":
            hidden = union((span.start, span.end) for span in spans if span.mark is HOST)
            assert hidden == intersect(covered, made.hides)
        if lane == "compute":
            waits = union((span.start, span.end) for span in spans if span.mark is WAIT)
            assert length_ns(subtract(waits, made.compute["wait"])) == 0
