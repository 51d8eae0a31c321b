"""Each hazard of the catalog is found: its run differs from the CPU's, and the run without the hazard does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulated.cases import Outcome, train
from tests.simulated.mutants import MUTANTS, SEEDS, Mutant
from tests.simulated.process import SimulatedProcess

IN_EVERY_RUN = 7  # of the catalog, one in so many


def shows(mutant: Mutant, seed: int, expected: Outcome) -> bool:
    """Whether the run with the hazard differs from the CPU, or an index that it read too early was out of range."""
    try:
        return not train(replace(mutant.shown_by, seed=seed), hazard=mutant.active).equals(expected)
    except (RuntimeError, IndexError) as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, IndexError):
            reason = reason.__cause__ or reason.__context__
        if reason is None:
            raise
        return True


def seed_that_shows(name: str) -> int | None:
    """The first seed under which the hazard shows; runs in the child process."""
    mutant = MUTANTS[name]
    expected = train(replace(mutant.shown_by, delays="none", seed=0), "cpu")
    for seed in SEEDS:
        if shows(mutant, seed, expected):
            assert train(replace(mutant.shown_by, seed=seed)).equals(expected), "it differs without the hazard, too"
            return seed
    return None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % IN_EVERY_RUN == 0 else pytest.mark.long)
        for number, name in enumerate(MUTANTS)
    ],
)
def test_hazard_is_found(simulated: SimulatedProcess, name: str) -> None:
    assert simulated.call(seed_that_shows, name, timeout=240) is not None


def test_every_hazard_is_still_in_the_source() -> None:
    """Most of the catalog is run by ``make test-long`` alone: a piece that has changed must not wait for that."""
    for mutant in MUTANTS.values():
        with mutant.active():
            pass
    assert len(MUTANTS) >= 25
