"""Each hazard of the catalog is found: its run differs from the CPU's, and the run without the hazard does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulated.cases import differing, on_cpu, train
from tests.simulated.mutants import MEMORY_MUTANTS, MUTANTS, RANK_MUTANTS, SEEDS, WEIGHT_MUTANTS
from tests.simulated.process import SimulatedCrash, SimulatedProcess
from zenflow_compile.runtime.nvme.state_file import StateFileError

IN_EVERY_RUN = 7  # of the catalog, one in so many


def shows(name: str, seed: int) -> bool:
    """Whether the run with the hazard differs from the CPU, or what it read too early was no index, or no file."""
    mutant = MUTANTS[name]
    try:
        return not train(replace(mutant.shown_by, seed=seed), hazard=mutant.active).equals(on_cpu(mutant.shown_by))
    except (RuntimeError, IndexError) as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, (IndexError, StateFileError)):
            reason = reason.__cause__ or reason.__context__
        if reason is None:
            raise
        return True


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % IN_EVERY_RUN == 0 else pytest.mark.long)
        for number, name in enumerate(MUTANTS)
    ],
)
def test_hazard_is_found(simulated: SimulatedProcess, name: str) -> None:
    for seed in SEEDS:
        try:
            found = simulated.call(shows, name, seed, timeout=120)
        except SimulatedCrash:  # by an index that it read too early, which not every kernel checks
            found = True
        if found:
            assert simulated.call(differing, [replace(MUTANTS[name].shown_by, seed=seed)], timeout=120) == []
            return
    pytest.fail("not found")


def test_every_hazard_is_still_in_the_source() -> None:
    """Most of the catalog is run by ``make test-long`` alone: a piece that has changed must not wait for that."""
    for mutant in (
        *MUTANTS.values(), *RANK_MUTANTS.values(), *WEIGHT_MUTANTS.values(), *MEMORY_MUTANTS.values(),
    ):  # fmt: skip
        with mutant.active():
            pass
    assert len(MUTANTS) >= 25
