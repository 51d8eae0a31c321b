"""Loads state whose slices were selected by another number of ranks.

Rows of a matrix that is sharded by rows belong to ranks, and each rank selects among its own. On another number of
ranks a rank finds more or fewer of its slices selected than it has memory for, and slices change sides. A slice cannot
change sides with gradients waiting in its update window, so the window is flushed first, as ``flush()`` would have
done it before the state was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients, rule_p_
from zenflow_compile.runtime.checkpoint.format import NONE, SCHEDULE, in_slices
from zenflow_compile.runtime.device.late_number import largest_magnitude
from zenflow_compile.runtime.device_updates import selection

_OF_WINDOW = SCHEDULE.index("leaving")
"""As many numbers of the entry ``schedule`` belong to the update window, the others to the selection."""


def reshard(
    plan: ParamPlan, entry: Mapping[str, Any], weight: Tensor, eps: float
) -> tuple[dict[str, Any], Tensor | None]:
    """Fit the entries of a parameter, or of this rank's part of it, whose weight is ``weight``, to ``plan``.

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
        coefficients = [StepCoefficients(*each) for each in entry["coefficients"].tolist()[:count]]
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
        scales = [float(each.grad_scale) for each in coefficients]
        unit, largest = largest_magnitude(scales[:1]), largest_magnitude(scales)
        mean = in_slices(plan, entry["window_sum"].cpu())[deferred] * (unit / largest / len(scales))
        # Rounded as the update window's buffer on the host would round it.
        return [mean.to(plan.dtype)] * len(scales), [each._replace(grad_scale=largest) for each in coefficients]
    gradients = []
    for place in range(len(coefficients)):
        gradient = in_slices(plan, entry[f"window{place}"].cpu())[deferred]
        if plan.compressed:
            gradient = gradient.float() * entry[f"scale{place}"].cpu()[deferred]
        gradients.append(gradient)
    return gradients, coefficients
