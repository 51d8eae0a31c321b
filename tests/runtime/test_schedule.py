"""Flushes and re-selections equal those of oracles in plain Python, and use values at a fixed lag."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from zenflow_compile.options.options import AUTO_SELECT_INTERVAL, Options
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates.selection import Selection
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.schedule import ENTRY_MARGIN, RESELECT_BELOW, STATE_BUDGET, Schedule

CPU = torch.device("cpu")
PLAN = ParamPlan(
    index=1,
    name="w",
    shape=(2, 200),
    dtype=torch.float32,
    placement=Placement.SPLIT_COLUMNS,
    dim=1,
    slices=200,
    length=2,
    k=20,
    interval=2,
)


class Run:
    """One parameter under a schedule. ``step`` does what an engine does, and applies selections immediately."""

    def __init__(self, plan: ParamPlan = PLAN, **options: Any) -> None:
        self.plan = plan
        self.schedule = Schedule(Options(**options), CPU, Recorder())
        self.schedule.make_room(3)
        self.device = DeviceState.allocate(plan, CPU)

    def select(self, slices: Tensor, at: int) -> None:
        self.device.selection = Selection.of(slices, self.plan.slices, CPU)
        self.device.selected_at = at

    def step(self, step: int, *, present: bool = True, unscale: float = 1.0) -> tuple[bool, Tensor | None]:
        """Return whether the window was flushed, and the new selection."""
        self.schedule.begin_step(step)
        factor = Number.known(unscale) if present else None
        (flushed,) = self.schedule.due([(self.plan, self.device, factor)], step)
        wanted = self.schedule.selection(self.plan, self.device, step) if flushed else None
        slices = None if wanted is None else wanted.slices
        if wanted is not None and slices is not None:
            assert len(set(slices.tolist()) - set(self.device.selection.selected.tolist())) <= wanted.swaps
            self.select(slices, step)
        self.schedule.end_step()
        return flushed, slices

    def reselections(self, first: int, last: int, score_at: Callable[[int], Tensor]) -> list[int]:
        """Return the steps at which there was a re-selection."""
        found = []
        for step in range(first, last):
            if self.device.selects:
                self.device.score.copy_(score_at(step))
            if self.step(step)[1] is not None:
                found.append(step)
        return found


def scores(entering: int, factor: float) -> Tensor:
    """Slices 0 to 19 have score 1; of the others ``entering`` have ``factor``, and the rest next to nothing."""
    score = torch.full((PLAN.slices,), 1e-3)
    score[: PLAN.k] = 1.0
    score[PLAN.k : PLAN.k + entering] = factor
    return score


def settled(**options: Any) -> Run:
    """A run whose first selection, at step 0, was slices 0 to 19."""
    run = Run(**options)
    run.device.score.copy_(scores(0, 0.0))
    assert run.step(0)[1].tolist() == list(range(PLAN.k))  # type: ignore[union-attr]
    return run


# Re-selections.


def test_drift_reselects_one_window_later() -> None:
    run = settled()
    assert run.reselections(1, 60, lambda step: scores(5, 4.0)) == [AUTO_SELECT_INTERVAL]
    assert set(range(20, 24)) < set(run.device.selection.selected.tolist())  # one of each group; 24 is in that of 20
    late = settled()
    drifted = AUTO_SELECT_INTERVAL + 3  # counted at the next flush, 20, and used at 22
    assert late.reselections(1, 60, lambda step: scores(5, 4.0 if step >= drifted else 0.0)) == [drifted + 3]


def test_drift_of_short_windows_is_known_in_time() -> None:
    """The drift counts two steps later, so that it is counted two windows of one step ahead."""
    run = Run(replace(PLAN, interval=1))
    run.device.score.copy_(scores(0, 0.0))
    run.step(0)
    assert run.reselections(1, 30, lambda step: scores(5, 4.0)) == [AUTO_SELECT_INTERVAL]


def test_steady_selection_is_kept() -> None:
    assert settled().reselections(1, 400, lambda step: scores(0, 0.0)) == []


def test_past_drift_counts_at_its_lag() -> None:
    """The earlier drift decides, and the current scores select: nothing changes sides if nothing has drifted since."""
    run = settled()
    assert run.reselections(1, 17, lambda step: scores(5, 4.0 if step <= 15 else 0.0)) == [16]
    assert run.device.selection.selected.tolist() == list(range(PLAN.k))


@pytest.mark.parametrize(("entering", "expected"), [(4, []), (5, [16])])
def test_small_drift_does_not_reselect(entering: int, expected: list[int]) -> None:
    assert math.isclose(RESELECT_BELOW, 0.8)
    assert settled().reselections(1, 40, lambda step: scores(entering, 4.0)) == expected


def test_slices_enter_only_by_a_margin() -> None:
    """Scores that alternate in leading swap slices back and forth without the margin, and none with it."""
    below, above = 1.0 + 0.9 * ENTRY_MARGIN, 1.0 + 1.1 * ENTRY_MARGIN
    assert settled().reselections(1, 100, lambda step: scores(20, below)) == []
    assert settled().reselections(1, 20, lambda step: scores(20, above)) == [16]
    fixed = settled(select_interval=16)
    turns = fixed.reselections(1, 100, lambda step: scores(20, below if step // 16 % 2 else 1 / below))
    assert turns == [16, 32, 48, 64, 80, 96]


def test_slices_below_the_margin_do_not_enter() -> None:
    run = settled()
    score = scores(5, 4.0)
    score[25:30] = 1.1  # ahead of what stays, but by less than the margin
    assert run.reselections(1, 20, lambda step: score) == [16]
    assert set(run.device.selection.selected.tolist()) & set(range(25, 30)) == set()


def test_given_select_interval_is_kept() -> None:
    run = settled(select_interval=6)
    assert run.reselections(1, 30, lambda step: scores(0, 0.0)) == [6, 12, 18, 24]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 20, 100])
@pytest.mark.parametrize("slices", [20, 200])
def test_moved_state_stays_within_its_budget(dtype: torch.dtype, k: int, slices: int) -> None:
    """The budget per step is a share of the parameter's bytes; here every slice drifts all the time."""
    plan = replace(PLAN, dtype=dtype, shape=(2, slices), slices=slices, k=min(k, slices // 2))
    run = Run(plan)
    swaps, selected, steps = 0, None, 600
    for step in range(steps):
        score = torch.rand(slices, generator=torch.Generator().manual_seed(step // 5)) ** 4
        run.device.score.copy_(score)
        wanted = run.step(step)[1]
        if wanted is not None:
            assert len(set(wanted.tolist())) == plan.k
            swaps += 0 if selected is None else len(set(wanted.tolist()) - selected)
            selected = set(wanted.tolist())
    moved = swaps * plan.length * 2 * 12
    allowed = STATE_BUDGET * steps * plan.numel * dtype.itemsize
    assert 0.4 * min(allowed, steps / 18 * plan.k * plan.length * 24) < moved <= allowed


@pytest.mark.parametrize("changes", [{"k": 0}, {"k": 200}, {"fixed": True}])
def test_nothing_is_selected_without_a_choice(changes: dict[str, Any]) -> None:
    assert Run(replace(PLAN, **changes)).reselections(0, 40, lambda step: torch.rand(200)) == []


# Windows that adapt.


def flushes_of(run: Run, steps: int, *, missing: frozenset[int] = frozenset(), first: int = 0) -> list[int]:
    """Return the steps at which windows are flushed, with norms that depend on the step alone."""
    found = []
    for step in range(first, first + steps):
        run.device.norms.copy_(norms_at(step))
        if run.step(step, present=step not in missing, unscale=0.5)[0]:
            found.append(step)
    return found


def norms_at(step: int) -> Tensor:
    norms = torch.rand(PLAN.slices, generator=torch.Generator().manual_seed(step))
    norms[: PLAN.k] *= 4.0
    return norms


def expected_flushes(steps: int, ratio: float, shortest: int, longest: int, missing: frozenset[int]) -> list[int]:
    """Compute the flushes by the rule, with the selection 0 to 19, which never changes here."""
    found: list[int] = []
    window: list[int] = []
    for step in range(steps):
        window.append(step)
        known = [each for each in window[:-2] if each not in missing]  # two steps late
        norms = [norms_at(each).double() for each in known]
        waiting = sum(float((each[20:].sum() / 180).sqrt()) for each in norms)
        selected = sum(float((each[:20].sum() / 20).sqrt()) for each in norms)
        grown = bool(known) and waiting >= ratio * selected / len(known)
        if (grown and len(window) >= shortest) or len(window) == longest:
            found.append(step)
            window = []
    return found


ADAPTIVE: dict[str, Any] = {"update_interval": (None, 6)}
LONGEST = replace(PLAN, interval=6)


@pytest.mark.parametrize("shortest", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("ratio", [0.0, 0.7, 0.99, 1.0])
@pytest.mark.parametrize("missing", [frozenset[int](), frozenset({3, 4, 11, 20, 21, 22, 23, 24, 25, 26})])
def test_windows_flush_when_deferred_norm_has_grown(ratio: float, shortest: int, missing: frozenset[int]) -> None:
    run = Run(LONGEST, update_interval=(shortest, 6), auto_ratio=ratio)
    run.device.score[: PLAN.k] = 1.0
    found = flushes_of(run, 60, missing=missing)
    assert found == expected_flushes(60, ratio, shortest, 6, missing)
    assert min(b - a for a, b in pairwise([-1, *found])) >= shortest


def test_gradients_alone_decide_before_measurement() -> None:
    run = Run(LONGEST, **ADAPTIVE, auto_ratio=0.7)
    assert run.schedule.shortest_window is None
    run.device.score[: PLAN.k] = 1.0
    assert flushes_of(run, 30) == expected_flushes(30, 0.7, 1, 6, frozenset())
    run.schedule.shortest_window = 6
    later = flushes_of(run, 40, first=30)
    assert {b - a for a, b in pairwise(later)} == {6}


@pytest.mark.parametrize("options", [{}, {"update_interval": 4}, {"update_interval": (None, 1)}])
def test_no_measurement_where_it_decides_nothing(options: dict[str, Any]) -> None:
    assert Run(**options).schedule.shortest_window == 1


# State.


@pytest.mark.parametrize("position", range(12, 24))
def test_restored_schedule_decides_alike(position: int) -> None:
    """The state is saved at every position, with norms and a drift that were computed but not used yet."""

    def score_at(step: int) -> Tensor:
        return torch.rand(PLAN.slices, generator=torch.Generator().manual_seed(step // 7))

    def go_on(run: Run, first: int) -> list[tuple[bool, list[int] | None]]:
        done = []
        for step in range(first, 60):
            run.device.norms.copy_(norms_at(step))
            run.device.score.copy_(score_at(step))
            flushed, wanted = run.step(step)
            done.append((flushed, None if wanted is None else wanted.tolist()))
        return done

    options: dict[str, Any] = {"update_interval": (1, 6), "auto_ratio": 0.9}
    whole = go_on(Run(LONGEST, **options), 0)
    assert sum(wanted is not None for _, wanted in whole[position:]) >= 2
    first = Run(LONGEST, **options)
    for step in range(position):
        first.device.norms.copy_(norms_at(step))
        first.device.score.copy_(score_at(step))
        first.step(step)
    file = io.BytesIO()
    torch.save(first.schedule.state(PLAN.index), file)
    second = Run(LONGEST, **options)
    second.device.norms.fill_(7.0)
    second.step(0)  # what it gathered for itself is dropped
    second.schedule.forget()
    second.schedule.restore(PLAN.index, torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    second.select(first.device.selection.selected, first.device.selected_at or 0)
    assert go_on(second, position) == whole[position:]
    assert go_on(first, position) == whole[position:]  # asking for the state changed nothing


def test_late_unscale_is_read_two_steps_later() -> None:
    reads: list[int] = []
    run, plain = (Run(LONGEST, update_interval=(1, 6), auto_ratio=0.7) for _ in range(2))
    for step in range(12):

        class Cell:
            def item(self, step: int = step) -> float:
                reads.append(step)
                return 0.5

        unscale = Number(torch.tensor(0.5, dtype=torch.float64), [], [Cell()])
        for each, factor in ((run, unscale), (plain, Number.known(0.5))):
            each.device.norms.copy_(norms_at(step))
            each.schedule.begin_step(step)
            (flushed,) = each.schedule.due([(LONGEST, each.device, factor)], step)
            if flushed and each.schedule.selection(LONGEST, each.device, step) is not None:
                each.device.selected_at = step
            each.schedule.end_step()
        assert all(read <= step - 2 for read in reads)
        assert run.schedule.window(LONGEST.index) == plain.schedule.window(LONGEST.index)
    assert len(reads) > 4
