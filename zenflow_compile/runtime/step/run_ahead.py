"""How far the host runs ahead of a device with streams."""

from __future__ import annotations

from collections import deque

from zenflow_compile.runtime.device.device import Device, Streams
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import DeviceEvent

STEPS_AHEAD = 2
"""Optimizer step t begins when the device has done step t - 2. What the device has computed there can be read without a
further wait, and the device has the work of a whole step queued while the host waits."""
STEP_BEFORE_LAST = "step before last"


class RunAhead:
    """Makes the training thread wait, at the begin of an optimizer step, for the end of the step before last.

    Each step that is not done keeps its queued launches, the memory of its gradients on the host, and its factors.
    """

    def __init__(self, device: Device, streams: Streams, recorder: Recorder) -> None:
        self._device = device
        self._streams = streams
        self._recorder = recorder
        self._ends: deque[DeviceEvent] = deque()  # of the steps that may be unfinished, oldest first

    def begin_step(self) -> None:
        """Wait for the step before last. Further calls in the same step do nothing."""
        while len(self._ends) >= STEPS_AHEAD:
            end = self._ends[0]
            with self._recorder.stall(not end.query(), param="", on_host=True):
                self._device.wait_for(end, STEP_BEFORE_LAST)
            self._ends.popleft()  # last: an interrupted wait is repeated

    def end_step(self) -> None:
        """Note the end of the step: all work that is queued now."""
        end = self._streams.event(blocking=True)
        end.record(self._streams.current())
        self._ends.append(end)
