"""The parts that every benchmark shares: statistics, rounds, the results file, the runner."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table

from benchmarks import __main__ as runner
from benchmarks.common import (
    ROOT,
    Spread,
    Target,
    interleaved,
    markdown,
    option_parser,
    percentile,
    ratios,
    write_results,
)


def test_spread_interpolates_order_statistics() -> None:
    spread = Spread.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (spread.n, spread.median, spread.iqr) == (5, 3.0, 2.0)
    assert spread.p5 == pytest.approx(1.2)
    assert spread.p95 == pytest.approx(4.8)
    assert Spread.of([7.0]).row() == {"n": 1, "median": 7.0, "p5": 7.0, "p95": 7.0, "iqr": 0.0}
    assert percentile([0.0, 10.0], 0.25) == 2.5
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_rounds_alternate_and_drop_the_warm_up() -> None:
    order: list[str] = []

    def work(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    kept = interleaved(2, {"a": work("a"), "b": work("b")}, warm_up=1)
    assert "".join(order) == "abbaab"
    assert kept == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_ratios_pair_rounds() -> None:
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


@pytest.mark.parametrize(("measured", "at_least", "met"), [(2.0, True, True), (1.0, True, False), (1.0, False, True)])
def test_target_knows_whether_it_is_met(measured: float, at_least: bool, met: bool) -> None:
    target = Target("speed", measured, 1.5, at_least)
    assert target.met is met
    assert target.row()["met"] is met
    assert ("MISSED" in str(target)) is not met


def test_results_name_machine_commit_and_command(results: Path) -> None:
    path = write_results("some", [{"x": 1}], seed=3, targets=[Target("claim", 1.0, 2.0, at_least=False)])
    assert path == results / "some.json"
    assert [each.name for each in results.iterdir()] == ["some.json"]  # nothing unfinished is left
    written = json.loads(path.read_text())
    assert written["rows"] == [{"x": 1}]
    assert written["command"] == "python -m benchmarks some --of 'a test'"
    assert written["seed"] == 3
    assert written["targets"][0]["met"] is True
    assert {"cpu", "cores", "python", "torch", "load_average_1min"} <= written["machine"].keys()
    assert "commit" in written


def test_out_is_the_exact_path(tmp_path: Path, results: Path) -> None:
    for name in ("trial", "trial.json", "made/here.txt"):
        path = write_results("some", [], out=tmp_path / name)
        assert path == tmp_path / name
        assert json.loads(path.read_text())["benchmark"] == "some"
    assert not results.exists()


@pytest.mark.parametrize("name", sorted(set(runner.benchmarks()) - {"gpu_first"}))  # which writes no results
def test_every_benchmark_takes_out(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert exit_.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"usage: python -m benchmarks {name} " in said
    where = f"results file (benchmarks/results/{name}.json)"
    if name == "gpu_evidence":  # one file per part
        where = "folder of the results files (benchmarks/results/gpu)"
    assert f"--out PATH {where}" in said


def test_table_in_markdown() -> None:
    table = Table(title="some: loss")
    table.add_column("rule")
    table.add_column("columns\n1%")
    table.add_row("AdamW", "-")
    assert markdown(table) == "**some: loss**\n\n| rule | columns 1% |\n| --- | --- |\n| AdamW | - |\n"


def test_shared_options_have_defaults() -> None:
    given = option_parser("some", "doc", rounds=7, seed=True).parse_args([])
    assert vars(given) == {"out": None, "rounds": 7, "seed": 0}
    given = option_parser("some", "doc").parse_args(["--out", "a/b.json"])
    assert vars(given) == {"out": Path("a/b.json")}


def test_runner_lists_the_benchmarks() -> None:
    known = runner.benchmarks()
    assert {"gil_gap", "host_adam", "level_steps", "peers", "profiler_overhead"} <= known.keys()
    assert not {"common", "__main__"} & known.keys()
    assert all(known.values()), "every benchmark says in one line what it is"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["host_adam", "--help"], 0, "usage: python -m benchmarks host_adam"),
        (["host_adm"], 2, "did you mean host_adam?"),
    ],
    ids=["option_of_a_benchmark", "wrong_name"],
)
def test_runner_reads_its_command_line(arguments: list[str], status: int, says: str) -> None:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == status, found.stderr
    assert says in found.stdout + found.stderr
