"""Invariant 1 for policies that keep a share of the state on the device or stream it, and for their mixtures."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch

from tests.exactness.test_half_precision import Given as OneOfEach
from tests.exactness.test_half_precision import MasterAdamW, trained, zenflow_adamw
from tests.support.copies import Copies
from tests.support.trajectories import each_member, largest_difference, plain_adamw, train
from tests.support.zoo import BY_NAME, Member, generator
from zenflow_compile.planning import planners
from zenflow_compile.planning.plan import Placement
from zenflow_compile.runtime.device.thread_lane import copy_without_gil

STREAMED: dict[str, Any] = {"policy": "deep_optimizer_states"}
TWINFLOW: dict[str, dict[str, Any]] = {
    f"twinflow_{ratio}": {"policy": "twinflow", "ratio": ratio} for ratio in (0.2, 0.5, 0.9)
}
STRIDES: dict[str, dict[str, Any]] = {
    "all": {**STREAMED, "update_stride": 1},
    "every_second": {**STREAMED, "update_stride": 2},
    "every_third": {**STREAMED, "update_stride": 3},
    "with_residents": {**STREAMED, "update_stride": 2, "ratio": 0.9},
}
LARGER_SUBGROUPS: dict[str, dict[str, Any]] = {
    "all_at_once": {**STREAMED, "update_stride": 1},
    "every_second_of_larger_ones": {**STREAMED, "update_stride": 2},
}
ONE_STEP: dict[str, Any] = {"update_interval": 1, "topk_ratio": 0.2, "select_interval": 2}
MIXTURES: dict[str, dict[str, Any]] = {
    "windows_and_streamed": {**ONE_STEP, "update_stride": 2},
    "windows_streamed_and_a_share": {**ONE_STEP, "update_stride": 2, "device_share": 0.6},
    "windows_streamed_and_spare_memory": {
        **ONE_STEP,
        "update_stride": 2,
        "device_share": 20_000,
    },
}
SOME = ["mlp", "gpt_tied", "unused_parameters", "experts_without_tokens"]


@pytest.mark.matrix(2)
@each_member(SOME)
@pytest.mark.parametrize("case", TWINFLOW)
def test_twinflow_is_adamw(member: Member, case: str) -> None:
    run = train(member, "eager", 20, **TWINFLOW[case])
    assert run.windows_flushed > 0
    assert largest_difference(run, plain_adamw(member, "eager", 20), member) < member.tolerance


@pytest.mark.matrix(3)
@each_member(SOME)
@pytest.mark.parametrize("case", STRIDES)
def test_deep_optimizer_states_are_adamw(member: Member, case: str) -> None:
    run = train(member, "eager", 20, **STRIDES[case])
    assert run.streamed
    assert run.flushes > 0
    assert (run.windows_flushed == 0) == case.startswith("all")
    assert largest_difference(run, plain_adamw(member, "eager", 20), member) < member.tolerance


@pytest.mark.matrix(3)
@each_member(SOME)
@pytest.mark.parametrize("case", LARGER_SUBGROUPS)
@mock.patch.object(planners, "STRIDES", 1)  # as many subgroups as the stride: several parameters in each
def test_larger_subgroups_are_adamw(member: Member, case: str) -> None:
    run = train(member, "eager", 20, **LARGER_SUBGROUPS[case])
    assert run.streamed
    assert (run.windows_flushed == 0) == (case == "all_at_once")
    assert largest_difference(run, plain_adamw(member, "eager", 20), member) < member.tolerance


@each_member(["mlp", "gpt_tied"])
@pytest.mark.parametrize("case", ["twinflow_0.5", "every_second", "with_residents"])
def test_policies_without_a_graph_are_adamw(member: Member, case: str) -> None:
    run = train(member, None, 20, **{**TWINFLOW, **STRIDES}[case])
    assert run.windows_flushed > 0
    assert largest_difference(run, plain_adamw(member, None, 20), member) < member.tolerance


@each_member(SOME[:2])
@pytest.mark.parametrize("case", MIXTURES)
@pytest.mark.parametrize("inner", ["eager", None])
def test_mixtures_with_one_step_windows_are_adamw(member: Member, case: str, inner: str | None) -> None:
    run = train(member, inner, 20, **MIXTURES[case])
    assert run.flushes >= 20
    assert run.windows_flushed >= 20
    assert run.moved_slices > 0
    assert largest_difference(run, plain_adamw(member, inner, 20), member) < member.tolerance


def test_control_lost_streamed_moments_differ(copies: Copies) -> None:
    """Control: the same run whose write-backs are lost differs by orders of magnitude."""
    member = BY_NAME["mlp"]

    def lossy(target: torch.Tensor, source: torch.Tensor) -> None:
        if threading.current_thread().name != "zenflow-D2H":
            copy_without_gil(target, source)

    copies.make = lossy
    run = train(member, "eager", 20, **STRIDES["all"])
    assert largest_difference(run, plain_adamw(member, "eager", 20), member) > 1e-3


class Several(OneOfEach):
    """A module whose gradients are its inputs: deferred parameters do not change the others' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Parameter(0.1 * torch.randn(24, 24))

    def forward(self, wide: torch.Tensor, tall: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return (self.wide * wide).sum() + (self.tall * tall).sum() + (self.last * last).sum()


def several(step: int) -> tuple[torch.Tensor, ...]:
    """Return the gradients of ``Several`` at a step."""
    source = generator(step)
    return tuple(torch.randn(shape, generator=source) for shape in ((24, 40), (40, 24), (24, 24)))


@pytest.mark.parametrize("inner", ["eager", None])
def test_streamed_state_is_adamw_next_to_windows(inner: str | None) -> None:
    options = {"update_interval": 4, "update_stride": 2, "topk_ratio": 0.2}
    weights, _, optimizer = trained(Several, several, torch.float32, zenflow_adamw(options), inner)
    expected, _, _ = trained(
        Several, several, torch.float32, lambda model: MasterAdamW(list(model.parameters())), inner
    )
    with optimizer:
        plans = optimizer.engine.plan.params
        assert sum(plan.streamed for plan in plans) == 1
        assert sum(plan.placement is Placement.SPLIT_COLUMNS for plan in plans) == 2
        for plan, weight, other in zip(plans, weights, expected, strict=True):
            difference = float((weight - other).abs().max())
            if plan.name == "vector" or plan.streamed:
                assert difference < 1e-6
            else:
                assert difference > 1e-3  # these are updated once in four steps
