"""One optimizer's events and what is needed to read them, for measured and simulated runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from zenflow_compile.performance.hardware import Bandwidths
from zenflow_compile.performance.traffic import Traffic, traffic_of
from zenflow_compile.planning.plan import Plan
from zenflow_compile.timeline import COMPUTE, AdaptiveWindows, Event, NormSums

Interval = tuple[int, int]
Intervals = list[Interval]
"""A set of times: sorted, disjoint, half-open ``(start, end)`` pairs in nanoseconds."""
_Key = TypeVar("_Key", bound=Hashable)


def union(pairs: Iterable[Interval]) -> Intervals:
    """Return the time covered by any of ``pairs``, which may overlap, be empty and come in any order."""
    merged: Intervals = []
    for start, end in sorted(pairs):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Return the time in both sets."""
    common: Intervals = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """Return the time in ``left`` that is not in ``right``."""
    if not left:
        return []
    gaps: Intervals = []
    cursor = left[0][0]
    for start, end in right:
        if start > cursor:
            gaps.append((cursor, start))
        cursor = max(cursor, end)
    if left[-1][1] > cursor:
        gaps.append((cursor, left[-1][1]))
    return intersect(left, gaps)


def length_ns(intervals: Intervals) -> int:
    """Return the total time of a set."""
    return sum(end - start for start, end in intervals)


def exclusive(layers: Iterable[tuple[_Key, Intervals]]) -> dict[_Key, Intervals]:
    """Make sets disjoint: time that is in several of them goes to the first."""
    own: dict[_Key, Intervals] = {}
    taken: Intervals = []
    for key, intervals in layers:
        own[key] = subtract(intervals, taken)
        taken = union([*taken, *own[key]])
    return own


_NECESSARY = 0.05  # share of the elements above which their update on the device is work that hides others

_TRAINING = ("forward", "backward", "update")

