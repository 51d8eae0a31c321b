"""Timelines with known answers."""

from __future__ import annotations

from zenflow_compile.profiling.recording import Recording
from zenflow_compile.timeline import Event, NormSums

MS = 1_000_000  # nanoseconds


def event(
    lane: str, kind: str, start_ms: float, end_ms: float, *, step: int = 0, param: str = "", size: int = 0
) -> Event:
    start_ns, end_ns = round(start_ms * MS), round(end_ms * MS)
    return Event(lane=lane, kind=kind, start_ns=start_ns, end_ns=end_ns, step=step, param=param, bytes=size)


def known_run() -> Recording:
    """Two steps of 40 ms: forward 14 with 4 of waiting and 1 of merging in it, backward 20, update 6.

    Worker 0 runs 20 ms per step, 6 of them in the next step; worker 1 runs 10 ms. A re-selection moves state.
    """
    events = []
    for step, origin in ((7, 0), (8, 40)):
        events += [
            event("step", "step", origin, origin + 40, step=step),
            event("compute", "forward", origin, origin + 14, step=step),
            event("compute", "wait", origin + 2, origin + 6, step=step, param="first"),
            event("compute", "merge", origin + 6, origin + 7, step=step, param="first"),
            event("compute", "backward", origin + 14, origin + 34, step=step),
            event("compute", "update", origin + 34, origin + 40, step=step),
            event("D2H", "copy", origin + 15, origin + 19, step=step, size=6_000_000),
            event("D2H", "copy", origin + 18, origin + 20, step=step, size=2_000_000),
            event("H2D", "copy", origin + 5, origin + 6, step=step, size=1_000_000),
            event("worker 0", "host_update", origin + 26, origin + 46, step=step, size=300_000_000),
            event("worker 1", "host_update", origin + 20, origin + 30, step=step, size=100_000_000),
            event("windows", "flush", origin + 26, origin + 26, step=step, param="first"),
            event("windows", "flush", origin + 20, origin + 20, step=step, param="second"),
        ]
    events += [event("H2D", "state", 70, 71, step=8, size=500_000), event("windows", "select", 70, 70, step=8)]
    return recording(events)


def recording(events: list[Event], **changes: object) -> Recording:
    """A recording of a model of 10 MB under zenflow."""
    settings: dict[str, object] = {
        "model_bytes": 10_000_000,
        "policy": "zenflow",
        "update_interval": 4,
        "selected_share": 0.1,
        "norms": NormSums(selected=61.0, total=100.0),
    }
    ordered = tuple(sorted(events, key=lambda e: (e.start_ns, e.end_ns)))
    return Recording(events=ordered, **(settings | changes))  # type: ignore[arg-type]
