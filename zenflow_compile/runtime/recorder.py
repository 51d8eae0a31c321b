"""Records what runtime objects do into a timeline, if a profiler is attached."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from zenflow_compile.timeline import (
    COMPUTE,
    D2H,
    GRADIENTS,
    H2D,
    MEMORY,
    RANKS,
    SLACK,
    STEP,
    WINDOWS,
    DeviceClock,
    DeviceEvent,
    Timeline,
)

_NOTHING = nullcontext()  # shared: making a generator's context costs as much as an operator

Moment = int | DeviceEvent
"""Nanoseconds of the host's clock, or a timed event of a device's stream."""


class DeviceMemory(Protocol):
    """What a device says of its memory without a wait; None where it does not count it."""

    def allocated_bytes(self) -> int | None:
        """Memory that tensors have now."""

    def peak_bytes(self) -> int | None:
        """Most memory that they had at a time since the last reset."""


def seconds_between(begin: Moment, end: Moment) -> float:
    """Seconds from ``begin`` to ``end``, two moments of one kind; waits for an event that has not happened yet."""
    if isinstance(begin, int) or isinstance(end, int):
        assert isinstance(begin, int)
        assert isinstance(end, int)
        return (end - begin) / 1e9
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


class Recorder:
    """Records events of an engine, its lanes and its workers; keeps none of them alive.

    Events of the device's stream time its work; the host's clock times waits of the host, and everything where
    operators are complete when they return (``clock`` is None).

    Attributes:
        timeline: where events go; None without a profiler.
        step: number of optimizer steps so far.
    """

    def __init__(self, clock: DeviceClock | None = None, memory: DeviceMemory | None = None) -> None:
        self.timeline: Timeline | None = None
        self.step = 0
        self._clock = clock
        self._memory = memory
        self._lane = COMPUTE
        self._phase: tuple[str, Moment] | None = None
        self._step_began: int | None = None

    def attach(self, timeline: Timeline | None) -> None:
        """Record into ``timeline`` from now on; None: stop. The current step counts from here."""
        self.timeline = timeline
        self._phase = None
        self._step_began = None if timeline is None else time.perf_counter_ns()

    def compute(self, kind: str, *, param: str = "", on_host: bool = False) -> AbstractContextManager[None]:
        """Record the block as ``kind`` on the compute lane: by the host's clock (``on_host``) or the device's."""
        return _NOTHING if self.timeline is None else self._recorded(kind, param, on_host)

    def stall(self, waiting: bool, *, param: str, on_host: bool = False) -> AbstractContextManager[None]:
        return self._recorded("wait", param, on_host) if waiting and self.timeline is not None else _NOTHING

    def rank_wait(self, *, on_host: bool = False) -> AbstractContextManager[None]:
        """Record the block as a wait for other ranks."""
        return self.compute("rank_wait", param="", on_host=on_host)

    @contextmanager
    def collective_of_shards(self, kind: str, size: int) -> Iterator[None]:
        """Record the block, in which FSDP2 puts ``size`` bytes into a collective, in its stream where there are any."""
        self.sent(kind, size)
        if self._clock is None:
            with self.rank_wait():
                yield
            return
        with self.behind_the_step(), self.rank_wait():
            yield

    @contextmanager
    def behind_the_step(self) -> Iterator[None]:
        """Record the block on the lane of the ranks: its work is queued on another stream than the training's."""
        self._lane = RANKS
        try:
            yield
        finally:
            self._lane = COMPUTE

    @contextmanager
    def _recorded(self, kind: str, param: str, on_host: bool) -> Iterator[None]:
        begin = time.perf_counter_ns() if on_host else self.now()
        try:
            yield
        finally:
            end = time.perf_counter_ns() if on_host else self.now()
            self._add(self._lane, kind, begin, end, step=self.step, param=param)

    def begin_phase(self, kind: str) -> None:
        """Begin the phase ``kind`` ("forward", "backward", "update") of the training thread; ends another one."""
        if self.timeline is None or (self._phase is not None and self._phase[0] in (kind, "inference")):
            return
        self.end_phase()
        self._phase = (kind, self.now())

    def end_phase(self) -> None:
        if self._phase is not None:
            (kind, begin), self._phase = self._phase, None
            self._add(self._lane, kind, begin, self.now(), step=self.step)
            if self._memory is not None and (size := self._memory.allocated_bytes()) is not None:
                self._mark(MEMORY, kind, size=size)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        interrupted = self._phase
        self.end_phase()
        self._phase = ("inference", self.now())
        try:
            yield
        finally:
            self.end_phase()
            if interrupted is not None and self.timeline is not None:
                self._phase = (interrupted[0], self.now())

    def inference(self) -> AbstractContextManager[None]:
        """Record what runs inside as a forward without gradients, which belongs to no training step."""
        return _NOTHING if self.timeline is None else self._inference()

    def end_step(self) -> None:
        self.end_phase()
        if self.timeline is not None and self._step_began is not None:
            if self._memory is not None and (size := self._memory.peak_bytes()) is not None:
                self._mark(MEMORY, "peak", size=size)
            now = time.perf_counter_ns()
            self.timeline.add(STEP, "step", self._step_began, now, step=self.step)
            self._step_began = now

    def mark(self, kind: str, *, param: str) -> None:
        """Record that an update window was flushed ("flush") or a selection took effect ("select")."""
        self._mark(WINDOWS, kind, param=param)

    def dense_gradient(self, line: str) -> None:
        """Record that the line ``line`` ("file:line") made a gradient dense."""
        self._mark(GRADIENTS, "dense", param=line)

    def sent(self, kind: str, size: int) -> None:
        """Record that this rank has put ``size`` bytes into a collective of this kind."""
        self._mark(RANKS, kind, size=size)

    def _mark(self, lane: str, kind: str, *, param: str = "", size: int = 0) -> None:
        if self.timeline is not None:
            now = time.perf_counter_ns()
            self.timeline.add(lane, kind, now, now, step=self.step, param=param, bytes=size)

    def slack(self, final: Moment | None, *, step: int, param: str) -> None:
        """Record the time from the final gradient of ``step`` (``final``) to the read of the weight, which is now."""
        if self.timeline is None or final is None or self._lane != COMPUTE:  # no read of the weight
            return
        self._add(SLACK, "slack", final, self.now(), step=step, param=param)

    def moved_state(self, size: int, begin_ns: int, *, param: str) -> None:
        """Record that the training thread moved ``size`` bytes of state each way for a re-selection.

        Where lanes move them, the lanes record it: their bytes include rows that only fill a bound
        (``Reselection.host_rows``), and the rows' numbers.
        """
        if self.timeline is not None and size:
            end = time.perf_counter_ns()
            for lane in (D2H, H2D):
                self.timeline.add(lane, "state", begin_ns, end, step=self.step, param=param, bytes=size)

    def now(self) -> Moment:
        """This moment of the training thread, or of its stream where the device has streams."""
        return time.perf_counter_ns() if self._clock is None else self._clock.now()

    def _add(self, lane: str, kind: str, begin: Moment, end: Moment, *, step: int, param: str = "") -> None:
        if self.timeline is None:
            return
        if isinstance(begin, int) and isinstance(end, int):
            self.timeline.add(lane, kind, begin, end, step=step, param=param)
        elif self._clock is not None and not isinstance(begin, int) and not isinstance(end, int):
            self.timeline.add_device(self._clock, lane, kind, begin, end, step=step, param=param)
