"""Experts that FSDP2 shards and that a rank does not use: an error that names one, and the way out of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from tests.ranks.models import ADAM, ALL_POLICIES, difference
from tests.ranks.sharded import whole
from tests.ranks.test_training import EXACT
from tests.support.rank_processes import RankProcesses, messages
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(180)
STEPS = 6


class Routed(nn.Module):
    """Two experts, of which a rank's tokens go to those that it chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.leave = nn.Linear(32, 8)

    def forward(self, x: Tensor, chosen: tuple[int, ...], *, uses_all: bool) -> Tensor:
        hidden = self.enter(x)
        for number, expert in enumerate(self.experts):
            if number in chosen:
                hidden = hidden + torch.tanh(expert(hidden))
            elif uses_all:
                hidden = hidden + expert(hidden[:0]).sum()
        logits: Tensor = self.leave(hidden)
        return logits


def routed() -> Routed:
    torch.manual_seed(0)
    return Routed()


def loss_of(model: nn.Module, step: int, rank: int, *, uses_all: bool) -> Tensor:
    """Each rank has one expert of its own in every other step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(4, 16, generator=generator), torch.randint(0, 8, (4,), generator=generator)
    return F.cross_entropy(model(x, (rank,) if step % 2 else (0, 1), uses_all=uses_all), y)


def train_routed(
    rank: int, options: dict[str, Any], *, each: bool, uses_all: bool, zeros: bool = False
) -> list[Tensor]:
    """Train with experts in groups of their own (``each``), and gradients that stay as zeros behind a step."""
    model = routed()
    if each:
        for expert in model.experts:
            fully_shard(expert)
    fully_shard(model)
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, **options)
    for step in range(STEPS):
        loss_of(model, step, rank, uses_all=uses_all).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeros)
    weights = whole(model)
    optimizer.close()
    return weights


def train_in_turns(rank: int) -> None:
    """Each rank uses both experts in a step, in two backwards, and the second rank in the other order."""
    model = routed()
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, **ALL_POLICIES["zenflow"])
    x = torch.ones(4, 16)
    for chosen in ((rank,), (1 - rank,)):
        model(x, chosen, uses_all=False).square().mean().backward()
    optimizer.step()


def adamw() -> list[Tensor]:
    model = routed()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        sum(loss_of(model, step, rank, uses_all=True) / 2 for rank in range(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("zeros", [False, True], ids=["cleared", "zeros"])
@pytest.mark.parametrize(
    "each", [pytest.param(False, marks=pytest.mark.tier1, id="in one group"), pytest.param(True, id="of their own")]
)
def test_unused_experts_are_refused_by_name(two_ranks: RankProcesses, each: bool, zeros: bool) -> None:
    options = ALL_POLICIES["zenflow"]
    for text in messages(two_ranks.outcomes(train_routed, options, each=each, uses_all=False, zeros=zeros)):
        assert "in step 1 FSDP2 has averaged a gradient of experts.0.weight on rank 0, where rank 1 has none" in text
        assert "an expert without tokens on an empty batch, in its turn: loss + expert(tokens[:0]).sum()" in text


def test_experts_in_another_order_are_refused(two_ranks: RankProcesses) -> None:
    for text in messages(two_ranks.outcomes(train_in_turns)):
        assert "in step 0 FSDP2 has averaged a gradient of experts.0.weight on rank 0" in text


@pytest.mark.parametrize("each", [False, True], ids=["in one group", "of their own"])
def test_experts_on_empty_batches_equal_adamw(two_ranks: RankProcesses, each: bool) -> None:
    first, second = two_ranks.call(train_routed, ALL_POLICIES["zenflow"], each=each, uses_all=True)
    assert difference(first, second) == 0
    assert difference(first, adamw()) < EXACT
