"""Each hazard of the catalog is found: its run differs from the CPU's (``test_forced_orders.py`` has those without)."""

from __future__ import annotations

import pytest

from tests.simulated.mutants import MEMORY_MUTANTS, MUTANTS, RANK_MUTANTS, WEIGHT_MUTANTS, is_found
from tests.simulated.process import SimulatedProcess

IN_EVERY_RUN = 7  # of the catalog, one in so many


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % IN_EVERY_RUN == 0 else pytest.mark.long)
        for number, name in enumerate(MUTANTS)
    ],
)
def test_hazard_is_found(simulated: SimulatedProcess, name: str) -> None:
    assert is_found(simulated, name)


def test_every_hazard_is_still_in_the_source() -> None:
    """Most of the catalog is run by ``make test-long`` alone: a piece that has changed must not wait for that."""
    for mutant in (
        *MUTANTS.values(), *RANK_MUTANTS.values(), *WEIGHT_MUTANTS.values(), *MEMORY_MUTANTS.values(),
    ):  # fmt: skip
        with mutant.active():
            pass
    assert len(MUTANTS) >= 25
