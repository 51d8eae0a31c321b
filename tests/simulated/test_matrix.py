"""Training on the simulated accelerator equals training on the CPU, bit for bit, in whatever order the device runs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from tests.simulated.cases import HABITS, LATE, MODELS, MUON_SETS, OPTION_SETS, Case, differing
from tests.simulated.process import SimulatedProcess
from tests.simulated.simulator import PATTERNS

DRAWN = 2


def every_case(options: str, model: str, habit: str) -> list[Case]:
    entries = ["graph"] if habit == "optimizer in backward" else ["graph", "hooks"]
    return [
        Case(options, model, entry, habit, delays, seed=number, values=values)
        for number, (entry, delays, values) in enumerate(product(entries, (*PATTERNS, *LATE), (True, False)))
    ]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", OPTION_SETS)
def test_training_equals_the_cpu(simulated: SimulatedProcess, options: str, model: str) -> None:
    """A seeded draw from all habits, entries and delays, with and without stream values; one of two streams."""
    draw = random.Random(f"{options} {model}")
    habits = draw.sample(HABITS, 1) if model == "gpt" else [*draw.sample(HABITS, DRAWN), "side stream"]
    drawn = [draw.choice(every_case(options, model, habit)) for habit in habits]
    assert simulated.call(differing, drawn, timeout=120) == []


@pytest.mark.parametrize("options", MUON_SETS)
def test_muon_equals_the_cpu(simulated: SimulatedProcess, options: str) -> None:
    draw = random.Random(options)
    habits = [habit for habit in HABITS if habit != "optimizer in backward"]
    drawn = [draw.choice(every_case(options, model, habit)) for habit in habits for model in ("matrices", "mlp")]
    assert simulated.call(differing, drawn, timeout=240) == []


def test_reselection_in_the_stream_of_forwards_equals(simulated: SimulatedProcess) -> None:
    """The next selection is memory of the optimizer step's stream, and the late forward's stream reads it."""
    late = Case("auto windows", "matrices", habit="side stream", delays="H2D late", values=False)
    cases = [replace(late, seed=seed) for seed in (3, 11)]
    assert simulated.call(differing, cases, timeout=120) == []


@pytest.mark.long(1000)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", OPTION_SETS)
def test_every_case_equals_the_cpu(simulated: SimulatedProcess, options: str, model: str, habit: str) -> None:
    assert simulated.call(differing, every_case(options, model, habit), timeout=600) == []
