"""What a recorder notes of the device's memory."""

from __future__ import annotations

from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import Timeline


class Memory:
    """A device that counts its memory, or does not."""

    def __init__(self, *allocated: int | None, peak: int | None) -> None:
        self._allocated, self._peak = [*allocated], peak

    def allocated_bytes(self) -> int | None:
        return self._allocated.pop(0)

    def peak_bytes(self) -> int | None:
        return self._peak


def noted(memory: Memory) -> list[tuple[str, int]]:
    recorder, timeline = Recorder(memory=memory), Timeline()
    recorder.attach(timeline)
    for phase in ("forward", "backward", "update"):
        recorder.begin_phase(phase)
    recorder.end_step()
    return [(event.kind, event.bytes) for event in timeline.events() if event.lane == "memory"]


def test_memory_after_each_phase_and_the_peak() -> None:
    assert noted(Memory(30, 20, 10, peak=40)) == [("forward", 30), ("backward", 20), ("update", 10), ("peak", 40)]


def test_no_memory_where_the_device_counts_none() -> None:
    assert noted(Memory(None, None, None, peak=None)) == []
