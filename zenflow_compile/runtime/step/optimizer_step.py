"""One optimizer step of all offloaded parameters: selected slices on the device, deferred ones into update windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.late_number import Number
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.selection import Selection
from zenflow_compile.runtime.device_updates.slice_state import SliceState
from zenflow_compile.runtime.device_updates.version_counter import bump_versions
from zenflow_compile.runtime.gradients.factors import UNSCALED
from zenflow_compile.runtime.parameters.device_state import feed_scores
from zenflow_compile.runtime.parameters.host_state import FlushedWindow
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.step.schedule import Schedule


class Member(NamedTuple):
    """A parameter in an optimizer step: its coefficients, the factor on its gradient among them, and eps."""

    offloaded: OffloadedParam
    coefficients: StepCoefficients
    eps: float


class StepContext:
    """What one optimizer step reads once for all parameters: param groups are the user's, and may change afterwards.

    Attributes:
        step: number of optimizer steps before this one.
        schedule: decides flushes and selections.
        warming_up: every update window is flushed, and applied in the next forward.
    """

    def __init__(self, registry: ParamRegistry, schedule: Schedule, step: int) -> None:
        self.step = step
        self.schedule = schedule
        self.warming_up = schedule.begin_step(step)
        self._registry = registry
        self._known: dict[tuple[int, Number], tuple[StepCoefficients, float]] = {}

    def members(self, params: Sequence[OffloadedParam]) -> list[Member]:
        """``params`` with their coefficients; equal ones are one object."""
        members: list[Member] = []
        groups, known = self._registry.group_numbers, self._known
        for offloaded in params:
            index = offloaded.plan.index
            grad_scale = 1.0 if (record := offloaded.record) is None else record.final.grad_scale
            if (found := known.get((groups[index], grad_scale))) is None:
                found = known[groups[index], grad_scale] = self._registry.coefficients(index, grad_scale)
            members.append(Member(offloaded, *found))
        return members


def update_slices(members: Sequence[Member]) -> None:
    """Do one AdamW step on the selected slices of ``members``, in place; their scores take the gradients."""
    if not members:
        return
    together: dict[tuple[StepCoefficients, float], list[SliceState]] = {}
    params = [member.offloaded for member in members]
    for offloaded, coefficients, eps in members:
        device, home = offloaded.device, offloaded.weights.home
        device.steps += 1
        selection: Selection | None
        if home is None or offloaded.weights.put_into_slices() is None:
            if home is not None:
                home.begin_write()
            matrix, dim, selection = offloaded.weights.matrix, offloaded.plan.dim, device.selection
        else:
            # The masters have the weight of these slices: what is cast goes where the gradient was.
            matrix, dim, selection = device.gradient, 0, None
        together.setdefault((coefficients, eps), []).append(
            SliceState(
                matrix,
                dim,
                selection,
                device.gradient,
                device.master,
                device.exp_avg,
                device.exp_avg_sq,
                device.steps,
                device.form,
            )
        )
    for (coefficients, eps), states in together.items():
        column_ops.adam_columns_(states, coefficients, eps=eps)
    # The kernels above write below autograd: a graph that saved the old weights must raise in its backward.
    bump_versions([each.param for each in params], [each.weights.counter for each in params])
    for offloaded in params:
        if (home := offloaded.weights.home) is not None and home.loaded and offloaded.weights.put_into_slices():
            home.load()
    finals = [UNSCALED if each.record is None else each.record.final for each in params]
    feed_scores([each.device for each in params], [final.unscale for final in finals])


def commit_gradient(member: Member, context: StepContext) -> FlushedWindow | None:
    """Add the parameter's gradient, if there is one, to its update window, and flush the window if it is due.

    Returns:
        The flushed window; its job is to be submitted.
    """
    offloaded, coefficients, eps = member
    record, present = offloaded.record, offloaded.record is not None
    step, plan, schedule = context.step, offloaded.plan, context.schedule
    if schedule.adaptive:
        unscale = 1.0 if record is None else record.final.unscale
        due = schedule.flushes(plan, offloaded.device, step, present=present, unscale=unscale)
    else:
        due = context.warming_up or step % plan.interval == plan.phase
    offloaded.commit(coefficients if present else None)
    if not due:
        return None
    selection = schedule.selection(plan, offloaded.device, step)
    return offloaded.flush(at=step, eps=eps, selection=selection, promptly=context.warming_up)
