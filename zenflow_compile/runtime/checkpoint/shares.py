"""Converts state of a parameter that several ranks divide between a state dict and the ranks' engines.

The state dict has whole tensors, or ``DTensor`` s of a sharded model, which ``torch.distributed.checkpoint`` saves in
parts. So it does not depend on the number of ranks, and loads into any other number.

[Note: resharding] Rows of a matrix that is sharded by rows belong to ranks, and each rank selects among its own. On
another number of ranks a rank finds more or fewer of its slices selected than it has memory for, and slices change
sides. A slice cannot change sides with gradients waiting in its update window, so the window is flushed first, as
``flush()`` would have done it before the state was saved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients, rule_p_
from zenflow_compile.runtime.checkpoint.format import NONE, SCHEDULE, in_slices
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import selection
from zenflow_compile.runtime.ranks.rank_group import RankGroup
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.torch_internals import torch_private

DENSE = re.compile(r"exp_avg|exp_avg_sq|master|window_sum|window\d+|residual|shown")
"""Names of entries of the parameter's shape."""
PER_SLICE = re.compile(r"score|mask|scale\d+")
"""Names of entries with a value for each slice."""
SCALE = re.compile(r"scale\d+")
"""Of these, the ones that depend on which elements of a slice a rank has."""

_OF_WINDOW = SCHEDULE.index("leaving")
"""As many numbers of the entry ``schedule`` belong to the update window, the others to the selection."""


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
        if DENSE.fullmatch(name):
            found[name] = param.entry(own, shape, [by.dim for by in (param.by, *param.pieces)])
        elif PER_SLICE.fullmatch(name):
            parts = 1 if SCALE.fullmatch(name) else None
            dims = [
                0 if shard.divides_slices else parts,
                *(0 if piece.dim == plan.whole.dim else 1 for piece in param.pieces),
            ]
            sizes = [param.by.ranks, *(piece.ranks for piece in param.pieces)]
            if any(dim is not None for dim in dims):
                columns = math.prod(size for size, dim in zip(sizes, dims, strict=True) if dim == 1)
                slices = plan.whole.slices
                if 0 in dims[1:]:  # of all pieces
                    slices = slices // plan.whole.shape[plan.whole.dim] * shape[plan.whole.dim]
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
        elif DENSE.fullmatch(name) and value.shape == param.sharded.shape:
            found[name] = by.view(param.piece_of(value))
        elif PER_SLICE.fullmatch(name) and value.dim() == 2 and value.shape[1] == 1:
            # As [indices along the sharded dimension, slices for each index].
            inner = plan.whole.slices // plan.whole.shape[plan.whole.dim]
            of_indices = value.reshape(-1, inner)
            for each in (*param.pieces, *([by] if shard.divides_slices else [])):
                of_indices = replace(each, dim=0).view(of_indices) if each.dim == plan.whole.dim else of_indices
            found[name] = of_indices.reshape(-1, 1)
    return found


def reshard(
    plan: ParamPlan, entry: Mapping[str, Any], weight: Tensor, eps: float
) -> tuple[dict[str, Any], Tensor | None]:
    """Fit the entries of a parameter, or of this rank's part of it, whose weight is ``weight``, to ``plan``.

    See [Note: resharding].

    Returns:
        The entries, with an empty update window and a mask of the plan's number of slices, and the weight that the
        flushed window leaves, of the parameter's shape and dtype; None if it held nothing.

    Raises:
        ValueError: the update window is not empty, and ``weight`` is not the one that belongs to it.
    """
    found, new_weight = dict(entry), None
    if int(entry.get("open", 0)) or bool((entry.get("visible_at", torch.empty(0)) != NONE).any()):
        before = _shown_weight(plan, entry)
        if not torch.equal(weight.detach().cpu().reshape(plan.shape), before):
            raise ValueError(
                f"the state dict was saved by another number of ranks, in the middle of an update window of "
                f"{plan.name!r}, and that weight is not the one that was saved with it: load the model's weights "
                "first, as by set_model_state_dict() before set_optimizer_state_dict(), or call optimizer.flush() "
                "before the state is saved"
            )
        found |= _flushed(plan, entry, eps)
        new_weight = found["master"].to(plan.dtype)
    # As many slices as ``plan`` has memory for: those that were selected come first, and then scores decide.
    score = entry["score"].flatten().cpu()
    places = torch.argsort(torch.argsort(score, stable=True)) + entry["mask"].flatten().cpu() * len(score)
    found["mask"] = torch.zeros((plan.slices, 1), dtype=torch.bool)
    found["mask"][selection.best_slices(places.float(), plan.k, plan.groups).long()] = True
    return found, new_weight


