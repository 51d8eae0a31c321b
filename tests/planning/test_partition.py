"""Shares of ranks: every slice has one part, and parts consist of whole groups of slices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import ParamPlan, Plan
from zenflow_compile.planning.planners import ParamSpec, ShardedBy, empty_plan, extend_plan, make_plan, parts_of

SHAPES = [(64, 16), (16, 640), (1000, 8), (33, 33), (40, 32), (3, 2), (1, 40), (7,)]
POLICIES = [
    {"policy": "zenflow", "topk_ratio": 0.1},
    {"policy": "zenflow", "topk_ratio": 1.0},
    {"policy": "zero_offload"},
    {"policy": "twinflow", "ratio": 0.5},
]


def specs() -> list[ParamSpec]:
    return [ParamSpec(f"p{number}", shape, torch.float32) for number, shape in enumerate(SHAPES)]


def divided(ranks: int, options: Options) -> list[Plan]:
    return [
        extend_plan(replace(empty_plan(options), rank=rank, ranks=ranks), specs(), options) for rank in range(ranks)
    ]


def slices_of(param: ParamPlan) -> list[int]:
    """The slices of the whole parameter that this rank has."""
    whole = torch.arange(param.whole.slices)
    matrix = whole.unsqueeze(1) if param.whole.dim == 0 else whole.unsqueeze(0)
    assert param.share is not None
    return param.share.view(matrix).flatten().tolist()


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 16, 32])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_shares_have_each_slice_once(policy: dict[str, object], ranks: int) -> None:
    options = Options.from_keywords(min_offload_size=1, **policy)
    plans = divided(ranks, options)
    alone = make_plan(specs(), options)
    for index, whole in enumerate(alone.params):
        shares = [plan.params[index] for plan in plans]
        if not whole.offloaded:
            assert shares == [whole] * ranks
            continue
        parts = parts_of(whole, ranks)
        assert ranks % parts == 0
        first = shares[:parts]
        assert sorted(each for share in first for each in slices_of(share)) == list(range(whole.slices))
        assert sum(share.k for share in first) == whole.k
        for rank, share in enumerate(shares):
            assert share.whole == whole
            assert slices_of(share) == slices_of(shares[rank % parts])
            assert share.slices == len(slices_of(share)) == share.shape[0]
            if whole.selects:
                assert share.selects
                assert whole.groups == share.groups * parts
                groups = {each % whole.groups for each in slices_of(share)}
                assert len(groups) == share.groups, "a group is divided among ranks"


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("ratio", [0.05, 0.25, 0.5, 0.75, 0.95, 0.999])
def test_ranks_defer_the_same_parameters(ratio: float, ranks: int) -> None:
    """They flush windows together: none has all slices of a parameter on the device where another one has not."""
    for policy in ({"policy": "twinflow", "ratio": ratio}, {"topk_ratio": ratio, "device_share": 0.0}):
        options = Options.from_keywords(min_offload_size=1, **policy)
        plans = divided(ranks, options)
        for index, whole in enumerate(make_plan(specs(), options).params):
            if whole.offloaded:
                assert len({plan.params[index].deferred > 0 for plan in plans}) == 1


def test_divisors_of_the_groups_divide_evenly() -> None:
    options = Options.from_keywords(topk_ratio=0.1)
    specs = [ParamSpec("large", (4096, 4096), torch.bfloat16)]
    alone = make_plan(specs, options)
    for ranks in (2, 3, 4, 6, 8, 12, 16):
        plan = extend_plan(replace(empty_plan(options), rank=ranks - 1, ranks=ranks), specs, options)
        assert plan.params[0].slices == 4096 // ranks  # the last one has least
        assert abs(plan.host_bytes * ranks / alone.host_bytes - 1) < 0.01
        assert abs(plan.device_bytes * ranks / alone.device_bytes - 1) < 0.03  # 410 selected slices
        assert plan.model_bytes == alone.model_bytes


def test_later_groups_get_the_phases_of_one_rank() -> None:
    options = Options.from_keywords(min_offload_size=1, update_interval=4)
    alone = empty_plan(options)
    divided = replace(alone, rank=1, ranks=2)
    for each in specs():
        alone, divided = (extend_plan(plan, [each], options) for plan in (alone, divided))
    assert [param.phase for param in divided.params] == [param.phase for param in alone.params]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 4, 5, 9])
def test_shards_are_the_chunks_of_pytorch(size: int, ranks: int) -> None:
    parts = [list(ShardedBy(dim=0, rank=rank, ranks=ranks).part(size)) for rank in range(ranks)]
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(ranks)]
    assert parts == chunks + [[]] * (ranks - len(chunks))
