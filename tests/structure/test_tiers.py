"""Tiers of tests stay within their limits, and runs name the tests that die, hang or leave something behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.left_behind import environment_of
from tests.support.progress import remaining
from tests.support.tiers import (
    COLLECTED,
    LIMITS,
    PARTS,
    ROOT,
    SLOW_PARTS,
    START,
    TIER,
    Durations,
    assign,
    drawn_by_commit,
    wall_seconds,
)

PROCESSES = 2


def over_limits(items: list[pytest.Item], durations: Durations) -> dict[int, float]:
    """The tiers among ``items`` that take too long with those below them, and their seconds."""
    tests = {tier: [item for item in items if item.stash[TIER] <= tier] for tier in LIMITS}
    tests[2] += drawn_by_commit(items, durations, 0)  # any other commit draws as much
    sums = {tier: wall_seconds(durations.total(item.nodeid for item in tests[tier]), PROCESSES) for tier in LIMITS}
    return {tier: seconds for tier, seconds in sums.items() if seconds > LIMITS[tier]}


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All tests without a GPU, of all tiers, if the run is of the whole suite."""
    return [item for item in request.config.stash[COLLECTED] if not item.get_closest_marker("gpu")]


def test_tiers_stay_within_their_limits(collected: list[pytest.Item]) -> None:
    assert over_limits(collected, Durations.read()) == {}, (
        "seconds of tiers; make tests cheaper, or mark cases as a matrix, and record with --record-durations"
    )


def test_every_test_has_a_record(collected: list[pytest.Item]) -> None:
    durations = Durations.read()
    unknown = {item.nodeid.partition("[")[0] for item in collected if durations.of(item.nodeid) is None}
    in_tier_3 = {item.nodeid.partition("[")[0] for item in collected if item.get_closest_marker("long")}
    assert not unknown - in_tier_3, "run them with --record-durations: seconds choose the tier of a test"


class Case:
    """What ``assign`` asks of an item."""

    def __init__(self, name: str, marks: tuple[pytest.Mark, ...], **arguments: object) -> None:
        self.nodeid = f"tests/a.py::{name}"
        self.marks = {mark.name: mark for mark in marks}
        self.stash: dict[Any, Any] = {}
        self.callspec = type("", (), {"params": arguments})

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


def cases(count: int, *marks: pytest.MarkDecorator) -> list[Any]:
    return [Case(f"test[{number}]", tuple(mark.mark for mark in marks), number=number) for number in range(count)]


@pytest.mark.parametrize(
    ("seconds", "marks", "expected"),
    [
        (0.1, (), [6, 0, 0]),
        (1.0, (), [1, 5, 0]),
        (10.0, (), [0, 0, 6]),
        (10.0, (pytest.mark.tier1,), [6, 0, 0]),
        (10.0, (pytest.mark.tier2,), [0, 6, 0]),
        (0.1, (pytest.mark.matrix(3),), [2, 0, 4]),
        (1.0, (pytest.mark.matrix(3),), [1, 1, 4]),
        (0.1, (pytest.mark.long,), [0, 0, 6]),
    ],
)
def test_cases_by_tier(seconds: float, marks: tuple[pytest.MarkDecorator, ...], expected: list[int]) -> None:
    durations = Durations()
    durations.update({"tests/a.py::test": seconds})
    draws = []
    for seed in range(20):
        items = cases(6, *marks)
        assign(items, durations, seed)
        found = [item.stash[TIER] for item in items]
        assert [found.count(tier) for tier in (1, 2, 3)] == expected
        draws.append(found)
    assert (len(set(map(tuple, draws))) > 1) == (0 < expected[0] < 6)


@pytest.mark.parametrize(("seconds", "others"), [(1.0, 2), (10.0, 3)])
def test_marked_case_is_in_tier_1(seconds: float, others: int) -> None:
    durations = Durations()
    durations.update({"tests/a.py::test": seconds})
    items = [*cases(5), Case("test[marked]", (pytest.mark.tier1.mark,), number="marked")]
    assign(items, durations, 0)  # type: ignore[arg-type]
    assert [item.stash[TIER] for item in items] == [others] * 5 + [1]


