"""Runs functions in a child process that has the simulated device.

[Note: A process of its own]
The device takes the place of PyTorch's PrivateUse1 for the life of a process, and a hang must be ended from outside. So
tests run in a child, which lives as long as its calls succeed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.fork_server import begin_process, fork_server

_T = TypeVar("_T")
_STACKS_AND_QUEUES, _QUEUES = signal.SIGUSR1, signal.SIGUSR2


class SimulatedHang(RuntimeError):  # noqa: N818 - what happened, not a mistake
    """A call did not return in time; the text has all stacks of the child and the heads of the device's streams."""


class SimulatedCrash(RuntimeError):  # noqa: N818
    """The child process ended during a call; the text has its stacks, if it could write them."""


class SimulatedProcess:
    """A child process with the simulated device; it starts at the first call."""

    def __init__(self) -> None:
        self._context = fork_server()
        self._process: BaseProcess | None = None
        self._connection: Connection
        self._folder: Path

    def call(
        self,
        function: Callable[..., _T],
        /,
        *arguments: Any,
        timeout: float = 60,
        stuck: str | None = None,
        **keywords: Any,
    ) -> _T:
        """Return ``function(*arguments, **keywords)`` of the child. The device is configured anew before it.

        Args:
            function: of a module that the child can import.
            timeout: seconds, without the start of the child.
            stuck: text of the device's queues in a state that it never leaves: seen two times, it is a hang.

        Raises:
            SimulatedHang: the function did not return in time. The child was killed.
            SimulatedCrash: the child ended.
            Exception: what the function raised, with the traceback as a note.
        """
        request = pickle.dumps((function, arguments, keywords))
        if self._process is None:
            self._start()
        try:
            self._connection.send_bytes(request)
            if not self._answers(timeout, stuck):
                text = self._diagnose(_STACKS_AND_QUEUES)
                self._kill()
                raise SimulatedHang(f"{function.__qualname__} did not return within {timeout:g} s\n{text}")
            failed, answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as lost:
            text = self._read("stacks")
            code = self._kill()
            raise SimulatedCrash(f"the child ended with code {code} in {function.__qualname__}\n{text}") from lost
        if failed:
            # Threads of the failed function may still use the device.
            self._kill()
            raise answer
        result: _T = answer
        return result

    def _answers(self, timeout: float, stuck: str | None) -> bool:
        deadline, seen = time.monotonic() + timeout, 0
        while seen < 2 and (left := deadline - time.monotonic()) > 0:
            if self._connection.poll(left if stuck is None else 1):
                return True
            # Hazard: faulthandler reads the frames of threads that run on, and may end the child.
            seen = seen + 1 if stuck is not None and stuck in self._diagnose(_QUEUES) else 0
        return False

    def close(self) -> int | None:
        """End the child as a program ends: its exit code, or None if there was no child."""
        if self._process is None:
            return None
        self._connection.close()
        self._process.join(20)
        return self._kill()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="simulated-"))
        self._connection, theirs = self._context.Pipe()
        # Not daemonic: the optimizer would take it for a worker of a DataLoader, and leave a core to it. It ends with
        # the connection.
        self._process = self._context.Process(
            target=_serve, args=(theirs, dict(os.environ), str(self._folder)), daemon=False
        )
        self._process.start()
        theirs.close()
        if not self._connection.poll(120):
            raise SimulatedHang(f"the child did not start\n{self._diagnose(_STACKS_AND_QUEUES)}")
        self._connection.recv_bytes()

    def _kill(self) -> int | None:
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        process.join()
        self._connection.close()
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()
        return process.exitcode

    def _diagnose(self, what: signal.Signals) -> str:
        """The device's queues, and all stacks of the child if asked, whatever its threads hold."""
        assert self._process is not None
        assert self._process.pid is not None
        (self._folder / "dump").unlink(missing_ok=True)
        os.kill(self._process.pid, what)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not self._read("dump"):
            time.sleep(0.05)
        return f"{self._read('stacks')}\n{self._read('dump')}"

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return ""


def in_simulator(test: Callable[..., None] | None = None, *, timeout: float = 60) -> Any:
    """Decorate a test that runs in the child process; its argument ``simulator`` is the child's ``Simulator``."""
    if test is None:
        return functools.partial(in_simulator, timeout=timeout)

    @functools.wraps(test)
    def run(simulated: SimulatedProcess, **keywords: Any) -> None:
        simulated.call(_run_test, test.__module__, test.__qualname__, timeout=timeout, **keywords)

    parameters = [p for name, p in inspect.signature(test).parameters.items() if name != "simulator"]
    fixture = inspect.Parameter("simulated", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([fixture, *parameters])  # type: ignore[attr-defined]  # what pytest reads
    return run


def _run_test(module: str, name: str, /, **keywords: Any) -> None:
    """Run the function under the decorator."""
    from tests.simulated.simulator import load_simulator

    gc.collect()  # memory of a device that a test before left in a circle
    getattr(importlib.import_module(module), name).__wrapped__(simulator=load_simulator(), **keywords)


def _serve(connection: Connection, environment: dict[str, str], folder: str) -> None:
    """Answer calls until the other end is closed."""
    begin_process(environment)
    stacks = open(f"{folder}/stacks", "w")  # noqa: SIM115 - faulthandler keeps the descriptor
    faulthandler.enable(stacks)
    faulthandler.register(_STACKS_AND_QUEUES, stacks, all_threads=True)
    import torch

    from tests.simulated.simulator import load_simulator

    torch.set_num_threads(1)
    simulator = load_simulator()
    # Hazard: the device's executor thread writes the dump while faulthandler writes stacks. With ``chain`` the signal
    # requests the dump after the last stack.
    faulthandler.unregister(_STACKS_AND_QUEUES)
    for each in (_STACKS_AND_QUEUES, _QUEUES):
        simulator.dump_on_signal(each, f"{folder}/dump")
    faulthandler.register(_STACKS_AND_QUEUES, stacks, all_threads=True, chain=True)
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            break
        connection.send_bytes(_answer(request))
    stacks.flush()


def _answer(request: bytes) -> bytes:
    import torch

    from tests.simulated.simulator import load_simulator

    try:
        function, arguments, keywords = pickle.loads(request)
        load_simulator().configure()
        torch._dynamo.reset()
        torch.manual_seed(0)
        answer = (False, function(*arguments, **keywords))
    except pytest.skip.Exception as skipped:
        return pickle.dumps((True, _Skip(str(skipped))))
    except BaseException as error:
        answer = (True, _portable(error))
    with contextlib.suppress(Exception):
        return pickle.dumps(answer)
    return pickle.dumps((True, TypeError(f"the result cannot be pickled: {answer[1]!r:.200}")))


class _Skip:
    """Pickled in place of pytest's exception, whose class cannot be found by its name."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __reduce__(self) -> Any:
        return _skipped, (self.reason,)


def _skipped(reason: str) -> BaseException:
    error: BaseException = pytest.skip.Exception(reason)
    return error


def _portable(error: BaseException) -> BaseException:
    """The error with its traceback as a note, or one like it that can be pickled."""
    note = "in the child process:\n" + "".join(traceback.format_exception(error))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error