INNERMOST_FIRST = ("wait", "rank_wait", "select", "merge", "update", "backward", "forward")
"""Kinds of training on the compute lane. A moment counts for the innermost one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The input of summary, report and trace.

    Attributes:
        events: by start time.
        model_bytes: bytes of all trainable parameters of the optimizer, in their own dtype; the unit "model size" of
            the traffic. 0 if unknown.
        update_interval: steps per update window (the longest of the plan); None if nothing is offloaded.
        adaptive_windows: bounds of the window length under ``update_interval="auto"``; None for fixed lengths.
        blocking: the step waits for its host updates by design (``zero_offload``, ``overlap_step=False``).
        updated_on_device: share of all elements whose update runs on the device: resident, streamed and selected ones.
        selected_share: share of the offloaded parameters' elements that is selected; None if unknown.
        norms: squared gradient norms, selected and total, over the recorded steps; None if unknown.
        rows: name and value of rows that features of the engine add to the report.
        traffic: what the plan moves per step; None if nothing is offloaded, or unknown.
        bandwidths: measured bandwidths of this machine's memory and link; None where they were not measured.
        host_bytes: of optimizer state and buffers in host memory, as planned.
        flops_per_step: of the model's forwards and backwards in a step, which the program tells; None if it does not.
        device_flops: FLOP/s of the device at its best; None where they are not known.
        title: heading of the report, where there are several optimizers.
        predicted: the events are simulated, in their steady state: no step is a warm-up.
        older_dropped: the run had more events than the profile keeps; those of its first steps are missing.
    """

    events: tuple[Event, ...]
    model_bytes: int = 0
    policy: str = ""
    update_interval: int | None = None
    adaptive_windows: AdaptiveWindows | None = None
    blocking: bool = False
    state_note: str | None = None
    updated_on_device: float = 1.0
    selected_share: float | None = None
    norms: NormSums | None = None
    rows: tuple[tuple[str, str], ...] = ()
    traffic: Traffic | None = None
    bandwidths: Bandwidths | None = None
    host_bytes: int = 0
    flops_per_step: float | None = None
    device_flops: float | None = None
    title: str = ""
    predicted: bool = False
    older_dropped: bool = False

    @property
    def evaluation(self) -> Intervals:
        """Time of evaluation. It has forwards without gradients, and gaps between them in which no training ran."""
        of_compute = [event for event in self.events if event.lane == COMPUTE]
        spans = union((event.start_ns, event.end_ns) for event in of_compute if event.kind == "inference")
        training = sorted(event.start_ns for event in of_compute if event.kind in _TRAINING)
        gaps = ((before[1], after[0]) for before, after in pairwise(spans))
        idle = [gap for gap in gaps if bisect_left(training, gap[0]) == bisect_left(training, gap[1])]
        return union([*spans, *idle])

    def evaluation_events(self) -> list[Event]:
        """``evaluation`` as events of the compute lane, for picture and trace."""
        steps = {event.start_ns: event.step for event in self.events if event.kind == "inference"}
        return [
            Event(lane=COMPUTE, kind="evaluation", start_ns=start, end_ns=end, step=steps[start])
            for start, end in self.evaluation
        ]

    @property
    def compilation(self) -> Intervals:
        """Time in which graphs were compiled."""
        return union((event.start_ns, event.end_ns) for event in self.events if event.kind == "compile")

    @property
    def compute(self) -> dict[str, Intervals]:
        """Time of each kind of training on the compute lane; nested work is cut out of the work around it."""
        spans: dict[str, list[Interval]] = {kind: [] for kind in INNERMOST_FIRST}
        for event in self.events:
            if event.lane == COMPUTE and event.kind in spans:
                spans[event.kind].append((event.start_ns, event.end_ns))
        left_out = union([*self.evaluation, *self.compilation])
        layers = [("", left_out), *((kind, union(pairs)) for kind, pairs in spans.items())]
        return {kind: intervals for kind, intervals in exclusive(layers).items() if kind}

    @property
    def forward_recorded(self) -> bool:
        """Whether any forward was recorded; models that are not compiled record none."""
        return any(event.lane == COMPUTE and event.kind == "forward" for event in self.events)

    @property
    def hides(self) -> Intervals:
        """Time of forwards, backwards and necessary updates on the device, under which host updates are hidden.

        Where the host updates nearly everything, the rest of a step waits for it, also where no wait was recorded.
        Models that are not compiled record no forward: there, all time counts that is neither.
        """
        compute = self.compute
        exposes = ["wait", "rank_wait"]
        if self.updated_on_device < _NECESSARY:
            exposes += ["update", "merge", "select"]
        if self.forward_recorded:
            return union(pair for kind in compute if kind not in exposes for pair in compute[kind])
        first = min((event.start_ns for event in self.events), default=0)
        last = max((event.end_ns for event in self.events), default=0)
        return subtract([(first, last)], union(pair for kind in exposes for pair in compute[kind]))

    @property
    def worker_lanes(self) -> list[str]:
        """Lanes of the workers that have events, in numeric order."""
        lanes = {event.lane for event in self.events if event.is_worker}
        return sorted(lanes, key=lambda lane: (len(lane), lane))


def recording_of(plan: Plan, events: Iterable[Event], model_bytes: int) -> Recording:
    """The recording of a run with ``plan``, with all that follows from the plan."""
    offloaded = [param for param in plan.params if param.offloaded]
    elements = sum(param.numel for param in offloaded)
    selected = sum(param.k * param.length for param in offloaded)
    everything = sum(param.numel for param in plan.params)
    return Recording(
        events=tuple(events),
        model_bytes=model_bytes,
        policy=plan.policy,
        update_interval=max((param.interval for param in offloaded), default=None),
        blocking=bool(offloaded) and all(param.blocking for param in offloaded),
        state_note=plan.state_note,
        updated_on_device=(everything - elements + selected) / everything,
        selected_share=selected / elements if elements else None,
        traffic=traffic_of(plan),
        host_bytes=plan.host_bytes,
    )
