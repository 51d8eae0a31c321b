"""Each call that can fail, fails one time: training raises or is not affected, and never hangs or differs silently."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.faults.injection import Site
from tests.faults.trials import PHASES, SCENARIOS, Trial, outcome, sites_of
from tests.simulated.process import SimulatedCrash, SimulatedHang, SimulatedProcess
from zenflow_compile.runtime.host.python_pool import PythonPool

IN_EVERY_RUN = 4  # sites of each scenario and phase
SECONDS = 30.0  # a trial takes less than two


def tried(process: SimulatedProcess, trial: Trial, sites: Sequence[Site]) -> dict[Site, str]:
    """The outcome of each trial."""
    found = {site: outcome_of(process, trial, site) for site in sites}
    print(trial, Counter(text.partition(":")[0] for text in found.values()))
    return found


def outcome_of(process: SimulatedProcess, trial: Trial, site: Site) -> str:
    """``outcome`` in a process that a hang ends."""
    try:
        return process.call(outcome, trial, site, timeout=SECONDS)
    except (SimulatedHang, SimulatedCrash) as lost:
        return f"WRONG: {lost}"
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", ()))


def wrong(found: dict[Site, str]) -> dict[Site, str]:
    return {site: text for site, text in found.items() if text.startswith("WRONG")}


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_some_failed_calls_are_harmless(simulated: SimulatedProcess, scenario: str, phase: str, device: str) -> None:
    trial = Trial(scenario, "hooks", phase, device)
    sites = simulated.call(sites_of, trial)
    drawn = random.Random(f"{scenario} {phase} {device}").sample(sites, min(IN_EVERY_RUN, len(sites)))
    found = tried(simulated, trial, drawn)
    assert not wrong(found)
    assert set(found.values()) - {"nothing changed"}, "no call has failed"


def defect_in_submission(trial: Trial, site: Site) -> str:
    """``outcome`` where jobs that could not be queued are not failed; runs in the child process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PythonPool, "_refuse", lambda *_: None)
        return outcome(trial, site)


def test_trials_find_a_job_without_an_end(simulated: SimulatedProcess) -> None:
    """Proves that a trial sees a hang: ``close`` waits forever for a job that no worker will run."""
    trial = Trial("windows", "hooks", "close")
    (site,) = (
        site for site in simulated.call(sites_of, trial) if site.callee == "sorted" and "python_pool" in site.file
    )
    assert not outcome_of(simulated, trial, site).startswith("WRONG")
    with pytest.raises(SimulatedHang):
        simulated.call(defect_in_submission, trial, site, timeout=5)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("entry", ["hooks", "graph"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_failed_call_is_harmless(
    simulated: SimulatedProcess, scenario: str, entry: str, phase: str, device: str
) -> None:
    trial = Trial(scenario, entry, phase, device)
    assert not wrong(tried(simulated, trial, simulated.call(sites_of, trial)))
