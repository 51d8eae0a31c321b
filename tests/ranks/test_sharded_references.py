"""Ways of sharding and training that PyTorch's own tests of ``fully_shard`` compare: each trains as with AdamW."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.ranks.models import ADAM, ALL_POLICIES, WINDOWED, batch, difference
from tests.ranks.sharded import whole
from tests.ranks.test_training import EXACT, assert_equal_ranks
from tests.support.rank_processes import RankProcesses
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(180)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 66)
        self.down = nn.Linear(66, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Stack(nn.Module):
    """Blocks between an embedding and a head.

    Args:
        recomputes: activations of blocks, by ``torch.utils.checkpoint`` with this ``use_reentrant``; None: none.
        tied: the head has the embedding's weight.
        rounds: how often the blocks run in a forward.
    """

    def __init__(self, *, recomputes: bool | None = None, tied: bool = False, rounds: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.recomputes, self.rounds = recomputes, rounds

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(x)
        for _ in range(self.rounds):
            for block in self.blocks:
                if self.recomputes is None:
                    hidden = block(hidden)
                else:
                    hidden = checkpoint(block, hidden, use_reentrant=self.recomputes)
        logits: Tensor = self.head(hidden)
        return logits


def blocks(model: Any, **keywords: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **keywords)
    fully_shard(model, **keywords)


def nested(model: Any, **keywords: Any) -> None:
    for block in model.blocks:
        fully_shard(block.up, **keywords)
        fully_shard(block, **keywords)
    fully_shard([model.embedding, model.head], **keywords)
    fully_shard(model, **keywords)


def root(model: Any, **keywords: Any) -> None:
    fully_shard(model, **keywords)


def frozen(model: Any, **keywords: Any) -> None:
    model.embedding.requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    blocks(model, **keywords)


def by_columns(model: Any, **keywords: Any) -> None:
    blocks(model, shard_placement_fn=lambda param: Shard(1) if param.dim() == 2 else None, **keywords)


def divided(model: Any, **keywords: Any) -> None:
    blocks(model, **keywords)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def from_meta(model: Any, **keywords: Any) -> None:
    """Parameters get memory after they were sharded."""
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.to("meta")
    blocks(model, **keywords)
    model.to_empty(device="cpu")
    for name, param in model.named_parameters():
        full = torch.distributed.tensor.distribute_tensor(weights[name], param.device_mesh, param.placements)
        with torch.no_grad():
            param.copy_(full)


class Case(NamedTuple):
    """A way to shard, and to train.

    Attributes:
        shard: shards a ``Stack`` that ``build`` gives the arguments of.
        keywords: of ``fully_shard``; replicated: over a mesh of (2, 1).
        backwards: of a step. Around each of them ``before`` is called with the model, its number, and how many.
        scheduled: two groups with other rates, and a scheduler.
        direct: a block is called by itself behind the model, in each step.
    """

    shard: Callable[..., None] = blocks
    build: Mapping[str, Any] = MappingProxyType({})
    keywords: Mapping[str, Any] = MappingProxyType({})
    replicated: bool = False
    backwards: int = 1
    before: Callable[[Any, int, int], None] = lambda model, part, parts: None
    scheduled: bool = False
    direct: bool = False


def syncs_last(model: Any, part: int, parts: int) -> None:
    model.set_is_last_backward(part == parts - 1)
    model.set_requires_gradient_sync(part == parts - 1)


def keeps_weights(model: Any, part: int, parts: int) -> None:
    """Weights stay whole until the last backward."""
    syncs_last(model, part, parts)
    model.set_reshard_after_backward(part == parts - 1)


def all_reduces_last(model: Any, part: int, parts: int) -> None:
    """Replicas scatter in each backward, and add up in the last one."""
    model.set_requires_all_reduce(part == parts - 1)


def unshards(model: Any, part: int, parts: int) -> None:
    for block in model.blocks:
        block.unshard(async_op=True)


CASES = {
    "blocks": Case(),
    "nested": Case(nested),
    "root only": Case(root),
    "tied": Case(root, {"tied": True}),
    "tied blocks": Case(blocks, {"tied": True}),
    "two forwards": Case(blocks, {"rounds": 2}),
    "recomputing": Case(blocks, {"recomputes": False}),
    "recomputing nested": Case(nested, {"recomputes": False}),
    "recomputing, reentrant": Case(blocks, {"recomputes": True}),
    "frozen": Case(frozen),
    "columns": Case(by_columns),
    "divide factor": Case(divided),
    "meta": Case(from_meta),
    "kept after forward": Case(keywords={"reshard_after_forward": False}),
    "resharded to 1": Case(keywords={"reshard_after_forward": 1}),
    "resharded to 2": Case(keywords={"reshard_after_forward": 2}),
    "unsharded early": Case(before=unshards),
    "accumulating": Case(backwards=3),
    "accumulating, one sync": Case(backwards=3, before=syncs_last),
    "accumulating whole": Case(backwards=3, before=keeps_weights),
    "accumulating, recomputing": Case(blocks, {"recomputes": False}, backwards=3, before=syncs_last),
    "replicas": Case(replicated=True),
    "replicas accumulating": Case(replicated=True, backwards=3, before=all_reduces_last),
    "replicas, one sync": Case(replicated=True, backwards=3, before=syncs_last),
    "groups": Case(scheduled=True),
    "direct": Case(direct=True),
}


def trained(rank: int, options: dict[str, Any] | None, name: str, steps: int) -> list[Tensor]:
    case = CASES[name]
    torch.manual_seed(0)
    model: Any = Stack(**case.build)
    mesh = init_device_mesh("cpu", (2,))
    if case.replicated:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    case.shard(model, mesh=mesh, **case.keywords)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if case.scheduled:
        groups = [
            {"params": [param for param in model.parameters() if (param.dim() > 1) is matrices], **adam}
            for matrices, adam in ((True, {"weight_decay": 0.1}), (False, {"weight_decay": 0.0, "lr": 2e-2}))
        ]
    with tempfile.TemporaryDirectory() as folder:
        if options is not None and "nvme_path" in options:
            options = {**options, "nvme_path": folder}
        optimizer: Any = (
            torch.optim.AdamW(groups, **ADAM) if options is None else ZenFlowAdamW(groups, **ADAM, workers=1, **options)
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if case.scheduled else None
        for step in range(steps):
            for part in range(case.backwards):
                x, y = batch(step * case.backwards + part, rank, 2)
                case.before(model, part, case.backwards)
                (F.cross_entropy(model(x), y) / case.backwards).backward()
                if case.direct:
                    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(2 * step + rank))
                    model.blocks[0](hidden).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
        if options is not None:
            optimizer.flush()
        weights = whole(model)
        if options is not None:
            optimizer.close()
    return weights


@pytest.mark.matrix(2)
@pytest.mark.parametrize("policy", [pytest.param("zero_offload", marks=pytest.mark.long), "zenflow"])
@pytest.mark.parametrize("name", CASES)
def test_case_equals_adamw(two_ranks: RankProcesses, name: str, policy: str) -> None:
    results = two_ranks.call(trained, ALL_POLICIES[policy], name, 6)
    assert_equal_ranks(results)
    assert difference(results[0], two_ranks.call(trained, None, name, 6)[0]) < EXACT


@pytest.mark.parametrize("windows", ["re-selecting", pytest.param("late", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["nested", "tied", "columns", "accumulating whole", "replicas accumulating"])
def test_case_keeps_windows_equal(two_ranks: RankProcesses, name: str, windows: str) -> None:
    results = two_ranks.call(trained, WINDOWED[windows], name, 13)
    assert_equal_ranks(results)
    assert all(bool(weight.isfinite().all()) for weight in results[0])
