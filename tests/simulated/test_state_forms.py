"""Host state in fewer bytes on the simulated accelerator: the bits of the CPU, and no waits."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tests.simulated.cases import HABITS, LATE, STATE_SETS, Case, Outcome, differing, train
from tests.simulated.process import SimulatedProcess
from tests.simulated.simulator import PATTERNS

STEADY = 5


def every_case(options: str, habit: str) -> list[Case]:
    return [
        Case(options, "wide", "graph", habit, delays, seed=number, values=values)
        for number, (delays, values) in enumerate(product((*PATTERNS, *LATE), (True, False)))
    ]


@pytest.mark.parametrize("options", STATE_SETS)
def test_training_equals_the_cpu(simulated: SimulatedProcess, options: str) -> None:
    """A seeded draw from all habits and delays."""
    draw = random.Random(options)
    drawn = draw.choice(every_case(options, draw.choice(HABITS)))
    assert simulated.call(differing, [drawn], timeout=120) == []


@pytest.mark.long(1000)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("options", STATE_SETS)
def test_every_case_equals_the_cpu(simulated: SimulatedProcess, options: str, habit: str) -> None:
    assert simulated.call(differing, every_case(options, habit), timeout=500) == []


@pytest.mark.parametrize("options", ["bytes reselect often", "bytes of weights"])
def test_steady_step_waits_for_one_event_at_most(simulated: SimulatedProcess, options: str) -> None:
    found: Outcome = simulated.call(train, Case(options, "wide", habit="clip", delays="random", steps=9))
    for syncs, copies in zip(found.syncs[STEADY:], found.copies[STEADY:], strict=True):
        assert set(copies) <= {"step before last"}
        assert syncs == ({"event.synchronize": copies["step before last"]} if copies else {})
