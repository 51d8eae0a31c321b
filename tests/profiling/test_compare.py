"""Several runs on one time scale."""

from __future__ import annotations

import dataclasses
import io
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

import zenflow_compile as zf
from tests.profiling.synthetic import MS, event, known_run, recording
from zenflow_compile.profiling.gantt import draw
from zenflow_compile.profiling.recording import Recording


def slower(factor: int = 2) -> Recording:
    """The known run, every time of it multiplied."""
    run = known_run()
    events = [
        dataclasses.replace(each, start_ns=factor * each.start_ns, end_ns=factor * each.end_ns) for each in run.events
    ]
    return dataclasses.replace(run, events=tuple(events), policy="zero_offload")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [60, 80, 140])
def test_one_above_the_other_on_one_scale(width: int, encoding: str) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    Console(file=file, width=width).print(zf.compare([slower(), known_run()]))
    file.flush()
    lines = raw.getvalue().decode(encoding).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()).startswith(
        "zenflow takes 40.0 ms per step on average, zero_offload 80.0 ms: zenflow is 2.00 times as fast."
    )
    above, below = (position for position, line in enumerate(lines) if line.startswith(("zero_offload  ", "zenflow  ")))
    assert above < below
    slow, fast = (line for line in lines if line.startswith("compute"))
    label = slow.index(slow.split()[1])
    assert abs(len(fast[label:].rstrip()) - len(slow[label:].rstrip()) / 2) <= 1
    shares = [line.split()[-1] for line in lines if line.startswith("D2H")]
    assert shares == ["12%", "12%"]  # of a run's own time
    assert len({line.rindex("%") for line in lines if line.startswith(("D2H", "H2D", "worker"))}) == 1


def test_lanes_of_a_run_alone_are_those_of_its_report() -> None:
    alone, scaled = draw(known_run(), width=96), draw(known_run(), width=96, scale_ns=160 * MS)
    assert alone is not None
    assert scaled is not None
    assert alone.busy == scaled.busy
    assert abs(len(alone.rows["compute"]) - 2 * len(scaled.rows["compute"])) <= 1


def test_names() -> None:
    run = known_run()
    assert zf.compare([run, run, slower()]).names == ("zenflow 1", "zenflow 2", "zero_offload")
    assert zf.compare([run, slower()], names=["before", "\x1b[31mafter"]).names == ("before", "\\x1b[31mafter")
    assert zf.compare([run, slower(), slower(4)]).ratios == [1.0, 0.5, 0.25]


def test_runs_of_one_policy_are_told_apart() -> None:
    run = known_run()
    longer = dataclasses.replace(run, update_interval=8)
    predicted = dataclasses.replace(run, predicted=True)
    assert zf.compare([run, longer]).names == ("zenflow (update_interval=4)", "zenflow (update_interval=8)")
    assert zf.compare([run, predicted]).names == ("zenflow", "zenflow (predicted)")
    compared = zf.compare([run, predicted, longer, longer], names=["a", "b", "c", "d"])
    headings = [line for line in str(compared).splitlines() if line.startswith(("a  ", "b  "))]
    assert [heading[3:].startswith("predicted, 40.0 ms") for heading in headings] == [False, True]


def test_periodic_stalls_count() -> None:
    """Three of four steps are faster than those of the other run, but not all four."""
    ends = [0, 20, 40, 60, 160]
    uneven = recording([event("step", "step", start, end) for start, end in pairwise(ends)], policy="uneven")
    assert zf.compare([known_run(), uneven]).ratios == [1.0, pytest.approx(1.0)]


def test_different_models_are_said() -> None:
    larger = dataclasses.replace(known_run(), model_bytes=20_000_000)
    said = " ".join(str(zf.compare([known_run(), larger], names=["a", "b"])).split())
    assert "The runs train different models: 10.00 MB in a, 20.00 MB in b." in said
    assert "different models" not in str(zf.compare([known_run(), known_run()]))


def test_many_workers_have_one_lane() -> None:
    events = [event(f"worker {i}", "host_update", i, i + 1) for i in range(5)]
    many = recording([*known_run().events, *events])
    lines = str(zf.compare([known_run(), many])).splitlines()
    lanes = [line.split()[0] for line in lines if line.startswith(("compute ", "copies ", "D2H ", "worker"))]
    assert lanes == ["compute", "copies", "workers"] * 2


def test_printed_without_a_console() -> None:
    text = str(zf.compare([known_run(), slower()]))
    assert text == repr(zf.compare([known_run(), slower()]))
    assert "zero_offload is 0.50 times as fast" in " ".join(text.split())
    assert "\x1b" not in text


@pytest.mark.tier1
@pytest.mark.parametrize(
    ("runs", "names", "error", "says"),
    [
        ([], None, ValueError, "no recorded step"),
        ([Recording(events=())], None, ValueError, "run 0 has no optimizer step"),
        ([7], None, TypeError, "got a int"),
        ([known_run(), Recording(events=())], None, ValueError, "run 1 has no optimizer step"),
        ([zf.profile(), known_run()], ["a"], ValueError, "run 0 has no optimizer step"),
        ([{"policies": []}], None, TypeError, r"got a dict; .* zf.simulate\(\) records what zf.plan\(\) forecasts"),
        (zf.profile(), None, TypeError, r"got a Profile; it takes a list of runs: zf.compare\(\[before, after\]\)"),
        ({"a": known_run()}, None, TypeError, r"zf.compare\(list\(runs.values\(\)\), names=list\(runs\)\)"),
        ([known_run(), known_run()], "ab", TypeError, "names='ab' must be a list of strings"),
        ([known_run()], ["a", "b"], ValueError, r"names=\['a', 'b'\] must be one name for each of the 1 runs"),
    ],
)
def test_bad_input(runs: Any, names: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        zf.compare(runs, names=names)
