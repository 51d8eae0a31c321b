"""Says in one sentence what limits a run and which option would help; ``gains`` says by how much.

With little stall the device limits. If the policy waits by design, another policy helps. Otherwise the host update, D2H
or H2D limits if it needs more time per step than there is to hide it in. If none does, the waits are a matter of
latency: the first layers have no slack, or flushes start late. Time outside of the graphs is told first where it is
most of a step. All times are means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

from zenflow_compile.profiling.summary import Summary, block_of

_NO_STALL = 0.02  # share of time below which no option is worth changing
_SATURATED = 0.7  # share of time above which a lane delays work that comes at a bad moment
_MOSTLY = 0.5
_FAR_TOO_MUCH = 2.0  # times the time there is


class Change(Enum):
    """A change of options whose gain can be computed: hide the host update, or double ``update_interval``."""

    OVERLAP = auto()
    LONGER_WINDOWS = auto()


class Diagnosis(NamedTuple):
    """What limits a run and which option would help, in one sentence, and the first such option if it is a change."""

    sentence: str
    change: Change | None = None


def diagnose(summary: Summary) -> Diagnosis:
    """Say what limits this run and which option would help."""
    step_ms = summary["step_ms"]
    stall_ms = summary["stall_ms_per_step"]
    if step_ms is None or stall_ms is None:
        return Diagnosis("Nothing was measured: no optimizer step ended while the profile was on.")
    stall_share = summary["stall_share"] or 0.0
    if (of_ranks := summary["rank_wait_ms_per_step"] or 0.0) >= max(stall_ms, _NO_STALL * step_ms):
        return Diagnosis(
            f"The ranks wait for each other and for their collectives, {milliseconds(of_ranks)} per step "
            f"({percent(of_ranks / step_ms)} of the time); larger batches, or gradient_accumulation_steps, make that "
            "rarer; they wait for the rank that waits least, which report_ranks() names."
        )
    offloads = bool(summary["host_update_ms_per_step"] or summary["d2h_bytes_per_step"])
    if stall_share < _NO_STALL and offloads:
        return Diagnosis(outside_of_graphs(summary) or _no_stall(summary, step_ms))
    if stall_share < _NO_STALL:
        policy = f" (policy {summary['policy']})" if summary["policy"] else ""
        own = "" if outside_of_graphs(summary) else f": the {milliseconds(step_ms)} of a step are the device's own"
        return Diagnosis(
            f'Nothing was offloaded{policy}{own}; policy="zenflow" would move optimizer state off the device.'
        )
    waits = f"{milliseconds(stall_ms)} of waiting per step ({percent(stall_share)} of the time)"
    if summary["blocking"]:
        remedy = 'policy="zenflow"' if summary["policy"] != "zenflow" else "overlap_step=True"
        return Diagnosis(
            f"The step waits for its host update by design (policy {summary['policy']}), {waits}; "
            f"{remedy} would let it run during the next forward.",
            Change.OVERLAP,
        )
    sentence, change, ratio = max(_demands(summary), key=lambda demand: demand[-1])
    early = (summary["stall_early_share"] or 0.0) >= _MOSTLY
    # The earliest use is served first. So an overloaded lane makes the whole forward wait; waits only in the first
    # layers are a matter of latency, unless the lane is far overloaded.
    if ratio >= (_FAR_TOO_MUCH if early else 1.0):
        return Diagnosis(sentence(summary, waits), change)
    if not summary["host_update_ms_per_step"]:
        return Diagnosis(
            f"The step waits{_where(summary['stall_by_param'])}, {waits}, though no host update ran: for copies, or "
            "for work from before the profile; record more steps to see which."
        )
    # A wait is that of an update only where one ended after the weight's next use.
    slack = summary["slack_by_block"]
    late = [
        name for name in summary["stall_by_param"] if (found := slack.get(block_of(name))) and found["margin_ms"] < 0
    ]
    where = _where(late)
    if early:
        return Diagnosis(
            f"The first layers' updates have too little time{where}, {waits}, though copies and workers have "
            "capacity left; a larger device_share keeps more of their state on the device."
        )
    return Diagnosis(
        f"Host updates start too late{where}, {waits}, though copies and workers have capacity left; "
        "more workers (option workers) would finish each flush sooner."
    )


def outside_of_graphs(summary: Summary) -> str | None:
    """Say that most of a step is neither the model's graphs nor the optimizer; None if it is not."""
    step_ms, other_ms = summary["step_ms"], summary["other_ms_per_step"]
    # Models that are not compiled record no forward: there, all of it would be outside.
    if step_ms is None or other_ms is None or not summary["forward_recorded"] or other_ms < _MOSTLY * step_ms:
        return None
    return (
        f"Most of a step runs outside of the compiled graphs and the optimizer ({milliseconds(other_ms)} of "
        f"{milliseconds(step_ms)}), such as data loading or code that is not compiled; no option changes that."
    )


