"""Several runs on one time scale."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

import zenflow_compile as zf
from tests.profiling.synthetic import MS, known_run
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
        "zenflow takes 40.0 ms per step, zero_offload 80.0 ms: zenflow is 2.00 times as fast."
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
        ([known_run()], ["a", "b"], ValueError, r"names=\['a', 'b'\] must be one name for each of the 1 runs"),
    ],
)
def test_bad_input(runs: list[object], names: list[str] | None, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        zf.compare(runs, names=names)
