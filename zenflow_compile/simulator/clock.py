"""Simulated time: lanes that do one thing at a time, and the host memory that they share.

Every transfer that touches host memory asks for a rate of it. Where the rates of all that run exceed what the memory
has, all are slowed by the same factor (processor sharing). What touches device memory alone runs at its own speed.
Where the device is the host's own processor, its work and its copies take cores, which are shared in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_ZERO_S = 1e-12  # what is left of a span after this much rounding is nothing


@dataclass(slots=True)
class Span:
    """Something that a lane is doing.

    Attributes:
        seconds: still to go, at full speed.
        host_rate: bytes of host memory per second, read and written, that it takes at full speed.
        done: called at its end.
        begin: when it began.
        cores: that it keeps busy, of those that are shared.
    """

    seconds: float
    host_rate: float
    done: Callable[[], None]
    begin: float = 0.0
    cores: float = 0.0


class Clock:
    """Runs spans side by side, one per lane, from one end of a span to the next.

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
        """Let ``lane``, which is idle, do ``span`` from now on."""
        assert lane not in self._running, lane
        span.begin = self.now
        self._running[lane] = span

    def stop(self, lane: str) -> Span:
        """Take what ``lane`` is doing off it; its ``seconds`` are what is left."""
        return self._running.pop(lane)

    def advance(self) -> bool:
        """Go on to the next end of a span; False if nothing runs."""
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
        """What share of its own speed everything runs at."""
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
