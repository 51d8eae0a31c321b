"""A pytest plugin that writes what becomes of each test to a file, as soon as it is known: ``python -m pytest -p``.

A process that a mutant ends, or that hangs in native code, has written which test it had started.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PATH = "ZENFLOW_OUTCOMES"
"""The environment variable that names the file."""


class _Outcomes:
    def __init__(self, path: str) -> None:
        self._path = path

    def _write(self, outcome: str, test: str) -> None:
        with open(self._path, "a") as file:
            file.write(f"{outcome}\t{test}\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.when == "teardown":
            self._write("failed" if report.failed else "ended", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    """Write in the process that the user starts, which hears of the tests of all others."""
    if not hasattr(config, "workerinput"):
        # The tests start pytest, too: those runs have no file.
        config.pluginmanager.register(_Outcomes(os.environ.pop(PATH)))


def first_failure(path: Path) -> str | None:
    """The first test that failed, else the last one that has started and not ended, else None."""
    running: dict[str, None] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        outcome, _, test = line.partition("\t")
        if outcome == "failed":
            return test
        if outcome == "started":
            running[test] = None
        else:
            running.pop(test, None)
    return next(reversed(running), None)
