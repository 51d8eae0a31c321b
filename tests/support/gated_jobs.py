"""Jobs of workers that are late, held or fail, by one more input of each: their threads run no Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.host.workers import Job, Work, Workers, bounds_of
from zenflow_compile.runtime.parameters.state_exchange import ExchangeWork

UPDATES = ("host_update",)
STATE = ("state",)


@contextmanager
def gated(
    gate: Callable[[], ThreadTicket | float | None], kinds: Sequence[str] = (*UPDATES, *STATE)
) -> Iterator[list[Job]]:
    """Give each job of these kinds that the block makes one more input; yields these jobs.

    Args:
        gate: called for each job. Returns the input; or seconds after which it arrives; None: it has arrived. If it
            raises, the input has failed with that error.
    """
    init = Job.__init__
    made: list[Job] = []

    def with_gate(job: Job, work: Work, inputs: Sequence[Any], *arguments: Any, **keywords: Any) -> None:
        if work.kind in kinds:
            inputs = [*inputs, _input_of(gate)]
            made.append(job)
        init(job, work, inputs, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "__init__", with_gate)
        yield made


def _input_of(gate: Callable[[], ThreadTicket | float | None]) -> ThreadTicket:
    try:
        found = gate()
    except Exception as error:
        return ThreadTicket.ended(error)
    if isinstance(found, ThreadTicket):
        return found
    if found is None:
        return ThreadTicket.ended()
    threading.Timer(found, (ticket := ThreadTicket()).set).start()
    return ticket


def failed_jobs(error: Exception, kinds: Sequence[str]) -> AbstractContextManager[list[Job]]:
    """Let each job of these kinds that the block makes fail with ``error``."""

    def gate() -> None:
        raise error

    return gated(gate, kinds)


class HeldJob(Job):
    """A queued job that ends when its ``gate`` is set, or fails with its error; it touches no memory of others."""

    def __init__(self, workers: Workers, *, deadline: int = 0) -> None:
        workers.start()
        self.gate = ThreadTicket()
        block = [torch.zeros(1, 1) for _ in range(3)]
        work = ExchangeWork(block, torch.zeros(1, dtype=torch.int32), block, bounds_of([slice(0, 1)]))
        super().__init__(work, (self.gate,), (), workers.handle, deadline=deadline, step=0, param="held")
        workers.submit(self)
