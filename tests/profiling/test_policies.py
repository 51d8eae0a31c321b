"""The reports of four policies on one simulated machine say what each policy does."""

from __future__ import annotations

import functools

import pytest

import zenflow_compile as zf
from zenflow_compile.profiling.content import sentences_of
from zenflow_compile.profiling.gantt import draw
from zenflow_compile.profiling.lanes import EXPOSED, HOST, lanes_of
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import summarize

POLICIES = ("resident", "zero_offload", "twinflow", "zenflow")


@functools.cache
def run(policy: str) -> Recording:
    options = {"ratio": 0.5} if policy == "twinflow" else {}
    return zf.simulate(1e9, "h200", policy=policy, tokens=32768, **options)


def shares(policy: str) -> dict[str, float]:
    """Shares of the host-update time drawn as hidden and as exposed."""
    steps = [each for each in run(policy).events if each.lane == "step"]
    lanes = lanes_of(run(policy), steps[0].start_ns, steps[-1].end_ns)
    times = {mark.meaning: 0 for mark in (HOST, EXPOSED)}
    for lane, spans in lanes.items():
        for span in spans if lane.startswith("worker") else ():
            times[span.mark.meaning] += span.end - span.start
    total = sum(times.values())
    return {meaning: time / total for meaning, time in times.items()} if total else {}


def test_hidden_and_exposed_are_what_the_policy_does() -> None:
    assert shares("resident") == {}
    assert shares("zero_offload")[EXPOSED.meaning] == 1.0
    assert shares("zenflow")[HOST.meaning] > 0.99
    assert 0.9 < shares("twinflow")[EXPOSED.meaning] < 1.0  # the device's half of the updates hides a little


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_drawn_shares_are_those_of_the_table(policy: str) -> None:
    assert shares(policy)[HOST.meaning] == pytest.approx(summarize(run(policy))["hidden_fraction"], abs=0.01)


@pytest.mark.parametrize("policy", POLICIES)
def test_drawn_levels_are_busy_shares(policy: str) -> None:
    made = run(policy)
    gantt = draw(made, width=100)
    assert gantt is not None
    for lane, share in gantt.busy.items():
        levels = [cell.level or 0 for cell in gantt.rows[lane]]
        assert abs(sum(levels) / len(levels) / 8 - share) <= 1 / 8


def test_sentences_name_the_policy_and_its_gain() -> None:
    blocking = sentences_of(run("zero_offload"), summarize(run("zero_offload")))
    assert "waits for its host update by design (policy zero_offload)" in blocking[0]
    assert "times as fast" in blocking[1]
    assert sentences_of(run("resident"), summarize(run("resident")))[0].startswith("Nothing was offloaded")


def test_compared_on_one_scale() -> None:
    comparison = zf.compare([run("zero_offload"), run("zenflow")])
    assert comparison.ratios[1] > 1.2
    text = str(comparison)
    assert text.index("zero_offload") < text.index("\nzenflow ")
