"""Sharded models under a mixed precision policy, in bf16, and with parts that FSDP2 keeps on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from tests.ranks.models import ALL_POLICIES, WINDOWED, difference, uneven
from tests.ranks.sharded import train_sharded
from tests.ranks.test_training import EXACT, assert_equal_ranks
from tests.support.rank_processes import RankProcesses

pytestmark = pytest.mark.timeout(180)
IN_FP32 = pytest.param(torch.float32, marks=pytest.mark.long)


def mixed(reduce: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce, cast_forward_inputs=False)


@pytest.mark.parametrize("reduce", [IN_FP32, pytest.param(None, marks=pytest.mark.long), torch.bfloat16])
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_mixed_precision_equals_adamw(two_ranks: RankProcesses, policy: str, reduce: torch.dtype | None) -> None:
    """Both compute with the same bf16 weights as long as their fp32 weights round alike."""
    settings: dict[str, Any] = {"clip": 0.1, "mp_policy": mixed(reduce)}
    results = two_ranks.call(train_sharded, 2, ALL_POLICIES[policy], **settings)
    assert_equal_ranks(results)
    expected = two_ranks.call(train_sharded, 2, None, **settings)[0]
    assert difference(results[0], expected) < EXACT


@pytest.mark.parametrize("reduce", [IN_FP32, torch.bfloat16])
@pytest.mark.parametrize("name", WINDOWED)
def test_mixed_windows_are_bitwise_equal(two_ranks: RankProcesses, name: str, reduce: torch.dtype) -> None:
    settings: dict[str, Any] = {"steps": 24, "clip": 0.1, "mp_policy": mixed(reduce)}
    results = two_ranks.call(train_sharded, 2, WINDOWED[name], **settings)
    assert_equal_ranks(results)
    assert all(bool(weight.isfinite().all()) for weight in results[0])


def bf16() -> nn.Module:
    return uneven().bfloat16()


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_bf16_shards_train_with_masters(two_ranks: RankProcesses, policy: str) -> None:
    """AdamW rounds bf16 weights in every step. All policies have fp32 masters instead, whose weights round alike."""
    results = two_ranks.call(train_sharded, 2, ALL_POLICIES[policy], build=bf16, clip=0.1)
    assert_equal_ranks(results)
    expected = two_ranks.call(train_sharded, 2, None, build=bf16, clip=0.1)[0]
    resident = two_ranks.call(train_sharded, 2, ALL_POLICIES["resident"], build=bf16, clip=0.1)[0]
    floats = [[each.float() for each in weights] for weights in (results[0], expected, resident)]
    assert difference(floats[0], floats[2]) < 0.01
    assert difference(floats[0], floats[1]) < 0.06


@pytest.mark.parametrize("name", WINDOWED)
def test_bf16_windows_are_bitwise_equal(two_ranks: RankProcesses, name: str) -> None:
    results = two_ranks.call(train_sharded, 2, WINDOWED[name], steps=24, build=bf16, clip=0.1)
    assert_equal_ranks(results)
    assert all(bool(weight.isfinite().all()) for weight in results[0])


@pytest.mark.parametrize("policy", ["resident", "zenflow"])
def test_parts_kept_on_the_host_equal_adamw(two_ranks: RankProcesses, policy: str) -> None:
    settings: dict[str, Any] = {"clip": 0.1, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    results = two_ranks.call(train_sharded, 2, ALL_POLICIES[policy], **settings)
    assert_equal_ranks(results)
    assert difference(results[0], two_ranks.call(train_sharded, 2, None, **settings)[0]) < EXACT
