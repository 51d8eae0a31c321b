"""Sharded models with replicas, on a mesh of (2, 2): four processes of one thread each."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.ranks.models import ALL_POLICIES, WINDOWED, batch, difference, optimizer_over, train, uneven
from tests.ranks.sharded import sharded, train_sharded, whole
from tests.ranks.test_sharded_checkpoints import ELSEWHERE, SAVED_AT, STEPS, flushed_state, steps
from tests.ranks.test_training import EXACT, assert_equal_ranks
from tests.support.rank_processes import RankProcesses, messages
from zenflow_compile.runtime.ranks.rank_group import Call, Levels, RankGroup
from zenflow_compile.torch_internals import torch_private

pytestmark = pytest.mark.timeout(180)
RANKS = 4


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def exchanged(rank: int) -> dict[str, Any]:
    """What each collective brings to a rank of the second shard group, and of the first one."""
    shards, first = mesh_of_four().get_group(1), rank - rank % 2
    group = RankGroup(shards, torch.device("cpu"), Levels([range(RANKS)], range(RANKS), [shards]))
    own = torch.tensor([float(rank)])
    found = {
        "places": [group.rank, group.size, group.message_rank, group.message_size],
        "all_reduce": group.all_reduce(own.clone()).wait("").tolist(),
        "mean": group.all_reduce(own.clone(), mean=True).wait("").tolist(),
        "sum of shards": group.sum_of_shards(own.clone(), (first, first + 1)).wait("").tolist(),
        "messages": group.exchange(Call.STEP, bytes([rank])),
        "texts": group.gather_texts(Call.STEP, str(rank)),
        "no texts": group.gather_texts(Call.STEP, ""),
    }
    group.close()
    return found


def test_parts_are_added_up_in_a_group_of_shards(four_ranks: RankProcesses) -> None:
    for rank, found in enumerate(four_ranks.call(exchanged)):
        first = rank - rank % 2
        pair = [float(first), first + 1.0]
        assert found == {
            "places": [rank, 4, rank, 4],
            "all_reduce": [6.0],
            "mean": [1.5],
            "sum of shards": [sum(pair)],
            "messages": [bytes([each]) for each in range(RANKS)],
            "texts": [str(each) for each in range(RANKS)],
            "no texts": [""] * RANKS,
        }


def train_hybrid(rank: int, options: dict[str, Any] | None, **keywords: Any) -> list[Tensor]:
    return train_sharded(rank, RANKS, options, mesh=mesh_of_four(), **keywords)


@pytest.mark.parametrize("clip", ["no clipping", "clip_grad_norm_", "max_grad_norm"])
@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=() if name == "zenflow" else pytest.mark.long) for name in ALL_POLICIES]
)
def test_replicated_shards_equal_adamw(four_ranks: RankProcesses, policy: str, clip: str) -> None:
    options, own = dict(ALL_POLICIES[policy]), 0.1 if clip == "clip_grad_norm_" else None
    if clip == "max_grad_norm":
        options["max_grad_norm"] = 0.1
    results = four_ranks.call(train_hybrid, options, clip=own)
    assert_equal_ranks(results)
    assert difference(results[0], train(None, clip=None if clip == "no clipping" else 0.1)) < EXACT


def local_parts(rank: int, options: dict[str, Any]) -> list[Tensor]:
    """What a rank has of state and weights after training with update windows."""
    model = sharded(mesh=mesh_of_four())
    with tempfile.TemporaryDirectory() as folder:
        optimizer = optimizer_over(model, {**options, "max_grad_norm": 0.1}, folder)
        for step in range(24):
            backward_of_four(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
        values = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
        values += list(model.parameters())
        found = [torch_private.local_tensor(each) if isinstance(each, DTensor) else each for each in values]
        found = [each.detach().clone() for each in found if isinstance(each, Tensor)]
        optimizer.flush()
        found += whole(model)
        optimizer.close()
    return found


def backward_of_four(model: nn.Module, step: int, rank: int) -> None:
    x, y = batch(step, rank, RANKS)
    F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "re-selecting" else pytest.mark.long) for name in WINDOWED]
)
def test_windowed_replicas_have_equal_state(four_ranks: RankProcesses, name: str) -> None:
    """Bit for bit. Shards have other parts, and the same whole weights."""
    results = four_ranks.call(local_parts, WINDOWED[name])
    assert_equal_ranks([results[0], results[2]])
    assert_equal_ranks([results[1], results[3]])
    weights = len(list(uneven().parameters()))
    assert_equal_ranks([found[-weights:] for found in results])
    assert all(bool(weight.isfinite().all()) for weight in results[0][-weights:])
    exact = train(None, steps=24, clip=0.1)
    windowed = difference(train(WINDOWED[name], steps=24, clip=0.1), exact)
    assert 1e-3 < difference(results[0][-weights:], exact) < 3 * windowed


def mesh_of(ranks: int) -> DeviceMesh:
    return mesh_of_four() if ranks == RANKS else init_device_mesh("cpu", (ranks,))


def saved(rank: int, ranks: int, options: dict[str, Any], folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """Train, save in the middle of update windows. Returns what is behind flush(), and at the end of a run without."""
    ended = []
    for flushes in (True, False):
        model = sharded(mesh=mesh_of(ranks))
        optimizer = optimizer_over(model, options, folder)
        steps(model, optimizer, 0, SAVED_AT, rank, ranks)
        if flushes:
            content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(content, checkpoint_id=f"{folder}/saved")
            ended.append(flushed_state(model, optimizer))
        else:
            steps(model, optimizer, SAVED_AT, STEPS, rank, ranks)
            optimizer.flush()
            ended.append(whole(model))
        optimizer.close()
    return ended[0], ended[1]


def loaded(rank: int, ranks: int, options: dict[str, Any], folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """Load what was saved. Returns the same as ``saved``."""
    ended = []
    for flushes in (True, False):
        model = sharded(mesh=mesh_of(ranks))
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.25)
        optimizer = optimizer_over(model, options, folder)
        content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(content, checkpoint_id=f"{folder}/saved")
        set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        if flushes:
            ended.append(flushed_state(model, optimizer))
        else:
            steps(model, optimizer, SAVED_AT, STEPS, rank, ranks)
            optimizer.flush()
            ended.append(whole(model))
        optimizer.close()
    return ended[0], ended[1]


@pytest.mark.long
@pytest.mark.parametrize("back", [4, 2, 1])
@pytest.mark.parametrize("name", ["zero_offload", "zenflow", "re-selecting", "late"])
def test_state_of_replicated_shards_loads(
    request: pytest.FixtureRequest, four_ranks: RankProcesses, name: str, back: int, tmp_path: Path
) -> None:
    """And goes back: bit for bit on as many shards."""
    options = {**ALL_POLICIES, **WINDOWED}[name] | ELSEWHERE
    others: RankProcesses = request.getfixturevalue({4: "four_ranks", 2: "two_ranks", 1: "one_rank"}[back])
    for count, runners, other_count, other_runners in ((4, four_ranks, back, others), (back, others, 4, four_ranks)):
        folder = tmp_path / f"{count} to {other_count}"
        folder.mkdir(exist_ok=True)
        expected = runners.call(saved, count, options, str(folder))[0]
        found = other_runners.call(loaded, other_count, options, str(folder))
        assert_equal_ranks([weights for _, weights in found])
        limit = 0.0 if back == 4 else EXACT
        assert difference(expected[0], found[0][0]) <= limit
        if name in ALL_POLICIES or back == 4:
            assert difference(expected[1], found[0][1]) <= limit


def differing(rank: int, change: str) -> None:
    """One replica has something else."""
    options = dict(ALL_POLICIES["zenflow"])
    if change == "options" and rank == 3:
        options["topk_ratio"] = 0.5
    model = sharded(mesh=mesh_of_four())
    optimizer = optimizer_over(model, options, "")
    for step in range(2):
        backward_of_four(model, step, rank)
        if step and change == "values in param_groups" and rank in (2, 3):
            optimizer.param_groups[0]["lr"] = 0.5
        if step and change == "gradients in .grad" and rank in (2, 3):
            next(model.parameters()).grad = None
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("change", ["options", "values in param_groups", "gradients in .grad"])
def test_replica_that_differs_is_refused(four_ranks: RankProcesses, change: str) -> None:
    """On all four ranks, also where each shard group agrees."""
    expected = f"rank 0 and rank {3 if change == 'options' else 2} have different {change}"
    if change == "gradients in .grad":
        expected = "in step 1 rank 0 has a gradient of single, and rank 2 has none"
    for text in messages(four_ranks.outcomes(differing, change)):
        assert expected in text
