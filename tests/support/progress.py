"""What a run of tests takes, how far it is, and what it leaves for later tiers: lines in the terminal.

Registered by ``tests/conftest.py`` in the process that the user starts; see ``tests/support/tiers.py``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.tiers import COMMANDS, LIMITS, Durations, wall_seconds

PRIOR = 20.0
"""Seconds for which the recorded speed counts against the measured one."""

_WIDTH = 30


def remaining(total: float, done: float, elapsed: float, processes: int) -> float:
    """Estimate how many seconds a run still takes.

    Args:
        total: recorded seconds of all tests, one after the other.
        done: recorded seconds of those that are done.
        elapsed: seconds since the first test began.
        processes: that run tests.
    """
    slowness = (elapsed + PRIOR) / (done / processes + PRIOR)
    return max(0.0, total - done) / processes * slowness


def clock(seconds: float) -> str:
    """Minutes and seconds, as ``7:05``."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02}"


class Progress:
    """Writes the bar: a line that is replaced on a terminal, and one line per tenth of the run elsewhere."""

    def __init__(self, config: pytest.Config, tiers: Sequence[int]) -> None:
        self._plugins = config.pluginmanager
        self._processes = max(1, config.getoption("numprocesses", None) or 1)
        self._quiet = config.get_verbosity() == 0
        self._tiers = tiers
        self._durations = Durations.read()
        self._start = time.monotonic()
        self._begin = 0.0
        self._total = self._done = 0.0
        self._tests = self._finished = 0
        self._written = -1
        self.later: Counter[int] = Counter()
        """How many tests of each tier this run leaves out."""

    @property
    def _terminal(self) -> Any:
        return self._plugins.get_plugin("terminalreporter")  # comes after this plugin

    def pytest_report_header(self) -> str:
        names = " and ".join(map(str, self._tiers))
        limit = LIMITS.get(max(self._tiers))
        takes = f"; on two quiet cores at most {limit // 60} minutes" if limit and 1 in self._tiers else ""
        return f"tests of tier {names}{takes}; {COMMANDS[max(self._tiers)]}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        if not self._tests:
            self._expect(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._expect([item.nodeid for item in session.items])

    def _expect(self, nodeids: Sequence[str]) -> None:
        self._tests = len(nodeids)
        self._total = self._durations.total(nodeids)
        self._begin = time.monotonic()
        takes = wall_seconds(self._total, self._processes)
        self._terminal.ensure_newline()
        self._terminal.write_line(
            f"{self._tests:,} tests, about {clock(takes)} minutes in {self._processes} processes on quiet cores"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Write no letters: the bar says what is done. What fails gets a line at once."""
        if not self._quiet or hasattr(report, "wasxfail"):
            return None
        if report.failed:
            return ("failed", "", "FAILED") if report.when == "call" else ("error", "", "ERROR")
        return (report.outcome, "", report.outcome.upper()) if report.when == "call" or report.skipped else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._quiet and report.failed:
            self._terminal.rewrite("", erase=True)
            self._terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
            self._written = -1

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._done += self._durations.total([nodeid])
        self._finished += 1
        if self._quiet:
            self._draw()

    def _draw(self) -> None:
        share = min(1.0, self._done / self._total) if self._total else 1.0
        if self._terminal.isatty:
            if self._finished % 10 and self._finished < self._tests:
                return
        elif (tenth := int(10 * share)) <= self._written:
            return
        else:
            self._written = tenth
        elapsed = time.monotonic() - self._begin
        left = remaining(self._total, self._done, elapsed, self._processes)
        bar = "#" * round(_WIDTH * share)
        line = f"[{bar:<{_WIDTH}}] {share:4.0%}  {self._finished:,} of {self._tests:,} tests, {clock(left)} left"
        if self._terminal.isatty:
            self._terminal.rewrite(line, erase=True)
        else:
            self._terminal.write_line(line)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if counts := getattr(node, "workeroutput", {}).get("later"):  # a process that died has sent none
            self.later = Counter(counts)

    def pytest_terminal_summary(self) -> None:
        took = clock(time.monotonic() - self._start)
        self._terminal.write_line(f"{self._finished:,} of {self._tests:,} tests ran in {took} minutes.")
        for tier, count in sorted(self.later.items()):
            self._terminal.write_line(f"Left out: {count:,} tests of tier {tier}, which `{COMMANDS[tier]}` runs.")
