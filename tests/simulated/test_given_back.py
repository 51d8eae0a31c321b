"""``offload_all()`` on the simulated accelerator, which counts bytes: all of them, the bits of the CPU, each wait."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.simulated.accelerator import serve
from tests.simulated.cases import OPTION_SETS, Case, Loop, differing, on_cpu
from tests.simulated.mutants import MEMORY_MUTANTS, is_found
from tests.simulated.process import SimulatedProcess, in_simulator
from tests.simulated.simulator import Simulator
from tests.support.calls import calls_of, interrupted

OFTEN = ("summed", "int8", "reselect stale", "streamed")  # in every run
CASES = [
    Case("windows", habit="offload all", delays="random"),
    Case("reselect stale", habit="offload all", delays="compute late", values=False),
    Case("summed", habit="offload all", delays="jobs late"),
    Case("int8", habit="offload all", delays="compute late"),
    Case("zenflow streamed", habit="offload all", delays="random", values=False),
    Case("weights exact", habit="offload all", delays="random"),
    Case("exact", entry="hooks", habit="offload all", delays="compute late"),
]


@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in OPTION_SETS]
)
@in_simulator
def test_every_byte_is_given_back(simulator: Simulator, options: str) -> None:
    """Also numbers that loss scaling and clipping leave on the device."""
    serve()
    simulator.configure(delays="random")
    loop = Loop(Case(options, habit="scaled", steps=6), simulator.device)
    gc.collect()
    torch.sim.synchronize()  # type: ignore[attr-defined]
    before = torch.sim.memory_allocated()  # type: ignore[attr-defined]
    for step in range(6):
        loop.step(step)
        if step > 3:
            gc.collect()
            assert torch.sim.memory_allocated() > before + 5_000  # type: ignore[attr-defined]
            loop.optimizer.offload_all()
            assert torch.sim.memory_allocated() == before, step  # type: ignore[attr-defined]
    loop.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.options}-{case.delays}")
def test_training_equals_the_cpu(simulated: SimulatedProcess, case: Case) -> None:
    assert simulated.call(differing, [case], timeout=120) == []


@pytest.mark.tier2
@pytest.mark.parametrize("name", MEMORY_MUTANTS)
def test_hazard_is_found(simulated: SimulatedProcess, name: str) -> None:
    assert is_found(simulated, name)


@in_simulator
def test_factors_on_a_gradient_come_back(simulator: Simulator) -> None:
    serve()
    loop = Loop(Case("windows"), simulator.device)
    for step in range(2):
        loop.step(step)
    loop.loss(2).backward()
    grad = loop.model[0].weight.grad  # type: ignore[index]
    expected = grad.clone().cpu() / 4
    half = torch.tensor(0.5, device=simulator.device)
    grad.mul_(half)
    loop.optimizer.offload_all()
    grad.mul_(half)
    assert torch.equal(grad.clone().cpu(), expected)
    loop.close()


@in_simulator
def test_failed_return_leaves_no_copy_behind(simulator: Simulator) -> None:
    """The device runs full while the values come back: no late copy may write memory that is freed again."""
    serve()
    loop = Loop(Case("windows"), simulator.device)
    for step in range(3):
        loop.step(step)
    memory = loop.optimizer.engine.device_memory
    loop.optimizer.offload_all()
    lane = memory._to_device
    simulator.delay(lane.stream, 0.997)
    no_room = interrupted(lane.submit, torch.OutOfMemoryError("no room"), after=20)
    with (
        no_room,
        calls_of(lane.submit, returned=True) as copies,
        pytest.raises(torch.OutOfMemoryError, match="has no room"),
    ):
        loop.optimizer.reload_all()
    assert len(copies) == 20
    assert all(copy.result.done() for copy in copies)
    assert loop.optimizer.device_bytes == 0
    loop.optimizer.reload_all()
    for step in range(3, 9):
        loop.step(step)
    weights = loop.weights()
    assert all(map(torch.equal, weights, on_cpu(Case("windows")).weights))
    loop.close()
