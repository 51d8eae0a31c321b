"""A bounded launch queue: training goes on also where a launch keeps the GIL while it blocks.

The device waits for a host job while the launching thread blocks on the full queue. Inductor's launcher and
``empty_strided_cuda`` keep the GIL there. Native jobs end without it; for the jobs of Python's threads the host waits,
and the device never does.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.simulated.cases import Case, Loop, train
from tests.simulated.process import SimulatedHang, SimulatedProcess
from tests.simulated.simulator import load_simulator
from tests.simulated.streams import current_stream
from tests.support.late_words import LateWord
from zenflow_compile.runtime.host.workers import Job

LIMITS = (8, 40, 1000)
LATE_STEP = 2
JOB_SECONDS = 0.5  # longer than the launching thread needs to fill the queue


def fill_queue(case: Case, hold_gil: bool) -> bool:
    """Train with jobs that are half a second late in one step, and launch more than the queue holds behind them.

    Returns:
        Whether the weights equal those of the CPU.
    """
    simulator, init, forward = load_simulator(), Job.__init__, Loop.loss
    expected = train(replace(case, limit=0), "cpu")

    def late_input(job: Job, parts: Any, inputs: Any, *arguments: Any, step: int, **keywords: Any) -> None:
        late = [LateWord(JOB_SECONDS)] if step == LATE_STEP else []
        init(job, parts, [*inputs, *late], *arguments, step=step, **keywords)

    def filling(loop: Loop, step: int) -> Tensor:
        value = forward(loop, step)
        if step == LATE_STEP + 1:
            for _ in range(case.limit + 10):
                simulator.launch_noop(current_stream(), hold_gil=hold_gil)
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "__init__", late_input)
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


class WordOfPython(LateWord):
    """The same word, raised by a thread of Python."""

    def __init__(self, seconds: float) -> None:
        self._word = ctypes.c_uint32()
        self._thread = threading.Timer(seconds, self._rise)
        self._thread.start()

    def _rise(self) -> None:
        self._word.value = 1

    def wait(self) -> None:
        self._thread.join()


def let_the_device_wait_for_python(case: Case) -> None:
    """``fill_queue`` with inputs of jobs that need the GIL; runs in the child process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "LateWord", WordOfPython)
        fill_queue(case, True)


def test_waits_for_jobs_with_the_gil_hang(simulated: SimulatedProcess) -> None:
    """Proves that the tests above see a hang: the device waits for a thread that waits for the GIL."""
    with pytest.raises(SimulatedHang):
        simulated.call(let_the_device_wait_for_python, Case("exact", limit=40, steps=5), timeout=12)
