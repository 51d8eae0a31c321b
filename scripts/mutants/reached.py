"""Which tests reach which changed places: a copy of this file, in an instrumented package, is also a pytest plugin.

``coverage.py`` copies it to ``zenflow_compile/reached.py`` of a temporary checkout, inserts calls of ``reach``
there, and runs ``python -m pytest -p zenflow_compile.reached``. A child process may live longer than one test, such as
that of the simulated device. So the number of the current test is in memory that all processes of a run map.
"""

from __future__ import annotations

import mmap
import os

PATH = "ZENFLOW_REACHED"
"""The environment variable that names the log. Without it nothing is recorded."""

_NUMBER_BYTES = 8

_seen: set[tuple[int, int]] = set()
_current: list[mmap.mmap] = []  # at most one: the number of the current test


def reach(number: int) -> None:
    """Record that the current test reaches the place ``number``, once for each process and test."""
    if not _current:
        if (path := os.environ.get(PATH)) is None or not os.path.exists(f"{path}.now"):
            return
        _current.append(_map(path))
    test = int.from_bytes(_current[0][:], "little")
    if (test, number) not in _seen:
        _seen.add((test, number))
        _log("reached", test, number)


def _map(path: str) -> mmap.mmap:
    with open(f"{path}.now", "r+b") as file:
        return mmap.mmap(file.fileno(), _NUMBER_BYTES)


def _log(*values: object) -> None:
    # One write in append mode: lines of several processes do not mix.
    file = os.open(os.environ[PATH], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, ("\t".join(map(str, values)) + "\n").encode())
    finally:
        os.close(file)


class _Tests:
    """Numbers the tests of the process that runs them, and logs what becomes of each."""

    def __init__(self) -> None:
        self._count = 0
        os.environ[PATH] += f"-{os.getpid()}"
        with open(f"{os.environ[PATH]}.now", "wb") as file:
            file.write(bytes(_NUMBER_BYTES))
        self._now = _map(os.environ[PATH])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._count += 1
        self._now[:] = self._count.to_bytes(_NUMBER_BYTES, "little")
        _log("test", self._count, nodeid)

    def pytest_runtest_logreport(self, report: object) -> None:
        _log("ended", self._count, getattr(report, "outcome", ""), getattr(report, "duration", 0.0))


def pytest_configure(config: object) -> None:
    """Record in the processes that run tests: with pytest-xdist, that is not the first one."""
    option = getattr(config, "option", None)
    if PATH in os.environ and (hasattr(config, "workerinput") or not getattr(option, "numprocesses", None)):
        config.pluginmanager.register(_Tests())  # type: ignore[attr-defined]
