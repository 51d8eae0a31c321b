"""FSDP2 beside tensor parallelism: it trains where tensor parallelism has one rank, and is refused elsewhere."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from tests.ranks.models import ADAM, ALL_POLICIES, BATCH, WINDOWED, difference, optimizer_over
from tests.ranks.sharded import whole
from tests.ranks.test_training import EXACT, assert_equal_ranks
from tests.support.rank_processes import RankProcesses, messages

pytestmark = pytest.mark.timeout(180)


class Mlp(nn.Module):
    """A norm that tensor parallelism leaves alone, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 66)
        self.down = nn.Linear(66, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def mlps() -> Any:
    """The same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(Mlp(), Mlp())


def parallel(data: int, tensor: int, layers: str = "both") -> nn.Module:
    """The model on a mesh of so many ranks in each dimension. The mesh of norms has the first one alone.

    Args:
        layers: that are parallel: "rows" is the second one of each block, whose input is divided.
    """
    model = mlps()
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layers == "rows":
        plan = {"down": RowwiseParallel(input_layouts=Replicate())}
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    for block in model:
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    sharded: nn.Module = fully_shard(model, mesh=mesh["data"])
    return sharded


def backward(model: nn.Module, step: int, rank: int = 0, ranks: int = 1) -> None:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, 32, generator=generator)[:, BATCH * rank // ranks : BATCH * (rank + 1) // ranks]
    F.mse_loss(model(x), y).backward()


def trained(rank: int, options: dict[str, Any], steps: int, *, saves: bool = False) -> list[Tensor]:
    """The whole weights; of a run that saves its state in the middle, and goes on with it in a new model."""
    model = parallel(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        optimizer = optimizer_over(model, options, folder)
        for step in range(steps):
            if saves and step == steps // 2:
                weights, state = get_state_dict(model, optimizer)
                before, model = optimizer, parallel(2, 1)
                optimizer = optimizer_over(model, options, folder)
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
                before.close()  # changes the weights that were saved
            backward(model, step, rank, 2)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        found = whole(model)
        optimizer.close()
    return found


def of_adamw(steps: int, clip: float | None) -> list[Tensor]:
    """The weights of one process on the joint batch."""
    model = mlps()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(steps):
        backward(model, step)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_local_tensor_parallelism_equals_adamw(two_ranks: RankProcesses, policy: str, clip: float | None) -> None:
    results = two_ranks.call(trained, ALL_POLICIES[policy] | {"max_grad_norm": clip}, 6)
    assert_equal_ranks(results)
    assert difference(results[0], of_adamw(6, clip)) < EXACT


@pytest.mark.parametrize("name", ["re-selecting", "late", "adaptive"])
def test_local_tensor_parallelism_resumes(two_ranks: RankProcesses, name: str) -> None:
    expected = two_ranks.call(trained, WINDOWED[name], 12)
    found = two_ranks.call(trained, WINDOWED[name], 12, saves=True)
    assert_equal_ranks(found)
    assert difference(expected[0], found[0]) == 0.0


def made(rank: int, data: int, tensor: int, layers: str) -> None:
    optimizer_over(parallel(data, tensor, layers), ALL_POLICIES["zenflow"], "")


@pytest.mark.parametrize("layers", ["both", "rows"])
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)])
def test_tensor_parallel_shards_are_refused(
    request: pytest.FixtureRequest, data: int, tensor: int, layers: str
) -> None:
    """At construction, on all ranks."""
    ranks: RankProcesses = request.getfixturevalue("two_ranks" if data * tensor == 2 else "four_ranks")
    for text in messages(ranks.outcomes(made, data, tensor, layers)):
        assert "as under tensor parallelism" in text
        assert "process_group=torch.distributed.group.WORLD" in text
