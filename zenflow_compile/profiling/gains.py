"""The shortest steps that the measured bandwidths allow: of this run, and with another option."""

from __future__ import annotations

from dataclasses import replace

from zenflow_compile.performance.equations import Limit, limit_of
from zenflow_compile.performance.hardware import Bandwidths
from zenflow_compile.performance.traffic import Traffic
from zenflow_compile.profiling.diagnose import Change, milliseconds
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import Summary

_GAIN = 0.02  # of a step, below which a change does not make it shorter


def limit_of_run(recording: Recording, summary: Summary) -> Limit | None:
    """The shortest step of the run as it is, never above the measured one; None without measured bandwidths."""
    limit = _limit(recording, summary, recording.traffic)
    step_ms, stall_ms = summary["step_ms"], summary["stall_ms_per_step"]
    if limit is not None and step_ms is not None and stall_ms is not None and limit.step_ms > step_ms:
        # The stall that was measured hides some of what the formula adds.
        return replace(limit, step_ms=step_ms, stall_ms=min(limit.stall_ms, stall_ms))
    return limit


def gain_of(change: Change | None, recording: Recording, summary: Summary) -> str | None:
    """Say by how much ``change`` can shorten a step, in one sentence; None where the bandwidths do not tell.

    It takes the difference of the two limits off the measured step: what the schedule adds to the limit stays.
    """
    moved, interval = recording.traffic, 2 * (summary["update_interval"] or 1)
    if change is None or moved is None:
        return None
    changed = replace(moved, blocking=False) if change is Change.OVERLAP else moved.at_interval(interval // 2, interval)
    limit, step_ms = _limit(recording, summary, changed), summary["step_ms"]
    before = limit_of_run(recording, summary)
    if limit is None or before is None or step_ms is None:
        return None
    less_ms = before.step_ms - limit.step_ms
    if before.step_ms < (1 - _GAIN) * step_ms and less_ms < _GAIN * step_ms:
        return None  # the bytes allow that without the change, too: what is late is a matter of the schedule
    if change is Change.OVERLAP:
        option = "If host updates are hidden, the bytes of a step allow"
    else:
        option = f"With update_interval={interval} the bytes of a step allow"
    if less_ms < _GAIN * step_ms:
        return f"{option} no shorter step on this machine."
    at_best = step_ms - less_ms
    return (
        f"{option} {milliseconds(less_ms)} less stall: {milliseconds(at_best)} per step at best, where this run takes "
        f"{milliseconds(step_ms)} on average, {step_ms / at_best:.2f} times as fast."
    )


def reached(measured: Bandwidths, summary: Summary) -> Bandwidths:
    """Measured bandwidths, or the run's own where it was faster: the machine may have been busy when measured."""
    return replace(
        measured,
        host=max(measured.host, 1e9 * (summary["host_update_gb_per_s"] or 0.0)),
        to_host=max(measured.to_host, 1e9 * (summary["d2h_gb_per_s"] or 0.0)),
        to_device=max(measured.to_device, 1e9 * (summary["h2d_gb_per_s"] or 0.0)),
    )


def _limit(recording: Recording, summary: Summary, moved: Traffic | None) -> Limit | None:
    step_ms, stall_ms = summary["step_ms"], summary["stall_ms_per_step"]
    if moved is None or recording.bandwidths is None or step_ms is None or stall_ms is None:
        return None
    seen = reached(recording.bandwidths, summary)
    waits_ms = stall_ms + (summary["rank_wait_ms_per_step"] or 0.0)
    return limit_of(moved, seen, device_ms=max(0.0, step_ms - waits_ms))
