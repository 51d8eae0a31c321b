"""State of a parameter of a sharded model: DTensors in a state dict, parts of them in the engines of the ranks.

So ``torch.distributed.checkpoint`` saves it in parts, and loads it into any other number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan, Shard
from zenflow_compile.runtime.checkpoint.shares import DENSE, PER_SLICE, SCALE
from zenflow_compile.runtime.local_shard import LocalShard
from zenflow_compile.torch_internals import torch_private


def sharded_entry(plan: ParamPlan, param: LocalShard, entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make DTensors of what this rank has of each entry. Scores and masks of divided slices are whole on each rank."""
    shard = _shard(plan)
    found = dict(entry)
    for name, own in entry.items():
        if DENSE.fullmatch(name):
            found[name] = torch_private.sharded_along(param.sharded, own, plan.whole.shape, param.by.dim)
        elif PER_SLICE.fullmatch(name) and shard.divides_slices:
            found[name] = torch_private.sharded_along(param.sharded, own, (plan.whole.slices, 1), 0)
        elif SCALE.fullmatch(name):
            found[name] = torch_private.sharded_along(param.sharded, own, (plan.slices, param.by.ranks), 1)
    return found


def local_entry(plan: ParamPlan, param: LocalShard, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Take what this rank has out of the entries of a parameter: of DTensors, or of whole tensors."""
    shard, by = _shard(plan), param.by
    found = dict(entry)
    for name, value in entry.items():
        if not isinstance(value, Tensor):
            continue
        if torch_private.is_dtensor(value):
            found[name] = torch_private.local_tensor(value)
        elif DENSE.fullmatch(name) and tuple(value.shape) == plan.whole.shape:
            part = by.part(plan.whole.shape[by.dim])
            found[name] = value.narrow(by.dim, part.start, len(part))
        elif PER_SLICE.fullmatch(name) and shard.divides_slices:
            inner = plan.whole.slices // plan.whole.shape[by.dim]
            part = by.part(plan.whole.shape[by.dim])
            found[name] = value[part.start * inner : part.stop * inner]
    return found


def _shard(plan: ParamPlan) -> Shard:
    assert plan.shard is not None
    return plan.shard
