"""Reduces a recording to numbers."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile
from statistics import median, quantiles
from typing import TypedDict

from zenflow_compile.profiling.recording import (
    INNERMOST_FIRST,
    Intervals,
    Recording,
    intersect,
    length_ns,
    subtract,
    union,
)
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
    Event,
)

_NS_PER_MS = 1e6
_BLOCK = re.compile(r".*?(?<![^.])\d+(?=\.|$)")


class BlockSlack(TypedDict):
    """Times of one block's flushed update windows.

    Keys:
        slack_ms: median time from the final gradient to the weight's next use, be it in training or evaluation.
        taken_ms: median time from the final gradient to the end of the host's update.
        margin_ms: smallest difference of the two for one flush; negative if a use had to wait.
    """

    slack_ms: float
    taken_ms: float
    margin_ms: float


def block_of(param: str) -> str:
    """Return a parameter's block: its name up to the first number, ``layers.3`` of ``layers.3.mlp.up.weight``."""
    found = _BLOCK.match(param)
    return found.group() if found else param.rpartition(".")[0] or param


def slack_by_block(events: Iterable[Event], steps: set[int]) -> dict[str, BlockSlack]:
    """Compute slack and time taken of the update windows flushed in ``steps``, the smallest margin first."""
    spans: dict[tuple[int, str], Event] = {}
    ends: dict[tuple[int, str], int] = {}
    for event in events:
        key = (event.step, event.param)
        if event.lane == SLACK and event.step in steps:
            spans[key] = event
        elif event.is_worker and event.kind == "host_update":
            ends[key] = max(event.end_ns, ends.get(key, 0))
    blocks: dict[str, list[tuple[int, int]]] = {}
    for key, span in spans.items():
        if key in ends:
            times = (span.duration_ns, ends[key] - span.start_ns)
            blocks.setdefault(block_of(span.param), []).append(times)
    found = {
        block: BlockSlack(
            slack_ms=median(slack for slack, _ in times) / _NS_PER_MS,
            taken_ms=median(taken for _, taken in times) / _NS_PER_MS,
            margin_ms=min(slack - taken for slack, taken in times) / _NS_PER_MS,
        )
        for block, times in blocks.items()
    }
    return dict(sorted(found.items(), key=lambda item: item[1]["margin_ms"]))


_WARM_UP_FACTOR = 5  # a leading step this many times the median is no training: kernels are built, memory is touched
_EARLY = 0.25  # share of a forward that counts as its first layers
_TOP_WAITERS = 5
_PHASES = ("forward", "backward", "update")


