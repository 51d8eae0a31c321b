"""Weights in host memory on the simulated accelerator: the bits of the CPU, no waits, and every hazard found."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.simulated.accelerator import serve
from tests.simulated.cases import HABITS, LATE, MODELS, WEIGHT_SETS, Case, Loop, Outcome, differing, train
from tests.simulated.mutants import WEIGHT_MUTANTS, is_found
from tests.simulated.process import SimulatedProcess, in_simulator
from tests.simulated.simulator import PATTERNS, Simulator
from tests.simulated.streams import Stream
from zenflow_compile.runtime.parameters.host_weight import HostWeight

STEADY = 5
OFTEN = ("weights exact", "weights late every step", "weights reselect often", "weights resident")  # in every run


def every_case(options: str, model: str, habit: str) -> list[Case]:
    return [
        Case(options, model, "graph", habit, delays, seed=number, values=values)
        for number, (delays, values) in enumerate(product((*PATTERNS, *LATE), (True, False)))
    ]


@pytest.mark.parametrize("options", WEIGHT_SETS)
def test_training_equals_the_cpu(simulated: SimulatedProcess, options: str) -> None:
    """A seeded draw from all models, habits and delays."""
    draw = random.Random(options)
    drawn = draw.choice(every_case(options, draw.choice(list(MODELS)), draw.choice(HABITS)))
    assert simulated.call(differing, [drawn], timeout=120) == []


@pytest.mark.long(1000)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", WEIGHT_SETS)
def test_every_case_equals_the_cpu(simulated: SimulatedProcess, options: str, model: str, habit: str) -> None:
    assert simulated.call(differing, every_case(options, model, habit), timeout=500) == []


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", ["weights windows", "weights resident"])
def test_fifty_orders_of_copies_are_equal(simulated: SimulatedProcess, options: str) -> None:
    """Memory that is freed, and that a copy has not filled yet, holds NaN."""
    cases = [Case(options, "gpt", habit="clip", delays="random", seed=seed, steps=4) for seed in range(50)]
    assert simulated.call(differing, cases, timeout=500) == []


@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in WEIGHT_SETS]
)
def test_steady_step_waits_for_one_event_at_most(simulated: SimulatedProcess, options: str) -> None:
    found: Outcome = simulated.call(train, Case(options, habit="clip", delays="random", steps=9))
    for syncs, copies in zip(found.syncs[STEADY:], found.copies[STEADY:], strict=True):
        assert set(copies) <= {"step before last"}
        assert syncs == ({"event.synchronize": copies["step before last"]} if copies else {})


@pytest.mark.tier2
@pytest.mark.parametrize("name", WEIGHT_MUTANTS)
def test_hazard_is_found(simulated: SimulatedProcess, name: str) -> None:
    assert is_found(simulated, name)


@in_simulator
def test_every_load_of_a_graph_is_copied_ahead(simulator: Simulator) -> None:
    """From the second step on, also the first loads of each graph; loaded weights stay within the ring."""
    serve()
    ahead: list[str] = []
    late: list[str] = []
    load = HostWeight.load

    def noting(self: HostWeight, staged: Any = None) -> None:
        (late if staged is None else ahead).append(self.plan.name)
        load(self, staged)

    with pytest.MonkeyPatch.context() as patch, sdpa_kernel(SDPBackend.MATH):
        patch.setattr(HostWeight, "load", noting)
        loop = Loop(Case("weights exact", "gpt", steps=6), simulator.device)
        for step in range(6):
            ahead.clear()
            late.clear()
            loop.loss(step).backward()
            weights = loop.optimizer.engine.weights
            if step > 1:
                assert late == []
                assert len(ahead) == 40
                assert weights.peak_bytes <= weights.ring_bytes
                assert weights.ring_bytes < 0.15 * sum(each.nbytes for each in weights.weights.values())
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.close()


@in_simulator
def test_memory_is_freed_behind_other_streams(simulator: Simulator) -> None:
    serve()
    loop = Loop(Case("weights exact", "matrices"), simulator.device)
    for step in range(3):
        loop.step(step)
    param = loop.model[2].weight  # type: ignore[index]
    weight = loop.optimizer.engine.weights.weights[1]
    side = Stream()
    simulator.delay(side, 0.997)
    with loop.optimizer.loaded_weights():
        expected = param.detach().cpu().clone()
        side.wait_stream(torch.sim.current_stream())  # type: ignore[attr-defined]
        with side:
            found = param.detach() + 0.0
            weight.unload()
    for _ in range(4):  # takes the place of the weight
        torch.full_like(found, float("nan"))
    assert torch.equal(found.cpu(), expected)
    loop.close()
