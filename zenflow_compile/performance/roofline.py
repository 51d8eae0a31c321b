"""The best that a machine allows: the time that a plan's bytes need at measured bandwidths.

A bound, not a forecast: every byte moves at full speed, at any time. The recorded stall next to it shows what the
schedule adds: updates of the first layers are due early, and flushes begin late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sympy import Symbol

from zenflow_compile.performance import equations
from zenflow_compile.performance.equations import CORES, DISK, FLUSHES, GRADIENTS, UPLOADS, WindowLane
from zenflow_compile.performance.formula import evaluated
from zenflow_compile.performance.traffic import Bandwidths, Traffic
from zenflow_compile.performance.workload import HOST_PASS_BYTES

_MS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The shortest times per step that measured bandwidths allow, in ms.

    Attributes:
        host_ms, to_host_ms, to_device_ms: time of each lane, streamed state included.
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
    """The limit of a measured run: the lanes of the performance model with measured rates.

    Args:
        device_ms: the device's own work per step, which hides host work: a measured step less its stall.
    """
    disk_byte = 0.0 if bandwidths.disk is None else 1 / bandwidths.disk
    values: dict[Symbol, float] = {
        equations.devices: 1,
        equations.link_to_host: bandwidths.to_host,
        equations.link_to_device: bandwidths.to_device,
        equations.core_rate: bandwidths.host / HOST_PASS_BYTES,
        equations.disk_read_byte: disk_byte,
        equations.disk_write_byte: disk_byte,
        equations.read_share: traffic.read_share,
        equations.gradients_per_step: traffic.host_per_gradient,
        equations.state: traffic.state,
        equations.DEVICE_TIME.symbol: device_ms / _MS,
    }
    # Averages as windows of one step: the windows of a plan's parameters may have different lengths.
    per_step = values | {
        equations.update_interval: 1,
        equations.updates_per_window: traffic.host - traffic.host_per_gradient,
        equations.gradients_per_window: traffic.to_host - traffic.host_per_gradient,
        equations.uploads_per_window: traffic.to_device,
        equations.files_per_window: traffic.files,
    }
    host_ms, gradients_ms, flushes_ms, to_device_ms, files_ms = (
        _MS * lane.evaluate(per_step) for lane in (CORES, GRADIENTS, FLUSHES, UPLOADS, DISK)
    )
    to_host_ms = gradients_ms + flushes_ms
    stall_ms = max(0.0, max(host_ms, to_host_ms, to_device_ms, files_ms) - device_ms)
    if traffic.blocking:
        stall_ms = max(stall_ms, host_ms, _MS * traffic.to_device / bandwidths.to_device)
    smallest = None
    if not traffic.blocking:
        windows = values | {
            equations.updates_per_window: traffic.host_per_window,
            equations.uploads_per_window: traffic.upload_per_window,
            equations.files_per_window: traffic.files_per_window,
        }
        smallest = shortest_window(map(WindowLane.of, (CORES, UPLOADS, FLUSHES, DISK)), windows)
    return Limit(
        host_ms=host_ms,
        to_host_ms=to_host_ms,
        to_device_ms=to_device_ms,
        disk_ms=None if traffic.files and bandwidths.disk is None else files_ms,
        stall_ms=stall_ms,
        step_ms=device_ms + stall_ms,
        smallest_interval=smallest,
    )


def shortest_window(lanes: Iterable[WindowLane], values: Mapping[Symbol, float]) -> int | None:
    """The smallest ``update_interval`` at which the lanes' work fits into the time that hides it; None if none does."""
    needed = 1.0
    for lane in lanes:
        per_window = evaluated(lane.per_window, values)
        time = values[lane.time]
        left = time - evaluated(lane.per_step, values)
        rounding = 1e-12 * time
        if left < -rounding or (per_window and left <= rounding):
            return None
        if per_window:
            needed = max(needed, lane.interval.evaluate(values))
    return math.ceil(needed - 1e-9)  # rounding must not turn 4.0 into 5
