"""Code that reads weights directly on the simulated accelerator reads the bits of the CPU, or is refused."""

from __future__ import annotations

import random

import pytest

from tests.simulated.cases import LATE, OPTION_SETS, WEIGHT_SETS, Case, differing
from tests.simulated.mutants import is_found
from tests.simulated.process import SimulatedProcess
from tests.simulated.simulator import PATTERNS

OFTEN = ("exact", "windows", "late every step", "reselect stale", "streamed", "weights exact")  # in every run
HAZARD = "weight read before its update"


@pytest.mark.parametrize(
    ("options", "entry"),
    [
        pytest.param(name, entry, marks=() if name in OFTEN else pytest.mark.long)
        for entry, names in (("graph", (*OPTION_SETS, *WEIGHT_SETS)), ("hooks", OPTION_SETS))
        for name in names
    ],
)
def test_direct_reads_equal_the_cpus(simulated: SimulatedProcess, options: str, entry: str) -> None:
    draw = random.Random(f"{options} {entry}")
    drawn = [
        Case(options, entry=entry, habit="weights read", delays=draw.choice((*PATTERNS, *LATE)), seed=seed)
        for seed in range(2)
    ]
    assert simulated.call(differing, drawn, timeout=120) == []


def test_reads_are_stale_without_the_guard(simulated: SimulatedProcess) -> None:
    """On every run; the rest of the catalog takes turns."""
    assert is_found(simulated, HAZARD)
