"""Holds host jobs until something waits for them. The order in which they run then is the same in every run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from zenflow_compile import ZenFlowAdamW
from zenflow_compile.native.library import COUNTER
from zenflow_compile.runtime.device.copy_lanes import Gate
from zenflow_compile.runtime.host.workers import Job


class HeldInput:
    """A ticket of one more input of a job, which arrives when the test says so."""

    error = None

    def __init__(self) -> None:
        self.word = ctypes.c_uint32(0)

    def arrive(self) -> None:
        self.word.value = 1

    def gate(self) -> Gate:
        return Gate(ctypes.addressof(self.word), 1, COUNTER, self.word)

    def done(self) -> bool:
        return bool(self.word.value)

    def wait(self) -> None:
        assert self.done()  # jobs wait for inputs that have arrived

    wait_on_device = settle = wait


class HeldJobs:
    """The jobs of a run, of which some are held.

    Args:
        kinds: of the jobs that are held.
        steps: they run before every so manyth step.
    """

    def __init__(self, kinds: Sequence[str], steps: int) -> None:
        self._kinds = kinds
        self._steps = steps
        self._made: dict[Job, HeldInput] = {}
        self._in_step = False

    def begin_step(self, step: int) -> None:
        """Run all jobs, if it is time."""
        if step % self._steps == 1 % self._steps:
            self.run()

    def run(self) -> None:
        """Run all jobs. The last one goes first, behind those that it waits for."""
        for job in reversed(list(self._made)):
            self._release(job)
            job.settle()
        self._made.clear()

    def _release(self, job: Job) -> None:
        """Let a job run, and the jobs that it waits for."""
        if job.is_settled:
            return
        if (held := self._made.get(job)) is not None:
            held.arrive()
        for other in (*job._after, *job._behind):  # type: ignore[attr-defined]
            if isinstance(other, Job):
                self._release(other)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the jobs that the block makes. One that the training thread waits for is held no longer."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Job, "__init__", self._with_input(Job.__init__))
            patch.setattr(Job, "_block", self._released(Job._block))
            patch.setattr(ZenFlowAdamW, "step", self._step(ZenFlowAdamW.step))
            yield

    def _step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def step_holding(optimizer: ZenFlowAdamW) -> None:
            self._in_step = True
            try:
                step(optimizer)
            finally:
                self._in_step = False

        return step_holding

    def _with_input(self, init: Callable[..., None]) -> Callable[..., None]:
        def make(job: Any, work: Any, inputs: Sequence[Any] = (), *arguments: Any, **keywords: Any) -> None:
            held = HeldInput()
            init(job, work, [*inputs, held], *arguments, **keywords)
            if not (self._in_step and work.kind in self._kinds):
                held.arrive()
            self._made[job] = held

        return make

    def _released(self, wait: Callable[..., None]) -> Callable[..., None]:
        def release_and_wait(job: Job, **keywords: Any) -> None:
            self._release(job)
            wait(job, **keywords)

        return release_and_wait
