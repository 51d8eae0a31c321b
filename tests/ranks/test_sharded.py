"""Models that FSDP2 shards train as with AdamW on the joint batch."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from tests.ranks.models import ADAM, ALL_POLICIES, WINDOWED, batch, difference, optimizer_over, train
from tests.ranks.sharded import across_slices, crosswise, sharded, train_sharded, whole
from tests.ranks.test_training import EXACT, assert_equal_ranks
from tests.support.rank_processes import RankProcesses
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_sharded_model_equals_adamw(two_ranks: RankProcesses, policy: str, clip: float | None) -> None:
    results = two_ranks.call(train_sharded, 2, ALL_POLICIES[policy], clip=clip)
    assert_equal_ranks(results)
    assert difference(results[0], train(None, clip=clip)) < EXACT


@pytest.mark.long
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_eight_ranks_of_shards_equal_adamw(eight_ranks: RankProcesses, policy: str) -> None:
    results = eight_ranks.call(train_sharded, 8, ALL_POLICIES[policy], clip=0.1, rows=24)
    assert_equal_ranks(results)
    assert difference(results[0], train(None, clip=0.1, rows=24)) < EXACT


@pytest.mark.parametrize("syncs", [True, False])
def test_accumulation_of_shards_equals_adamw(two_ranks: RankProcesses, syncs: bool) -> None:
    results = two_ranks.call(train_sharded, 2, ALL_POLICIES["zenflow"], backwards=3, syncs=syncs, clip=0.1)
    assert_equal_ranks(results)
    assert difference(results[0], train(None, backwards=3, clip=0.1)) < EXACT


def prefetch(model: nn.Module) -> None:
    children = [child for child in model.children() if isinstance(child, FSDPModule)]
    for one, following in pairwise(children):
        one.set_modules_to_forward_prefetch([following])


def test_forward_prefetch_equals_adamw(two_ranks: RankProcesses) -> None:
    results = two_ranks.call(train_sharded, 2, ALL_POLICIES["zero_offload"], change=prefetch)
    assert difference(results[0], train(None)) < EXACT


def test_compiled_blocks_equal_adamw(two_ranks: RankProcesses) -> None:
    results = two_ranks.call(train_sharded, 2, ALL_POLICIES["zenflow"], compiled=True)
    assert difference(results[0], train(None)) < EXACT


def hybrid(rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return train_sharded(rank, 2, options, clip=0.1, mesh=mesh)


def test_hybrid_shards_equal_adamw(two_ranks: RankProcesses) -> None:
    results = two_ranks.call(hybrid, ALL_POLICIES["zenflow"])
    assert_equal_ranks(results)
    assert difference(results[0], train(None, clip=0.1)) < EXACT


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_of_shards_train(two_ranks: RankProcesses, name: str) -> None:
    """Rows are selected by the rank that has them, so that the run is not that of one device."""
    results = two_ranks.call(train_sharded, 2, WINDOWED[name], steps=24, clip=0.1)
    assert_equal_ranks(results)
    windowed = difference(train(WINDOWED[name], steps=24, clip=0.1), train(None, steps=24, clip=0.1))
    assert 1e-3 < difference(results[0], train(None, steps=24, clip=0.1)) < 3 * windowed


@pytest.mark.parametrize("name", [name for name in WINDOWED if name != "int8"])  # its scales are those of parts
def test_undivided_slices_train_as_one_device(two_ranks: RankProcesses, name: str) -> None:
    """Each rank has a part of every slice: slices are selected and scheduled by norms over all ranks."""
    settings: dict[str, Any] = {"steps": 24, "clip": 0.1, "build": crosswise}
    results = two_ranks.call(train_sharded, 2, WINDOWED[name], shard_placement_fn=across_slices, **settings)
    assert_equal_ranks(results)
    alone = train(WINDOWED[name], **settings)
    assert difference(results[0], alone) < EXACT
    assert difference(alone, train(None, **settings)) > 1e-3, "the windows change nothing"


def test_three_shards_equal_adamw(three_ranks: RankProcesses) -> None:
    """A row of 1 is empty on two ranks."""
    results = three_ranks.call(train_sharded, 3, ALL_POLICIES["zenflow"], clip=0.1)
    assert_equal_ranks(results)
    assert difference(results[0], train(None, clip=0.1)) < EXACT


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_lone_rank_equals_adamw(one_rank: RankProcesses, policy: str, clip: float | None) -> None:
    """FSDP2 shards over a mesh of one rank, as scripts do when they are tried on one device."""
    (weights,) = one_rank.call(train_sharded, 1, ALL_POLICIES[policy], clip=clip)
    assert difference(weights, train(None, clip=clip)) < EXACT


@pytest.mark.parametrize("keywords", [{"compiled": True}, {"backwards": 3}, {"reshard_after_forward": False}])
def test_lone_rank_trains_in_every_way(one_rank: RankProcesses, keywords: dict[str, Any]) -> None:
    (weights,) = one_rank.call(train_sharded, 1, ALL_POLICIES["zenflow"], clip=0.1, **keywords)
    assert difference(weights, train(None, clip=0.1, backwards=keywords.get("backwards", 1))) < EXACT


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_of_a_lone_rank_are_one_devices(one_rank: RankProcesses, name: str) -> None:
    settings: dict[str, Any] = {"steps": 24, "clip": 0.1, "build": crosswise}
    (weights,) = one_rank.call(train_sharded, 1, WINDOWED[name], **settings)
    assert difference(weights, train(WINDOWED[name], **settings)) < EXACT


def trained_beside_frozen(
    rank: int, options: dict[str, Any] | None, *, given_all: bool, root: bool, **keywords: Any
) -> list[torch.Tensor]:
    """The weights of a model whose first layer is frozen, and a group of FSDP2 of its own.

    Args:
        given_all: the optimizer has the frozen parameters, too.
        root: the model is a group of FSDP2, which ends a forward.
        keywords: of ``fully_shard``.
    """
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 66), nn.Tanh(), nn.Linear(66, 40))
    model[0].requires_grad_(False)
    for layer in (model[0], model[1], model[3], *([model] if root else ())):
        fully_shard(layer, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)), **keywords)
    params = [param for param in model.parameters() if param.requires_grad or given_all]
    optimizer: Any = torch.optim.AdamW(params, **ADAM) if options is None else ZenFlowAdamW(params, **ADAM, **options)
    for step in range(4):
        x, y = batch(step, rank, 2)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if options is not None:
        optimizer.close()
    for layer in model:
        if isinstance(layer, FSDPModule):
            layer.reshard()
    return whole(model)


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("given_all", [False, True])
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_frozen_groups_train_as_with_adamw(
    request: pytest.FixtureRequest, ranks: str, given_all: bool, reshards: bool, root: bool
) -> None:
    """A frozen group has no backward that takes its gathered weights back."""
    run = partial(
        request.getfixturevalue(ranks).call,
        trained_beside_frozen,
        given_all=given_all,
        root=root,
        reshard_after_forward=reshards,
    )
    found = run(ALL_POLICIES["zenflow"])
    assert_equal_ranks(found)
    assert difference(found[0], run(None)[0]) < EXACT


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_option_clips_by_the_norm_of_all_shards(request: pytest.FixtureRequest, ranks: str) -> None:
    processes: RankProcesses = request.getfixturevalue(ranks)
    results = processes.call(train_sharded, processes.ranks, {**ALL_POLICIES["zenflow"], "max_grad_norm": 0.1})
    assert difference(results[0], train(None, clip=0.1)) < EXACT


def last_step_flushes(rank: int) -> list[Tensor]:
    model = sharded()
    optimizer = optimizer_over(model, {**WINDOWED["re-selecting"], "total_steps": 6}, "")
    for step in range(6):
        x, y = batch(step, rank, 2)
        F.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not optimizer.engine.windows_hold_gradients
    weights = whole(model)
    optimizer.close()
    return weights


def test_last_step_flushes_shards(two_ranks: RankProcesses) -> None:
    results = two_ranks.call(last_step_flushes)
    expected = two_ranks.call(train_sharded, 2, WINDOWED["re-selecting"], steps=6)
    for one, other in zip(results, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
