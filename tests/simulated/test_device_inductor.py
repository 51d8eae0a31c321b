"""Code that Inductor generates for the simulated device depends on no order that streams leave open."""

from __future__ import annotations

import pytest

from tests.simulated import inductor
from tests.simulated.inductor import Kernel, compile_with_inductor, launches_hold_gil
from tests.simulated.plain_training import equal, train
from tests.simulated.process import in_simulator
from tests.simulated.simulator import PATTERNS, Simulator

pytestmark = pytest.mark.skipif(inductor.missing() is not None, reason=str(inductor.missing()))


@pytest.mark.timeout(420)
@in_simulator(timeout=400)
def test_generated_code_equals_itself_in_order(simulator: Simulator) -> None:
    simulator.configure(in_order=True)
    expected = train("mlp", simulator.device, compiled=compile_with_inductor, fused=True)
    launched = Kernel.launched
    assert launched > 0
    for pattern in PATTERNS:
        for seed in range(2):
            simulator.configure(seed=seed, delays=pattern)
            assert equal(train("mlp", simulator.device, compiled=compile_with_inductor, fused=True), expected)
    # Room for few launches, which keep the GIL while they wait for it: nothing here needs Python to go on.
    simulator.configure(delays="compute late", limit=8)
    with launches_hold_gil():
        assert equal(train("mlp", simulator.device, compiled=compile_with_inductor, fused=True), expected)
    assert Kernel.launched > 2 * launched
