"""Forces the order of a run: what is late happens only while the host waits, and all else is at rest."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from tests.simulated.library import library
from tests.simulated.simulator import Simulator
from tests.simulated.streams import Event, Stream
from tests.support.stream_collectives import THREAD
from zenflow_compile.runtime.device.stream_flags import Flag
from zenflow_compile.runtime.host.workers import Job
from zenflow_compile.runtime.ranks.rank_group import RankGroup

_POLL_SECONDS = 20e-6


@contextmanager
def known_waits() -> Iterator[None]:
    """Let the device know that the host waits for a job, a flag or another rank: then it holds back nothing."""

    def known(wait: Callable[..., Any]) -> Callable[..., Any]:
        def wait_known(*arguments: Any, **keywords: Any) -> Any:
            if threading.current_thread().name == THREAD:
                return wait(*arguments, **keywords)
            library().ask("count_waiting", 1)
            try:
                return wait(*arguments, **keywords)
            finally:
                library().ask("count_waiting", -1)

        return wait_known

    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((Job, "_block"), (Flag, "wait"), (RankGroup, "_poll")):
            patch.setattr(kind, name, known(getattr(kind, name)))
        yield


class WaitsAtRest:
    """Waits of the host thread. Streams that are late with probability 1 run one item at a time, inside of them.

    So the order of each item of such a stream and of all other work is the same in every run, however busy the machine
    is: other streams come first, and so do jobs whose inputs have arrived.
    """

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._jobs: list[Job] = []

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Make all waits of the block such waits."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Job, "__init__", self._noting(Job.__init__))
            patch.setattr(Job, "_block", self._block(Job._block))
            patch.setattr(Flag, "wait", self._wait(Flag.wait))
            patch.setattr(RankGroup, "_poll", self._poll(RankGroup._poll))
            for kind in (Event, Stream):
                patch.setattr(kind, "synchronize", self._synchronize(kind.synchronize))
            yield

    def _until(self, reached: Callable[[], object]) -> None:
        while not reached():
            self._simulator.run_others()
            if not (self._some_job_ends() or reached() or self._simulator.run_last()):
                time.sleep(_POLL_SECONDS)  # another process is what it waits for

    def _some_job_ends(self) -> bool:
        """Wait for a job whose inputs have arrived. False: there is none."""
        self._jobs = [job for job in self._jobs if not job.is_settled]
        for job in self._jobs:
            waits = (*job.inputs, *job.after), (*job.behind, *job.read_by)
            if (
                job.memory.queued
                and all(each.done() for each in waits[0])
                and all(each.is_settled for each in waits[1])
            ):
                while not job.is_settled:
                    time.sleep(_POLL_SECONDS)
                return True
        return False

    def _noting(self, init: Callable[..., None]) -> Callable[..., None]:
        def make(job: Job, *arguments: Any, **keywords: Any) -> None:
            init(job, *arguments, **keywords)
            self._jobs.append(job)

        return make

    def _block(self, block: Callable[..., None]) -> Callable[..., None]:
        def block_at_rest(job: Job, *, settled: bool = False) -> None:
            if job.memory.queued:
                self._until(lambda: job.is_settled if settled else job.is_set)
            block(job, settled=settled)

        return block_at_rest

    def _wait(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        def wait_at_rest(flag: Flag, seconds: float = math.inf) -> bool:
            if threading.current_thread().name != THREAD:
                self._until(flag.reached)
            return wait(flag, seconds)

        return wait_at_rest

    def _poll(self, poll: Callable[..., None]) -> Callable[..., None]:
        def poll_at_rest(group: RankGroup, work: dist.Work) -> None:
            self._until(lambda: work.is_completed() or group.attendance.raise_failure_of_others(group.step))
            poll(group, work)

        return poll_at_rest

    def _synchronize(self, synchronize: Callable[[Any], None]) -> Callable[[Any], None]:
        def synchronize_at_rest(waited_for: Event | Stream) -> None:
            self._until(waited_for.query)
            synchronize(waited_for)

        return synchronize_at_rest
