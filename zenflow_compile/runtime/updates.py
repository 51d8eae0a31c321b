"""The optimizer step of many parameters at once: what they share is looked up, and done, once."""

from __future__ import annotations

from collections.abc import Sequence

from zenflow_compile.runtime import device_ops
from zenflow_compile.runtime.adam import SlotCoefficients
from zenflow_compile.runtime.columns import feed_scores
from zenflow_compile.runtime.gradient import GradientState
from zenflow_compile.runtime.offloaded import OffloadedParam
from zenflow_compile.runtime.roster import Roster
from zenflow_compile.runtime.schedule import Schedule
from zenflow_compile.runtime.version_counter import bump_versions
from zenflow_compile.runtime.windows import Close


class Coefficients:
    """Hyperparameters of one optimizer step: param groups are the user's, and may change afterwards."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._known: dict[tuple[int, float], tuple[SlotCoefficients, float]] = {}

    def of(self, offloaded: OffloadedParam) -> tuple[SlotCoefficients, float]:
        """The parameter's coefficients, the factor on its gradient among them, and eps."""
        index = offloaded.plan.index
        grad_scale = 1.0 if offloaded.record is None else offloaded.record.grad_scale
        key = (id(self._roster.group_of(index)), grad_scale)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._roster.coefficients(index, grad_scale)
        return found


def update_columns(params: Sequence[OffloadedParam], in_force: Coefficients) -> None:
    """AdamW on the selected lines of ``params``, in place; their scores take the gradients."""
    if not params:
        return
    together: dict[tuple[SlotCoefficients, float], list[OffloadedParam]] = {}
    for offloaded in params:
        together.setdefault(in_force.of(offloaded), []).append(offloaded)
    for (slot, eps), members in together.items():
        device_ops.adam_columns_([each.next_step() for each in members], slot, eps=eps)
    bump_versions([each.param for each in params], [each.weights.counter for each in params])
    feed_scores([each.device for each in params], [each.unscale for each in params])


def end_on_host(offloaded: OffloadedParam, in_force: Coefficients, schedule: Schedule, step: int) -> Close | None:
    """The gradient of ``step``, if there is one, joins the parameter's window.

    Returns:
        What closed with it, if the window is due; its job is to be submitted.
    """
    present = offloaded.state is GradientState.PARTS
    slot, eps = in_force.of(offloaded)
    plan, side = offloaded.plan, offloaded.device
    closing = schedule.closes(plan, side, step, present=present, unscale=offloaded.unscale)
    offloaded.update_on_host(slot if present else None)
    if not closing:
        return None
    selection = schedule.selection(plan, side, step)
    return offloaded.close_window(at=step, eps=eps, selection=selection, promptly=schedule.warming_up(step))
