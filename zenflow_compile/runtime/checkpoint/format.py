"""The entries of a state dict, whose names, shapes and dtypes follow from the plan of a parameter alone.

So a fresh optimizer and a trained one write the same entries, and ``torch.distributed.checkpoint`` can load into the
tensors of both. All entries are tensors: no None, no string and no list of varying length.

Tools for distributed checkpoints keep ``state`` and ``param_groups`` and nothing else. So the optimizer's own values
(step, shortest window, measured options) are in the entries of each parameter, and must be equal in all of them.

The order of rows is not saved: ``mask`` says which slices are selected, and a load puts both sides in ascending order.
So no number may depend on that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zenflow_compile.options.options import OFFLOAD_DEVICES, Options
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.update_rule import StepCoefficients

FORMAT = 11

CHOSEN = ("policy", "ratio", "update_stride", "device_share", "offload_device")
"""Options that a measurement may choose, in the order of the entry ``chosen``."""

SCHEDULE = (
    *("attempted", "seen", "waiting", "selected", "latest_selected", "latest_waiting"),
    *("next_selected", "next_waiting", "leaving", "next_leaving"),
)
"""The numbers of the entry ``schedule``; -1 where there is none. Scheduling inputs are used two steps after they were
computed: ``latest`` ones in the next step, ``next`` ones in the step after it."""

_PLANNED = ("placement", "dtype", "row_dims", "dim", "k", "interval", "phase", "staleness", "summed", "compressed")
# A state dict has the position of a name in its list: append new names, and never reorder.
POLICIES = ("resident", "zero_offload", "twinflow", "deep_optimizer_states", "zenflow", "zero_infinity")
_NAMES: dict[str, tuple[Any, ...]] = {
    "policy": POLICIES,
    "offload_device": OFFLOAD_DEVICES,
    "placement": (
        *(Placement.DEVICE, Placement.HOST, Placement.HOST_STREAMED),
        *(Placement.FILE, Placement.SPLIT_COLUMNS),
    ),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "summed": (False, True),
    "compressed": (False, True),
}
NONE = -1
"""Stands for None where every number is >= 0."""


def saved_coefficients(plan: ParamPlan, entry: Mapping[str, Any]) -> list[StepCoefficients]:
    """The coefficients of each gradient in the update window, oldest first."""
    count = int(entry.get("open", 0))
    rows = entry["coefficients"].tolist()[:count] if count else []
    return [StepCoefficients(plan.rule.options(*row[:-1]), Number.known(row[-1]), plan.rule) for row in rows]


class Field(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def state_dtype(plan: ParamPlan) -> torch.dtype:
    """The dtype of moments and master."""
    return torch.float64 if plan.dtype == torch.float64 else torch.float32


def array_names(plan: ParamPlan) -> tuple[str, ...]:
    """Entries of the rule's arrays."""
    return tuple(array.name for array in plan.rule.arrays)


def window_places(plan: ParamPlan) -> int:
    """Most gradients in an update window between two steps: the last one of a window flushes it."""
    return plan.interval - 1 if plan.offloaded and plan.deferred else 0


