"""Two ranks train on simulated devices as on the CPU, bit for bit, in whatever order the devices run."""

from __future__ import annotations

import gc
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zenflow_compile as zf
from tests.simulated.accelerator import serve
from tests.simulated.cases import (
    HABITS,
    LATE,
    LATE_COLLECTIVES,
    OPTION_SETS,
    RANK_MODELS,
    Case,
    Loop,
    differing,
    on_cpu,
    train,
)
from tests.simulated.mutants import FORCED_ORDERS_OF_RANKS, RANK_MUTANTS
from tests.simulated.simulator import PATTERNS, load_simulator
from tests.simulated.streams import Event, Stream, default_stream
from tests.support.rank_processes import RankProcesses
from tests.support.training import IN_FLIGHT
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.stream_flags import Flag, HostFlags
from zenflow_compile.timeline import COMPUTE, RANKS

pytestmark = pytest.mark.timeout(300)
DELAYS = (*PATTERNS, *LATE, LATE_COLLECTIVES)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """Two processes that have a simulated device each."""
    processes = RankProcesses(2)
    yield processes
    processes.close()


def differing_of_rank(rank: int, cases: list[Case]) -> list[Case]:
    return differing(cases)


def entries_of(habit: str) -> list[str]:
    return ["graph"] if habit == "optimizer in backward" else ["graph", "hooks"]


def every_case(options: str, model: str, habit: str, entries: list[str]) -> list[Case]:
    return [
        Case(options, model, entry, habit, delays, seed=7 * number, values=values, ranks=2)
        for number, (entry, delays, values) in enumerate(
            (entry, delays, values) for entry in entries for delays in DELAYS for values in (True, False)
        )
    ]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("options", OPTION_SETS)
def test_training_equals_the_cpu(ranks: RankProcesses, options: str) -> None:
    draw = random.Random(options)
    model, habit = draw.choice(list(RANK_MODELS)), draw.choice(HABITS)
    drawn = draw.choice(every_case(options, model, habit, entries_of(habit)))
    assert ranks.call(differing_of_rank, [drawn], timeout=200) == [[], []]


def test_expert_that_a_rank_does_not_use_is_received(ranks: RankProcesses) -> None:
    """No forward of the rank waits for what the others send of it, and the optimizer in backward reads a sample."""
    case = Case("windows", "experts", "graph", "optimizer in backward", ranks=2)
    assert ranks.call(differing_of_rank, [case], timeout=200) == [[], []]


def bytes_left_by(rank: int, options: str) -> list[int]:
    """Device memory that an optimizer has when it has given all back, behind each step."""
    serve()
    loop = Loop(Case(options, "experts", habit="scaled", ranks=2, steps=5), load_simulator().device)
    gc.collect()
    torch.sim.synchronize()  # type: ignore[attr-defined]
    before, left = torch.sim.memory_allocated(), []  # type: ignore[attr-defined]
    for step in range(5):
        loop.step(step)
        loop.optimizer.offload_all()
        gc.collect()
        left.append(torch.sim.memory_allocated() - before)  # type: ignore[attr-defined]
    loop.close()
    return left


@pytest.mark.parametrize("options", ["windows", "reselect often", "zenflow streamed"])
def test_ranks_give_every_byte_back(ranks: RankProcesses, options: str) -> None:
    assert ranks.call(bytes_left_by, options, timeout=200) == [[0] * 5, [0] * 5]


@pytest.mark.parametrize(
    "case",
    [
        Case("windows", "matrices", habit="offload all", delays="random", ranks=2),
        Case("reselect often", entry="hooks", habit="offload all", delays=LATE_COLLECTIVES, ranks=2),
    ],
    ids=lambda case: case.options,
)
def test_each_rank_gives_its_memory_back(ranks: RankProcesses, case: Case) -> None:
    """The other one keeps its memory."""
    assert ranks.call(differing_of_rank, [case], timeout=200) == [[], []]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("options", "delays"),
    [
        pytest.param(
            options,
            delays,
            marks=pytest.mark.tier2 if options == "windows" or delays == "random" else pytest.mark.long,
        )
        for options in ("windows", "zero_offload", "staleness")
        for delays in ("none", "random", LATE_COLLECTIVES, "H2D late")
    ],
)
def test_flush_behind_a_step_equals_the_cpu(ranks: RankProcesses, options: str, delays: str) -> None:
    case = Case(options, "gpt", habit="flush", delays=delays, seed=5, steps=6, ranks=2)
    assert ranks.call(differing_of_rank, [case], timeout=200) == [[], []]


@pytest.mark.long(1000)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("habit", "entry"), [(habit, entry) for habit in HABITS for entry in entries_of(habit)])
@pytest.mark.parametrize("model", RANK_MODELS)
@pytest.mark.parametrize("options", OPTION_SETS)
def test_every_case_equals_the_cpu(ranks: RankProcesses, options: str, model: str, habit: str, entry: str) -> None:
    assert ranks.call(differing_of_rank, every_case(options, model, habit, [entry]), timeout=1200) == [[], []]


EARLY = r"index|written through \.data"
"""Errors of a hazard: of an index that was read too early, or a sample that was taken too early."""


