"""Simulated time: lanes that do one thing at a time, and the host memory that they share.

Every transfer that touches host memory has a rate of it. If the sum of these rates exceeds the memory's bandwidth, all
are slowed by the same factor (processor sharing). Work in device memory alone runs at full speed. If the device is the
host's processor, its work and its copies take cores, which are shared in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_ZERO_S = 1e-12  # a span with less than this left has ended, up to rounding


@dataclass(slots=True)
class Span:
    """One piece of work of a lane.

    Attributes:
        seconds: remaining, at full speed.
        host_rate: bytes of host memory per second, read and written, that it takes at full speed.
        done: called at its end.
        begin: time of its start.
        cores: shared cores that it keeps busy.
    """

    seconds: float
    host_rate: float
    done: Callable[[], None]
    begin: float = 0.0
    cores: float = 0.0


class Clock:
    """Runs spans in parallel, one per lane, from one end of a span to the next.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self, host_bandwidth: float, cores: float = math.inf) -> None:
        """``host_bandwidth``: bytes/s of host memory that spans share; ``cores`` likewise."""
        self.now = 0.0
        self._host_bandwidth = host_bandwidth
        self._cores = cores
        self._running: dict[str, Span] = {}

    def idle(self, lane: str) -> bool:
        """Whether ``lane`` is free to start something."""
        return lane not in self._running

    def start(self, lane: str, span: Span) -> None:
        """Start ``span`` on ``lane``, which is idle."""
        assert lane not in self._running, lane
        span.begin = self.now
        self._running[lane] = span

    def stop(self, lane: str) -> Span:
        """Interrupt the span of ``lane``; its ``seconds`` are the remaining ones."""
        return self._running.pop(lane)

    def advance(self) -> bool:
        """Advance to the next end of a span; False if no lane is busy."""
        running = self._running
        if not running:
            return False
        speeds = self._speeds()
        passed = min([span.seconds / speed for span, speed in zip(running.values(), speeds, strict=True)])
        self.now += passed
        ended = []
        for (lane, span), speed in zip(running.items(), speeds, strict=True):
            span.seconds -= passed * speed
            if span.seconds <= _ZERO_S:
                ended.append(lane)
        for span in [running.pop(lane) for lane in ended]:
            span.done()
        return True

    def _speeds(self) -> list[float]:
        """The share of its full speed at which each span runs."""
        spans = self._running.values()
        asked = busy = 0.0
        for span in spans:
            asked += span.host_rate
            busy += span.cores
        if asked <= self._host_bandwidth and busy <= self._cores:
            return [1.0] * len(spans)
        memory = self._host_bandwidth / asked if asked > self._host_bandwidth else 1.0
        cores = self._cores / busy if busy > self._cores else 1.0
        return [min(memory if span.host_rate else 1.0, cores if span.cores else 1.0) for span in spans]