def layout(plan: ParamPlan, *, adaptive: bool) -> dict[str, Field]:
    """The entries of one parameter. ``adaptive``: gradient values decide when update windows are flushed."""
    count, shape, per_slice = Field((), torch.int64), plan.shape, (plan.slices, 1)
    dense = Field(shape, state_dtype(plan))
    fields = {"step": Field((), torch.float32), **{array.name: dense for array in plan.rule.arrays}}
    if plan.offloaded or plan.dtype != dense.dtype:
        fields["master"] = dense
    if plan.offloaded and plan.selects:
        fields["score"] = Field(per_slice, torch.float32)
        fields["mask"] = Field(per_slice, torch.bool)
        fields["selected_at"] = count
        fields["selecting_ranks"] = count
    if places := window_places(plan):
        fields["open"] = count
        fields["coefficients"] = Field((places, len(plan.rule.options._fields) + 1), torch.float64)
        if plan.summed:
            fields["window_sum"] = Field(shape, torch.float32)
        for place in () if plan.summed else range(places):
            fields[f"window{place}"] = Field(shape, torch.int8 if plan.compressed else plan.dtype)
            if plan.compressed:
                fields[f"scale{place}"] = Field(per_slice, torch.float32)
    if plan.has_pending_gradient and plan.compressed:
        fields["residual"] = Field(shape, torch.float32 if plan.dtype == torch.float32 else torch.bfloat16)
    if plan.offloaded and plan.deferred and plan.staleness:
        fields["visible_at"] = Field((plan.staleness,), torch.int64)
        fields["shown"] = Field(shape, plan.dtype)
    if plan.offloaded and (adaptive or plan.selects):
        fields["schedule"] = Field((len(SCHEDULE),), torch.float64)
    fields["plan"] = Field((1 + len(_PLANNED),), torch.int64)
    fields["chosen"] = Field((len(CHOSEN),), torch.float64)
    fields["optimizer_step"] = count
    if adaptive:
        fields["shortest_window"] = count
    return fields


def plan_entry(plan: ParamPlan) -> Tensor:
    """The format, and the fields of the plan that decide the entries and their meaning: int64[n]."""
    return torch.tensor([FORMAT, *(_code(name, getattr(plan, name)) for name in _PLANNED)], dtype=torch.int64)


def planned(entry: Tensor) -> dict[str, Any]:
    """The names and values of ``plan_entry``, without the format."""
    return {name: _named(name, code) for name, code in zip(_PLANNED, entry.tolist()[1:], strict=True)}


def chosen_entry(options: Options) -> Tensor:
    """The values of ``CHOSEN``: f64[n]."""
    return torch.tensor([_code(name, getattr(options, name)) for name in CHOSEN], dtype=torch.float64)


def chosen(entry: Tensor) -> dict[str, Any]:
    """The names and values of ``chosen_entry``."""
    values = dict(zip(CHOSEN, entry.tolist(), strict=True))
    shares = {"ratio": values["ratio"]}
    if values["device_share"] <= 1.0:  # more are bytes
        shares["device_share"] = values["device_share"]
    return {name: shares.get(name, _named(name, value)) for name, value in values.items()}


def in_slices(plan: ParamPlan, tensor: Tensor) -> Tensor:
    """A tensor of the parameter's shape as [slices, length], a view where possible."""
    matrix = tensor.reshape(plan.matrix_shape)
    return matrix if plan.dim == 0 else matrix.t()


def in_shape(plan: ParamPlan, parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """A new tensor of the parameter's shape on the host, zero in slices of no part.

    Each of ``parts`` has indices i[n] of slices, and their values [n, length].
    """
    slices = torch.zeros((plan.slices, plan.length), dtype=dtype)
    for indices, values in parts:
        slices[indices.cpu().long()] = values.to(device="cpu", dtype=dtype)
    return (slices if plan.dim == 0 else slices.t()).reshape(plan.shape).contiguous()


def per_slice(plan: ParamPlan, indices: Tensor, values: Tensor) -> Tensor:
    """[slices, 1] on the host: ``values`` [n] at ``indices``, zero elsewhere."""
    entry = torch.zeros((plan.slices, 1), dtype=values.dtype)
    entry[indices.cpu().long(), 0] = values.cpu()
    return entry


def _code(name: str, value: Any) -> float:
    if name in _NAMES:
        return _NAMES[name].index(value)
    return NONE if value is None else value


def _named(name: str, code: float) -> Any:
    """The value that ``code`` stands for; the number itself if it stands for none."""
    names = _NAMES.get(name)
    if names is None:
        return None if code == NONE else int(code) if float(code).is_integer() else code
    if not (float(code).is_integer() and 0 <= code < len(names)):
        return code
    value = names[int(code)]
    return str(value) if name in ("placement", "dtype") else value
