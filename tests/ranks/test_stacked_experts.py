"""Several ranks train a stack of experts' matrices: they divide it, or FSDP2 has sharded it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.ranks.models import ALL_POLICIES, WINDOWED, difference, optimizer_over, train
from tests.ranks.sharded import sharded, train_sharded
from tests.ranks.test_sharded_checkpoints import SAVED_AT, STEPS, ended, get_state_dict, set_state_dict, steps
from tests.ranks.test_training import EXACT, assert_equal_ranks
from tests.support.moe import FAMILIES, built, loss_of
from tests.support.rank_processes import RankProcesses
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(180)
ROUNDING = 1e-6


class Stack(nn.Module):
    """Two experts in one parameter: each row goes to the one that its token chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 34, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,boi->bo", x, self.weight[(x[:, 0] > 0).long()])


def stacked() -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 32), Stack(), nn.Tanh(), nn.Linear(34, 40))


def along(dim: int) -> Any:
    return lambda param: Shard(dim) if param.dim() == 3 else None


def train_along(rank: int, options: dict[str, Any] | None, dim: int, **keywords: Any) -> list[Tensor]:
    return train_sharded(rank, 2, options, build=stacked, shard_placement_fn=along(dim), **keywords)


def train_divided(rank: int, options: dict[str, Any], *, compiled: bool) -> list[Tensor]:
    return train(options, rank, 2, build=stacked, compiled=compiled)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graph"])
@pytest.mark.parametrize("name", [*ALL_POLICIES, *WINDOWED])
def test_ranks_divide_a_stack(two_ranks: RankProcesses, name: str, compiled: bool) -> None:
    options = {**ALL_POLICIES, **WINDOWED}[name]
    found = two_ranks.call(train_divided, options, compiled=compiled)
    assert_equal_ranks(found)
    rounding = 1e-2 if name == "int8" else 1e-3 if name not in ALL_POLICIES else 1e-5
    assert difference(found[0], train(options, build=stacked)) < rounding
    if name in ALL_POLICIES:
        assert difference(found[0], train(None, build=stacked)) < 1e-5


@pytest.mark.matrix(3)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", ALL_POLICIES)
def test_sharded_stack_is_trained_as_by_adamw(two_ranks: RankProcesses, name: str, dim: int) -> None:
    found = two_ranks.call(train_along, ALL_POLICIES[name], dim, clip=0.1)
    assert_equal_ranks(found)
    assert difference(found[0], two_ranks.call(train_along, None, dim, clip=0.1)[0]) < EXACT


def save(rank: int, dim: int, name: str, folder: str) -> list[Tensor]:
    model = sharded(stacked, shard_placement_fn=along(dim))
    optimizer = optimizer_over(model, WINDOWED[name], folder)
    steps(model, optimizer, 0, SAVED_AT, rank, 2)
    content = get_state_dict(model, optimizer)
    torch.save(content, f"{folder}/{rank}.pt")
    steps(model, optimizer, SAVED_AT, STEPS, rank, 2)
    return ended(model, optimizer)


def resume(rank: int, dim: int, name: str, folder: str) -> list[Tensor]:
    model = sharded(stacked, shard_placement_fn=along(dim))
    optimizer = optimizer_over(model, WINDOWED[name], folder)
    weights, state = torch.load(f"{folder}/{rank}.pt", weights_only=False)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    steps(model, optimizer, SAVED_AT, STEPS, rank, 2)
    return ended(model, optimizer)


@pytest.mark.parametrize("dim", [0, 2])
def test_resumed_shards_of_a_stack(two_ranks: RankProcesses, dim: int, tmp_path: Path) -> None:
    expected = two_ranks.call(save, dim, "re-selecting", str(tmp_path))
    found = two_ranks.call(resume, dim, "re-selecting", str(tmp_path))
    assert_equal_ranks(found)
    assert difference(expected[0], found[0]) == 0.0


def views(rank: int, dim: int) -> tuple[int, int, int]:
    model = sharded(stacked, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=along(dim))
    with ZenFlowAdamW(model.named_parameters(), min_offload_size=1, device_share=0.0, workers=1) as optimizer:
        (plan,) = [each.plan for each in optimizer.engine.offloaded.values() if len(each.plan.shape) == 3]
        return plan.row_dims, plan.slices, plan.length


@pytest.mark.parametrize(("dim", "view"), [(0, (2, 34, 32)), (2, (2, 68, 16)), (1, (1, 544, 2))])
def test_view_of_a_sharded_stack(two_ranks: RankProcesses, dim: int, view: tuple[int, int, int]) -> None:
    assert two_ranks.call(views, dim) == [view, view]


def load_across_rows(rank: int, options: dict[str, Any]) -> None:
    """Load a state that was saved whole into a model that is sharded along the second dimension."""
    whole = StateDictOptions(full_state_dict=True)
    model = stacked()
    saving = optimizer_over(model, options, "", process_group=dist.group.WORLD)
    steps(model, saving, 0, 2, rank, 2)
    weights, state = copy.deepcopy(get_state_dict(model, saving, options=whole))
    saving.close()  # writes the weights
    model = sharded(stacked, shard_placement_fn=along(1))
    with optimizer_over(model, options, "") as loading:
        set_model_state_dict(model, weights, options=whole)
        set_optimizer_state_dict(model, loading, state, options=whole)
        steps(model, loading, 2, 4, rank, 2)


@pytest.mark.tier2
@pytest.mark.filterwarnings("ignore:the state of .* was saved with other options:UserWarning")
def test_state_of_rows_that_no_rank_has_is_refused(two_ranks: RankProcesses) -> None:
    for outcome in two_ranks.outcomes(load_across_rows, WINDOWED["re-selecting"]):
        assert "whose rows were its first 2 dimensions, and the model is sharded along dimension 1" in str(outcome)
    two_ranks.call(load_across_rows, ALL_POLICIES["zero_offload"])


def train_family(rank: int | None, family: str, name: str | None) -> list[Tensor]:
    """Train by ``name``'s options, or by AdamW, on one batch a step; ``rank`` None: on those of both ranks."""
    model = built(family)
    params = model.named_parameters()
    if name is None:
        optimizer: Any = torch.optim.AdamW([param for _, param in params], lr=1e-2, eps=1e-3)
    else:
        options = {"min_offload_size": 100, **{**ALL_POLICIES, **WINDOWED}[name]}
        optimizer = ZenFlowAdamW(
            params, lr=1e-2, eps=1e-3, **options, process_group=None if rank is None else dist.group.WORLD
        )
    for step in range(8):
        for each in (0, 1) if rank is None else (rank,):
            (loss_of(model, 2 * step + each) / (2 if rank is None else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if name is not None:
        divided = [each.plan.whole for each in optimizer.engine.offloaded.values()]
        stacks = [plan for plan in divided if len(plan.shape) == 3 and plan.slices == plan.shape[0] * plan.shape[1]]
        assert stacks or name == "deep_optimizer_states"  # it may stream all of them
        optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("name", ["zero_offload", "deep_optimizer_states", "zenflow", "re-selecting"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_experts_train_on_two_ranks(two_ranks: RankProcesses, family: str, name: str) -> None:
    """Some experts get tokens on one rank only, or on none."""
    found = two_ranks.call(train_family, family, name)
    assert_equal_ranks(found)
    expected = train_family(None, family, None if name in ALL_POLICIES else name)
    assert difference(found[0], expected) < (1e-5 if name in ALL_POLICIES else 1e-3)
