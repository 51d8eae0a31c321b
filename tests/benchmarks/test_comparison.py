"""Tests which systems take turns, and that a system that fails is reported."""

from __future__ import annotations

from typing import Any

from benchmarks.systems.case import Case
from benchmarks.systems.comparison import Outcome, Schedule, compare
from benchmarks.systems.process import WorkerError

SCHEDULE = Schedule(warm_up=1, pilot=1, rounds=2, settle=1, steps=2, profile=1)


class FakeWorker:
    """Takes 10 ms per step and thread, ten times that for zero_offload; the fields say how it fails."""

    missing: frozenset[str] = frozenset()
    fails_in_turns: frozenset[str] = frozenset()
    memory = 1.0

    def __init__(self, case: Case) -> None:
        self.case = case
        self.losses = [1.0] * SCHEDULE.warm_up
        self.runs = 0
        self.network_bytes: list[float] = []

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self) -> dict[str, Any]:
        if self.case.system in self.missing:
            raise WorkerError("not installed", "missing")
        return {"start_seconds": 0.0}

    def run(self, *, settle: int, steps: int) -> tuple[float, list[float]]:
        self.runs += 1
        if self.case.system in self.fails_in_turns and self.runs > 1:
            raise WorkerError("out of memory", "memory")
        self.losses += [1.0] * (settle + steps)
        ms = 10.0 * self.case.threads * (10 if self.case.system == "zero_offload" else 1)
        return ms, [ms] * steps

    def ask(self, command: str, **_: object) -> dict[str, Any]:
        return {"summary": {}} if command == "profile" else {"device_peak_mib": None}

    def memory_mib(self) -> float:
        return self.memory

    def idle_cpu_share(self, seconds: float) -> float:
        return 0.0


def outcomes(*systems: str, **fields: Any) -> dict[str, Outcome]:
    fake: Any = type("Fake", (FakeWorker,), fields)
    cases = [Case(system=system, model="tiny") for system in systems]
    found = compare(cases, [2, 1], SCHEDULE, fake, lambda line: None)
    assert [outcome.case.system for outcome in found] == list(systems)
    return {outcome.case.system: outcome for outcome in found}


def test_systems_continue_with_their_fastest_threads() -> None:
    found = outcomes("adamw", "zero_offload", "zenflow")
    assert found["zero_offload"].tried_ms == {2: 200.0, 1: 100.0}
    assert found["zero_offload"].case.threads == 1
    assert found["zero_offload"].rounds_over_reference == [10.0, 10.0]
    assert set(found["zenflow"].turns_with) == {"adamw", "zero_offload"}
    assert found["adamw"].rounds_over_reference == []
    assert found["zenflow"].breakdown == {}
    assert found["adamw"].breakdown is None


def test_systems_that_do_not_fit_run_pairwise() -> None:
    found = outcomes("adamw", "zero_offload", "zenflow", memory=1e12)
    assert found["zenflow"].turns_with == ("adamw",)
    assert found["adamw"].turns_with == ("zero_offload", "zenflow")
    assert len(found["adamw"].rounds_ms) == 2 * SCHEDULE.rounds
    assert found["zenflow"].rounds_over_reference == [1.0, 1.0]


def test_failed_system_does_not_stop_the_others() -> None:
    found = outcomes(
        "adamw",
        "zero_offload",
        "zenflow",
        missing=frozenset({"zero_offload"}),
        fails_in_turns=frozenset({"zenflow"}),
    )
    assert found["zero_offload"].skipped == "not installed"
    assert found["zenflow"].skipped == "out of memory"
    assert found["zenflow"].rounds_ms == []
    assert len(found["adamw"].rounds_ms) == SCHEDULE.rounds


def test_no_ratios_without_the_reference() -> None:
    found = outcomes("adamw", "zenflow", missing=frozenset({"adamw"}))
    assert found["zenflow"].rounds_over_reference == []
    assert len(found["zenflow"].rounds_ms) == SCHEDULE.rounds