class Summary(TypedDict):
    """What a profile says in numbers.

    None where nothing was measured, or where a ratio has no denominator; 0 only where 0 was measured.

    *Measured steps* are all recorded ones but the leading warm-up steps. *Measured time* is the time inside them,
    without compilations and forwards under ``torch.no_grad()`` (evaluation), which belong to no training step. Every
    number "per step" is a mean over the measured steps, so that the parts of a step add up::

        step_ms = forward + backward + update + merge + select + stall + rank_wait + other

    Each moment counts for the innermost kind of compute: waits before updates, merges and re-selections, these before
    forward and backward. Waits, compute and shares of time are cut to measured time. Bytes and host updates count
    where their own ``step`` is a measured one, so that work that ends after the last step is neither lost nor counted
    twice.

    Keys:
        policy, update_interval, blocking, state_note, selected_share: of the plan, see ``Recording``.
        adaptive_windows: whether update windows adapt, up to ``update_interval`` steps.
        shortest_window: the smallest length of an adaptive window, in steps; None if windows do not adapt, or until
            the time that decides it has been measured.
        shortest_window_measured: whether measured time decides ``shortest_window``; otherwise an option does.
        mean_window_steps: mean distance in steps between two flushes of one parameter, over all recorded steps; None
            where no parameter was flushed twice.
        steps: optimizer steps recorded, warm-up included.
        warm_up_steps: leading steps longer than 5 medians; left out of everything but
            ``steps``, ``windows_flushed``, ``selections``, ``dense_gradients`` and the norms.
        compilations: how often graphs were compiled, over all recorded steps.
        compilation_ms: total time of that, which is left out of all other times.
        evaluation_ms: total time of evaluation inside the measured steps, see ``Recording.evaluation``; left out of all
            other times. Without a step, all of it. An evaluation that keeps gradients enabled counts as forward.
        step_ms, step_ms_median, step_ms_p95: mean, median and 95th percentile (linear interpolation) of the measured
            steps, each from the end of the previous step to its own.
        stall_ms_per_step: time in which the training thread or the device waited for a copy or a host update.
        stall_share: that time as a share of measured time.
        stall_early_share: share of the stall in waits that began in the first quarter of their step's
            forward, counted in forward work done until then. None without forward events.
        stall_by_param: the five parameters with the longest waits, ms per step, longest first.
        forward_ms_per_step, backward_ms_per_step, update_ms_per_step, merge_ms_per_step, select_ms_per_step:
            time of each kind of compute; None for a kind without events.
        other_ms_per_step: the rest of the step: data loading, checkpoints, code that is not compiled.
        slack_by_block: per block of the model the time that host updates had and took, see ``BlockSlack``; the block
            with the smallest margin first.
        host_update_ms_per_step: busy time of all workers, added up: two workers that update at the same time count
            twice. ``prediction.forecast`` counts such time one time, as ``host_update_s``.
        hidden_fraction: share of the workers' host-update time, within measured time and as a union per
            worker, that ran under a forward, a backward or a necessary update of the device, see ``Recording.hides``.
        forward_recorded: see ``Recording``; if none was, what is no wait hides.
        workers: worker lanes with at least one event.
        worker_busy_share: share of these workers' measured time that was host update.
        d2h_busy_share, h2d_busy_share: share of measured time in which at least one copy of that direction
            ran.
        d2h_ms_per_step, h2d_ms_per_step: time in which at least one copy of that direction ran.
        d2h_bytes_per_step, h2d_bytes_per_step: all bytes of that direction, state moves included.
        state_bytes_per_step: bytes of re-selections' state moves, both directions.
        weight_bytes_per_step: bytes of offloaded weights, loaded and written back.
        traffic_model_sizes_per_step: bytes of gradients and of uploads, both directions without state moves and
            offloaded weights, over the bytes of all trainable parameters.
        state_model_sizes_per_step: ``state_bytes_per_step`` over the same bytes.
        host_update_gb_per_s: bytes of host memory read and written by updates, in 1e9, per second in which at
            least one worker was updating: the bandwidth of all workers together.
        d2h_gb_per_s, h2d_gb_per_s: likewise for copies.
        selected_norm_share: share of the squared gradient norm in the selected slices, summed over steps.
        windows_flushed, selections: flushed update windows and re-selections, over all recorded steps.
        state_moves: how many copies carried state.
        rank_wait_ms_per_step: time in which the training thread or the device waited for other ranks and their
            gradients and weights; no part of the stall. None without other ranks.
        in_collectives_ms_per_step: that time, and time in which a collective ran on another stream: least on the rank
            that the others wait for. None without other ranks.
        sent_bytes_per_step: bytes that this rank put into collectives; None without other ranks.
        dense_gradients: gradients of offloaded parameters that took memory of their own, counted by the user's line
            ("file:line") that caused it, most frequent first, over all recorded steps.
        device_bytes_by_phase: most bytes that tensors had on the device after a forward, backward or update; empty
            where the device does not count its memory.
        device_bytes_peak: most bytes that tensors had on the device at a time since its peak was last reset, which is
            before the profile unless the program does it; None where that is not counted.
    """

    policy: str
    update_interval: int | None
    adaptive_windows: bool
    shortest_window: int | None
    shortest_window_measured: bool
    mean_window_steps: float | None
    blocking: bool
    state_note: str | None
    selected_share: float | None
    steps: int
    warm_up_steps: int
    compilations: int
    compilation_ms: float
    evaluation_ms: float
    step_ms: float | None
    step_ms_median: float | None
    step_ms_p95: float | None
    stall_ms_per_step: float | None
    stall_share: float | None
    stall_early_share: float | None
    stall_by_param: dict[str, float]
    slack_by_block: dict[str, BlockSlack]
    forward_ms_per_step: float | None
    backward_ms_per_step: float | None
    update_ms_per_step: float | None
    merge_ms_per_step: float | None
    select_ms_per_step: float | None
    other_ms_per_step: float | None
    host_update_ms_per_step: float | None
    hidden_fraction: float | None
    forward_recorded: bool
    workers: int
    worker_busy_share: float | None
    d2h_busy_share: float | None
    h2d_busy_share: float | None
    d2h_ms_per_step: float | None
    h2d_ms_per_step: float | None
    d2h_bytes_per_step: float | None
    h2d_bytes_per_step: float | None
    state_bytes_per_step: float | None
    weight_bytes_per_step: float | None
    traffic_model_sizes_per_step: float | None
    state_model_sizes_per_step: float | None
    host_update_gb_per_s: float | None
    d2h_gb_per_s: float | None
    h2d_gb_per_s: float | None
    selected_norm_share: float | None
    windows_flushed: int
    selections: int
    state_moves: int
    rank_wait_ms_per_step: float | None
    in_collectives_ms_per_step: float | None
    sent_bytes_per_step: float | None
    dense_gradients: dict[str, int]
    device_bytes_by_phase: dict[str, int]
    device_bytes_peak: int | None


