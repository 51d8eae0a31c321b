"""The best that a machine allows: the time that a plan's bytes need at measured bandwidths.

A bound, not a forecast: every byte moves at full speed, at any time. The recorded stall next to it shows what the
schedule adds: updates of the first layers are due early, and flushes begin late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from zenflow_compile.performance.traffic import Bandwidths, Traffic

_MS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The shortest times per step that measured bandwidths allow, in ms.

    Attributes:
        host_ms, to_host_ms, to_device_ms: time of each lane, streamed state and loaded weights included.
        disk_ms: likewise; None where files move and the bandwidth is not known.
        stall_ms: waiting that no schedule avoids: the longest lane's time beyond the device's own work. A blocking plan
            hides neither host update nor upload; it may hide streamed state and files, which are read ahead and
            written behind.
        step_ms: device work and that stall.
        smallest_interval: the shortest update window, in steps, whose host update, upload and files take no longer than
            the device's own work; None if no window does, or if the plan blocks.
    """

    host_ms: float
    to_host_ms: float
    to_device_ms: float
    disk_ms: float | None
    stall_ms: float
    step_ms: float
    smallest_interval: int | None


def limit_of(traffic: Traffic, bandwidths: Bandwidths, *, device_ms: float) -> Limit:
    """The limit of a measured run: the lanes of the performance model (``equations``) with measured rates.

    Args:
        device_ms: the device's own work per step, which hides host work: a measured step less its stall.
    """
    device = device_ms / _MS
    disk = 0.0 if bandwidths.disk is None else 2 / bandwidths.disk  # seconds per byte of state
    host_ms = _MS * traffic.host / bandwidths.host
    back = traffic.state + traffic.rewritten
    there = traffic.state + traffic.loads
    to_host_ms = _MS * (traffic.to_host + back) / bandwidths.to_host
    to_device_ms = _MS * (traffic.to_device + there) / bandwidths.to_device
    files_ms = _MS * traffic.files * disk
    stall_ms = max(0.0, max(host_ms, to_host_ms, to_device_ms, files_ms) - device_ms)
    if traffic.blocking:
        stall_ms = max(stall_ms, host_ms, _MS * traffic.to_device / bandwidths.to_device)
    lanes = (  # host updates, uploads with loads, what goes back to the host, files
        (traffic.host_per_window / bandwidths.host, traffic.host_per_gradient / bandwidths.host, device),
        (traffic.upload_per_window / bandwidths.to_device, there / bandwidths.to_device, device),
        (0.0, back / bandwidths.to_host, device),
        (traffic.files_per_window * disk, 0.0, device),
    )
    return Limit(
        host_ms=host_ms,
        to_host_ms=to_host_ms,
        to_device_ms=to_device_ms,
        disk_ms=None if traffic.files and bandwidths.disk is None else files_ms,
        stall_ms=stall_ms,
        step_ms=device_ms + stall_ms,
        smallest_interval=None if traffic.blocking else shortest_window(lanes),
    )


def shortest_window(lanes: Iterable[tuple[float, float, float]]) -> int | None:
    """The smallest ``update_interval`` at which the lanes' work fits into the time that hides it; None if none does.

    Args:
        lanes: seconds of each: work per update window, work per step, and the time of a step that hides both.
    """
    needed = 1.0
    for per_window, per_step, time in lanes:
        left = time - per_step
        rounding = 1e-12 * time
        if left < -rounding or (per_window and left <= rounding):
            return None
        if per_window:
            needed = max(needed, per_window / left)
    return math.ceil(needed - 1e-9)  # rounding must not turn 4.0 into 5
