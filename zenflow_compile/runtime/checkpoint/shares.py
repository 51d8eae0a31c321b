"""Converts state of a parameter that several ranks divide between a state dict and the ranks' engines.

The state dict has whole tensors, or ``DTensor`` s of a sharded model, which ``torch.distributed.checkpoint`` saves in
parts. So it does not depend on the number of ranks, and loads into any other number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zenflow_compile.planning.plan import FlatShare, MatrixShare, ParamPlan
from zenflow_compile.runtime.checkpoint.format import array_names, in_slices
from zenflow_compile.runtime.ranks.rank_group import RankGroup
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.torch_internals import torch_private

DENSE = re.compile(r"master|window_sum|window\d+|residual|shown")
"""Names of entries of the parameter's shape, but for the arrays of the rule."""
PER_SLICE = re.compile(r"score|mask|scale\d+")
"""Names of entries with a value for each slice."""
SCALE = re.compile(r"scale\d+")
"""Of these, the ones that depend on which elements of a slice a rank has."""


def is_dense(plan: ParamPlan, name: str) -> bool:
    """Whether an entry has the parameter's shape."""
    return DENSE.fullmatch(name) is not None or name in array_names(plan)


def whole_entry(plan: ParamPlan, entry: dict[str, Tensor], ranks: RankGroup) -> dict[str, Tensor]:
    """Put the entries of all ranks' shares together; ``plan`` is this rank's. All ranks call it, with equal names."""
    whole = plan.whole
    found = dict(entry)
    for name, own in entry.items():
        if plan.flat is not None:
            if is_dense(plan, name):
                found[name] = _of_all_parts(plan, plan.flat, own, ranks)
        elif is_dense(plan, name):
            slices = _gather(plan, own, ranks)
            found[name] = (slices if whole.dim == 0 else slices.t()).reshape(whole.shape).contiguous()
        elif PER_SLICE.fullmatch(name):
            found[name] = _gather(plan, own, ranks)
    return found


def own_entry(plan: ParamPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Take this rank's share out of the entries of a whole parameter."""
    found = dict(entry)
    if (flat := plan.flat) is not None:
        return found | {name: flat.part_of(value) for name, value in entry.items() if is_dense(plan, name)}
    share = plan.share
    assert share is not None
    for name, value in entry.items():
        if is_dense(plan, name):
            found[name] = in_slices(share.whole, value)[share.part :: share.parts]
        elif PER_SLICE.fullmatch(name):
            found[name] = value[share.part :: share.parts]
    return found


def _of_all_parts(plan: ParamPlan, flat: FlatShare, own: Tensor, ranks: RankGroup) -> Tensor:
    """Put the parts of all ranks together: a tensor of the parameter's shape. All ranks call it."""
    whole = torch.empty(plan.whole.shape, dtype=own.dtype)
    if isinstance(flat, MatrixShare):
        flat.view(whole).copy_(own.flatten())
        ranks.broadcast_on_host(whole, flat.owner, f"the state of {plan.whole.name}")
        return whole
    rows = _gather_rows(plan, own, max(len(flat.bounds(rank)) for rank in range(flat.ranks)), ranks)
    for rank, row in enumerate(rows):
        part = flat.view(whole, rank)
        part.copy_(row[: len(part)])
    return whole


def _gather(plan: ParamPlan, own: Tensor, ranks: RankGroup) -> Tensor:
    """[slices of the whole, ...] from [slices of each share, ...]."""
    share = plan.share
    assert share is not None
    rows = _gather_rows(plan, own, share.most_slices, ranks)
    slices = torch.empty((share.whole.slices, *own.shape[1:]), dtype=own.dtype)
    for target, of_parts in share.in_parts(slices, torch.stack(rows[: share.parts])):
        target.copy_(of_parts)
    return slices


def _gather_rows(plan: ParamPlan, own: Tensor, most: int, ranks: RankGroup) -> list[Tensor]:
    padded = torch.zeros((most, *own.shape[1:]), dtype=own.dtype)
    padded[: len(own)] = own
    return ranks.gather_on_host(padded, f"the state of {plan.whole.name}")


def sharded_entry(plan: ParamPlan, param: LocalShard, entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make DTensors of what this rank has of each entry. Scores and masks of divided slices are whole on each rank.

    An entry with a value for each slice has a second dimension, for pieces and parts of slices that have their own.
    """
    found, shard = dict(entry), plan.shard
    assert shard is not None
    shape = tuple(param.sharded.shape)
    for name, own in entry.items():
        if is_dense(plan, name):
            found[name] = param.entry(own, shape, [by.dim for by in (param.by, *param.pieces)])
        elif PER_SLICE.fullmatch(name):
            parts = 1 if SCALE.fullmatch(name) else None
            dims = [
                0 if shard.divides_slices else parts,
                *(0 if piece.dim == plan.whole.slice_dim else 1 for piece in param.pieces),
            ]
            sizes = [param.by.ranks, *(piece.ranks for piece in param.pieces)]
            if any(dim is not None for dim in dims):
                columns = math.prod(size for size, dim in zip(sizes, dims, strict=True) if dim == 1)
                slices = plan.whole.slices
                if 0 in dims[1:]:  # of all pieces
                    slices = slices // plan.whole.shape[plan.whole.slice_dim] * shape[plan.whole.slice_dim]
                found[name] = param.entry(own, (slices, columns), dims)
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
        elif is_dense(plan, name) and value.shape == param.sharded.shape:
            found[name] = by.view(param.piece_of(value))
        elif PER_SLICE.fullmatch(name) and value.dim() == 2 and value.shape[1] == 1:
            # As [indices along the sharded dimension, slices for each index].
            inner = plan.whole.slices // plan.whole.shape[plan.whole.slice_dim]
            of_indices = value.reshape(-1, inner)
            for each in (*param.pieces, *([by] if shard.divides_slices else [])):
                if each.dim == plan.whole.slice_dim:
                    of_indices = replace(each, dim=0).view(of_indices)
            found[name] = of_indices.reshape(-1, 1)
    return found
