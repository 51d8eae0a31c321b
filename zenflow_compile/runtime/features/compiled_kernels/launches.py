"""What an offloaded parameter launches: calls of the launching functions themselves, on tensors without memory.

This module imports Triton, so it is imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import triton_kernels, triton_updates
from zenflow_compile.runtime.device_updates.selection import SliceState
from zenflow_compile.runtime.host.host_kernel import scales_and_values
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.update_rule import StepCoefficients

_META = torch.device("meta")  # shapes and dtypes alone; addresses count as multiples of 16, as those of real memory are


def launches_of(plan: ParamPlan, *, host_weights: bool) -> Iterable[Callable[[], object]]:
    """What the offloaded parameter of ``plan`` launches, in the order of first uses.

    Args:
        host_weights: ``offload_weights`` may put its weight into host memory.
    """
    whole = torch.empty(plan.of_weight.matrix_shape, dtype=plan.dtype, device=_META)
    matrix = whole if plan.share is None else plan.share.view(whole)
    # Of a share, the weight's slices lie apart in it, and the gradient comes from the ranks as a block.
    gradient = matrix if plan.share is None else torch.empty(plan.slices, plan.length, dtype=plan.dtype, device=_META)
    device = DeviceState.allocate(plan, _META)
    selection, dim = device.selection, plan.dim
    deferred = torch.empty(plan.deferred, plan.length, dtype=plan.dtype, device=_META)
    yield partial(triton_kernels.norms_and_split, gradient, dim, selection, device.gradient, deferred)
    # Clipping and loss scales are known to the device alone.
    factors = Number.known(1.0), Number(torch.empty((), dtype=torch.float64, device=_META))
    rows = device.gradient, device.state.master, device.state[1:], 2, device.form
    states = [SliceState(matrix, dim, selection, *rows)]
    if host_weights:  # what is cast goes where the gradient was
        states.append(SliceState(device.gradient, 0, None, *rows))
    for factor in factors:
        coefficients = StepCoefficients(plan.rule.initial, factor, plan.rule)
        for state in states:
            yield partial(triton_updates.update_slices_, state, coefficients)
    if plan.compressed:
        lost = deferred if plan.dtype == torch.float32 else deferred.bfloat16()
        scales, values = scales_and_values(torch.empty(plan.gradient_buffers.shape, dtype=torch.int8, device=_META))
        for factor in factors:
            yield partial(triton_kernels.quantize_slices_, deferred, lost, factor.for_kernels(), scales, values)
    if host_weights:
        yield partial(triton_kernels.unsplit_columns, matrix, dim, selection, device.gradient, deferred)
    yield partial(triton_kernels.merge_columns, matrix, dim, selection, deferred)
