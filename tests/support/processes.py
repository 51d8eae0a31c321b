"""Starts two processes on this machine, as a distributed run would, or forks one, and collects their results."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.fork_server import begin_process, fork_server

Results = dict[str, Any]


def _run(
    rank: int,
    environment: dict[str, str],
    work: Callable[[int], Results],
    folder: str,
    port: int,
    process_group: bool,
) -> None:
    """Run the body of one process."""
    begin_process(environment)
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if process_group:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=30)
        )
    torch.save(work(rank), f"{folder}/{rank}.pt")
    if process_group:
        dist.destroy_process_group()


def run_two_processes(work: Callable[[int], Results], folder: Path, *, process_group: bool = True) -> list[Results]:
    """Run ``work(rank)`` in two new processes and return both results, by rank.

    Args:
        work: a function of a module; it returns a dict that ``torch.load(weights_only=True)`` can read.
        folder: an empty folder for the rendezvous and the results.
        process_group: make a gloo process group first; without it, only the environment variables for one are set.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork_server()
    arguments = (dict(os.environ), work, str(folder), port, process_group)
    mp.start_processes(_run, args=arguments, nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def chosen_cases(request: pytest.FixtureRequest) -> frozenset[str]:
    """The values of the arguments of a module's tests that run, and the names of those tests."""
    found: set[str] = set()
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            callspec = getattr(item, "callspec", None)
            found.update([item.name] if callspec is None else map(str, callspec.params.values()))
    return frozenset(found)


def results_of(runs: Mapping[str, Callable[[], Any]], before: Callable[[], None]) -> Results:
    """Call ``before`` and then each run: by its name, what it returns or the text of its error."""
    results: Results = {}
    for name, run in runs.items():
        before()
        try:
            results[name] = run()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return results


def in_child(action: Callable[..., object], *arguments: object) -> str:
    """Run ``action`` in a forked child.

    Returns its error or its result as text, or the signal that ended the child. A result that is no number is not read.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # Python's handler would wait for the end of a call
        signal.alarm(10)  # a child that hangs ends by a signal
        torch.set_num_threads(1)  # OpenMP's threads are not in a fork, and a parallel kernel would wait for them
        try:
            result = action(*arguments)
            told = f"returned {result if isinstance(result, (int, float)) else None}"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        told = file.read()
    _, status = os.waitpid(child, 0)
    return told if os.WIFEXITED(status) else f"signal {os.WTERMSIG(status)}"
