"""Processes that stay, each a rank of one process group, and run the same functions."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.fork_server import begin_process, fork_server

_T = TypeVar("_T")
GROUP_SECONDS = 20.0
"""How long a collective waits for the other ranks."""


class RankError(AssertionError):
    """A rank raised, ended, or did not answer; the text has what each rank said."""


class RankProcesses:
    """Processes of one thread each, in a gloo group; they start at the first call and live as long as calls succeed."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._context = fork_server()
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: Path | None = None

    def call(self, function: Callable[..., _T], /, *arguments: Any, timeout: float = 120, **keywords: Any) -> list[_T]:
        """``function(rank, *arguments, **keywords)`` of each rank, by rank.

        Raises:
            RankError: a rank raised, ended or did not answer. All of them were ended.
        """
        answers = self.outcomes(function, *arguments, timeout=timeout, **keywords)
        if any(isinstance(each, BaseException) for each in answers):
            self.close()
            raise RankError("\n".join(f"rank {rank}: {_text(each)}" for rank, each in enumerate(answers)))
        return answers

    def outcomes(
        self, function: Callable[..., Any], /, *arguments: Any, timeout: float = 120, **keywords: Any
    ) -> list[Any]:
        """As ``call``, with the exceptions of ranks instead of what they return. Ends the processes after any."""
        if not self._processes:
            self._start()
        request = pickle.dumps((function, arguments, keywords))
        for connection in self._connections:
            connection.send_bytes(request)
        answers = [_answer(connection, timeout) for connection in self._connections]
        if any(isinstance(each, BaseException) for each in answers):
            self.close()
        return answers

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.ranks):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(theirs, dict(os.environ), rank, self.ranks, str(self._folder)), daemon=False
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)


def _answer(connection: Connection, timeout: float) -> Any:
    try:
        if not connection.poll(timeout):
            return TimeoutError(f"no answer within {timeout:g} s")
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError) as lost:
        return lost


def _text(answer: object) -> str:
    notes = "\n".join(getattr(answer, "__notes__", ()))
    return f"{type(answer).__name__}: {answer}\n{notes}" if isinstance(answer, BaseException) else "returned"


def _serve(connection: Connection, environment: dict[str, str], rank: int, ranks: int, folder: str) -> None:
    begin_process(environment)
    import torch
    import torch.distributed as dist

    from zenflow_compile.runtime.step import gradient_reduction, weight_gather

    # The tensors of tests are small: they travel in as many pieces as large ones.
    gradient_reduction.BUCKET_BYTES = 1 << 13
    gradient_reduction.FLAT_BYTES = 1 << 8
    weight_gather.CallersStream.most_bytes = weight_gather.OwnStream.most_bytes = 1 << 12
    torch.set_num_threads(1)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in own.items()})
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    while True:
        try:
            function, arguments, keywords = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            break
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        try:
            answer = function(rank, *arguments, **keywords)
        except BaseException as error:
            answer = _portable(error)
        connection.send_bytes(pickle.dumps(answer))
    os._exit(0)


def _portable(error: BaseException) -> BaseException:
    """``error`` with its traceback as a note; another of its text, if it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    error.add_note(text)
    return error


def messages(outcomes: Sequence[Any]) -> list[str]:
    """The text of each rank's exception.

    Raises:
        AssertionError: a rank raised none.
    """
    for rank, each in enumerate(outcomes):
        if not isinstance(each, BaseException):
            pytest.fail(f"rank {rank} returned {each!r}, and others: {[_text(other) for other in outcomes]}")
    return [str(each) for each in outcomes]
