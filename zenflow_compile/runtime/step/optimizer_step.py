"""The optimizer step of many parameters at once: what they share is looked up, and done, once."""

from __future__ import annotations

from collections.abc import Sequence

from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device import column_ops
from zenflow_compile.runtime.device.version_counter import bump_versions
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.parameters.device_state import feed_scores
from zenflow_compile.runtime.parameters.host_state import FlushedWindow
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.step.schedule import Schedule


class Coefficients:
    """Hyperparameters of one optimizer step: param groups are the user's, and may change afterwards."""

    def __init__(self, registry: ParamRegistry) -> None:
        self._registry = registry
        self._known: dict[tuple[int, float], tuple[StepCoefficients, float]] = {}

    def of(self, offloaded: OffloadedParam) -> tuple[StepCoefficients, float]:
        """The parameter's coefficients, the factor on its gradient among them, and eps."""
        index = offloaded.plan.index
        grad_scale = 1.0 if offloaded.record is None else offloaded.record.grad_scale
        key = (id(self._registry.group_of(index)), grad_scale)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._registry.coefficients(index, grad_scale)
        return found


def update_columns(params: Sequence[OffloadedParam], in_force: Coefficients) -> None:
    """AdamW on the selected slices of ``params``, in place; their scores take the gradients."""
    if not params:
        return
    together: dict[tuple[StepCoefficients, float], list[OffloadedParam]] = {}
    for offloaded in params:
        together.setdefault(in_force.of(offloaded), []).append(offloaded)
    for (slot, eps), members in together.items():
        column_ops.adam_columns_([each.next_step() for each in members], slot, eps=eps)
    bump_versions([each.param for each in params], [each.weights.counter for each in params])
    feed_scores([each.device for each in params], [each.unscale for each in params])


def end_on_host(
    offloaded: OffloadedParam, in_force: Coefficients, schedule: Schedule, step: int
) -> FlushedWindow | None:
    """The gradient of ``step``, if there is one, joins the parameter's window.

    Returns:
        What closed with it, if the window is due; its job is to be submitted.
    """
    present = offloaded.state is GradientState.PARTS
    slot, eps = in_force.of(offloaded)
    plan, side = offloaded.plan, offloaded.device
    closing = schedule.flushes(plan, side, step, present=present, unscale=offloaded.unscale)
    offloaded.update_on_host(slot if present else None)
    if not closing:
        return None
    selection = schedule.selection(plan, side, step)
    return offloaded.flush_window(at=step, eps=eps, selection=selection, promptly=schedule.warming_up(step))
