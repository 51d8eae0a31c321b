"""What a machine allows at best: the time that a plan's bytes need at measured bandwidths (a roofline).

A bound, not a forecast: it takes every byte to move at full speed, whenever there is room for it. That the first
layers' updates fall due early, or that a close starts late, is not in it; the recorded stall beside it shows that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zenflow_compile.planning.plan import STATE_BYTES, Plan

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
        state: optimizer state per step that is streamed to the device, and as much back; not in ``to_host`` and
            ``to_device``, though it takes the same ways.
        disk: read from files and written to them per step, together; disk_per_window: by a closed window.
        blocking: the step waits for its host updates by design.
    """

    host: float
    to_host: float
    to_device: float
    host_per_window: int
    host_per_gradient: int
    upload_per_window: int
    state: int = 0
    disk: float = 0.0
    disk_per_window: float = 0.0
    blocking: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Measured, in bytes per second.

    Attributes:
        host: of memory, bytes read and bytes written, with as many threads as there are workers.
        to_host, to_device: of the link between device and host.
        disk: of the disk, as many bytes read as written; None where it was not measured.
    """

    host: float
    to_host: float
    to_device: float
    disk: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What bandwidths make of traffic, in ms per step.

    Attributes:
        host_ms, to_host_ms, to_device_ms: what each needs at least, streamed state included.
        disk_ms: likewise; None where its bandwidth is not known and there is something to move.
        stall_ms: waiting that no schedule avoids: what the longest of them exceeds the device's own work by. Under a
            blocking plan host update and upload are not hidden at all; streamed state and files may be, since they are
            fetched ahead and go back later.
        step_ms: device work and that stall.
        smallest_interval: the shortest window, in steps, whose host update, upload and files take no longer than the
            device's own work; None if none is, or if the plan blocks.
    """

    host_ms: float
    to_host_ms: float
    to_device_ms: float
    disk_ms: float | None
    stall_ms: float
    step_ms: float
    smallest_interval: int | None


def traffic_of(plan: Plan) -> Traffic | None:
    """What ``plan`` moves between its windows' first and last step; None if all state stays on the device."""
    offloaded = [param for param in plan.params if param.offloaded and param.deferred]
    state = sum(param.whole_state_bytes for param in plan.params if param.streamed)
    if not offloaded and not state:
        return None
    host = to_host = to_device = disk = 0.0
    per_window = per_gradient = uploads = 0
    for param in offloaded:
        elements = param.deferred * param.length
        weights = elements * param.dtype.itemsize
        window = elements * 2 * STATE_BYTES + weights
        gradient = param.buffer_bytes
        if param.summed:  # it comes once per window
            window, gradient = window + gradient, 0
        per_window += window
        uploads += weights
        per_gradient += gradient
        host += window / param.interval + gradient
        to_host += param.buffer_bytes / param.interval if param.summed else gradient
        to_device += weights / param.interval
        disk += param.file_bytes / param.interval
    # What stays in the window of files until its next use is not read again.
    moves = 2 - plan.file_window_bytes / max(1, plan.file_bytes)
    return Traffic(
        host=host,
        to_host=to_host,
        to_device=to_device,
        host_per_window=per_window,
        host_per_gradient=per_gradient,
        upload_per_window=uploads,
        state=state,
        disk=moves * disk,
        disk_per_window=moves * plan.file_bytes,
        blocking=all(param.blocking for param in offloaded),
    )


def limit_of(traffic: Traffic, bandwidths: Bandwidths, *, device_ms: float) -> Limit:
    """The limit of a run.

    Args:
        device_ms: what the device works per step, which is what there is to hide host work in: a measured step less
            its stall.
    """
    host_ms = _MS * traffic.host / bandwidths.host
    to_host_ms = _MS * (traffic.to_host + traffic.state) / bandwidths.to_host
    to_device_ms = _MS * (traffic.to_device + traffic.state) / bandwidths.to_device
    disk_ms = _disk_ms(traffic, bandwidths)
    stall_ms = max(0.0, max(host_ms, to_host_ms, to_device_ms, disk_ms or 0.0) - device_ms)
    if traffic.blocking:
        stall_ms = max(stall_ms, host_ms, _MS * traffic.to_device / bandwidths.to_device)
    return Limit(
        host_ms=host_ms,
        to_host_ms=to_host_ms,
        to_device_ms=to_device_ms,
        disk_ms=disk_ms,
        stall_ms=stall_ms,
        step_ms=device_ms + stall_ms,
        smallest_interval=None if traffic.blocking else _smallest_interval(traffic, bandwidths, device_ms),
    )


def _disk_ms(traffic: Traffic, bandwidths: Bandwidths) -> float | None:
    if not traffic.disk:
        return 0.0
    return None if bandwidths.disk is None else _MS * traffic.disk / bandwidths.disk


def _smallest_interval(traffic: Traffic, bandwidths: Bandwidths, device_ms: float) -> int | None:
    """The smallest S >= 1 that leaves what comes once a window, and so is divided by S, room beside the rest.

    Of a run that was measured; ``planning.perfmodel.smallest_interval`` is the equations' answer before there is one.
    """
    room = device_ms / _MS
    host_room = room * bandwidths.host - traffic.host_per_gradient  # bytes left to what comes once a window
    upload_room = room * bandwidths.to_device - traffic.state
    if host_room <= 0.0 or upload_room <= 0.0 or traffic.state > room * bandwidths.to_host:
        return None
    needed = [traffic.host_per_window / host_room, traffic.upload_per_window / upload_room]
    if bandwidths.disk is not None:
        needed.append(traffic.disk_per_window / (room * bandwidths.disk))
    return max(1, *(math.ceil(steps) for steps in needed))
