"""Chooses the kind of copy lane that a device needs."""

from __future__ import annotations

import torch

from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.transfer.copy_lanes import CopyLane
from zenflow_compile.runtime.transfer.cpu_lane import ThreadLane
from zenflow_compile.runtime.transfer.cuda_lane import StreamLane


def make_lane(name: str, device: torch.device, recorder: Recorder) -> CopyLane:
    """Make the lane ``name`` ("D2H" or "H2D") of ``device``."""
    if device.type == "cuda":
        return StreamLane(name, device, recorder)
    return ThreadLane(name, recorder)
