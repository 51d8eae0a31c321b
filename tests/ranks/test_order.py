"""Ranks whose backwards differ: experts without tokens, tied weights over graphs, other shapes on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.models import ADAM, ALL_POLICIES, OFFLOAD, difference
from tests.support.calls import Call, at_calls
from tests.support.rank_processes import RankProcesses
from tests.support.training import EAGER_BACKEND
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.step.gradient_reduction import GradientReduction

EXACT = 1e-6
pytestmark = pytest.mark.timeout(180)


class Experts(nn.Module):
    """Two experts; a batch goes through those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.outside = nn.Linear(32, 8)

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        hidden = torch.tanh(self.inside(x))
        for expert in chosen:
            hidden = hidden + torch.tanh(self.experts[expert](hidden))
        return self.outside(hidden)


class Tied(nn.Module):
    """One matrix that is used two times, with a graph break in between."""

    def __init__(self, *, second_compiled: bool) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(32, 32) / 6)
        self.out = nn.Linear(32, 8)
        self.second_compiled = second_compiled

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        hidden = torch.tanh(F.pad(x, (0, 16)) @ self.matrix)
        torch._dynamo.graph_break()
        if self.second_compiled:
            return self.out(torch.tanh(hidden @ self.matrix))
        return self.out(torch.tanh(_uncompiled(hidden, self.matrix)))


@torch._dynamo.disable
def _uncompiled(hidden: Tensor, matrix: Tensor) -> Tensor:
    return hidden @ matrix


ROUTES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one lacks": ((0, 1), (1,)),
    "both lack": ((1,), (1,)),
    "different": ((0,), (1,)),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Experts() if name == "experts" else Tied(second_compiled=name == "tied")


def loss_of(call: Any, step: int, rank: int, chosen: tuple[int, ...], size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(size, 16, generator=generator), torch.randint(0, 8, (size,), generator=generator)
    return F.cross_entropy(call(x, chosen), y)


def routes_of(name: str, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which experts each rank chooses."""
    if name != "alternating":
        return ROUTES[name]
    return list(ROUTES.values())[step % len(ROUTES)]


def rank_with(
    rank: int, model_name: str, routes: str, compiled: bool, steps: int, options: dict[str, Any]
) -> tuple[list[Tensor], list[int]]:
    """The weights of a rank, and how many parameters came late in each step."""
    late: list[int] = []

    def count(call: Call) -> None:
        late[-1] += 1

    model = build(model_name)
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **options, process_group=dist.group.WORLD)
    call = torch.compile(model, **EAGER_BACKEND) if compiled else model
    with at_calls(count, GradientReduction._send_late):
        for step in range(steps):
            late.append(0)
            loss_of(call, step, rank, routes_of(routes, step)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()], late


def adamw(model_name: str, routes: str, steps: int) -> list[Tensor]:
    """The weights of one process whose gradients are the means of the ranks'."""
    model = build(model_name)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(steps):
        losses = [loss_of(model, step, rank, routes_of(routes, step)[rank]) for rank in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graph"])
@pytest.mark.parametrize("routes", [*ROUTES, "alternating"])
def test_experts_without_tokens_equal_adamw(two_ranks: RankProcesses, routes: str, compiled: bool) -> None:
    results = two_ranks.call(rank_with, "experts", routes, compiled, 8, ALL_POLICIES["zenflow"])
    (first, late), (second, _) = results
    assert difference(first, second) == 0
    assert difference(first, adamw("experts", routes, 8)) < EXACT
    assert not any(late)


@pytest.mark.parametrize("model", ["tied", "tied, one use uncompiled"])
def test_late_contribution_comes_late_once(two_ranks: RankProcesses, model: str) -> None:
    """A gradient that comes after its parameter was sent is sent again, and waits for all from then on."""
    options = {"update_interval": 1, "topk_ratio": 0.25, **OFFLOAD}
    (first, late), (second, _) = two_ranks.call(rank_with, model, "both lack", True, 6, options)
    assert difference(first, second) == 0
    assert difference(first, adamw(model, "both lack", 6)) < EXACT
    assert sum(late) <= 1


def with_shapes(rank: int) -> tuple[list[Tensor], list[str]]:
    """Weights, and the collectives that were started, of a rank whose batches may have changing sizes."""
    model = build("experts")
    optimizer = ZenFlowAdamW(
        model.named_parameters(), **ADAM, **ALL_POLICIES["zenflow"], process_group=dist.group.WORLD
    )
    call, sent = torch.compile(model, **EAGER_BACKEND), []
    for step, size in enumerate((4, 6, 5, 7)):
        loss_of(call, step, rank, (0, 1), size if rank else 4).backward()
        optimizer.engine.recorder.sent = lambda name, count: sent.append(f"{name} {count}")
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()], sent


def test_shapes_of_one_rank_may_change(two_ranks: RankProcesses) -> None:
    """One rank compiles its graphs anew, and the other waits for it."""
    (first, sent), (second, sent_by_second) = two_ranks.call(with_shapes)
    assert difference(first, second) == 0
    assert sent == sent_by_second
    assert len(sent) > 8
