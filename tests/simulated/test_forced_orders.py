"""The orders that show the hazards of ``mutants.py``, without a hazard: a change that makes one is found here."""

from __future__ import annotations

import pytest

from tests.simulated.cases import Case, differing
from tests.simulated.mutants import FORCED_ORDERS
from tests.simulated.process import SimulatedProcess


@pytest.mark.tier1
@pytest.mark.parametrize(
    "case", FORCED_ORDERS, ids=lambda case: f"{case.options}-{case.model}-{case.habit}-{case.delays}"
)
def test_training_equals_the_cpu(simulated: SimulatedProcess, case: Case) -> None:
    assert simulated.call(differing, [case], timeout=120) == []