def _shown_weight(plan: ParamPlan, entry: Mapping[str, Any]) -> Tensor:
    """The weight that was saved: of the masters, but for deferred slices whose update is not visible yet."""
    cast: Tensor = entry["master"].cpu().to(plan.dtype)
    if "visible_at" not in entry or not bool((entry["visible_at"] != NONE).any()):
        return cast
    deferred = in_slices(plan, entry["shown"].cpu())
    selected = entry["mask"].cpu()
    slices = torch.where(selected, in_slices(plan, cast), deferred)
    return (slices if plan.dim == 0 else slices.t()).reshape(plan.shape)


def _flushed(plan: ParamPlan, entry: Mapping[str, Any], eps: float) -> dict[str, Any]:
    """The entries that change when the update window is flushed."""
    deferred = torch.nonzero(~entry["mask"].cpu().flatten()).flatten()
    found: dict[str, Any] = {}
    if count := int(entry.get("open", 0)):
        coefficients = [StepCoefficients.known(*each) for each in entry["coefficients"].tolist()[:count]]
        gradients, coefficients = _waiting(plan, entry, deferred, coefficients)
        names = ("master", "exp_avg", "exp_avg_sq")
        state = [in_slices(plan, entry[name].cpu())[deferred] for name in names]  # copies
        rule_p_(state[0], state[1], state[2], gradients, coefficients, step=int(entry["step"]), eps=eps)
        for name, values in zip(names, state, strict=True):
            whole = entry[name].cpu().clone(memory_format=torch.contiguous_format)
            in_slices(plan, whole)[deferred] = values
            found[name] = whole
        found["open"] = torch.tensor(0)
    else:
        found["master"] = entry["master"].cpu()
    if "visible_at" in entry:
        found["visible_at"] = torch.full_like(entry["visible_at"], NONE)
    if "schedule" in entry:
        values = entry["schedule"].clone()
        values[:_OF_WINDOW] = torch.tensor([0.0 if name in _COUNTED else NONE for name in SCHEDULE[:_OF_WINDOW]])
        found["schedule"] = values
    return found


_COUNTED = ("attempted", "seen", "waiting", "selected")
"""Numbers of an adaptive update window that an empty one has as 0, and not as None."""


def _waiting(
    plan: ParamPlan, entry: Mapping[str, Any], deferred: Tensor, coefficients: list[StepCoefficients]
) -> tuple[list[Tensor], list[StepCoefficients]]:
    """The gradients [deferred, length] in the update window, oldest first, and the coefficients of each."""
    if plan.summed:
        scales = [each.grad_scale for each in coefficients]
        unit, largest = Number.largest(scales[0]), Number.largest(*scales)
        mean = in_slices(plan, entry["window_sum"].cpu())[deferred] * unit.quotient(largest, len(scales))
        # Rounded as the update window's buffer on the host would round it.
        return [mean.to(plan.dtype)] * len(scales), [each._replace(grad_scale=largest) for each in coefficients]
    gradients = []
    for place in range(len(coefficients)):
        gradient = in_slices(plan, entry[f"window{place}"].cpu())[deferred]
        if plan.compressed:
            gradient = gradient.float() * entry[f"scale{place}"].cpu()[deferred]
        gradients.append(gradient)
    return gradients, coefficients