def summarize(recording: Recording, *, warm_up: int | None = None) -> Summary:
    """Reduce a recording; see ``Summary`` for what each number means.

    Args:
        warm_up: how many of its first steps are left out; None for those that took far longer than the others.
    """
    events = recording.events
    steps = sorted((event for event in events if event.lane == STEP), key=lambda event: event.end_ns)
    inference, compilation = recording.evaluation, recording.compilation
    no_training = union([*inference, *compilation])
    training_ns = [length_ns(subtract([(step.start_ns, step.end_ns)], no_training)) for step in steps]
    left_out = _warm_up_steps(recording, training_ns) if warm_up is None else min(warm_up, len(steps))
    measured = steps[left_out:]
    numbers = {step.step for step in measured}
    elapsed = union((step.start_ns, step.end_ns) for step in measured)
    time = subtract(elapsed, no_training)
    total_ns = length_ns(time)
    durations_ms = [duration_ns / _NS_PER_MS for duration_ns in training_ns[left_out:]]
    if len(durations_ms) == 1:
        durations_ms *= 2  # ``quantiles`` takes no single value
    of_compute = [event for event in events if event.lane == COMPUTE]
    found = {kind: [event for event in of_compute if event.kind == kind] for kind in INNERMOST_FIRST}
    compute = {kind: intersect(intervals, time) for kind, intervals in recording.compute.items()}
    waits, wait_events = compute["wait"], found["wait"]

    def per_step(amount: float) -> float | None:
        return amount / len(measured) if measured else None

    def ms_per_step(time_ns: float) -> float | None:
        return per_step(time_ns / _NS_PER_MS)

    def model_sizes_per_step(bytes_moved: int) -> float | None:
        return per_step(bytes_moved / recording.model_bytes) if recording.model_bytes else None

    def compute_ms(kind: str) -> float | None:
        return ms_per_step(length_ns(compute[kind])) if found[kind] else None

    updates = [event for event in events if event.is_worker and event.kind == "host_update"]
    own_updates = [event for event in updates if event.step in numbers]
    busy = [intersect(_spans(of_worker), time) for of_worker in _by_lane(updates).values()]
    busy_ns = sum(length_ns(intervals) for intervals in busy)
    hides = recording.hides
    copies = {lane: [event for event in events if event.lane == lane] for lane in (D2H, H2D)}
    own_copies = {lane: [event for event in copies[lane] if event.step in numbers] for lane in copies}
    d2h_bytes = sum(event.bytes for event in own_copies[D2H])
    h2d_bytes = sum(event.bytes for event in own_copies[H2D])
    both_ways = own_copies[D2H] + own_copies[H2D]
    state = [event for event in both_ways if event.kind == "state"]
    state_bytes = sum(event.bytes for event in state)
    weight_bytes = sum(event.bytes for event in both_ways if event.kind in ("load", "write_back"))
    windows = Counter(event.kind for event in events if event.lane == WINDOWS)
    norms = recording.norms
    collectives = [event for event in events if event.lane == RANKS]
    sent_bytes = sum(event.bytes for event in collectives if event.step in numbers)
    in_collectives = [event for event in events if event.kind == "rank_wait"]
    bounds = recording.adaptive_windows
    memory: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.lane == MEMORY and event.step in numbers:
            memory[event.kind].append(event.bytes)

    return Summary(
        policy=recording.policy,
        update_interval=recording.update_interval,
        adaptive_windows=bounds is not None,
        shortest_window=bounds.shortest if bounds else None,
        shortest_window_measured=bounds is not None and bounds.measured,
        mean_window_steps=_mean_window(events),
        blocking=recording.blocking,
        state_note=recording.state_note,
        selected_share=recording.selected_share,
        steps=len(steps),
        warm_up_steps=left_out,
        compilations=sum(event.kind == "compile" for event in of_compute),
        compilation_ms=length_ns(compilation) / _NS_PER_MS,
        evaluation_ms=length_ns(subtract(intersect(elapsed, inference) if steps else inference, compilation))
        / _NS_PER_MS,
        step_ms=ms_per_step(total_ns),
        step_ms_median=median(durations_ms) if measured else None,
        step_ms_p95=quantiles(durations_ms, n=20, method="inclusive")[-1] if measured else None,
        stall_ms_per_step=ms_per_step(length_ns(waits)),
        stall_share=length_ns(waits) / total_ns if total_ns else None,
        stall_early_share=_early_share(wait_events, measured, time, compute["forward"]),
        stall_by_param=_stall_by_param(wait_events, time, len(measured)),
        slack_by_block=slack_by_block(events, numbers),
        forward_ms_per_step=compute_ms("forward"),
        backward_ms_per_step=compute_ms("backward"),
        update_ms_per_step=compute_ms("update"),
        merge_ms_per_step=compute_ms("merge"),
        select_ms_per_step=compute_ms("select"),
        other_ms_per_step=ms_per_step(total_ns - sum(length_ns(intervals) for intervals in compute.values())),
        host_update_ms_per_step=ms_per_step(sum(length_ns(_spans(e)) for e in _by_lane(own_updates).values())),
        hidden_fraction=sum(length_ns(intersect(own, hides)) for own in busy) / busy_ns if busy_ns else None,
        forward_recorded=recording.forward_recorded,
        workers=len(recording.worker_lanes),
        worker_busy_share=busy_ns / (len(busy) * total_ns) if busy and total_ns else None,
        d2h_busy_share=length_ns(intersect(_spans(copies[D2H]), time)) / total_ns if total_ns else None,
        h2d_busy_share=length_ns(intersect(_spans(copies[H2D]), time)) / total_ns if total_ns else None,
        d2h_ms_per_step=ms_per_step(length_ns(_spans(own_copies[D2H]))),
        h2d_ms_per_step=ms_per_step(length_ns(_spans(own_copies[H2D]))),
        d2h_bytes_per_step=per_step(d2h_bytes),
        h2d_bytes_per_step=per_step(h2d_bytes),
        state_bytes_per_step=per_step(state_bytes),
        weight_bytes_per_step=per_step(weight_bytes),
        traffic_model_sizes_per_step=model_sizes_per_step(d2h_bytes + h2d_bytes - state_bytes - weight_bytes),
        state_model_sizes_per_step=model_sizes_per_step(state_bytes),
        host_update_gb_per_s=_gb_per_s(own_updates),
        d2h_gb_per_s=_gb_per_s(own_copies[D2H]),
        h2d_gb_per_s=_gb_per_s(own_copies[H2D]),
        selected_norm_share=norms.selected / norms.total if norms is not None and norms.total > 0 else None,
        windows_flushed=windows["flush"],
        selections=windows["select"],
        state_moves=len(state),
        rank_wait_ms_per_step=ms_per_step(length_ns(compute["rank_wait"])) if collectives else None,
        in_collectives_ms_per_step=ms_per_step(length_ns(intersect(_spans(in_collectives), time)))
        if collectives
        else None,
        sent_bytes_per_step=per_step(sent_bytes) if collectives else None,
        dense_gradients=dict(Counter(event.param for event in events if event.lane == GRADIENTS).most_common()),
        device_bytes_by_phase={phase: max(memory[phase]) for phase in _PHASES if memory[phase]},
        device_bytes_peak=max(memory["peak"], default=None),
    )


