"""Updates selected slices on the device, those of all parameters that take part in an optimizer step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.selection import Selection, SliceState
from zenflow_compile.runtime.device_updates.version_counter import bump_versions
from zenflow_compile.runtime.gradients.factors import UNSCALED
from zenflow_compile.runtime.parameters.device_state import feed_scores
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.update_rule import StepCoefficients


class Member(NamedTuple):
    """A parameter in an optimizer step, and its coefficients, the factor on its gradient among them."""

    offloaded: OffloadedParam
    coefficients: StepCoefficients


def members_of(params: Sequence[OffloadedParam], registry: ParamRegistry) -> list[Member]:
    """Read the coefficients of ``params``, once per optimizer step: param groups are the user's, and may change later.

    Equal coefficients are one object.
    """
    members: list[Member] = []
    groups, known = registry.group_numbers, dict[tuple[int, Number], StepCoefficients]()
    for offloaded in params:
        index = offloaded.plan.index
        grad_scale = (UNSCALED if (record := offloaded.shown.record) is None else record.final).grad_scale
        if (found := known.get((groups[index], grad_scale))) is None:
            found = known[groups[index], grad_scale] = registry.coefficients(index, grad_scale)
        members.append(Member(offloaded, found))
    return members


def update_slices(members: Sequence[Member]) -> None:
    """Do one step on the selected slices of ``members``, in place; their scores take the gradients."""
    if not members:
        return
    together: dict[StepCoefficients, list[SliceState]] = {}
    params = [member.offloaded for member in members]
    for offloaded, coefficients in members:
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
        state = device.gradient, device.state[0], device.state[1:], device.steps, device.form
        together.setdefault(coefficients, []).append(SliceState(matrix, dim, selection, *state))
    for coefficients, states in together.items():
        column_ops.update_columns_(states, coefficients)
    # The kernels above write below autograd: a graph that saved the old weights must raise in its backward.
    bump_versions([each.param for each in params], [each.weights.counter for each in params])
    for offloaded in params:
        if (home := offloaded.weights.home) is not None and home.loaded and offloaded.weights.put_into_slices():
            home.load()
    if scored := [each for each in params if each.device.selects]:
        finals = [UNSCALED if (record := each.shown.record) is None else record.final for each in scored]
        feed_scores([each.device for each in scored], [final.unscale for final in finals])
