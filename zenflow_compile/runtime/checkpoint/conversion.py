"""Fits the saved state of a parameter to another plan: of another number of ranks, or of other options.

[Note: converted state] A slice cannot change sides with gradients waiting in its update window, and a window of other
steps has no place for them. So the window is flushed first, as ``flush()`` would have done it before the state was
saved, and the slices that were selected, then those with the best scores, are selected as far as there is memory.
Rows of a matrix that is sharded by rows belong to ranks, and each rank selects among its own: on another number of them
a rank finds more or fewer of its slices selected than it has memory for, and slices change sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.checkpoint.format import (
    NONE,
    SCHEDULE,
    array_names,
    in_slices,
    planned,
    saved_coefficients,
)
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import selection
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_

_OF_WINDOW = SCHEDULE.index("leaving")
"""As many numbers of the entry ``schedule`` belong to the update window, the others to the selection."""

_SELECTION = ("score", "mask", "selected_at")


def saved_plan(own: ParamPlan, entry: Mapping[str, Any]) -> ParamPlan:
    """The plan of a whole parameter when ``entry`` was saved, which is ``own`` now.

    Raises:
        ValueError: there is no such plan; the text says what is wrong with its entry.
    """
    values = planned(entry["plan"])
    row_dims = values["row_dims"]
    has_view = row_dims in range(1, max(2, len(own.shape)))
    rows, columns = replace(own, row_dims=row_dims if has_view else 1).matrix_shape
    placements = {str(each): each for each in Placement}
    dim, k, interval, staleness = (values[name] for name in ("dim", "k", "interval", "staleness"))
    slices, length = (rows, columns) if dim == 0 else (columns, rows)
    offloaded = values["placement"] in map(str, (Placement.HOST, Placement.FILE, Placement.SPLIT_COLUMNS))
    has_window = offloaded and interval != 1 and k != slices
    if has_window and "coefficients" not in entry:
        raise ValueError("no 'coefficients'")
    places = len(entry["coefficients"]) if has_window else 0
    possible = {
        "placement": values["placement"] in placements and (not offloaded or len(own.shape) >= 2),
        "row_dims": has_view,
        "dim": dim in (0, 1),
        "k": isinstance(k, int) and 0 <= k <= slices,
        "interval": isinstance(interval, int) and interval >= 1 and (not has_window or interval == 1 + places),
        "phase": isinstance(values["phase"], int) and 0 <= values["phase"] < max(interval or 0, 1),
        "staleness": isinstance(staleness, int) and staleness in (0, len(entry.get("visible_at", ()))),
        "summed": values["summed"] in (False, True),
        "compressed": values["compressed"] in (False, True),
    }
    if wrong := [name for name, is_possible in possible.items() if not is_possible]:
        raise ValueError(f"'plan' with {wrong[0]}={values[wrong[0]]!r}")
    return replace(
        own,
        placement=placements[values["placement"]],
        row_dims=row_dims,
        dim=dim,
        slices=slices if offloaded else 0,
        length=length if offloaded else 0,
        k=k,
        interval=interval,
        phase=values["phase"],
        staleness=staleness,
        fixed=bool(k) and not any(name in entry for name in _SELECTION),
        summed=values["summed"],
        compressed=values["compressed"],
    )


def convert(
    plan: ParamPlan, saved: ParamPlan, entry: Mapping[str, Any], weight: Tensor, *, has_layout: bool
) -> tuple[dict[str, Any], Tensor | None]:
    """Fit the entries of a parameter, or of this rank's part of it, whose weight is ``weight``, to ``plan``.

    See [Note: converted state].

    Args:
        saved: the plan of the entries.
        has_layout: the entries are those of ``plan``, and mean the same, but for selected slices.

    Returns:
        The entries, with an empty update window; of another layout those that any plan has, and of the selection. And
        the weight that the flushed window leaves, of the parameter's shape and dtype; None if it held nothing.

    Raises:
        ValueError: the update window is not empty, and ``weight`` is not the one that belongs to it.
    """
    found, new_weight = dict(entry), None
    if has_open_window(entry):
        before = _shown_weight(saved, entry)
        if not torch.equal(weight.detach().cpu().reshape(saved.shape), before):
            raise ValueError(
                f"the state dict was saved by another number of ranks or with other options, in the middle of an "
                f"update window of {plan.name!r}, and that weight is not the one that was saved with it: load the "
                "model's weights first, as by set_model_state_dict() before set_optimizer_state_dict(), or call "
                "optimizer.flush() before the state is saved"
            )
        found |= _flushed(saved, entry)
        new_weight = found["master"].to(plan.dtype)
    selects = plan.selects and saved.selects and _view(plan) == _view(saved)
    if not has_layout:
        of_selection, lost = _SELECTION if selects else (), ("residual",) if plan.compressed else ()
        names = ("step", "master", *array_names(plan), *of_selection, *lost)
        found = {name: found[name] for name in names if name in found}
    if selects:
        # As many slices as ``plan`` has memory for: those that were selected come first, and then scores decide.
        score = entry["score"].flatten().cpu()
        places = torch.argsort(torch.argsort(score, stable=True)) + entry["mask"].flatten().cpu() * len(score)
        found["mask"] = torch.zeros((plan.slices, 1), dtype=torch.bool)
        found["mask"][selection.best_slices(places.float(), plan.k, plan.groups).long()] = True
    return found, new_weight


def has_open_window(entry: Mapping[str, Any]) -> bool:
    """Whether gradients wait in the update window, or an update is not visible yet."""
    return bool(int(entry.get("open", 0)) or (entry.get("visible_at", torch.empty(0)) != NONE).any())


def have_one_layout(plan: ParamPlan, saved: ParamPlan) -> bool:
    """Whether a state of one plan has the entries of the other, and they mean the same, but for selected slices."""
    same = all(getattr(plan, name) == getattr(saved, name) for name in _OF_LAYOUT)
    return same and bool(plan.deferred) == bool(saved.deferred)


_view = attrgetter("row_dims", "dim", "slices")

_OF_LAYOUT = ("placement", "row_dims", "dim", "interval", "phase", "staleness", "selects", "summed", "compressed")


def _shown_weight(plan: ParamPlan, entry: Mapping[str, Any]) -> Tensor:
    """The weight that was saved: of the masters, but for deferred slices whose update is not visible yet."""
    cast: Tensor = entry["master"].cpu().to(plan.dtype)
    if "visible_at" not in entry or not bool((entry["visible_at"] != NONE).any()):
        return cast
    deferred = in_slices(plan, entry["shown"].cpu())
    slices = torch.where(_mask(plan, entry), in_slices(plan, cast), deferred)
    return (slices if plan.dim == 0 else slices.t()).reshape(plan.shape)


def _flushed(plan: ParamPlan, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that change when the update window is flushed."""
    deferred = torch.nonzero(~_mask(plan, entry).flatten()).flatten()
    found: dict[str, Any] = {}
    if coefficients := saved_coefficients(plan, entry):
        gradients, coefficients = _waiting(plan, entry, deferred, coefficients)
        names = ("master", *array_names(plan))
        state = [in_slices(plan, entry[name].cpu())[deferred] for name in names]  # copies
        update_window_(state, gradients, coefficients, step=int(entry["step"]))
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


def _mask(plan: ParamPlan, entry: Mapping[str, Any]) -> Tensor:
    """Which slices are selected: bool[slices, 1]. Without a choice they are the first ones."""
    return entry["mask"].cpu() if "mask" in entry else (torch.arange(plan.slices) < plan.k).unsqueeze(1)
