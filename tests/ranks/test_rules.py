"""Several ranks train by any rule: they divide the state, or FSDP2 has sharded the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.exactness.test_rules import CASES, POLICIES
from tests.ranks.models import difference
from tests.support.rank_processes import RankProcesses
from zenflow_compile import ZenFlow

pytestmark = pytest.mark.timeout(180)
STEPS = 8


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 40))


def whole(name: str, options: dict[str, Any] | None) -> Tensor:
    """One process; by PyTorch's optimizer without options."""
    rule, theirs, keywords = CASES[name]
    model = mlp()
    optimizer: Any = (
        theirs(model.parameters(), **keywords)
        if options is None
        else ZenFlow(model.parameters(), rule, min_offload_size=1, workers=1, **options)
    )
    return trained(model, optimizer, 0, 1)


def trained(model: nn.Module, optimizer: Any, rank: int, ranks: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randn(16, 48, generator=generator).chunk(ranks)[rank]
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, ZenFlow):
        optimizer.close()
    full = (getattr(param, "full_tensor", lambda: param)() for param in model.parameters())  # noqa: B023
    return torch.cat([param.detach().flatten() for param in full])


def divided(rank: int, name: str, options: dict[str, Any]) -> Tensor:
    model, group = mlp(), dist.group.WORLD
    optimizer = ZenFlow(
        model.parameters(), CASES[name][0], process_group=group, min_offload_size=1, workers=1, **options
    )
    return trained(model, optimizer, rank, 2)


def sharded(rank: int, name: str, options: dict[str, Any]) -> Tensor:
    model = mlp()
    fully_shard(model)
    optimizer = ZenFlow(model.parameters(), CASES[name][0], min_offload_size=1, workers=1, **options)
    return trained(model, optimizer, rank, 2)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("how", [divided, sharded], ids=["process_group", "FSDP2"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_pytorch(two_ranks: RankProcesses, name: str, policy: str, how: Any) -> None:
    found = two_ranks.call(how, name, POLICIES[policy])
    assert torch.equal(*found)
    assert difference([found[0]], [whole(name, None)]) < 1e-5


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_windows_of_one(two_ranks: RankProcesses, name: str) -> None:
    options = POLICIES["zenflow"] | {"update_interval": 4}
    found = two_ranks.call(divided, name, options)
    assert torch.equal(*found)
    assert difference([found[0]], [whole(name, options)]) < 1e-4
