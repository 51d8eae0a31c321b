"""Clips gradients by the norm over all of them, before an optimizer step uses any."""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.step.one_rank import OneRank


def clip_gradients(registry: ParamRegistry, device: torch.device, limit: float, calls: OneRank) -> None:
    """Scale all gradients to an L2 norm of at most ``limit``, as ``torch.nn.utils.clip_grad_norm_`` does.

    All ranks of a sharded model, ``calls``, clip by the norm of the whole gradients.
    """
    away = {
        offloaded.param: offloaded.shown.record
        for offloaded in registry.offloaded.values()
        if offloaded.shown.state is GradientState.PARTS and offloaded.shown.record is not None
    }
    on_device = dict(registry.device_updated.gradients())
    records, resident = list(away.values()), list(on_device.values())
    norms = _norms(records, resident)
    norm = calls.norm_of(norms, [*away, *on_device], device)
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
