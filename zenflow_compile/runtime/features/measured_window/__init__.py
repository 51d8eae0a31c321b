"""Decides the shortest update window that the host keeps up with, once, from two measurements.

The host must finish its updates in the time that hides them. With windows of S steps, it flushes 1/S of all windows per
step, and each flush reads S gradients in addition to the state: longer windows need less of its time. The time that
hides them goes from the optimizer step to the end of the next forward, which needs the flushed updates. If updates run
in the backward, it is a whole step: the flush of a late layer has the rest of the backward, an early layer is used
first in the forward, and the order by earliest deadline fits both into one step.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Self

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.features.feature import EngineParts, Feature, FeatureCalls
from zenflow_compile.runtime.parameters.host_state import touched_bytes
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.recorder import Moment, Recorder, seconds_between
from zenflow_compile.runtime.step.host_rate import host_rate
from zenflow_compile.runtime.step.one_rank import OneRank
from zenflow_compile.runtime.step.schedule import Schedule


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


class MeasuredWindow(Feature):
    """Bounds the update windows of one engine as soon as the bound is known.

    Args:
        graphs: what the backend has compiled for the engine.
        calls: of several ranks, of which the first one's measurement counts: it comes with the next step's message.
    """

    def __init__(self, shortest: ShortestWindow, schedule: Schedule, graphs: Sized, calls: OneRank) -> None:
        self._shortest = shortest
        self._schedule = schedule
        self._graphs = graphs
        self._calls = calls

    @classmethod
    def of(cls, engine: EngineParts) -> Self | None:
        if not engine.schedule.measured:
            return None
        shortest = ShortestWindow(engine.registry, engine.recorder, whole_step=engine.finalizes_in_backward)
        return cls(shortest, engine.schedule, engine.graphs, engine.calls)

    def calls(self) -> FeatureCalls:
        return {"begin_backward": self.begin_backward, "end_step": self.end_step, "abandon": self._shortest.forget}

    def begin_backward(self) -> None:
        if self._schedule.shortest_window is None:
            measured = self._shortest.begin_backward(len(self._graphs))
            self._schedule.shortest_window = self._calls.shortest_window(measured)

    def end_step(self) -> None:
        if self._schedule.shortest_window is None:
            self._shortest.end_step(len(self._graphs))


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