def hidden_text(summary: Summary) -> str | None:
    """The share of the host update that made no step longer, in words; None without one."""
    share = summary["hidden_fraction"]
    if share is None:
        return None
    # Without a recorded forward it is only known that nothing waited.
    return f"{percent(share)} {'hidden' if summary['forward_recorded'] else 'not waited for'}"


def milliseconds(value: float) -> str:
    """Format a duration with three significant digits."""
    if value >= 9999.5:
        return f"{value / 1000:.1f} s"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} ms"


def percent(share: float) -> str:
    """Format a share; 0% and 100% only for exactly none and all."""
    if 0 < share < 0.01:
        return "<1%"
    if 0.99 < share < 1:
        return ">99%"
    return f"{100 * share:.0f}%"


def _where(params: Iterable[str]) -> str:
    most = list(params)[:2]
    return f" (most at {' and '.join(most)})" if most else ""


def _no_stall(summary: Summary, step_ms: float) -> str:
    hidden = hidden_text(summary)
    during = "" if hidden is None else f", host update {hidden}"
    sentence = f"The device's own work limits this run ({milliseconds(step_ms)} per step{during})"
    interval = summary["update_interval"] or 1
    # Half the interval is at most twice the flushes and uploads; gradients go down every step in any case.
    busiest = max(summary["worker_busy_share"] or 0.0, summary["h2d_busy_share"] or 0.0)
    if interval > 1 and 2 * busiest < _SATURATED:
        return f"{sentence}; update_interval={interval // 2} would cost little and is closer to exact AdamW."
    return f"{sentence}; no offloading option would make it faster."


def _demands(summary: Summary) -> list[tuple[Callable[[Summary, str], str], Change | None, float]]:
    """Each lane's sentence, its change, and the time that it needs per step over the time it has; from 1 on it is full.

    Host updates and uploads have the next forward, gradient copies the backward. Where those are not recorded, a lane
    that is nearly always busy counts as full.
    """
    of_weights = (summary["weight_bytes_per_step"] or 0.0) > _MOSTLY * (summary["h2d_bytes_per_step"] or 0.0)
    up = (_loads_sentence, None) if of_weights else (_h2d_sentence, Change.LONGER_WINDOWS)
    forward_ms, backward_ms = summary["forward_ms_per_step"], summary["backward_ms_per_step"]
    demands: list[tuple[Callable[[Summary, str], str], Change | None, float]] = []
    for sentence, change, needed_ms, available_ms, busy_share in (
        (_worker_sentence, Change.LONGER_WINDOWS, _per_worker_ms(summary), forward_ms, summary["worker_busy_share"]),
        (_d2h_sentence, None, summary["d2h_ms_per_step"], backward_ms, summary["d2h_busy_share"]),
        (*up, summary["h2d_ms_per_step"], forward_ms, summary["h2d_busy_share"]),
    ):
        ratio = needed_ms / available_ms if needed_ms and available_ms else 0.0
        if (busy_share or 0.0) >= _SATURATED:
            ratio = max(ratio, _FAR_TOO_MUCH)
        demands.append((sentence, change, ratio))
    return demands


def _per_worker_ms(summary: Summary) -> float | None:
    total = summary["host_update_ms_per_step"]
    return total / summary["workers"] if total and summary["workers"] else None


def _worker_sentence(summary: Summary, waits: str) -> str:
    interval = summary["update_interval"] or 1
    work = milliseconds(_per_worker_ms(summary) or 0.0)
    workers = summary["workers"]
    return (
        f"The host update limits this run ({work} per step on {'each of ' if workers > 1 else ''}{workers} "
        f"worker{'s' if workers > 1 else ''}), {waits}; raise update_interval from {interval} to "
        f"{2 * interval}, or raise topk_ratio or workers."
    )


def _d2h_sentence(summary: Summary, waits: str) -> str:
    copies = _copies(summary["d2h_ms_per_step"], summary["d2h_gb_per_s"])
    return (
        f"Copies from device to host limit this run ({copies}), {waits}; raise topk_ratio, so that less "
        "gradient leaves the device."
    )


def _loads_sentence(summary: Summary, waits: str) -> str:
    copies = _copies(summary["h2d_ms_per_step"], summary["h2d_gb_per_s"])
    return (
        f"Loads of weights limit this run ({copies}), {waits}; more bytes for offload_weights, or a smaller share, "
        "keep more of them on the device, and more tokens in each micro-batch give loads more time."
    )


def _h2d_sentence(summary: Summary, waits: str) -> str:
    interval = summary["update_interval"] or 1
    copies = _copies(summary["h2d_ms_per_step"], summary["h2d_gb_per_s"])
    return (
        f"Copies from host to device limit this run ({copies}), {waits}; raise update_interval from "
        f"{interval} to {2 * interval}, so that uploads come less often."
    )


def _copies(busy_ms: float | None, gb_per_s: float | None) -> str:
    rate = "" if gb_per_s is None else f" at {gb_per_s:.1f} GB/s"
    return f"{milliseconds(busy_ms or 0.0)} per step{rate}"
