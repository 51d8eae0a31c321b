"""Converts state of a parameter that several ranks divide between a state dict and the ranks' engines.

The state dict has whole tensors, or ``DTensor`` s of a sharded model, which ``torch.distributed.checkpoint`` saves in
parts. So it does not depend on the number of ranks, and loads into any other number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.checkpoint.format import in_slices
from zenflow_compile.runtime.ranks.rank_group import RankGroup
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.torch_internals import torch_private

DENSE = re.compile(r"exp_avg|exp_avg_sq|master|window_sum|window\d+|residual|shown")
"""Names of entries of the parameter's shape."""
PER_SLICE = re.compile(r"score|mask|scale\d+")
"""Names of entries with a value for each slice."""
SCALE = re.compile(r"scale\d+")
"""Of these, the ones that depend on which elements of a slice a rank has."""


def whole_entry(plan: ParamPlan, entry: dict[str, Tensor], ranks: RankGroup) -> dict[str, Tensor]:
    """Put the entries of all ranks' shares together; ``plan`` is this rank's. All ranks call it, with equal names."""
    whole = plan.whole
    found = dict(entry)
    for name, own in entry.items():
        if (flat := plan.flat) is not None:
            if DENSE.fullmatch(name):
                rows = _gather_rows(plan, own, flat.most_elements, ranks)
                found[name] = torch.cat(rows)[: whole.numel].view(whole.shape)
        elif DENSE.fullmatch(name):
            slices = _gather(plan, own, ranks)
            found[name] = (slices if whole.dim == 0 else slices.t()).reshape(whole.shape).contiguous()
        elif PER_SLICE.fullmatch(name):
            found[name] = _gather(plan, own, ranks)
    return found


def own_entry(plan: ParamPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Take this rank's share out of the entries of a whole parameter."""
    found = dict(entry)
    if (flat := plan.flat) is not None:
        return found | {name: flat.view(value) for name, value in entry.items() if DENSE.fullmatch(name)}
    share = plan.share
    assert share is not None
    for name, value in entry.items():
        if DENSE.fullmatch(name):
            found[name] = in_slices(share.whole, value)[share.part :: share.parts]
        elif PER_SLICE.fullmatch(name):
            found[name] = value[share.part :: share.parts]
    return found


def _gather(plan: ParamPlan, own: Tensor, ranks: RankGroup) -> Tensor:
    """[slices of the whole, ...] from [slices of each share, ...]."""
    share = plan.share
    assert share is not None
    rows = _gather_rows(plan, own, share.most_slices, ranks)
    slices = torch.empty((share.whole.slices, *own.shape[1:]), dtype=own.dtype)
    for part in range(share.parts):
        slices[part :: share.parts] = rows[part][: share.count(share.whole.slices, part)]
    return slices


def _gather_rows(plan: ParamPlan, own: Tensor, most: int, ranks: RankGroup) -> list[Tensor]:
    padded = torch.zeros((most, *own.shape[1:]), dtype=own.dtype)
    padded[: len(own)] = own
    return ranks.gather_on_host(padded, f"the state of {plan.whole.name}")


def sharded_entry(plan: ParamPlan, param: LocalShard, entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make DTensors of what this rank has of each entry. Scores and masks of divided slices are whole on each rank."""
    found, shard = dict(entry), plan.shard
    assert shard is not None
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
    found, shard, by = dict(entry), plan.shard, param.by
    assert shard is not None
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
