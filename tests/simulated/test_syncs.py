"""What the host waits for: nothing in a steady step but the step before last, by name."""

from __future__ import annotations

import pytest

from tests.simulated.accelerator import serve
from tests.simulated.cases import OPTION_SETS, Case, Loop, Outcome, train
from tests.simulated.process import SimulatedProcess, in_simulator
from tests.simulated.simulator import Simulator
from tests.simulated.streams import Event, default_stream

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


def steps_behind(simulator: Simulator, late: float) -> int:
    """The most steps that a late device has not done when the host has queued the next one."""
    simulator.configure()
    simulator.delay(default_stream(), late)
    loop, ends = Loop(Case("exact", steps=6), simulator.device), []
    behind = 0
    for step in range(6):
        loop.step(step)
        ends.append(Event())
        ends[-1].record()
        behind = max(behind, sum(not end.query() for end in ends))
    loop.close()
    return behind


@in_simulator
def test_host_is_two_steps_ahead_at_most(simulator: Simulator) -> None:
    serve()
    behind = 0
    for late in (0.997, 0.999, 0.9995):  # a busy machine slows the host: the device must be later than it
        behind = max(behind, steps_behind(simulator, late))
        if behind >= 2:
            break
    assert behind == 2, "the device has the work of one whole step queued when the next one is"
