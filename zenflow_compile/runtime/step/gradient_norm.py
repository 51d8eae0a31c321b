"""Norms over all gradients that the optimizer step uses: split ones, and those in ``.grad``."""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.step.shard_calls import ShardCalls
from zenflow_compile.timeline.events import Timeline


def clip_gradients(registry: ParamRegistry, device: torch.device, limit: float, shards: ShardCalls | None) -> None:
    """Scale all gradients to an L2 norm of at most ``limit``, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        shards: the ranks of a sharded model, which all clip by the norm of the whole gradients.
    """
    records = [offloaded.record for offloaded in registry.offloaded.values() if offloaded.state is GradientState.PARTS]
    away = [record for record in records if record is not None]
    resident = registry.device_updated.gradients()
    norm = _total_norm(away, resident, device)
    if shards is not None:
        norm = shards.norm_of(norm)
    if registry.gradients.factors.deferred:
        above = norm.double() + 1e-6
        # Not ``limit / above``: PyTorch multiplies by the reciprocal, which rounds two times. NaN stays NaN.
        late = (torch.full_like(above, limit) / above).clamp(max=1.0)
        for record in away:
            record.scale(late)
        for dtype in dict.fromkeys(grad.dtype for grad in resident):
            # Rounded first, as ``_foreach_mul_`` rounds a float on the CPU. A factor of 1 leaves every bit.
            torch._foreach_mul_([grad for grad in resident if grad.dtype == dtype], late.to(dtype))
        return
    factor = min(limit / (float(norm) + 1e-6), 1.0)  # in this order NaN stays NaN, as in PyTorch
    for record in away:
        record.scale(factor)
    if factor != 1.0 and resident:
        torch._foreach_mul_(resident, factor)


def _total_norm(away: list[GradientRecord], resident: list[Tensor], device: torch.device) -> Tensor:
    norms = [record.l2_norm(torch.float32) for record in away]
    if resident:
        norms += [norm.float() for norm in torch._foreach_norm(resident)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)


def record_norms(registry: ParamRegistry, timeline: Timeline, step: int) -> None:
    """Record the share of squared gradient norm in the selected slices."""
    used = (GradientState.PARTS, GradientState.CONSUMED)
    present = [offloaded for offloaded in registry.offloaded.values() if offloaded.state in used]
    if not present:
        return
    sides = [offloaded.device for offloaded in present]
    selected = torch.stack([side.selected_norm() for side in sides]).sum()
    timeline.add_norms(step, selected, torch.stack([side.norms.sum() for side in sides]).sum())
