"""Runs the tests that need a GPU, one row per test."""

from __future__ import annotations

from typing import Any

from benchmarks.common import ROOT
from benchmarks.evidence.setting import Emit, Setting

_LONGEST_MESSAGE = 4000


class _Reporter:
    """A pytest plugin that writes a row as soon as a test is done."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.outcomes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for a test's set-up, call and tear-down; only failures of the first and the last are of interest."""
        if report.when != "call" and report.outcome == "passed":
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.outcome != "passed":
            row["message"] = str(report.longrepr)[-_LONGEST_MESSAGE:]
        self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
        self._emit(row)


def measure(setting: Setting, emit: Emit) -> None:
    """Run them.

    Raises:
        RuntimeError: a test failed, or there were none.
    """
    import pytest  # the other parts do without it

    reporter = _Reporter(emit)
    tests = ROOT / "tests"
    chosen = tests / "gpu" if setting.tiny else tests
    options = [
        "-q",
        "-m",
        "gpu",
        "--tiers",
        "all",
        "-p",
        "no:cacheprovider",
        "--show-capture=no",
        "--rootdir",
        str(ROOT),
    ]
    status = pytest.main([*options, str(chosen)], plugins=[reporter])
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with status {int(status)}; outcomes: {reporter.outcomes}")
