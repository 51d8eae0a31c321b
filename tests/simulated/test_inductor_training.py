"""Training in code that Inductor generates: equal to itself with the device in order, and hazards are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulated import inductor
from tests.simulated.cases import Case, train
from tests.simulated.mutants import MUTANTS
from tests.simulated.process import SimulatedProcess

pytestmark = pytest.mark.skipif(inductor.missing() is not None, reason=inductor.missing() or "")

OPTIONS = ("exact", "windows", "staleness", "reselect often", "int8", "max_grad_norm", "zero_offload", "streamed")
DELAYS = ("random", "compute late", "D2H late", "H2D late", "jobs late")
HAZARDS = (
    "copy before the gradient is split", "upload before its job", "merge before the upload", "job before its gradients",
)  # fmt: skip


def differing(options: str, model: str) -> list[str]:
    """Delays under which training differs from that with the device in order; runs in the child process."""
    case = Case(options, model, entry="inductor", steps=6)
    launched = inductor.Kernel.launched
    expected = train(replace(case, in_order=True))
    assert inductor.Kernel.launched > launched
    return [
        each
        for number, each in enumerate(DELAYS)
        if not train(replace(case, delays=each, seed=number)).equals(expected)
    ]


def shown(name: str) -> bool:
    """Whether the run shows the hazard; runs in the child process."""
    mutant = MUTANTS[name]
    case = replace(mutant.shown_by, entry="inductor")
    expected = train(replace(case, in_order=True))
    return not train(case, hazard=mutant.active).equals(expected)


@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=pytest.mark.long if n > 1 else ()) for n, name in enumerate(OPTIONS)]
)
def test_mlp_equals_itself_in_order(simulated: SimulatedProcess, options: str) -> None:
    assert simulated.call(differing, options, "mlp", timeout=200) == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", OPTIONS)
def test_gpt_equals_itself_in_order(simulated: SimulatedProcess, options: str) -> None:
    assert simulated.call(differing, options, "gpt", timeout=500) == []


@pytest.mark.long
@pytest.mark.parametrize("name", HAZARDS)
def test_hazard_is_found_in_generated_code(simulated: SimulatedProcess, name: str) -> None:
    assert simulated.call(shown, name, timeout=200)