def _warm_up_steps(recording: Recording, training_ns: Sequence[int]) -> int:
    """How many steps of the first half took far longer than the others. A predicted run has none."""
    if recording.predicted or len(training_ns) <= 2:
        return 0
    limit = _WARM_UP_FACTOR * median(training_ns)
    return len(list(takewhile(lambda time_ns: time_ns > limit, training_ns[: len(training_ns) // 2])))


def _early_share(waits: Iterable[Event], steps: list[Event], time: Intervals, forward: Intervals) -> float | None:
    """Share of the stall that began within the first quarter of its step's forward, by work done before."""
    starts = [start for start, _ in forward]
    done = [0, *accumulate(end - start for start, end in forward)]

    def work_until(moment: int) -> int:
        index = bisect_right(starts, moment)
        if index == 0:
            return 0
        return done[index - 1] + min(moment, forward[index - 1][1]) - forward[index - 1][0]

    step_starts = [step.start_ns for step in steps]
    early = total = 0
    for event in waits:
        index = bisect_right(step_starts, event.start_ns) - 1
        if index < 0:
            continue
        step = steps[index]
        of_step = work_until(step.end_ns) - work_until(step.start_ns)
        if not of_step:
            continue
        inside = length_ns(intersect([(event.start_ns, event.end_ns)], time))
        total += inside
        if work_until(event.start_ns) - work_until(step.start_ns) < _EARLY * of_step:
            early += inside
    return early / total if total else None


def _stall_by_param(waits: Iterable[Event], time: Intervals, steps: int) -> dict[str, float]:
    """The parameters with the longest waits, ms per step."""
    waited_ns: Counter[str] = Counter()
    for event in waits:
        if event.param:
            waited_ns[event.param] += length_ns(intersect([(event.start_ns, event.end_ns)], time))
    longest = waited_ns.most_common(_TOP_WAITERS)
    return {param: waited / _NS_PER_MS / steps for param, waited in longest if waited}


def _mean_window(events: Iterable[Event]) -> float | None:
    """Mean steps between two flushes of one parameter."""
    flushes: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.lane == WINDOWS and event.kind == "flush":
            flushes[event.param].append(event.step)
    gaps = sum(len(steps) - 1 for steps in flushes.values())
    return sum(max(steps) - min(steps) for steps in flushes.values()) / gaps if gaps else None


def _spans(events: Iterable[Event]) -> Intervals:
    return union((event.start_ns, event.end_ns) for event in events)


def _by_lane(events: Iterable[Event]) -> dict[str, list[Event]]:
    lanes: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        lanes[event.lane].append(event)
    return lanes


def _gb_per_s(events: list[Event]) -> float | None:
    """Bytes per nanosecond in which at least one of the events ran, which is 1e9 bytes per second."""
    busy_ns = length_ns(_spans(events))
    return sum(event.bytes for event in events) / busy_ns if busy_ns else None
