"""One optimizer step of all offloaded parameters: selected slices on the device, deferred ones into update windows.

Before it, gradients are clipped by the norm over all of them, and the host waits for the step before last: no other
call of a steady step waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.device import Device, Streams
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.selection import Selection, SliceState
from zenflow_compile.runtime.device_updates.version_counter import bump_versions
from zenflow_compile.runtime.gradients.factors import UNSCALED
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.parameters.device_state import feed_scores
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.runtime.step.rank_calls import ShardCalls
from zenflow_compile.timeline import DeviceEvent


class Member(NamedTuple):
    """A parameter in an optimizer step: its coefficients, the factor on its gradient among them, and eps."""

    offloaded: OffloadedParam
    coefficients: StepCoefficients
    eps: float


def members_of(params: Sequence[OffloadedParam], registry: ParamRegistry) -> list[Member]:
    """Read the coefficients of ``params``, once per optimizer step: param groups are the user's, and may change later.

    Equal coefficients are one object.
    """
    members: list[Member] = []
    groups, known = registry.group_numbers, dict[tuple[int, Number], tuple[StepCoefficients, float]]()
    for offloaded in params:
        index = offloaded.plan.index
        grad_scale = (UNSCALED if (record := offloaded.record) is None else record.final).grad_scale
        if (found := known.get((groups[index], grad_scale))) is None:
            found = known[groups[index], grad_scale] = registry.coefficients(index, grad_scale)
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
        state = device.gradient, device.master, device.exp_avg, device.exp_avg_sq, device.steps, device.form
        together.setdefault((coefficients, eps), []).append(SliceState(matrix, dim, selection, *state))
    for (coefficients, eps), states in together.items():
        column_ops.adam_columns_(states, coefficients, eps=eps)
    # The kernels above write below autograd: a graph that saved the old weights must raise in its backward.
    bump_versions([each.param for each in params], [each.weights.counter for each in params])
    for offloaded in params:
        if (home := offloaded.weights.home) is not None and home.loaded and offloaded.weights.put_into_slices():
            home.load()
    finals = [UNSCALED if each.record is None else each.record.final for each in params]
    feed_scores([each.device for each in params], [final.unscale for final in finals])


STEPS_AHEAD = 2
"""Optimizer step t begins when the device has done step t - 2. What the device has computed there can be read without a
further wait, and the device has the work of a whole step queued while the host waits."""
STEP_BEFORE_LAST = "step before last"


class RunAhead:
    """Makes the training thread wait, at the begin of an optimizer step, for the end of the step before last.

    Each step that is not done keeps its queued launches, the memory of its gradients on the host, and its factors.
    """

    def __init__(self, device: Device, streams: Streams, recorder: Recorder) -> None:
        self._device = device
        self._streams = streams
        self._recorder = recorder
        self._ends: deque[DeviceEvent] = deque()  # of the steps that may be unfinished, oldest first

    def begin_step(self) -> None:
        """Wait for the step before last. Further calls in the same step do nothing."""
        while len(self._ends) >= STEPS_AHEAD:
            end = self._ends[0]
            with self._recorder.stall(not end.query(), param="", on_host=True):
                self._device.wait_for(end, STEP_BEFORE_LAST)
            self._ends.popleft()  # last: an interrupted wait is repeated

    def end_step(self) -> None:
        """Note the end of the step: all work that is queued now."""
        end = self._streams.event(blocking=True)
        end.record(self._streams.current())
        self._ends.append(end)


def clip_gradients(registry: ParamRegistry, device: torch.device, limit: float, shards: ShardCalls | None) -> None:
    """Scale all gradients to an L2 norm of at most ``limit``, as ``torch.nn.utils.clip_grad_norm_`` does.

    All ranks of a sharded model, ``shards``, clip by the norm of the whole gradients.
    """
    away = {
        offloaded.param: offloaded.record
        for offloaded in registry.offloaded.values()
        if offloaded.state is GradientState.PARTS and offloaded.record is not None
    }
    on_device = dict(registry.device_updated.gradients())
    records, resident = list(away.values()), list(on_device.values())
    norms = _norms(records, resident)
    if shards is None:
        norm = _total_norm(norms, device)
    else:
        sharded = [isinstance(param, LocalShard) for param in [*away, *on_device]]
        parts = [norm for norm, is_sharded in zip(norms, sharded, strict=True) if is_sharded]
        whole = [norm for norm, is_sharded in zip(norms, sharded, strict=True) if not is_sharded]
        norm = shards.norm_of(_total_norm(parts, device), _total_norm(whole, device) if whole else None)
    if registry.gradients.factors.deferred:
        above = norm.double() + 1e-6
        # Not ``limit / above``: PyTorch multiplies by the reciprocal, which rounds two times. NaN stays NaN.
        late = (torch.full_like(above, limit) / above).clamp(max=1.0)
        for record in records:
            record.scale(late)
        for dtype in dict.fromkeys(grad.dtype for grad in resident):
            # Rounded first, as ``_foreach_mul_`` rounds a float on the CPU. A factor of 1 leaves every bit.
            torch._foreach_mul_([grad for grad in resident if grad.dtype == dtype], late.to(dtype))
        return
    factor = min(limit / (float(norm) + 1e-6), 1.0)  # in this order NaN stays NaN, as in PyTorch
    for record in records:
        record.scale(factor)
    if factor != 1.0 and resident:
        torch._foreach_mul_(resident, factor)


def _norms(records: list[GradientRecord], resident: list[Tensor]) -> list[Tensor]:
    norms = [record.l2_norm(torch.float32) for record in records]
    if resident:
        norms += [norm.float() for norm in torch._foreach_norm(resident)]
    return norms


def _total_norm(norms: list[Tensor], device: torch.device) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)
