"""A bounded launch queue: where training goes on, and where it hangs because a launch keeps the GIL.

The device waits for a host job, the job's thread needs the GIL, and the launching thread blocks on the full queue with
the GIL. Inductor's launcher and ``empty_strided_cuda`` block like this.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from torch import Tensor

from tests.simulated.cases import Case, Loop, train
from tests.simulated.process import SimulatedHang, SimulatedProcess
from tests.simulated.simulator import load_simulator
from tests.simulated.streams import current_stream
from zenflow_compile.runtime.parameters.host_state import WindowJob

LIMITS = (8, 40, 1000)
HANGING = (40, 1000)
LATE_STEP = 2
JOB_SECONDS = 0.5  # longer than the launching thread needs to fill the queue


def fill_queue(limit: int, hold_gil: bool, values: bool) -> bool:
    """Train with jobs of half a second in one step, and launch more than the queue holds behind their first update.

    Returns:
        Whether the weights equal those of the CPU.
    """
    case = Case("exact", limit=limit, values=values, steps=5)
    simulator, run, forward = load_simulator(), WindowJob.run, Loop.loss
    expected = train(replace(case, limit=0), "cpu")

    def late(job: WindowJob, part: slice) -> int:
        if job.step == LATE_STEP:
            time.sleep(JOB_SECONDS)
        return run(job, part)

    def filling(loop: Loop, step: int) -> Tensor:
        value = forward(loop, step)
        if step == LATE_STEP + 1:
            for _ in range(limit + 10):
                simulator.launch_noop(current_stream(), hold_gil=hold_gil)
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowJob, "run", late)
        patch.setattr(Loop, "loss", filling)
        return train(case).equals(expected)


@pytest.mark.parametrize("values", [True, False], ids=["values", "no values"])
@pytest.mark.parametrize("limit", LIMITS)
def test_full_queue_without_the_gil_goes_on(simulated: SimulatedProcess, limit: int, values: bool) -> None:
    assert simulated.call(fill_queue, limit, False, values, timeout=60)


@pytest.mark.parametrize("limit", [HANGING[0], pytest.param(HANGING[1], marks=pytest.mark.long)])
def test_full_queue_with_the_gil_hangs_on_values(simulated: SimulatedProcess, limit: int) -> None:
    """The hang that jobs without the GIL will end: the device waits for a thread that waits for the GIL."""
    with pytest.raises(SimulatedHang):
        simulated.call(fill_queue, limit, True, True, timeout=12)


def test_shortest_queue_is_full_before_the_launch(simulated: SimulatedProcess) -> None:
    """The forward's own operators fill it, and wait without the GIL until the job is done."""
    assert simulated.call(fill_queue, min(LIMITS), True, True, timeout=60)


@pytest.mark.parametrize("limit", LIMITS)
def test_full_queue_with_the_gil_goes_on_elsewhere(simulated: SimulatedProcess, limit: int) -> None:
    """Without stream values the host waits for jobs, and the device never does."""
    assert simulated.call(fill_queue, limit, True, False, timeout=60)
