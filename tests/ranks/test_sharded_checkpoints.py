"""``torch.distributed.checkpoint`` saves and loads sharded models and their optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.ranks.models import ADAM, ALL_POLICIES, WINDOWED, batch, difference, optimizer_over
from tests.ranks.sharded import sharded, whole
from tests.ranks.test_training import assert_equal_ranks
from tests.support.rank_processes import RankProcesses
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(180)
SAVED_AT, STEPS = 6, 13


def steps(model: nn.Module, optimizer: Any, first: int, stop: int, rank: int, ranks: int) -> None:
    for step in range(first, stop):
        F.cross_entropy(model(batch(step, rank, ranks)[0]), batch(step, rank, ranks)[1]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def save(rank: int, ranks: int, options: dict[str, Any] | None, folder: str, *, flush: bool = False) -> list[Tensor]:
    """Train, save in between, and return the weights at the end."""
    model = sharded(mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = optimizer_over(model, options, folder)
    steps(model, optimizer, 0, SAVED_AT, rank, ranks)
    if flush:
        optimizer.flush()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/saved")
    steps(model, optimizer, SAVED_AT, STEPS, rank, ranks)
    return ended(model, optimizer)


def ended(model: nn.Module, optimizer: Any) -> list[Tensor]:
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.flush()
    found = whole(model)
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.close()
    return found


def resume(rank: int, ranks: int, options: dict[str, Any], folder: str) -> list[Tensor]:
    """The weights at the end of a run that goes on from what was saved."""
    model = sharded(mesh=init_device_mesh("cpu", (ranks,)))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.25)
    optimizer = optimizer_over(model, options, folder)
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=f"{folder}/saved")
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    steps(model, optimizer, SAVED_AT, STEPS, rank, ranks)
    return ended(model, optimizer)


SETS = {**ALL_POLICIES, **{f"windowed {name}": options for name, options in WINDOWED.items()}}


@pytest.mark.parametrize("name", SETS)
def test_resumed_shards_are_bitwise_equal(two_ranks: RankProcesses, name: str, tmp_path: Path) -> None:
    expected = two_ranks.call(save, 2, SETS[name], str(tmp_path))
    found = two_ranks.call(resume, 2, SETS[name], str(tmp_path))
    assert_equal_ranks(found)
    assert difference(expected[0], found[0]) == 0.0


def test_sharded_state_of_adamw_loads(two_ranks: RankProcesses, tmp_path: Path) -> None:
    expected = two_ranks.call(save, 2, None, str(tmp_path))
    model_and_state = two_ranks.call(from_adamw, str(tmp_path))
    assert difference(expected[0], model_and_state[0]) < 1e-6


def from_adamw(rank: int, folder: str) -> list[Tensor]:
    """Go on with what AdamW has saved: loaded into an AdamW first, as its names are others."""
    model = sharded()
    before = torch.optim.AdamW(model.parameters(), **ADAM)
    weights, state = get_state_dict(model, before)
    content = {"model": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=f"{folder}/saved")
    set_state_dict(model, before, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    optimizer = optimizer_over(model, ALL_POLICIES["zenflow"], folder)
    optimizer.load_state_dict(before.state_dict())
    steps(model, optimizer, SAVED_AT, STEPS, rank, dist.get_world_size())
    return ended(model, optimizer)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_state_of_two_ranks_loads_on_three(
    two_ranks: RankProcesses, three_ranks: RankProcesses, policy: str, tmp_path: Path
) -> None:
    """And back: rows change ranks, and with them their place among the selected ones."""
    there, back = tmp_path / "there", tmp_path / "back"
    there.mkdir()
    back.mkdir()
    expected = two_ranks.call(save, 2, ALL_POLICIES[policy], str(there))
    assert difference(expected[0], three_ranks.call(resume, 3, ALL_POLICIES[policy], str(there))[0]) < 1e-6
    expected = three_ranks.call(save, 3, ALL_POLICIES[policy], str(back))
    assert difference(expected[0], two_ranks.call(resume, 2, ALL_POLICIES[policy], str(back))[0]) < 1e-6


@pytest.mark.parametrize("name", [name for name in WINDOWED if name != "int8"])
def test_flushed_windows_load_on_three(
    two_ranks: RankProcesses, three_ranks: RankProcesses, name: str, tmp_path: Path
) -> None:
    """Scales of int8 gradients belong to the parts of columns that ranks have: they load on as many ranks."""
    expected = two_ranks.call(save, 2, WINDOWED[name], str(tmp_path), flush=True)
    found = three_ranks.call(resume, 3, WINDOWED[name], str(tmp_path))
    assert_equal_ranks(found)
    assert difference(expected[0], found[0]) < 0.05
