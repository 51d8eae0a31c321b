"""Each hazard of the catalog is found: its run differs from the CPU's (``test_forced_orders.py`` has those without)."""

from __future__ import annotations

import pytest

from tests.simulated.mutants import MEMORY_MUTANTS, MUTANTS, RANK_MUTANTS, WEIGHT_MUTANTS, is_found
from tests.simulated.process import SimulatedProcess


@pytest.mark.tier2
@pytest.mark.parametrize("name", MUTANTS)
def test_hazard_is_found(simulated: SimulatedProcess, name: str) -> None:
    assert is_found(simulated, name)


def test_every_hazard_is_still_in_the_source() -> None:
    """The catalog runs in the second tier: a piece that has changed must not wait for that."""
    for mutant in (
        *MUTANTS.values(), *RANK_MUTANTS.values(), *WEIGHT_MUTANTS.values(), *MEMORY_MUTANTS.values(),
    ):  # fmt: skip
        with mutant.active():
            pass
    assert len(MUTANTS) >= 25
