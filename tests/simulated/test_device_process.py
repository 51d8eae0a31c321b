"""The child process returns results and errors, and is replaced if it does not."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from tests.simulated.process import SimulatedCrash, SimulatedHang, SimulatedProcess
from tests.simulated.simulator import Stream, load_simulator


def _add(a: int, *, b: int) -> tuple[int, torch.Tensor]:
    return a + b, torch.full((2,), float(a), device="sim").cpu()


def _fail() -> None:
    raise KeyError("what it says")


def _skip() -> None:
    pytest.skip("not here")


def _sleep(depth: int) -> None:
    if depth:
        _sleep(depth - 1)
    else:
        time.sleep(60)


def _sleep_beside_threads() -> None:
    """As the first of many threads, whose stack comes last."""
    for _ in range(60):
        threading.Thread(target=_sleep, args=(60,), daemon=True).start()
    time.sleep(60)


def _crash() -> None:
    os._exit(3)


def _leave_work(dead: bool) -> None:
    """Return with items that never run: behind a number that is never written, or on a dead device."""
    simulator = load_simulator()
    flag, stream = torch.zeros(1, dtype=torch.int32, pin_memory=True), Stream()
    simulator.wait_value(stream, flag.data_ptr(), 1)
    with stream:
        torch.ones(8, device="sim").add_(1)
    globals()["kept"] = (flag, torch.ones(8, device="sim"))  # freed while the interpreter ends
    if dead:
        simulator.die()


def test_result_comes_back(simulated: SimulatedProcess) -> None:
    total, tensor = simulated.call(_add, 1, b=2)
    assert total == 3
    assert tensor.tolist() == [1, 1]


def test_error_comes_back_with_its_traceback(simulated: SimulatedProcess) -> None:
    with pytest.raises(KeyError, match="what it says") as error:
        simulated.call(_fail)
    assert "in _fail" in "".join(error.value.__notes__)
    with pytest.raises(pytest.skip.Exception, match="not here"):
        simulated.call(_skip)


def test_hang_ends_with_stacks(simulated: SimulatedProcess) -> None:
    with pytest.raises(SimulatedHang, match=r"in _sleep_beside_threads(?s:.)*simulated device: alive"):
        simulated.call(_sleep_beside_threads, timeout=2)
    assert simulated.call(_add, 1, b=2)[0] == 3


def test_crash_is_reported(simulated: SimulatedProcess) -> None:
    with pytest.raises(SimulatedCrash, match="code 3 in _crash"):
        simulated.call(_crash)
    assert simulated.call(_add, 1, b=2)[0] == 3


@pytest.mark.parametrize("dead", [False, True])
def test_process_ends_with_unfinished_work(simulated: SimulatedProcess, dead: bool) -> None:
    process = SimulatedProcess()
    process.call(_leave_work, dead)
    assert process.close() == 0
