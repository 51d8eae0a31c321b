"""How short the windows may be that the host keeps up with: decided once, from two measurements.

The host must finish within the time that hides it. Per step it closes 1/S of all bytes, and each close reads S
gradients beside the state, so longer windows need less of its time. Against that stands the time from the moment when
gradients are final to the end of the next forward, where closed windows are needed: the forward, and what the loop does
before it. Where updates run on the tail of the backward it is a whole step: a late layer's close has the rest of the
backward, an early layer's use comes first in the forward, and earliest deadline first fits both into one step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.host.cores import last_level_cache_bytes
from zenflow_compile.runtime.host.host_adam import HostAdam
from zenflow_compile.runtime.host.workers import Job, WorkerPool
from zenflow_compile.runtime.parameters.host_state import TASK_ELEMENTS, touched_bytes
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.recorder import Moment, Recorder, seconds_between

_CACHES = 2  # times the last-level cache that the measurement of the host's rate goes through


class ShortestWindow:
    """Measures the host's rate and one step, then says how short windows may be.

    Measured is the first step that compiles no graph and begins with no update in flight: what it waits for is then its
    own. Until its numbers are read, in the backward after it, there is no bound.
    """

    def __init__(self, registry: ParamRegistry, recorder: Recorder, *, whole_step: bool) -> None:
        """
        Args:
            whole_step: updates run on the tail of the backward.
        """
        self._registry = registry
        self._recorder = recorder
        self._whole_step = whole_step
        self._rate: float | None = None
        self._graphs = 0
        self._begin: Moment | None = None
        self._forward_end: Moment | None = None
        self._end: Moment | None = None

    def begin_backward(self, graphs: int) -> int | None:
        """A forward is over; returns the shortest window in steps, if the step before was measured.

        Args:
            graphs: how many were compiled so far.
        """
        if self._end is not None:
            return self._decided()
        if self._begin is not None and self._forward_end is None and graphs == self._graphs:
            self._forward_end = self._recorder.now()
        return None

    def end_step(self, graphs: int) -> None:
        """A step is over; the next one is measured, if this one was not and it can be."""
        if self._forward_end is not None and graphs == self._graphs:
            self._end = self._recorder.now()
            return
        self.forget()
        offloaded = self._registry.offloaded.values()
        if not offloaded or any(each.host.flushed for each in offloaded):
            return
        if self._rate is None:
            largest = max(offloaded, key=lambda each: each.plan.deferred * each.plan.length)
            self._rate = host_rate(largest.host.kernel, largest.plan, self._registry.transport.workers)
        self._graphs, self._begin = graphs, self._recorder.now()

    def forget(self) -> None:
        """Drop a measurement that is under way."""
        self._begin = self._forward_end = self._end = None

    def _decided(self) -> int:
        assert self._begin is not None
        assert self._forward_end is not None
        assert self._end is not None
        assert self._rate is not None
        forward = seconds_between(self._begin, self._forward_end)
        step = seconds_between(self._begin, self._end)
        plans = [offloaded.plan for offloaded in self._registry.offloaded.values()]
        hidden = (step if self._whole_step else forward) + plans[0].staleness * step
        self.forget()
        return shortest_window(plans, rate=self._rate, hidden=hidden)


def shortest_window(plans: Sequence[ParamPlan], *, rate: float, hidden: float) -> int:
    """The smallest S at which the closes of one step fit into the time that hides them; the longest one if none does.

    Args:
        plans: of the offloaded parameters, at least one.
        rate: bytes of host memory that an update reads and writes per second, by all workers.
        hidden: seconds per step.
    """
    longest = max(plan.interval for plan in plans)
    for steps in range(1, longest):
        touched = sum(plan.deferred * plan.length * touched_bytes(plan, steps) for plan in plans)
        if touched / steps <= rate * hidden:
            return steps
    return longest


def host_rate(kernel: HostAdam, plan: ParamPlan, workers: WorkerPool) -> float:
    """Bytes per second at which all workers together close windows of the longest length, on memory of its own.

    It takes some ten milliseconds: tasks of usual size, as many for each worker, together larger than the last-level
    cache, as a model's state is; once to touch the memory and once for the clock.
    """
    slots = [StepCoefficients(lr=0.0, beta1=0.9, beta2=0.999, weight_decay=0.0, grad_scale=1.0)] * plan.interval
    touched = round(TASK_ELEMENTS * touched_bytes(plan, len(slots)))
    gradient_dtype = torch.float32 if plan.compressed else plan.dtype  # what the kernel is handed

    def task() -> Callable[[], int]:
        # Ones, since the system backs fresh zeros with a single page, which would be read from the cache.
        master, exp_avg, exp_avg_sq = (torch.ones(TASK_ELEMENTS, device="cpu") for _ in range(3))
        out = torch.ones(TASK_ELEMENTS, dtype=plan.dtype, device="cpu")
        gradients = [torch.ones(TASK_ELEMENTS, dtype=gradient_dtype, device="cpu") for _ in slots]

        def run() -> int:
            kernel(master, exp_avg, exp_avg_sq, gradients, slots, step=len(slots), eps=1.0, out=out)
            return touched

        return run

    rounds = max(1, math.ceil(_CACHES * last_level_cache_bytes() / (touched * workers.workers)))
    tasks = [task() for _ in range(rounds * workers.workers)]
    seconds = 0.0
    for _ in range(2):
        job = Job(tasks, deadline=0, step=0, param="(measuring the host's rate)", ready=lambda: None)
        begin = time.perf_counter()
        workers.submit(job)
        job.wait()
        seconds = time.perf_counter() - begin
    return touched * len(tasks) / seconds
