"""A device with streams compares samples of weights without a wait, and the host learns of a write two steps later."""

from __future__ import annotations

import pytest

from tests.simulated.accelerator import serve
from tests.simulated.cases import Case, Loop
from tests.simulated.process import in_simulator
from tests.simulated.simulator import Simulator
from zenflow_compile.runtime.device.readback import LAG


@pytest.mark.parametrize("options", ["exact", "windows", "zero_offload", "staleness"])
@in_simulator
def test_data_write_raises_two_steps_later(simulator: Simulator, options: str) -> None:
    serve()
    loop = Loop(Case(options, steps=12), simulator.device)
    for step in range(5):
        loop.step(step)
    loop.optimizer.synchronize()
    for param in loop.model.parameters():
        param.data.mul_(0.5)
    for step in range(5, 5 + LAG):
        loop.step(step)
    with pytest.raises(RuntimeError, match=r"was written through \.data"):
        loop.step(5 + LAG)
    loop.step(6 + LAG)  # the optimizer has undone the write