@pytest.mark.parametrize(
    ("marks", "rate"), [((pytest.mark.long(),), PARTS), ((pytest.mark.long(5),), 5), ((), SLOW_PARTS)]
)
def test_commits_draw_equal_parts_of_tier_3(marks: tuple[pytest.MarkDecorator, ...], rate: int) -> None:
    durations = Durations()
    durations.update({"tests/a.py::test": 10.0})
    items = cases(80, *marks)
    assign(items, durations, 0)
    drawn = [[item.nodeid for item in drawn_by_commit(items, durations, 7 * rate + number)] for number in range(rate)]
    assert sorted(nodeid for part in drawn for nodeid in part) == sorted(item.nodeid for item in items)
    assert {len(part) for part in drawn} == {80 // rate}


def test_outgrown_tiers_are_found() -> None:
    durations = Durations()
    items = cases(3)
    assign(items, durations, 0)
    assert over_limits(items, durations) == {}
    durations.update({"tests/a.py::test": (LIMITS[1] - START) * PROCESSES / 3 + 1})
    assert over_limits(items, durations).keys() == {1}


def test_draw_counts_for_its_tier() -> None:
    durations = Durations()
    durations.update({"tests/a.py::test": 10.0})
    items = cases(SLOW_PARTS * LIMITS[2] * PROCESSES // 10)
    assign(items, durations, 0)
    assert over_limits(items, durations).keys() == {2}


def test_record_has_the_mean_of_cases(tmp_path: Path) -> None:
    durations = Durations()
    durations.update({"tests/a.py::test[1]": 1.0, "tests/a.py::test[2]": 2.0, "tests/b.py::test": 1.0})
    durations.write(tmp_path / "durations.json")
    assert Durations.read(tmp_path / "durations.json").seconds == {
        "tests/a.py": {"test": 1.5},
        "tests/b.py": {"test": 1.0},
    }


@pytest.mark.parametrize("slowness", [0.7, 1.0, 3.0])
def test_time_left_is_right_within_a_factor_of_two(slowness: float) -> None:
    """From a tenth of the run on, on a machine that is slower or faster than the recorded one."""
    total, processes = 800.0, 2
    for done in range(80, 800, 40):
        estimate = remaining(total, done, elapsed=slowness * done / processes, processes=processes)
        assert 0.5 < estimate / (slowness * (total - done) / processes) < 2.0


BAD_TESTS = {
    "dies": "def test_bad(): os.kill(os.getpid(), signal.SIGKILL)",
    "hangs": """
        @pytest.mark.timeout(0.1)
        def test_bad():
            ctypes.PyDLL(None).sleep(600)  # keeps the GIL: no signal is heard
    """,
    "leaves a process": "def test_bad(): subprocess.Popen(['sleep', '600'])",
    "leaves a file": "def test_bad(): open(tempfile.mkdtemp() + '/file', 'w').close()",
}  # fmt: skip


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Any]:
    """Starts pytest on a file of tests, with the plugin, in the folder ``temporary``."""
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    for name in [name for name in environment if name.startswith(("PYTEST_", "ZENFLOW_COMPILE_TEST"))]:
        del environment[name]
    started: list[subprocess.Popen[str]] = []

    def start(source: str) -> subprocess.Popen[str]:
        lines = "\n".join(line.removeprefix("        ") for line in source.splitlines())
        imports = "import ctypes, os, pytest, signal, subprocess, tempfile, time\n"
        (tmp_path / "test_few.py").write_text(f"{imports}\n{lines}\ndef test_good(): pass\n")
        options = [
            "-p",
            "tests.support.left_behind",
            "-p",
            "no:cacheprovider",
            "-n",
            "1",
            "-s",
            "--max-worker-restart",
            "2",
        ]
        command = [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_few.py"), f"--rootdir={tmp_path}"]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", BAD_TESTS)
def test_bad_test_is_named(suite: Any, tmp_path: Path, name: str) -> None:
    output, _ = (run := suite(BAD_TESTS[name])).communicate(timeout=120)
    assert run.returncode == (0 if name.startswith("leaves") else 1)
    assert re.search(r"\b[12] passed", output)
    assert "test_few.py::test_bad" in output.partition("test session starts")[2]
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not running(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing(suite: Any, tmp_path: Path, number: int) -> None:
    begun = tmp_path / "begun"
    run = suite(
        f"""
        def test_slow():
            subprocess.Popen(["sleep", "600"])
            tempfile.mkdtemp()
            open({str(begun)!r}, "w").close()
            time.sleep(600)
        """
    )
    while not begun.exists():
        assert run.poll() is None
        time.sleep(0.01)
    assert running(tmp_path)
    run.send_signal(number)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, output
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not running(tmp_path)


def running(folder: Path) -> list[str]:
    """The processes whose temporary files are in ``folder``."""
    pids = filter(str.isdigit, os.listdir("/proc"))
    return [pid for pid in pids if environment_of(int(pid)).get("TMPDIR", "").startswith(str(folder))]
