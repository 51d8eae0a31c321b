"""Where the time of a run goes: set-up, call and teardown of tests by folder, and what fixtures and graphs took of it.

    make test-ci ARGS="--durations-to durations.json"
    make test-ci ARGS="--record-durations"

The file has seconds per test, and the terminal the sums. The second form writes those that choose and limit the tiers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.callback import callback_handler

from tests.support.tiers import Durations

_PHASES = ("setup", "call", "teardown")
_STARTS = {"os.fork", "os.posix_spawn", "subprocess.Popen"}


class _Worker:
    """Measures in the process that runs tests. A report brings what was spent since the last one."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._begin = 0.0
        sys.addaudithook(lambda event, _: self._start() if event in _STARTS else None)

    def _start(self) -> None:
        self._spent["processes started"] += 1

    def _begin_compilation(self, _: object) -> None:
        self._begin = time.perf_counter()

    def _end_compilation(self, _: object) -> None:
        self._spent["compilations"] += 1
        self._spent["compilation"] += time.perf_counter() - self._begin

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        callback_handler.clear()  # so does the reset of Dynamo before each test
        callback_handler.register_start_callback(self._begin_compilation)
        callback_handler.register_end_callback(self._end_compilation)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            self._spent[f"fixture {fixturedef.argname}"] += time.perf_counter() - begin

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.user_properties.append(("spent", dict(self._spent)))
        self._spent.clear()
        return report


class _Sums:
    """Adds the reports of all workers."""

    def __init__(self, path: Path | None, record: bool) -> None:
        self._path = path
        self._record = record
        self._tests: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_PHASES, 0.0))
        self._spent: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when in _PHASES:  # not that of a process that died
            self._tests[report.nodeid][report.when] += report.duration
        for name, value in report.user_properties:
            if name == "spent":
                for what, amount in value.items():  # type: ignore[attr-defined]
                    self._spent[what] += amount

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps({"tests": self._tests, "spent": self._spent}, indent=1))
        if self._record:
            durations = Durations.read()
            durations.update({nodeid: sum(phases.values()) for nodeid, phases in self._tests.items()})
            durations.write()
        folders: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        for nodeid, phases in self._tests.items():
            sums = folders[os.path.dirname(nodeid.partition("::")[0])]
            for place, value in enumerate((1.0, *phases.values())):
                sums[place] += value
        terminalreporter.section("seconds by folder: tests, set-up, call, teardown")
        for folder, sums in sorted(folders.items(), key=lambda item: -sum(item[1][1:])):
            terminalreporter.write_line(f"{folder:24} {sums[0]:6.0f} {sums[1]:8.1f} {sums[2]:8.1f} {sums[3]:8.1f}")
        for what, amount in sorted(self._spent.items(), key=lambda item: -item[1])[:15]:
            terminalreporter.write_line(f"{what:48} {amount:10.1f}")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--durations-to", type=Path, help="file for the seconds of each test")
    parser.addoption(
        "--record-durations", action="store_true", help="write the seconds that choose and limit the tiers"
    )


def register(config: pytest.Config) -> None:
    """Measure if the options say so: in the processes that run tests, and in the one that adds their reports."""
    path, record = config.getoption("--durations-to"), config.getoption("--record-durations")
    if path is None and not record:
        return
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Worker())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Sums(path, record))
