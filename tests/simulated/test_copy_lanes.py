"""Lanes of a device with streams, used by several threads."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.simulated.accelerator import SimulatedDevice
from tests.simulated.process import in_simulator
from tests.simulated.simulator import Simulator
from zenflow_compile.runtime.device.device import Stream, Streams
from zenflow_compile.runtime.device.stream_flags import Flag
from zenflow_compile.runtime.device.stream_lane import StreamLane
from zenflow_compile.runtime.recorder import Recorder


@in_simulator
def test_numbers_of_copies_are_written_in_order(simulator: Simulator) -> None:
    """A second thread submits a copy while the first one writes the number of its own."""
    device = SimulatedDevice(simulator.device)
    lane = StreamLane("D2H", device, device.streams, Recorder(device.streams, device))
    source, written = torch.ones(4, device=simulator.device), list[int]()
    targets = [torch.zeros(4, pin_memory=True) for _ in range(2)]
    others: list[threading.Thread] = []
    write = Flag.write_from

    def watched(flag: Flag, streams: Streams, stream: Stream) -> None:
        if not others:
            others.append(threading.Thread(target=lane.submit, args=(targets[1], source), kwargs=where))
            others[0].start()
            others[0].join(0.3)  # as long as it can run; it waits for this call
        written.append(flag.value)
        write(flag, streams, stream)

    where = {"step": 0, "param": "w"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flag, "write_from", watched)
        first = lane.submit(targets[0], source, step=0, param="w")
        others[0].join()
    assert written == [1, 2]
    lane.settle()
    assert first.done()
    assert all(target.eq(1).all() for target in targets)
    lane.close()
