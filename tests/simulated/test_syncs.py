"""What the host waits for: nothing in a steady step but the step before last, by name."""

from __future__ import annotations

import pytest

from tests.simulated.accelerator import serve
from tests.simulated.cases import OPTION_SETS, Case, Loop, Outcome, train
from tests.simulated.process import SimulatedProcess, in_simulator
from tests.simulated.simulator import Simulator
from tests.simulated.streams import Event, default_stream
from tests.simulated.waits_at_rest import WaitsAtRest

STEADY = 5  # from this step on: selections have been made, and update windows have been flushed
WAIT = "step before last"


@pytest.mark.parametrize("options", OPTION_SETS)
def test_steady_step_waits_for_one_event_at_most(simulated: SimulatedProcess, options: str) -> None:
    for entry, habit in (("graph", "plain"), ("graph", "clip"), ("hooks", "scaled")):
        found: Outcome = simulated.call(train, Case(options, entry=entry, habit=habit, delays="random", steps=9))
        for syncs, copies in zip(found.syncs[STEADY:], found.copies[STEADY:], strict=True):
            assert set(copies) <= {WAIT}
            assert syncs == ({"event.synchronize": copies[WAIT]} if copies else {})
            assert copies.get(WAIT, 0) <= 1


def test_re_selecting_step_copies_nothing_by_itself(simulated: SimulatedProcess) -> None:
    """Every step selects anew, from the first on."""
    found: Outcome = simulated.call(train, Case("reselect often", delays="none", steps=6))
    for syncs in found.syncs[1:]:
        assert set(syncs) <= {"event.synchronize"}


def test_a_read_of_a_number_is_counted(simulated: SimulatedProcess) -> None:
    """The counts see what the tests above exclude."""
    found: Outcome = simulated.call(train, Case("windows", habit="reads"))
    assert found.syncs[STEADY]


@in_simulator
def test_host_is_two_steps_ahead_at_most(simulator: Simulator) -> None:
    """The device, which works only while the host waits for it, has one whole step queued when the next one is."""
    serve()
    simulator.delay(default_stream(), 1.0)
    ends: list[Event] = []
    behind = []
    with WaitsAtRest(simulator).in_force():
        loop = Loop(Case("exact", steps=6), simulator.device)
        for step in range(6):
            loop.loss(step).backward()
            ends.append(Event())
            ends[-1].record()  # the optimizer step follows: the host waits for its end
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            behind.append(sum(not end.query() for end in ends))
        loop.close()
    assert max(behind) == 2, behind