def with_hazard(rank: int, name: str, folder: Path) -> bool:
    """Whether the run with the hazard differs from the CPU's. After such an error, ``folder`` has a file."""
    mutant, step = RANK_MUTANTS[name], Loop.step

    def step_or_end(loop: Loop, number: int) -> Tensor:
        try:
            return step(loop, number)
        except RuntimeError as error:
            if re.search(EARLY, str(error)):
                (folder / "found").touch()
                os._exit(1)  # the other rank, which may wait for this one, is told by its connection
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "step", step_or_end)
        return not train(mutant.shown_by, hazard=mutant.active).equals(on_cpu(mutant.shown_by))


@pytest.mark.tier1
@pytest.mark.parametrize("case", FORCED_ORDERS_OF_RANKS, ids=lambda case: f"{case.options}-{case.model}-{case.delays}")
def test_forced_order_equals_the_cpu(ranks: RankProcesses, case: Case) -> None:
    """The orders that show the hazards, without a hazard."""
    assert ranks.call(differing_of_rank, [case]) == [[], []]


@pytest.mark.tier2
@pytest.mark.parametrize("name", RANK_MUTANTS)
def test_hazard_is_found(ranks: RankProcesses, name: str, tmp_path: Path) -> None:
    found = ranks.outcomes(with_hazard, name, tmp_path)
    assert True in found or (tmp_path / "found").exists(), found


# Waits that no run needs as long as the others hold, and the order of events behind a step.


@contextmanager
def held(stream: Stream) -> Iterator[None]:
    """Make ``stream`` stop at this place until the block ends."""
    device = device_of(load_simulator().device)
    assert device.streams is not None
    flags = HostFlags(1, device)
    Flag(flags, 0, 1).wait_on(device.streams, stream)
    behind = Event()
    behind.record(stream)
    try:
        yield
    finally:
        Flag(flags, 0, 1).raise_it()
        behind.synchronize()  # Hazard: a stream that looks later would wait for memory that is others' by then.


@contextmanager
def trained(case: Case, steps: int) -> Iterator[Loop]:
    """A loop that has done some steps."""
    serve()
    load_simulator().configure()
    loop = Loop(case, load_simulator().device)
    for step in range(steps):
        loop.step(step)
    yield loop
    loop.close()


EXACT = Case("exact", "matrices", steps=5, ranks=2)


def step_with_held_uploads(rank: int) -> bool:
    with trained(EXACT, 3) as loop:
        engine = loop.optimizer.engine
        with held(engine.registry.transport.to_device.stream):
            loop.step(3)
            load_simulator().run_others()
            arrivals = [each.arriving for each in engine.offloaded.values()]
            assert all(event is not None and not event.query() for event in arrivals)
        loop.step(4)
        weights = loop.weights()
    return all(map(torch.equal, weights, on_cpu(EXACT).weights))


def test_step_does_not_wait_for_weights(ranks: RankProcesses) -> None:
    """The host goes on while uploads are late, and with them the slices of both ranks."""
    assert ranks.call(step_with_held_uploads) == [True, True]


def recorded_kinds(rank: int) -> tuple[set[tuple[str, str]], float]:
    """Lane and kind of all events of a few steps, and the bytes that were sent."""
    with trained(EXACT, 2) as loop, zf.profile(loop.optimizer) as profile:
        for step in range(2, 5):
            loop.step(step)
        (recording,) = profile.recordings()
    return {(event.lane, event.kind) for event in recording.events}, profile.summary()["sent_bytes_per_step"] or 0.0


def test_gather_has_its_own_lane(ranks: RankProcesses) -> None:
    """Its merges are no work of the training's stream."""
    for kinds, sent in ranks.call(recorded_kinds):
        assert (RANKS, "merge") in kinds
        assert (COMPUTE, "merge") not in kinds
        assert sent > 0


def compute_behind_step(rank: int) -> None:
    """The compute stream ends a step while the weights of that step are held, or never."""
    with trained(Case("auto windows", "matrices", steps=9, ranks=2), 6) as loop:
        loop.loss(6).backward()
        with held(loop.optimizer.engine.ranks.weight_gather.stream.raw):
            loop.optimizer.step()
            default_stream().synchronize()


def test_compute_does_not_wait_for_weights(ranks: RankProcesses) -> None:
    """Also where numbers are summed over ranks for the schedule."""
    ranks.call(compute_behind_step)


def backward_behind_weights(rank: int) -> tuple[bool, bool]:
    with trained(EXACT, 3) as loop:
        loss = loop.loss(3)
        with held(loop.optimizer.engine.ranks.weight_gather.stream.raw):
            loss.backward()
            load_simulator().run_others()
            early = default_stream().query()
        default_stream().synchronize()
        return early, default_stream().query()


def test_backward_comes_behind_the_weights(ranks: RankProcesses) -> None:
    """An applied update may bring the selection by which it splits gradients."""
    assert ranks.call(backward_behind_weights) == [(False, True)] * 2


def write_before_weights_come(rank: int) -> str:
    with trained(EXACT, 3) as loop:
        weight = next(iter(loop.model.parameters()))
        with torch.no_grad(), pytest.raises(RuntimeError, match=IN_FLIGHT):
            weight.mul_(1.01)
        weight.data = torch.ones_like(weight)
        with pytest.raises(RuntimeError) as raised:
            loop.step(3)
        return str(raised.value)


def test_write_while_weights_come_is_refused(ranks: RankProcesses) -> None:
    for text in ranks.call(write_before_weights_come):
        assert "was written while an update of it was on its way" in text
