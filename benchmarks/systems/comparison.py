"""Measures several systems on one workload: thread counts tried alone, then rounds in which they take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psutil
import torch

from benchmarks.common import interleaved, ratios
from benchmarks.systems.case import OURS, Case
from benchmarks.systems.process import TrainingWorker, WorkerError

REFERENCE = "adamw"
_MEMORY_SHARE = 0.7  # of what is free, that processes alive at once may take
_IDLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long everything is measured, in steps.

    Attributes:
        warm_up: before the first answer: compilation, first windows, first selection.
        pilot: timed steps per thread count that is tried.
        rounds: turns of every system.
        settle: steps of a turn that are not timed: caches and clocks recover from the turn of another.
        steps: timed steps of a turn; a multiple of the window, so that each turn holds whole windows.
        profile: steps under ``zf.profile()``, after all rounds.
    """

    warm_up: int = 12
    pilot: int = 12
    rounds: int = 10
    settle: int = 4
    steps: int = 12
    profile: int = 24


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Measurements of one system, or why there are none.

    Attributes:
        case: with the thread count that was chosen.
        tried_ms: mean step per thread count, tried alone. The mean, because a window's long step must count.
        memory_mib: host memory after the pilot, of all ranks, children included.
        network_bytes: that each rank has sent through the network per step, by round.
        rounds_ms: mean step of each round.
        steps_ms: every timed step, by round.
        rounds_over_reference: ratios of ``rounds_ms`` to the reference's rounds.
        losses: of every step made, warm-up included.
        facts: of the process, see ``worker.Trainer.facts``.
        idle_cpu_share: cores kept busy while idle.
        breakdown: ``zf.profile().summary()``, for our policies.
        turns_with: the systems that took turns with it.
        skipped: why there are no numbers.
    """

    case: Case
    tried_ms: dict[int, float] = field(default_factory=dict)
    memory_mib: float = 0.0
    network_bytes: list[float] = field(default_factory=list)
    rounds_ms: list[float] = field(default_factory=list)
    steps_ms: list[list[float]] = field(default_factory=list)
    rounds_over_reference: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    idle_cpu_share: float | None = None
    breakdown: dict[str, Any] | None = None
    turns_with: tuple[str, ...] = ()
    skipped: str | None = None


def compare(
    cases: Sequence[Case],
    threads: Sequence[int],
    schedule: Schedule,
    make: Callable[[Case], TrainingWorker],
    say: Callable[[str], None],
) -> list[Outcome]:
    """Measure ``cases``, which differ in their system alone; outcomes in their order.

    Every system is tried alone with each of ``threads`` and goes on with its fastest. Then all take turns,
    ``REFERENCE`` among them. Where they do not fit into memory together, each takes turns with the reference alone.
    """
    outcomes = [_try_threads(case, threads, schedule, make, say) for case in cases]
    running = [outcome for outcome in outcomes if outcome.skipped is None]
    reference = next((outcome for outcome in running if outcome.case.system == REFERENCE), None)
    others = [outcome for outcome in running if outcome is not reference]
    groups = [others] if _fit_together(running) else [[outcome] for outcome in others]
    with ExitStack() as stack:
        kept = _start(stack, reference, make, say) if reference else None
        for group in groups or [[]]:
            with ExitStack() as of_group:
                workers = [(o, _start(of_group, o, make, say)) for o in group]
                present = [(o, worker) for o, worker in workers if worker is not None]
                if reference is not None and kept is not None:
                    present.insert(0, (reference, kept))
                say("turns of " + ", ".join(outcome.case.system for outcome, _ in present))
                _take_turns(present, schedule)
                for outcome, worker in present:
                    if outcome.skipped is None:
                        _look_at(outcome, worker, schedule)
    return outcomes


def _try_threads(
    case: Case,
    threads: Iterable[int],
    schedule: Schedule,
    make: Callable[[Case], TrainingWorker],
    say: Callable[[str], None],
) -> Outcome:
    outcome = Outcome(case=case)
    for count in threads:
        alone = replace(case, threads=count)
        try:
            with make(alone) as worker:
                seconds = worker.start()["start_seconds"]
                outcome.tried_ms[count], _ = worker.run(settle=schedule.settle, steps=schedule.pilot)
                outcome.facts = worker.ask("facts")
                outcome.memory_mib = max(outcome.memory_mib, worker.memory_mib())
        except WorkerError as error:
            outcome.skipped = str(error)
            say(f"{case.system}: {'not run' if error.kind == 'missing' else error.kind}: {error}")
            return outcome
        say(f"{case.system}, threads {count}: {outcome.tried_ms[count]:.1f} ms, ready after {seconds:.0f} s")
    outcome.case = replace(case, threads=min(outcome.tried_ms, key=outcome.tried_ms.__getitem__))
    return outcome


def _fit_together(outcomes: Sequence[Outcome]) -> bool:
    """Whether all processes can be alive at once, judged by what each took alone."""
    host = sum(outcome.memory_mib for outcome in outcomes) * 2**20
    if host > _MEMORY_SHARE * psutil.virtual_memory().available:
        return False
    device = sum(outcome.facts["device_peak_mib"] or 0 for outcome in outcomes) * 2**20
    return not device or device < _MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory


def _start(
    stack: ExitStack, outcome: Outcome, make: Callable[[Case], TrainingWorker], say: Callable[[str], None]
) -> TrainingWorker | None:
    """Start a worker that ``stack`` closes; None if it failed."""
    worker = stack.enter_context(make(outcome.case))
    try:
        worker.start()
    except WorkerError as error:
        outcome.skipped = str(error)
        say(f"{outcome.case.system}: {error.kind}: {error}")
        return None
    return worker


def _take_turns(present: Sequence[tuple[Outcome, TrainingWorker]], schedule: Schedule) -> None:
    """Rounds of turns; each outcome gets its times, and its ratios to the reference of the same round.

    A system that fails in a turn, out of memory for example, has no further ones and no numbers.
    """

    def turn(outcome: Outcome, worker: TrainingWorker) -> float:
        if outcome.skipped is not None:
            return float("nan")
        try:
            mean, each = worker.run(settle=schedule.settle, steps=schedule.steps)
        except WorkerError as error:
            outcome.skipped = str(error)
            return float("nan")
        outcome.steps_ms.append(each)
        return mean

    works = {outcome.case.system: partial(turn, outcome, worker) for outcome, worker in present}
    means = interleaved(schedule.rounds, works, warm_up=0)
    running = [(outcome, worker) for outcome, worker in present if outcome.skipped is None]
    systems = [outcome.case.system for outcome, _ in running]
    for outcome, worker in running:
        system = outcome.case.system
        outcome.rounds_ms += means[system]
        outcome.losses = list(worker.losses)
        outcome.network_bytes = list(worker.network_bytes)
        outcome.turns_with += tuple(other for other in systems if other != system and other not in outcome.turns_with)
        if system != REFERENCE and REFERENCE in systems:
            outcome.rounds_over_reference = ratios(means[system], means[REFERENCE])


def _look_at(outcome: Outcome, worker: TrainingWorker, schedule: Schedule) -> None:
    """Read everything but times, after the rounds, so that it cannot disturb them."""
    outcome.facts = worker.ask("facts")
    outcome.idle_cpu_share = worker.idle_cpu_share(_IDLE_SECONDS)
    if outcome.case.system in OURS:
        outcome.breakdown = worker.ask("profile", steps=schedule.profile)["summary"]
