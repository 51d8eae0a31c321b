"""Decides the shortest update window that the host keeps up with, one time, from two measurements.

The host must finish its updates in the time that hides them. With windows of S steps, it flushes 1/S of all windows per
step, and each flush reads S gradients in addition to the state: longer windows need less of its time. The time that
hides them goes from the optimizer step to the end of the next forward, which needs the flushed updates. If updates run
in the backward, it is a whole step: the flush of a late layer has the rest of the backward, an early layer is used
first in the forward, and the order by earliest deadline fits both into one step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence, Sized

import torch

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.host.cores import last_level_cache_bytes
from zenflow_compile.runtime.host.host_adam import HostAdam, WindowUpdate
from zenflow_compile.runtime.host.workers import Job, Workers, bounds_of
from zenflow_compile.runtime.parameters.host_state import TASK_ELEMENTS, UpdateWork, WindowAddresses, touched_bytes
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.recorder import Moment, Recorder, seconds_between
from zenflow_compile.runtime.state_forms import StateForm
from zenflow_compile.runtime.step.rank_calls import StepMessages
from zenflow_compile.runtime.step.schedule import Schedule

_CACHES = 2  # the measurement of the host's rate covers this many times the last-level cache


class ShortestWindow:
    """Measures the host's rate and one step, then decides how short update windows may be.

    It measures the first step that compiles no graph and begins without an update in flight, so that the step waits for
    no earlier work. The bound is known in the backward after that step.
    """

    def __init__(self, registry: ParamRegistry, recorder: Recorder, *, whole_step: bool) -> None:
        self._registry = registry
        self._recorder = recorder
        self._whole_step = whole_step
        self._bytes_per_second: float | None = None
        self._graphs = 0
        self._begin: Moment | None = None
        self._forward_end: Moment | None = None
        self._end: Moment | None = None

    def begin_backward(self, graphs: int) -> int | None:
        """Note the end of a forward, after ``graphs`` were compiled.

        Returns the shortest update window, in steps, if the previous step was measured.
        """
        if self._end is not None:
            return self._decide()
        if self._begin is not None and self._forward_end is None and graphs == self._graphs:
            self._forward_end = self._recorder.now()
        return None

    def end_step(self, graphs: int) -> None:
        """Note the end of a step, and measure the next one if this one was not measured and the next can be."""
        if self._forward_end is not None and graphs == self._graphs:
            self._end = self._recorder.now()
            return
        self.forget()
        offloaded = self._registry.offloaded.values()
        if not offloaded or any(each.host.flushed for each in offloaded):
            return
        if self._bytes_per_second is None:
            largest = max(offloaded, key=lambda each: each.plan.deferred * each.plan.length)
            self._bytes_per_second = host_rate(largest.host.kernel, largest.plan, self._registry.transport.workers)
        self._graphs, self._begin = graphs, self._recorder.now()

    def forget(self) -> None:
        self._begin = self._forward_end = self._end = None

    def _decide(self) -> int:
        assert self._begin is not None
        assert self._forward_end is not None
        assert self._end is not None
        assert self._bytes_per_second is not None
        forward_s = seconds_between(self._begin, self._forward_end)
        step_s = seconds_between(self._begin, self._end)
        plans = [offloaded.plan for offloaded in self._registry.offloaded.values()]
        hidden_s = (step_s if self._whole_step else forward_s) + plans[0].staleness * step_s
        self.forget()
        return shortest_window(plans, bytes_per_second=self._bytes_per_second, hidden_s=hidden_s)


class MeasuredWindow:
    """Bounds the update windows of one engine as soon as the bound is known: a part of it at each backward and step.

    Args:
        graphs: what the backend has compiled for the engine.
        calls: of several ranks, of which the first one's measurement counts: it comes with the next step's message.
    """

    def __init__(self, shortest: ShortestWindow, schedule: Schedule, graphs: Sized, calls: StepMessages | None) -> None:
        self._shortest = shortest
        self._schedule = schedule
        self._graphs = graphs
        self._calls = calls

    def begin_backward(self) -> None:
        if self._schedule.shortest_window is None:
            measured = self._shortest.begin_backward(len(self._graphs))
            if self._calls is None:
                self._schedule.shortest_window = measured
            else:
                self._calls.measured_window = measured or self._calls.measured_window

    def end_step(self) -> None:
        if self._schedule.shortest_window is None:
            self._shortest.end_step(len(self._graphs))

    def forget(self) -> None:
        self._shortest.forget()


def shortest_window(plans: Sequence[ParamPlan], *, bytes_per_second: float, hidden_s: float) -> int:
    """Return the smallest S at which the flushes of a step fit into the time that hides them; the longest if none does.

    Args:
        plans: of the offloaded parameters, at least one.
        bytes_per_second: of host memory that updates read and write, with all workers.
        hidden_s: seconds per step that hide the host's work.
    """
    longest = max(plan.interval for plan in plans)
    for steps in range(1, longest):
        bytes_per_flush = sum(plan.deferred * plan.length * touched_bytes(plan, steps) for plan in plans)
        if bytes_per_flush / steps <= bytes_per_second * hidden_s:
            return steps
    return longest


def host_rate(kernel: HostAdam, plan: ParamPlan, workers: Workers) -> float:
    """Measure the bytes per second at which all workers together update windows of the longest length.

    It takes some ten milliseconds, in memory made for it: tasks of the usual size, the same number for each worker,
    together larger than the last-level cache, as a model's state is. The first round touches the memory, the second one
    is timed.
    """
    coefficients = [StepCoefficients.known(lr=0.0, beta1=0.9, beta2=0.999, weight_decay=0.0)] * plan.interval
    touched = touched_bytes(plan, len(coefficients))
    of_task = max(1, TASK_ELEMENTS // plan.length)  # slices
    rounds = max(1, math.ceil(_CACHES * last_level_cache_bytes() / (of_task * plan.length * touched * workers.count)))
    tasks = rounds * workers.count
    slices, elements = tasks * of_task, tasks * of_task * plan.length
    form = StateForm.of_deferred(plan)
    # Ones, because the system backs fresh zeros with a single page, which would be read from the cache.
    stored = zip(form.row_elements, form.dtypes, strict=True)
    state = [torch.ones(slices * row, dtype=dtype, device="cpu") for row, dtype in stored]
    out = torch.ones(elements, dtype=plan.dtype, device="cpu")
    shape = (slices, plan.buffer_shape[1]) if plan.compressed else (elements,)
    gradients = [torch.ones(shape, dtype=plan.buffer_dtype, device="cpu") for _ in coefficients]
    update = WindowUpdate(
        state, out, gradients, coefficients, len(coefficients), 1.0, form, out if form.split else None
    )
    addresses = WindowAddresses(kernel.window(update), update)
    bounds = bounds_of([slice(number * elements // tasks, (number + 1) * elements // tasks) for number in range(tasks)])
    work = UpdateWork(addresses, coefficients, len(coefficients), 1.0, touched, bounds)
    workers.start()
    seconds = 0.0
    for _ in range(2):
        job = Job(work, (), (), workers.handle, deadline=0, step=0, param="(measuring the host's rate)")
        begin = time.perf_counter()
        workers.submit(job)
        job.wait()
        seconds = time.perf_counter() - begin
    return elements * touched / seconds
