"""Systems in turns, for models of which few fit into memory together.

Companions stay alive for the whole run. The other systems are started one after another, each one time, and take turns
with the companions, so that every ratio is of one round. ``peers`` starts each system two times and keeps more of them
alive; here a start is minutes of compilation and of page-locking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.common import Spread, interleaved, ratios
from benchmarks.evidence.planned import fit
from benchmarks.systems.case import OURS, Case
from benchmarks.systems.comparison import Schedule
from benchmarks.systems.process import TrainingWorker, WorkerError

_FAULTS = ("failure", "died")  # other kinds say that a package or memory is missing


@dataclass(slots=True)
class Turns:
    """Measurements of one system, or why there are none.

    Attributes:
        rounds_ms: mean step of each round; steps_ms: every timed step.
        over: per companion, ratios of ``rounds_ms`` to its rounds.
        companions_ms: per companion, its mean steps in the same rounds.
        facts: of the process; summary: of ``zf.profile()``, for our policies.
        error: why it could not start or go on.
    """

    name: str
    case: Case
    rounds_ms: list[float] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    over: dict[str, list[float]] = field(default_factory=dict)
    companions_ms: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    error: WorkerError | None = None

    @property
    def faulty(self) -> bool:
        """Whether it failed for another reason than a missing package or too little memory."""
        return self.error is not None and self.error.kind in _FAULTS

    def row(self) -> dict[str, Any]:
        """For a results file."""
        case = self.case
        row: dict[str, Any] = {
            "name": self.name,
            "system": case.system,
            **case.described(),
            "clip": case.clip,
            "cores": len(case.cores),
            "threads": case.threads,
            "options": case.options,
        }
        if self.error is not None:
            return {**row, "skipped": str(self.error), "kind": self.error.kind}
        return {
            **row,
            "step_ms": Spread.of(self.rounds_ms).row(),
            "single_step_ms": Spread.of(self.steps_ms).row(),
            "over": {name: Spread.of(values).row() for name, values in self.over.items()},
            "loss": {"first": self.losses[0], "last": self.losses[-1], "steps": len(self.losses)},
            **self.facts,
            "breakdown": self.summary,
        }


def take_turns(
    companions: Mapping[str, Case],
    others: Mapping[str, Case],
    schedule: Schedule,
    make: Callable[..., TrainingWorker] = TrainingWorker,
    memory_bytes: int | None = None,
) -> Iterator[Turns]:
    """Measure ``others`` in their order, each as soon as it is done, then the companions.

    A system that fails has an error and no numbers, and the others go on. A companion that fails is left out.

    Args:
        memory_bytes: of the device. If it does not hold all companions beside each of the others, each of the others
            takes turns with one companion at a time, and both are started for it.
    """
    cases = others.values()
    if memory_bytes is None or all(fit([*companions.values(), case], memory_bytes) for case in cases):
        yield from _beside_all(companions, others, schedule, make, memory_bytes)
    else:
        yield from _beside_one(companions, others, schedule, make, memory_bytes)


def _beside_all(
    companions: Mapping[str, Case],
    others: Mapping[str, Case],
    schedule: Schedule,
    make: Callable[..., TrainingWorker],
    memory_bytes: int | None,
) -> Iterator[Turns]:
    beside = [Turns(name, case) for name, case in companions.items()]
    with ExitStack() as stack:
        kept: list[_Present] = []
        for name, case in others.items():
            turns = Turns(name, case)
            with ExitStack() as alone:
                first = [] if kept else [(each, stack) for each in beside]
                *started, (_, worker) = _start([*first, (turns, alone)], make, schedule, memory_bytes)
                kept = kept or started
                if worker is not None:
                    _run([*kept, (turns, worker)], schedule)
                    _look_at(turns, worker, schedule)
            yield turns
        kept = kept or _start([(each, stack) for each in beside], make, schedule, memory_bytes)
        for turns, worker in kept:
            if turns.error is None and not turns.rounds_ms:  # no other system took turns with it
                _run(kept, schedule)
            if worker is not None:
                _look_at(turns, worker, schedule)
            yield turns


def _beside_one(
    companions: Mapping[str, Case],
    others: Mapping[str, Case],
    schedule: Schedule,
    make: Callable[..., TrainingWorker],
    memory_bytes: int | None,
) -> Iterator[Turns]:
    beside = [Turns(name, case) for name, case in companions.items()]
    for name, case in others.items():
        turns = Turns(name, case)
        for companion in beside:
            with ExitStack() as both:
                started = [(each, both) for each in (companion, turns) if each.error is None]
                pair = _start(started, make, schedule, memory_bytes)
                _run(pair, schedule)
                for each, worker in pair:
                    if worker is not None:
                        _look_at(each, worker, schedule)
        yield turns
    yield from beside


_Present = tuple[Turns, TrainingWorker | None]


def _start(
    systems: Sequence[tuple[Turns, ExitStack]],
    make: Callable[..., TrainingWorker],
    schedule: Schedule,
    memory_bytes: int | None,
) -> list[_Present]:
    """Start systems, each in its stack, and wait for them: one compiles while others do, if all can train at once.

    One that found no memory beside the others, after all, starts again when they wait.
    """
    at_once = memory_bytes is not None and fit([turns.case for turns, _ in systems], memory_bytes, at_once=True)
    present: list[_Present] = []
    for turns, stack in systems:
        present.append((turns, _made(turns, stack, make, schedule)))
        if not at_once:
            present[-1] = _ready(*present[-1])
    if not at_once:
        return present
    present = [_ready(*each) for each in present]
    for number, (turns, stack) in enumerate(systems):
        if turns.error is not None and turns.error.kind == "memory":
            turns.error = None
            present[number] = _ready(turns, _made(turns, stack, make, schedule))
    return present


def _made(
    turns: Turns, stack: ExitStack, make: Callable[..., TrainingWorker], schedule: Schedule
) -> TrainingWorker | None:
    try:
        return stack.enter_context(make(turns.case, warm_up=schedule.warm_up))
    except WorkerError as error:
        turns.error = error
        return None


def _ready(turns: Turns, worker: TrainingWorker | None) -> _Present:
    try:
        if worker is not None:
            worker.start()
    except WorkerError as error:
        turns.error = error
        return turns, None
    return turns, worker


def _run(present: Sequence[_Present], schedule: Schedule) -> None:
    """Turns of all that run, with ratios to the others of the same round."""
    running = {turns.name: (turns, worker) for turns, worker in present if turns.error is None and worker is not None}

    def turn(turns: Turns, worker: TrainingWorker) -> float:
        if turns.error is not None:
            return float("nan")
        try:
            mean, each = worker.run(settle=schedule.settle, steps=schedule.steps)
        except WorkerError as error:
            turns.error = error
            return float("nan")
        turns.steps_ms += each
        return mean

    works = {name: partial(turn, turns, worker) for name, (turns, worker) in running.items()}
    means = interleaved(schedule.rounds, works, warm_up=0)
    alive = {name: means[name] for name, (turns, _) in running.items() if turns.error is None}
    for name, found in alive.items():
        turns, worker = running[name]
        turns.rounds_ms += found
        turns.losses = list(worker.losses)
        for other, theirs in alive.items():
            if other != name:
                turns.over[other] = turns.over.get(other, []) + ratios(found, theirs)
                turns.companions_ms[other] = turns.companions_ms.get(other, []) + theirs


def _look_at(turns: Turns, worker: TrainingWorker, schedule: Schedule) -> None:
    """Read everything but times, after the rounds, so that it cannot disturb them."""
    if turns.error is not None:
        return
    try:
        turns.facts = worker.ask("facts")
        if turns.case.system in OURS:
            turns.summary = worker.ask("profile", steps=schedule.profile)["summary"]
    except WorkerError as error:
        turns.error = error
