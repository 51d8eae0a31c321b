"""Norms and factors over all gradients of an engine that wait: split, accumulated, or in ``.grad``."""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_compile.profiling.timeline import Timeline
from zenflow_compile.runtime.roster import Roster


def waiting_norm(
    roster: Roster, device: torch.device, only: set[int] | None, *, unscale: float, resident_unscale: float
) -> Tensor:
    """L2 norm over all waiting gradients (of the parameters ``only``), 0-d f32.

    Args:
        unscale, resident_unscale: factors on the gradients of offloaded parameters, and on those in ``.grad``.
    """
    squares: list[Tensor] = []
    for p, offloaded in roster.offloaded.items():
        if offloaded.contributions and (only is None or p in only):
            offloaded.settle()
            squares.append(offloaded.device.norms.sum() * (offloaded.clip * unscale) ** 2)
    if grads := [grad for _, grad, _ in roster.residents(only)]:
        squares.extend((norm.float() * resident_unscale).square() for norm in torch._foreach_norm(grads))
    if not squares:
        return torch.zeros((), device=device)
    return torch.stack(squares).sum().sqrt()


def scale_waiting(roster: Roster, factor: float, only: set[int] | None) -> None:
    """Multiply all waiting gradients (of the parameters ``only``) by ``factor``."""
    for p, offloaded in roster.offloaded.items():
        if offloaded.contributions and (only is None or p in only):
            offloaded.clip *= factor
    if factor != 1.0 and (grads := [grad for _, grad, _ in roster.residents(only)]):
        torch._foreach_mul_(grads, factor)


def clip_waiting(
    roster: Roster, device: torch.device, limit: float, *, unscale: float, resident_unscale: float
) -> None:
    """Scale all waiting gradients to a norm of at most ``limit``, in unscaled units; see ``waiting_norm``."""
    norm = float(waiting_norm(roster, device, None, unscale=unscale, resident_unscale=resident_unscale))
    scale_waiting(roster, min(limit / (norm + 1e-6), 1.0), None)  # in this order NaN stays NaN, as in PyTorch


def record_norms(roster: Roster, timeline: Timeline | None, step: int) -> None:
    """Leave the share of squared gradient norm in the selected lines with the profiler, if one listens."""
    present = [offloaded for offloaded in roster.offloaded.values() if offloaded.contributions or offloaded.updated]
    if timeline is None or not present:
        return
    sides = [(offloaded.device.norms, offloaded.device.selection.selected) for offloaded in present]
    selected = torch.stack([norms.index_select(0, lines).sum() for norms, lines in sides]).sum()
    timeline.add_norms(step, selected, torch.stack([norms.sum() for norms, _ in sides]).sum())
