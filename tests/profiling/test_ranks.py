"""The report of all ranks, from recordings that are made up: clocks, rows, and who is the slowest."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.profiling.synthetic import MS, event
from zenflow_compile.profiling.diagnose import diagnose
from zenflow_compile.profiling.ranks import (
    Common,
    Meeting,
    RankPart,
    clock_difference,
    on_one_clock,
    print_ranks,
    slowest,
)
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import summarize


def rank_recording(wait_ms: int, *, steps: int = 4, ahead: int = 0) -> Recording:
    """Steps of 100 ms, the forward of which ends in ``wait_ms`` of waiting for other ranks; the clock is ``ahead``."""
    events = []
    for step in range(steps):
        begin = 100 * step
        events += [
            event("step", "step", begin, begin + 100, step=step),
            event("compute", "forward", begin, begin + 100, step=step),
            event("compute", "rank_wait", begin + 100 - wait_ms, begin + 100, step=step),
            event("ranks", "message", begin + 50, begin + 50, step=step, size=8),
        ]
    moved = (replace(each, start_ns=each.start_ns + ahead, end_ns=each.end_ns + ahead) for each in events)
    return Recording(events=tuple(moved), model_bytes=100, policy="zenflow")


def part(wait_ms: int, *, ahead: int = 0, machine: str = "a") -> RankPart:
    clock = [Meeting(1_000 + ahead, 5_000 + ahead), Meeting(8_000 + ahead, 9_000 + ahead)]
    recording = rank_recording(wait_ms, ahead=ahead)
    return RankPart(summarize(recording), recording, clock, machine)


def test_one_clock_is_left_as_it_is() -> None:
    assert clock_difference([Meeting(0, 10)], [Meeting(9, 12)]) == 0


def test_difference_of_clocks_is_in_its_bounds() -> None:
    """The first sends at 0 and has all at 10; the other, 1,000 ahead, sends at 1 and has all at 7: 991 to 1,007."""
    assert clock_difference([Meeting(0, 10)], [Meeting(1_001, 1_007)]) == (991 + 1_007) // 2
    # A quicker round bounds it closer, and a slow one takes nothing back.
    rounds = [Meeting(0, 10), Meeting(20, 24)], [Meeting(1_001, 1_007), Meeting(1_022, 1_023)]
    assert clock_difference(*rounds) == (998 + 1_003) // 2


def test_ranks_of_other_machines_are_on_one_clock() -> None:
    parts = [part(50), part(50, ahead=7_000 * MS, machine="b")]
    first, second = on_one_clock(parts)
    assert (first.title, second.title) == ("rank 0 on a", "rank 1 on b")
    assert first.events == parts[0].recording.events
    for here, there in zip(first.events, second.events, strict=True):
        assert abs(here.start_ns - there.start_ns) <= 4_000
        assert here.end_ns - here.start_ns == there.end_ns - there.start_ns


def test_part_travels_whole() -> None:
    recording = rank_recording(20)
    own = RankPart.of(recording, [Meeting(1, 2)], Common(first_step=1, steps=2, whole=True))
    received = RankPart.decoded(own.encoded())
    assert received.summary == own.summary
    assert own.summary["warm_up_steps"] == 1
    assert received.recording.events == recording.events
    assert received.clock == own.clock
    fewer = RankPart.of(recording, [], Common(first_step=0, steps=2, whole=False)).recording.events
    assert {each.step for each in fewer} == {2, 3}
    assert {each.lane for each in fewer} == {"compute", "step"}


def test_all_ranks_report_alike() -> None:
    """One has recorded from step 3 on, and one is asked for a trace."""
    early, late = rank_recording(10), rank_recording(10)
    late = replace(late, events=tuple(each for each in late.events if each.step > 2))
    sent: list[bytes] = []

    def keep(own: bytes) -> list[bytes]:
        sent.append(own)
        return [own]

    Common.of(early, keep, steps=4, whole=True)
    Common.of(late, keep, steps=6, whole=False)
    found = [Common.of(each, lambda _: sent, steps=4, whole=False) for each in (early, late)]
    assert found == [Common(first_step=3, steps=6, whole=True)] * 2
    assert RankPart.of(early, [], found[0]).summary["warm_up_steps"] == 3
    assert RankPart.of(late, [], found[0]).summary["warm_up_steps"] == 0


def test_no_rank_is_named_where_waits_are_not_recorded() -> None:
    recordings = [rank_recording(60), rank_recording(10)]
    out = io.StringIO()
    summaries = [summarize(each) for each in recordings]
    print_ranks(summaries, recordings, Console(file=out, width=100, color_system=None), complete=False)
    assert "Which rank is the slowest is not known" in out.getvalue()
    assert "is the slowest:" not in out.getvalue()


def test_waits_for_ranks_are_no_stall() -> None:
    summary = summarize(rank_recording(30))
    assert (summary["stall_ms_per_step"], summary["rank_wait_ms_per_step"]) == (0.0, 30.0)
    assert (summary["forward_ms_per_step"], summary["other_ms_per_step"]) == (70.0, 0.0)
    assert summary["in_collectives_ms_per_step"] == 30.0
    sentence = diagnose(summary).sentence
    assert sentence.startswith("The ranks wait for each other and for their collectives, 30.0 ms per step (30% of the")


def test_collectives_on_another_stream_are_no_wait() -> None:
    recording = rank_recording(0)
    behind = [event("ranks", "rank_wait", 100 * step + 10, 100 * step + 50, step=step) for step in range(4)]
    summary = summarize(replace(recording, events=(*recording.events, *behind)))
    assert (summary["rank_wait_ms_per_step"], summary["in_collectives_ms_per_step"]) == (0.0, 40.0)


def test_slowest_rank_is_the_one_that_waits_least() -> None:
    def of(*waits: int) -> str:
        return slowest([summarize(rank_recording(each)) for each in waits])

    assert of(60, 10, 50).startswith("Rank 1 is the slowest: the others wait for it. It is in collectives for 10.0 ms")
    assert of(10, 13).startswith("The ranks are even: 100 ms per step, and their waits differ by 3%")
    assert slowest([summarize(Recording(events=()))]).startswith("Nothing was measured")


@pytest.mark.parametrize("ranks", [2, 40])
def test_slowest_ranks_have_rows(ranks: int) -> None:
    recordings = [rank_recording(50 if rank < ranks - 1 else 5) for rank in range(ranks)]
    out = io.StringIO()
    console = Console(file=out, width=100, color_system=None)
    print_ranks([summarize(each) for each in recordings], recordings, console, steps=2)
    text = out.getvalue()
    lanes = [line for line in text.splitlines() if line.startswith("rank ")]
    assert lanes[-1].startswith(f"rank {ranks - 1}")
    assert len(lanes) == min(ranks, 16)
    assert lanes[-1].count("?") < lanes[0].count("?")
    assert ("24 ranks more" in text) == (ranks == 40)
    assert f"Rank {ranks - 1} is the slowest" in text
