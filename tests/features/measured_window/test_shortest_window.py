"""Tests the arithmetic of the shortest update window, and which steps may be measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.features import measured_window
from zenflow_compile.runtime.features.measured_window import ShortestWindow, shortest_window
from zenflow_compile.runtime.recorder import Recorder

CPU = torch.device("cpu")
# 80 deferred slices of 100: 8000 elements; in bf16 a flush of S = 1, 2, 3, 4 steps touches 28, 30, 32, 34 bytes each.
PLAN = ParamPlan(
    index=0,
    name="w",
    shape=(100, 100),
    dtype=torch.bfloat16,
    placement=Placement.SPLIT_COLUMNS,
    dim=1,
    slices=100,
    length=100,
    k=20,
    interval=4,
)
PER_STEP = {steps: 8000 * (26 + 2 * steps) / steps for steps in (1, 2, 3, 4)}


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_flushes_of_a_step_fit_into_the_hidden_time(steps: int) -> None:
    assert shortest_window([PLAN], bytes_per_second=PER_STEP[steps] * 1.001, hidden_s=1.0) == steps
    assert shortest_window([PLAN], bytes_per_second=1.0, hidden_s=PER_STEP[steps] * 1.001) == steps
    assert shortest_window([PLAN] * 3, bytes_per_second=3.003 * PER_STEP[steps], hidden_s=1.0) == steps


def test_longest_window_if_none_is_long_enough() -> None:
    assert shortest_window([PLAN], bytes_per_second=1.0, hidden_s=1.0) == 4
    assert shortest_window([replace(PLAN, interval=1)], bytes_per_second=1.0, hidden_s=1.0) == 1


class Clock(Recorder):
    """A recorder whose time is set by hand, in seconds."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.seconds = 0.0

    def now(self) -> int:
        return round(self.seconds * 1e9)


class Measuring:
    """The bound for one parameter, on a machine that flushes windows of one step in exactly a second."""

    def __init__(self, *, whole_step: bool = False, plan: ParamPlan = PLAN) -> None:
        self.clock = Clock()
        self.flushed: list[Any] = []
        offloaded = SimpleNamespace(plan=plan, host=SimpleNamespace(kernel=None, flushed=self.flushed))
        registry: Any = SimpleNamespace(offloaded={0: offloaded}, transport=SimpleNamespace(workers=None))
        self.bound = ShortestWindow(registry, self.clock, whole_step=whole_step)

    def step(self, forward: float, backward: float, *, graphs: tuple[int, int] = (0, 0)) -> int | None:
        """``graphs``: compiled until the end of the forward, and of the step."""
        self.clock.seconds += forward
        found = self.bound.begin_backward(graphs[0])
        self.clock.seconds += backward
        self.bound.end_step(graphs[1])
        return found


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Replaces the host's measurement by a number, and counts the calls."""
    made: list[float] = []

    def measured(*_: Any) -> float:
        made.append(PER_STEP[1])
        return PER_STEP[1]

    monkeypatch.setattr(measured_window, "host_rate", measured)
    return made


def fits(steps: int) -> float:
    """Seconds in which a step's flushes fit with update windows of this many steps, and not with shorter ones."""
    return PER_STEP[steps] / PER_STEP[1] * 1.001


def test_second_step_decides_for_the_third(rate: list[float]) -> None:
    run = Measuring()
    assert run.step(100.0, 100.0) is None  # compiles
    assert rate == [PER_STEP[1]]
    assert run.step(fits(3), 50.0) is None
    assert run.step(100.0, 100.0) == 3
    assert len(rate) == 1


def test_whole_step_hides_updates_in_the_backward() -> None:
    run = Measuring(whole_step=True)
    run.step(100.0, 100.0)
    run.step(fits(3) - 0.3, 0.3)
    assert run.step(1.0, 1.0) == 3


def test_staleness_adds_a_step_to_hide_in() -> None:
    run = Measuring(plan=replace(PLAN, staleness=1))
    run.step(100.0, 100.0)
    run.step(0.1, fits(2) - 0.2)
    assert run.step(1.0, 1.0) == 2


@pytest.mark.parametrize("graphs", [(3, 3), (2, 3)], ids=["forward", "backward"])
def test_compiling_step_is_not_measured(graphs: tuple[int, int], rate: list[float]) -> None:
    run = Measuring()
    run.step(100.0, 100.0, graphs=(1, 2))
    assert run.step(100.0, 100.0, graphs=graphs) is None
    assert run.step(fits(4), 1.0, graphs=(3, 3)) is None
    assert run.step(100.0, 100.0, graphs=(3, 3)) == 4
    assert len(rate) == 1


def test_step_with_update_in_flight_is_not_measured(rate: list[float]) -> None:
    run = Measuring()
    run.flushed.append(object())
    run.step(100.0, 100.0)
    assert rate == []  # nor is the host, whose workers are busy
    run.step(100.0, 100.0)
    run.flushed.clear()
    run.step(100.0, 100.0)
    run.step(fits(2), 1.0)
    assert run.step(100.0, 100.0) == 2


def test_step_without_backward_is_not_measured() -> None:
    """Gradients were written by hand, or a state was loaded in between."""
    run = Measuring()
    run.step(100.0, 100.0)
    run.bound.end_step(0)
    run.step(fits(2), 1.0)
    run.bound.forget()
    assert run.step(100.0, 100.0) is None
    run.step(fits(3), 1.0)
    assert run.step(100.0, 100.0) == 3
