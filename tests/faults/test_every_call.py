"""Each call that can fail, fails one time, and Ctrl-C comes anywhere: nothing hangs, and nothing differs silently."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.faults.injection import Site, Target
from tests.faults.trials import BY_MUON, PHASES, SCENARIOS, Trial, outcome, targets_of
from tests.simulated.process import SimulatedCrash, SimulatedHang, SimulatedProcess
from zenflow_compile.runtime.host.workers import Job

IN_EVERY_RUN = 4  # sites of each scenario and phase
SECONDS = 30.0  # a trial takes less than two
FAILING = [
    (scenario, phase)
    for scenario in SCENARIOS
    for phase in PHASES
    if not (scenario == BY_MUON and phase != "train")  # its state is loaded and closed as that of "streamed"
]


def tried(process: SimulatedProcess, trial: Trial, targets: Sequence[Target]) -> dict[Target, str]:
    """The outcome of each trial."""
    found = {target: outcome_of(process, trial, target) for target in targets}
    print(trial, Counter(text.partition(":")[0] for text in found.values()))
    return found


def outcome_of(process: SimulatedProcess, trial: Trial, target: Target) -> str:
    """``outcome`` in a process that a hang ends."""
    try:
        return process.call(outcome, trial, target, timeout=SECONDS)
    except (SimulatedHang, SimulatedCrash) as lost:
        return f"WRONG: {lost}"
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", ()))


def wrong(found: dict[Target, str]) -> dict[Target, str]:
    return {target: text for target, text in found.items() if text.startswith("WRONG")}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(("scenario", "phase"), FAILING)
def test_some_failed_calls_are_harmless(simulated: SimulatedProcess, scenario: str, phase: str, device: str) -> None:
    trial = Trial(scenario, "hooks", phase, device)
    sites, _ = simulated.call(targets_of, trial)
    drawn = random.Random(f"{scenario} {phase} {device}").sample(sites, len(sites))
    found = tried(simulated, trial, drawn[:IN_EVERY_RUN])
    further = iter(drawn[IN_EVERY_RUN:])
    while set(found.values()) == {"nothing changed"}:  # no call that matters was drawn
        site = next(further, None)
        assert site is not None, "no call has failed"
        found |= tried(simulated, trial, [site])
    assert not wrong(found)


def defect_in_submission(trial: Trial, site: Site) -> str:
    """``outcome`` where jobs that could not be queued are not failed; runs in the child process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "abort", lambda *_: None)
        return outcome(trial, site)


def test_trials_find_a_job_without_an_end(simulated: SimulatedProcess) -> None:
    """Proves that a trial sees a hang: ``close`` waits forever for a job that no worker will run."""
    trial = Trial("windows", "hooks", "close")
    sites = simulated.call(targets_of, trial)[0]
    site = next(site for site in sites if site.callee == "pointer" and "workers" in site.file)
    assert not outcome_of(simulated, trial, site).startswith("WRONG")
    with pytest.raises(SimulatedHang):
        simulated.call(defect_in_submission, trial, site, timeout=5)


@pytest.mark.long(100)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("entry", ["hooks", "graph"])
@pytest.mark.parametrize(("scenario", "phase"), FAILING)
def test_every_failed_call_is_harmless(
    simulated: SimulatedProcess, scenario: str, entry: str, phase: str, device: str
) -> None:
    trial = Trial(scenario, entry, phase, device)
    assert not wrong(tried(simulated, trial, simulated.call(targets_of, trial)[0]))


INTERRUPTED = [
    (scenario, entry, phase)
    for scenario in SCENARIOS
    for entry in ("hooks", "graph", "backward")
    for phase in ("train", "close")
    if not (scenario == BY_MUON and (entry == "backward" or phase == "close"))  # that optimizer has one rule
]


def points_of(process: SimulatedProcess, trial: Trial, count: int) -> list[int]:
    """A seeded draw of the points at which the trial can be interrupted."""
    _, points = process.call(targets_of, trial)
    return random.Random(str(trial)).sample(range(points), min(count, points))


@pytest.mark.matrix(5)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(("scenario", "entry", "phase"), INTERRUPTED)
def test_some_interrupts_are_harmless(
    simulated: SimulatedProcess, scenario: str, entry: str, phase: str, device: str
) -> None:
    trial = Trial(scenario, entry, phase, device)
    assert not wrong(tried(simulated, trial, points_of(simulated, trial, 2)))


@pytest.mark.long(100)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(("scenario", "entry", "phase"), INTERRUPTED)
def test_many_interrupts_are_harmless(
    simulated: SimulatedProcess, scenario: str, entry: str, phase: str, device: str
) -> None:
    trial = Trial(scenario, entry, phase, device)
    count = 60 if phase == "train" else 20
    assert not wrong(tried(simulated, trial, points_of(simulated, trial, count)))
