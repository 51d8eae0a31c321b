"""One optimizer's events and what is needed to read them; from here on measured and simulated look alike."""

from __future__ import annotations

from dataclasses import dataclass

from zenflow_compile.performance.traffic import Bandwidths, Traffic
from zenflow_compile.timeline.events import AdaptiveWindows, Event, NormSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What summary, report and trace are made of.

    Attributes:
        events: by start time.
        model_bytes: bytes of all trainable parameters that the optimizer manages, in their own dtype; the unit
            "model size" of the traffic. 0 where it is not known.
        policy: name of the policy that made the plan.
        update_interval: steps per window (the longest of the plan); None if nothing is offloaded.
        adaptive_windows: their bounds under ``update_interval="auto"``; None where windows are of fixed length.
        blocking: the step waits for its host updates by design (``zero_offload``, ``overlap_step=False``).
        selected_share: share of the offloaded parameters' elements that is in the selection; None if unknown.
        norms: squared gradient norms, selected and total, over the recorded steps; None if unknown.
        traffic: what the plan moves per step; None if nothing is offloaded, or unknown.
        bandwidths: what this machine's memory and link reach; None where nobody measured them.
        title: what the report calls this optimizer, where there are several.
    """

    events: tuple[Event, ...]
    model_bytes: int = 0
    policy: str = ""
    update_interval: int | None = None
    adaptive_windows: AdaptiveWindows | None = None
    blocking: bool = False
    selected_share: float | None = None
    norms: NormSums | None = None
    traffic: Traffic | None = None
    bandwidths: Bandwidths | None = None
    title: str = ""

    @property
    def worker_lanes(self) -> list[str]:
        """Lanes of the workers that did something, in numeric order."""
        lanes = {event.lane for event in self.events if event.is_worker}
        return sorted(lanes, key=lambda lane: (len(lane), lane))
