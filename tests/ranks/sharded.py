"""Models that ``fully_shard`` shards, and loops that train them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from tests.ranks.models import BATCH, batch, optimizer_over, uneven


def sharded(build: Callable[[], nn.Module] = uneven, **keywords: Any) -> nn.Module:
    """The model, each of its modules sharded over all ranks, or over the mesh that ``keywords`` give."""
    model = build()
    mesh = keywords.pop("mesh", None) or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for child in model.children():
        fully_shard(child, mesh=mesh, **keywords)
    return fully_shard(model, mesh=mesh, **keywords)


def by_columns(param: nn.Parameter) -> Shard | None:
    """Columns where two ranks divide these evenly: FSDP2 wants that."""
    return Shard(1) if param.dim() == 2 and param.shape[1] % 2 == 0 else None


def crosswise() -> nn.Module:
    """Matrices of 40, 66, 66 and 40 slices; see ``across_slices``."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(40, 32), nn.Linear(32, 66), nn.Tanh(), nn.Linear(66, 34), nn.Tanh(), nn.Linear(34, 40)
    )


def across_slices(param: nn.Parameter) -> Shard | None:
    """Shard each matrix of ``crosswise`` so that a rank has a part of every slice."""
    return Shard(1) if param.dim() == 2 and param.shape[0] > param.shape[1] else None


def whole(model: nn.Module) -> list[Tensor]:
    """The weights, of all ranks together, with the updates that are on their way."""
    return [value.full_tensor().detach().clone() for value in model.state_dict().values()]


def train_sharded(
    rank: int,
    ranks: int,
    options: dict[str, Any] | None,
    *,
    steps: int = 10,
    clip: float | None = None,
    backwards: int = 1,
    syncs: bool = True,
    compiled: bool = False,
    change: Callable[[nn.Module], None] | None = None,
    build: Callable[[], nn.Module] = uneven,
    rows: int = BATCH,
    **keywords: Any,
) -> list[Tensor]:
    """The whole weights after training as one of ``ranks`` with parts of the batch.

    Args:
        backwards: per step.
        syncs: each backward averages gradients; else the last one of a step.
        compiled: each module by ``torch.compile``.
        change: called with the sharded model.
    """
    model = sharded(build, **keywords)
    assert isinstance(model, FSDPModule)
    device = next(model.parameters()).device
    if change is not None:
        change(model)
    if compiled:
        for child in model.children():
            child.compile(backend="zenflow", options={"inner": "eager"})
    with tempfile.TemporaryDirectory() as folder:
        optimizer = optimizer_over(model, options, folder)
        for step in range(steps):
            for part in range(backwards):
                x, y = (each.to(device) for each in batch(step * backwards + part, rank, ranks, rows))
                if not syncs:
                    model.set_requires_gradient_sync(part == backwards - 1)
                (F.cross_entropy(model(x).float(), y) / backwards).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        if options is not None:
            optimizer.flush()
        weights = whole(model)
        if options is not None:
            optimizer.close()
    return weights
