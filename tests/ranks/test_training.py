"""Ranks that divide a model train as one process does on the joint batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.ranks.models import ALL_POLICIES, WINDOWED, as_rank, difference, in_backward_as_rank, train, uneven
from tests.ranks.sharded import train_sharded
from tests.support.rank_processes import RankProcesses
from zenflow_compile.options.options import Options
from zenflow_compile.planning.planners import ParamSpec, make_plan
from zenflow_compile.runtime.step.gradient_reduction import GradientReduction

EXACT = 1e-6
pytestmark = pytest.mark.timeout(180)


def assert_equal_ranks(results: list[list[torch.Tensor]]) -> None:
    """The weights of all ranks are equal bit for bit."""
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graph"])
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_two_ranks_equal_adamw(two_ranks: RankProcesses, policy: str, compiled: bool, clip: float | None) -> None:
    results = two_ranks.call(as_rank, 2, ALL_POLICIES[policy], compiled=compiled, clip=clip)
    assert_equal_ranks(results)
    assert difference(results[0], train(None, clip=clip)) < EXACT


@pytest.mark.matrix(3)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graph"])
@pytest.mark.parametrize("name", WINDOWED)
def test_two_ranks_equal_one(two_ranks: RankProcesses, name: str, compiled: bool, clip: float | None) -> None:
    results = two_ranks.call(as_rank, 2, WINDOWED[name], steps=24, compiled=compiled, clip=clip)
    assert_equal_ranks(results)
    one = train(WINDOWED[name], steps=24, clip=clip)
    # Noise of 1e-8 may round an element to the next int8 value, a hundredth of the gradient.
    assert difference(results[0], one) < (EXACT if name != "int8" else 2e-3)
    assert difference(one, train(None, steps=24, clip=clip)) > 1e-3, "the windows change nothing"


@pytest.mark.parametrize(
    "options",
    [ALL_POLICIES["zenflow"], WINDOWED["re-selecting"], ALL_POLICIES["deep_optimizer_states"]],
    ids=["exact", "windowed", "streamed"],
)
def test_three_ranks_equal_one(three_ranks: RankProcesses, options: dict[str, Any]) -> None:
    """Three does not divide the groups of slices, so that several ranks have the same ones."""
    results = three_ranks.call(as_rank, 3, options, steps=12, clip=0.1)
    assert_equal_ranks(results)
    assert difference(results[0], train(options, steps=12, clip=0.1)) < EXACT


def in_bf16() -> torch.nn.Module:
    return uneven().bfloat16()


@pytest.mark.parametrize("policy", ["deep_optimizer_states", "zenflow"])
def test_ranks_divide_masters(two_ranks: RankProcesses, policy: str) -> None:
    """bf16 weights have fp32 masters, of which each rank has a part. The mean gradient is rounded once more."""
    results = two_ranks.call(as_rank, 2, ALL_POLICIES[policy], build=in_bf16)
    assert_equal_ranks(results)
    alone = train(ALL_POLICIES[policy], build=in_bf16)
    assert difference([each.float() for each in results[0]], [each.float() for each in alone]) < 2e-2


@pytest.mark.parametrize("declared", [False, True], ids=["not declared", "declared"])
@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graph"])
def test_accumulated_gradients_equal_adamw(two_ranks: RankProcesses, compiled: bool, declared: bool) -> None:
    options = {**ALL_POLICIES["zenflow"], **({"gradient_accumulation_steps": 3} if declared else {})}
    results = two_ranks.call(as_rank, 2, options, compiled=compiled, backwards=3, clip=0.1)
    assert_equal_ranks(results)
    assert difference(results[0], train(None, backwards=3, clip=0.1)) < EXACT


@pytest.mark.parametrize("options", [ALL_POLICIES["zenflow"], WINDOWED["re-selecting"]], ids=["exact", "windowed"])
def test_optimizer_in_backward_equals_one_rank(two_ranks: RankProcesses, options: dict[str, Any]) -> None:
    results = two_ranks.call(in_backward_as_rank, options, 12)
    assert_equal_ranks(results)
    assert difference(results[0], train(options, steps=12)) < EXACT


def late_in_declared(rank: int) -> int:
    """How many parameters are sent a second time, of two declared backwards per step."""
    count = 0

    def counted(*_: Any, **__: Any) -> None:
        nonlocal count
        count += 1

    with mock.patch.object(GradientReduction, "_send_late", counted):
        train({**ALL_POLICIES["zenflow"], "gradient_accumulation_steps": 2}, rank, 2, backwards=2)
    return count


def test_declared_accumulation_sends_once(two_ranks: RankProcesses) -> None:
    assert two_ranks.call(late_in_declared) == [0, 0]


def bf16() -> torch.nn.Module:
    return uneven().to(torch.bfloat16)


@pytest.mark.parametrize("name", ["zero_offload", "zenflow"])
def test_bf16_ranks_stay_equal(two_ranks: RankProcesses, name: str) -> None:
    results = two_ranks.call(as_rank, 2, ALL_POLICIES[name], build=bf16, clip=0.5)
    assert_equal_ranks(results)
    assert difference(results[0], train(None, build=bf16, clip=0.5)) < 0.05


STREAMED = {**ALL_POLICIES["deep_optimizer_states"], "update_stride": 1}
ROUNDED = {"state_dtype": "fp8", "split_master": True, "min_offload_size": 41}


@pytest.mark.parametrize("name", ["zero_offload", "zenflow"])
def test_split_masters_change_no_rank(two_ranks: RankProcesses, name: str) -> None:
    """Each rank has the upload buffers of its own slices, which complete their masters."""
    results = two_ranks.call(as_rank, 2, {**ALL_POLICIES[name], "split_master": True}, build=bf16)
    assert_equal_ranks(results)
    for one, other in zip(results[0], two_ranks.call(as_rank, 2, ALL_POLICIES[name], build=bf16)[0], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "options",
    [ALL_POLICIES["zero_offload"], WINDOWED["re-selecting"], ALL_POLICIES["resident"], STREAMED],
    ids=["whole", "slices", "resident", "streamed"],
)
def test_ranks_with_rounded_moments_are_equal(two_ranks: RankProcesses, options: dict[str, Any]) -> None:
    """Rounding depends on values alone, so it does not matter which rank has a slice."""
    results = two_ranks.call(as_rank, 2, {**options, **ROUNDED}, build=bf16, steps=12)
    assert_equal_ranks(results)
    assert difference(results[0], train({**options, **ROUNDED}, build=bf16, steps=12)) < 0.05
    assert difference(results[0], train(options, build=bf16, steps=12)) > 0.0


@pytest.mark.parametrize(("name", "moments"), [("resident", "fp8"), ("zero_offload", "bf16"), ("zenflow", "bf16")])
def test_shards_with_rounded_moments(two_ranks: RankProcesses, name: str, moments: str) -> None:
    """A rank may have a part of each slice, which is too short for 8 bits here."""
    options = {**ALL_POLICIES[name], "state_dtype": moments, "min_offload_size": 41}
    results = two_ranks.call(train_sharded, 2, options, build=bf16, steps=12)
    assert_equal_ranks(results)
    assert difference(results[0], two_ranks.call(train_sharded, 2, ALL_POLICIES[name], build=bf16, steps=12)[0]) > 0.0
    assert difference(results[0], train(options, build=bf16, steps=12)) < 0.05


@pytest.mark.parametrize(("dtype", "least", "most"), [("fp32", 0.0, 1e-6), ("bf16", 1e-5, 5e-2)])
def test_dtype_of_sums_is_chosen(two_ranks: RankProcesses, dtype: str, least: float, most: float) -> None:
    options = {**ALL_POLICIES["zenflow"], "communication_data_type": dtype}
    results = two_ranks.call(as_rank, 2, options)
    assert_equal_ranks(results)
    assert least <= difference(results[0], train(None)) <= most


@pytest.mark.parametrize("options", [ALL_POLICIES["zenflow"], WINDOWED["re-selecting"]], ids=["exact", "windowed"])
def test_inductor_ranks_equal_one(two_ranks: RankProcesses, options: dict[str, Any]) -> None:
    results = two_ranks.call(as_rank, 2, options, compiled="inductor", steps=6, timeout=170)
    assert_equal_ranks(results)
    assert difference(results[0], train(options, steps=6)) < EXACT


class OneHot(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x, 256).float()


def four_layers() -> nn.Module:
    """Under ``twinflow`` with a ratio of 0.25, all slices of one matrix but one are on the device."""
    torch.manual_seed(0)
    return nn.Sequential(OneHot(), *(nn.Linear(256, 256) for _ in range(4)))


def test_one_deferred_slice_is_one_of_all_ranks(two_ranks: RankProcesses) -> None:
    options: dict[str, Any] = {"policy": "twinflow", "ratio": 0.25}
    params = four_layers().named_parameters()
    plan = make_plan([ParamSpec(name, param.shape, param.dtype) for name, param in params], Options(**options))
    assert 1 in {param.deferred for param in plan.params}
    results = two_ranks.call(as_rank, 2, options, steps=3, build=four_layers)
    assert_equal_ranks(results)
    assert difference(results[0], train(None, steps=3, build=four_layers)) < EXACT
