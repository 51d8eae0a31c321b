"""Names the tests that hang, and those that leave processes or files behind, and removes what they leave.

    python -m pytest -p tests.support.left_behind

The temporary files of a run are in one folder, which goes at its end, also if it is interrupted.
"""

from __future__ import annotations

import faulthandler
import getpass
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest

_RUN = "ZENFLOW_COMPILE_TEST_RUN"
_FOLDERS = "zenflow-compile-tests-"
_MANAGED = ("pytest-", "pymp-", "torchinductor", ".", "build")
"""Beginnings of the names of files that pytest, multiprocessing, Inductor and other tools keep."""

_HANG = 30.0
"""Seconds after a test's time limit, at which pytest-timeout interrupts it, until its process ends."""

_END = 4.0
"""Seconds that processes have to end after those that started them. Those of multiprocessing, which end by themselves,
have five times as long: a busy machine needs it."""


class _Worker:
    """In each process that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._watched = (tempfile.gettempdir(), config.rootpath)
        self._before = set(self._entries())
        self.left: dict[str, str] = {}
        """The test after which a file was first seen, by path."""

    def _entries(self) -> Iterator[str]:
        for folder in self._watched:
            yield from (each.path for each in os.scandir(folder) if not each.name.startswith(_MANAGED))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0]) if marker and marker.args else float(item.config.getini("timeout") or 0)
        if limit:  # a process that hangs in native code hears no signal
            faulthandler.dump_traceback_later(limit + _HANG, exit=True, file=sys.__stderr__)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            for path in set(self._entries()) - self._before - self.left.keys():
                self.left[path] = item.nodeid

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["left"] = self.left


class _Run:
    """In the process that the user has started."""

    def __init__(self) -> None:
        self._left: dict[str, str] = {}
        self._messages: list[str] = []
        self.worker: _Worker | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left.update(getattr(node, "workeroutput", {}).get("left", {}))

    @pytest.hookimpl(trylast=True)  # after the processes that run tests have ended
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self.worker is not None:
            self._left.update(self.worker.left)
        for pid, test in _processes_left(0.0 if exitstatus == pytest.ExitCode.INTERRUPTED else _END).items():
            self._messages.append(f"{test} left process {pid} ({_command(pid)}), which was killed")
            _kill(pid)
        for path, test in self._left.items():
            if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
                self._messages.append(f"{test}, or another test at that time, left {path}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for message in self._messages:
            terminalreporter.write_line(f"LEFT BEHIND: {message}", red=True)


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process started with; empty if it has ended, or is another user's."""
    try:
        parts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (part.decode(errors="replace").partition("=") for part in parts)
    return {name: value for name, _, value in pairs}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _processes_left(seconds: float) -> dict[int, str]:
    """The processes of this run that do not end within ``seconds``, and the tests that have started them."""
    begin = time.monotonic()
    while True:
        left = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            environment = environment_of(int(name))
            if environment.get(_RUN) == os.environ[_RUN] and not _ends_with_us(int(name)):
                test = environment.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
                left[int(name)] = test or "a test of a process that was forked"
        waited = time.monotonic() - begin
        if not left or waited > (5 * seconds if any(_is_server(pid) for pid in left) else seconds):
            return left
        time.sleep(0.1)


def _ends_with_us(pid: int) -> bool:
    """Whether this is a server of ``multiprocessing``, which ends with the process that uses it."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:  # it has ended
        return True
    return int(parent) == os.getpid() and _is_server(pid)


def _is_server(pid: int) -> bool:
    return "multiprocessing" in _command(pid)


def _remove_dead(parent: Path) -> None:
    """Remove the folders of runs that were killed."""
    for folder in parent.glob(f"{_FOLDERS}*"):
        if not Path("/proc", folder.name.removeprefix(_FOLDERS).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _end(folder: Path) -> None:
    """Remove what is left after an interrupted clean-up, too."""
    for pid in _processes_left(0.0):
        _kill(pid)
    shutil.rmtree(folder, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """Let interrupts arrive, and keep the run's temporary files together."""
    # A shell starts background jobs with SIGINT ignored, and Python leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker is None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        parent = Path(tempfile.gettempdir())
        _remove_dead(parent)
        folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDERS}{os.getpid()}-"))
        # After multiprocessing has removed its own, which has priority -100.
        Finalize(None, _end, args=(folder,), exitpriority=-200)
        os.environ[_RUN] = folder.name
        # Compiled graphs stay for the next run, as they do for users.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(parent / f"torchinductor_{getpass.getuser()}"))
        config.pluginmanager.register(run := _Run())
    else:
        folder = Path(os.environ["TMPDIR"]) / worker
        folder.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    if worker is not None or not config.getoption("numprocesses", None):
        config.pluginmanager.register(tests := _Worker(config))
        if worker is None:
            run.worker = tests
