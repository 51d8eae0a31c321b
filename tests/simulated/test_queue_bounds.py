"""A bounded launch queue: training goes on also where a launch keeps the GIL while it blocks.

The device waits for a host job while the launching thread blocks on the full queue. Inductor's launcher and
``empty_strided_cuda`` keep the GIL there. Native jobs end without it; for the jobs of Python's threads the host waits,
and the device never does.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.simulated.cases import Case, LateInput, Loop, train
from tests.simulated.process import SimulatedHang, SimulatedProcess
from tests.simulated.simulator import load_simulator
from tests.simulated.streams import current_stream
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.stream_flags import Flag, HostFlags
from zenflow_compile.runtime.host.workers import Job

LIMITS = (8, 40, 1000)
LATE_STEP = 2


def fill_queue(case: Case, hold_gil: bool, of_python: bool = False) -> bool:
    """Train with jobs that are late in one step, and launch more than the queue holds behind them.

    Args:
        of_python: a thread that needs the GIL lets the jobs run as soon as the queue is full; else the device does.

    Returns:
        Whether the weights equal those of the CPU.
    """
    simulator, init, block, forward = load_simulator(), Job.__init__, Job._block, Loop.loss
    expected = train(replace(case, limit=0), "cpu")
    flags = HostFlags(2, device_of(simulator.device))
    full, late = Flag(flags, 0, 1), Flag(flags, 1, 1)
    if of_python:
        threading.Thread(target=lambda: (full.wait(), late.raise_it()), daemon=True).start()

    def late_input(job: Job, parts: Any, inputs: Any, *arguments: Any, step: int, **keywords: Any) -> None:
        if step == LATE_STEP:
            simulator.write_when_full((full if of_python else late).address)
        inputs = [*inputs, *([LateInput(late)] if step == LATE_STEP else ())]
        init(job, parts, inputs, *arguments, step=step, **keywords)

    def released(job: Job, **keywords: Any) -> None:
        late.raise_it()  # the host waits, and fills no queue
        block(job, **keywords)

    def filling(loop: Loop, step: int) -> Tensor:
        value = forward(loop, step)
        if step == LATE_STEP + 1:
            for _ in range(case.limit + 10):
                simulator.launch_noop(current_stream(), hold_gil=hold_gil)
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "__init__", late_input)
        patch.setattr(Job, "_block", released)
        patch.setattr(Loop, "loss", filling)
        return train(case).equals(expected)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("options", ["exact", "files"])
@pytest.mark.parametrize("values", [True, False], ids=["values", "no values"])
@pytest.mark.parametrize("hold_gil", [True, False], ids=["with the GIL", "without"])
@pytest.mark.parametrize("limit", LIMITS)
def test_full_queue_goes_on(
    simulated: SimulatedProcess, limit: int, hold_gil: bool, values: bool, options: str
) -> None:
    case = Case(options, limit=limit, values=values, steps=5)
    assert simulated.call(fill_queue, case, hold_gil, timeout=60)


def test_waits_for_jobs_with_the_gil_hang(simulated: SimulatedProcess) -> None:
    """Proves that the tests above see a hang: the device waits for a thread that waits for the GIL."""
    case = Case("exact", limit=40, steps=5)
    with pytest.raises(SimulatedHang, match="launch_noop"):
        simulated.call(fill_queue, case, True, of_python=True, stuck="40 queued entries of 40, 1 blocked")
