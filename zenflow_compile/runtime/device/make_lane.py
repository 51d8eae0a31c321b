"""Chooses the kind of copy lane that a device needs."""

from __future__ import annotations

from zenflow_compile.runtime.device.copy_lanes import CopyLane
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.stream_lane import StreamLane
from zenflow_compile.runtime.device.thread_lane import ThreadLane
from zenflow_compile.runtime.recorder import Recorder


def make_lane(name: str, device: Device, recorder: Recorder) -> CopyLane:
    """Make the lane ``name`` ("D2H" or "H2D") of ``device``."""
    if device.streams is None:
        return ThreadLane(name, recorder)
    return StreamLane(name, device, device.streams, recorder)
