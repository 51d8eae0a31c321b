"""Comparing two checkouts: turns in their own processes, rows matched by what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import before_after
from benchmarks.before_after import Checkout, compare, numbers, table

BENCHMARK = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--model")
{out}
given = parser.parse_args(sys.argv[2:])
path = getattr(given, "out", None) or pathlib.Path("benchmarks/results") / f"{{sys.argv[1]}}.json"
row = {{"model": given.model, "inner": "eager", "python_cpu_ms": {cost}, "step_ms": {{"zenflow": {{"median": 8.0}}}}}}
pathlib.Path(path).write_text(json.dumps({{"commit": "{cost}", "rows": [row]}}))
"""


def checkout(folder: Path, *, cost: float, has_out: bool) -> Path:
    """A checkout whose benchmark writes ``cost``, under ``--out`` or to its results file."""
    results = folder / "benchmarks" / "results"
    results.mkdir(parents=True)
    (folder / "benchmarks" / "op_overhead.py").touch()
    out = 'parser.add_argument("--out", metavar="PATH")' if has_out else ""
    (folder / "benchmarks" / "__main__.py").write_text(BENCHMARK.format(out=out, cost=cost))
    return folder


def test_checkouts_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = checkout(tmp_path / "old", cost=6.0, has_out=False)
    new = checkout(tmp_path / "new", cost=3.0, has_out=True)
    kept = old / "benchmarks" / "results" / "op_overhead.json"
    kept.write_text("kept")
    options = ["op_overhead", "--against", str(old), "--turns", "3", "--model", "linear"]
    assert before_after.main([*options, "--out", str(tmp_path / "made" / "compared.json")], new) == 0
    order = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if ": run " in line]
    assert order == ["before", "after", "after", "before", "before", "after"]
    assert kept.read_text() == "kept"
    assert not list((new / "benchmarks" / "results").iterdir())
    python, step = json.loads((tmp_path / "made" / "compared.json").read_text())["rows"]
    assert (python["row"], python["metric"]) == ("linear, eager", "python_cpu_ms")
    assert python["before"]["median"] == 6.0
    assert python["after"]["median"] == 3.0
    assert python["ratio"] == {"n": 3, "median": 0.5, "p5": 0.5, "p95": 0.5, "iqr": 0.0}
    assert python["commits"] == {"before": "6.0", "after": "3.0"}
    assert (step["metric"], step["ratio"]["median"]) == ("step_ms.zenflow.median", 1.0)


def test_missing_results_file_is_not_left_behind(tmp_path: Path) -> None:
    root = checkout(tmp_path, cost=1.0, has_out=False)
    assert Checkout(root).run("op_overhead", [])["rows"][0]["python_cpu_ms"] == 1.0
    assert not list((root / "benchmarks" / "results").iterdir())


def test_failed_benchmark_says_where_and_why(tmp_path: Path) -> None:
    root = checkout(tmp_path, cost=1.0, has_out=True)
    with pytest.raises(RuntimeError, match=rf"--models .*failed in {root}:[^$]*unrecognized arguments"):
        Checkout(root).run("op_overhead", ["--models", "linear"])


def test_rows_are_matched_by_what_was_measured() -> None:
    old = {"rows": [{"model": "a", "system": "adamw", "step_ms": {"median": 2.0}}, {"model": "b", "skipped": "no"}]}
    new = {"rows": [{"model": "b", "step_ms": {"median": 1.0}}, *old["rows"][:1]]}
    before, after = (numbers(each, before_after.METRICS["peers"]) for each in (old, new))
    assert before == {("a, adamw", "step_ms.median"): 2.0}
    rows = compare([before], [after])
    assert [(row["row"], row["ratio"]["median"]) for row in rows] == [("a, adamw", 1.0)]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table("title", rows))
    assert "a, adamw" in capture.get()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["op_overhead"], "required: --against"),
        (["op_overhead", "--against", "nowhere"], "--against nowhere is no checkout"),
        (["slack", "--against", "."], "invalid choice: 'slack'"),
        (["peers", "--against", str(before_after.ROOT), "--turns", "0"], "--turns 0 must be at least 1"),
    ],
)
def test_wrong_options(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        before_after.main(arguments)
    assert says in capsys.readouterr().err
