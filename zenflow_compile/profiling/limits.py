"""What a machine allows at best: the time that a plan's bytes need at measured bandwidths (a roofline).

A bound, not a forecast: it takes every byte to move at full speed, whenever there is room for it. That the first
layers' updates fall due early, or that a close starts late, is not in it; the recorded stall beside it shows that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zenflow_compile.planning.plan import FP32_BYTES, STATE_TENSORS, Plan

_MS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a plan moves, in bytes, averaged over the steps of a window.

    Attributes:
        host: read and written in host memory per step by host updates: each close reads and writes fp32 master and
            moments (24 bytes per remaining element), reads the window's gradients and writes the upload buffer.
        to_host, to_device: gradients down and weights up per step.
        host_per_window, host_per_gradient: ``host`` taken apart, so that other window lengths S can be asked about: it
            is ``host_per_window / S + host_per_gradient``.
        upload_per_window: weights that a closed window sends up.
        blocking: the step waits for its host updates by design.
    """

    host: float
    to_host: float
    to_device: float
    host_per_window: int
    host_per_gradient: int
    upload_per_window: int
    blocking: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Measured, in bytes per second.

    Attributes:
        host: of memory, bytes read and bytes written, with as many threads as there are workers.
        to_host, to_device: of the link between device and host.
    """

    host: float
    to_host: float
    to_device: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What bandwidths make of traffic, in ms per step.

    Attributes:
        host_ms, to_host_ms, to_device_ms: what each needs at least.
        stall_ms: waiting that no schedule avoids: what the longest of them exceeds the device's own work by. Under a
            blocking plan host update and upload are not hidden at all.
        step_ms: device work and that stall.
        smallest_interval: the shortest window, in steps, whose host update and upload are no longer than the device's
            own work; None if none is, or if the plan blocks.
    """

    host_ms: float
    to_host_ms: float
    to_device_ms: float
    stall_ms: float
    step_ms: float
    smallest_interval: int | None


def traffic_of(plan: Plan) -> Traffic | None:
    """What ``plan`` moves between its windows' first and last step; None if it offloads nothing."""
    offloaded = [param for param in plan.params if param.offloaded and param.rest]
    if not offloaded:
        return None
    host = to_host = to_device = 0.0
    per_window = per_gradient = uploads = 0
    for param in offloaded:
        elements = param.rest * param.length
        weights = elements * param.dtype.itemsize
        window = elements * 2 * STATE_TENSORS * FP32_BYTES + weights
        gradient = param.slot_bytes
        if param.summed:  # it comes once per window
            window, gradient = window + gradient, 0
        per_window += window
        uploads += weights
        per_gradient += gradient
        host += window / param.interval + gradient
        to_host += param.slot_bytes / param.interval if param.summed else gradient
        to_device += weights / param.interval
    return Traffic(
        host=host,
        to_host=to_host,
        to_device=to_device,
        host_per_window=per_window,
        host_per_gradient=per_gradient,
        upload_per_window=uploads,
        blocking=all(param.blocking for param in offloaded),
    )


def limit_of(traffic: Traffic, bandwidths: Bandwidths, *, device_ms: float) -> Limit:
    """The limit of a run.

    Args:
        device_ms: what the device works per step, which is what there is to hide host work in: a measured step less
            its stall.
    """
    host_ms = _MS * traffic.host / bandwidths.host
    to_host_ms = _MS * traffic.to_host / bandwidths.to_host
    to_device_ms = _MS * traffic.to_device / bandwidths.to_device
    if traffic.blocking:
        stall_ms = max(host_ms, to_device_ms)
    else:
        stall_ms = max(0.0, max(host_ms, to_host_ms, to_device_ms) - device_ms)
    return Limit(
        host_ms=host_ms,
        to_host_ms=to_host_ms,
        to_device_ms=to_device_ms,
        stall_ms=stall_ms,
        step_ms=device_ms + stall_ms,
        smallest_interval=None if traffic.blocking else _smallest_interval(traffic, bandwidths, device_ms),
    )


def _smallest_interval(traffic: Traffic, bandwidths: Bandwidths, device_ms: float) -> int | None:
    """The smallest S >= 1 that leaves both ``per_window / S + per_gradient`` and ``upload / S`` time enough."""
    room = device_ms / _MS
    host_room = room * bandwidths.host - traffic.host_per_gradient  # bytes left to what comes once a window
    if host_room <= 0.0:
        return None
    upload = traffic.upload_per_window / (room * bandwidths.to_device)
    return max(1, math.ceil(traffic.host_per_window / host_room), math.ceil(upload))
