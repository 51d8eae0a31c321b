"""Gradient clipping over gradients on the device, on their way to the host, and in ``.grad``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from zenflow_compile.runtime import ops
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.validate import check_positive


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients that the coming ``step()`` will use to a global L2 norm of ``max_norm``, exactly.

    A drop-in for ``torch.nn.utils.clip_grad_norm_``, which cannot see gradients that never reach ``.grad`` and would
    return 0. Parameters without a ZenFlow optimizer are clipped as usual and count towards the norm.

    Args:
        parameters: one tensor or many.
        max_norm: > 0, in units of unscaled gradients if ``GradScaler.unscale_`` ran, else of the gradients as they are.
        norm_type: 2.0; column norms are L2 norms.
        error_if_nonfinite: raise if the norm is NaN or infinite.
        foreach: as in PyTorch; for gradients in ``.grad``.

    Returns:
        The total norm before clipping, 0-d f32.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` out of range.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; or the update has run in the backward.
    """
    limit = check_positive("max_norm", max_norm)
    if float(norm_type) != 2.0:
        raise ValueError(f"norm_type={norm_type!r} must be 2.0: gradients are kept as squared column norms")
    owned: dict[Engine, set[int]] = {}
    loose: list[Tensor] = []
    for param in [parameters] if isinstance(parameters, Tensor) else parameters:
        if (owner := ops.owner_of(param)) is not None:
            owned.setdefault(cast(Engine, owner[0]), set()).add(owner[1])
        elif param.grad is not None:
            loose.append(param.grad)
    if any(engine.implicit for engine in owned):
        raise RuntimeError(
            "the update of a model compiled without an optimizer object runs inside its backward, so nothing is "
            "left to clip: pass max_grad_norm among the options of torch.compile, or create a ZenFlowAdamW"
        )
    squares = [
        engine.gradient_norm(only, unscale=engine.optimizer.unscaled_by).square() for engine, only in owned.items()
    ]
    if loose:
        squares.append(torch.nn.utils.get_total_norm(loose, foreach=foreach).float().square())
    if not squares:
        return torch.zeros(())
    total = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of gradients is {float(total)}, so it cannot be clipped; "
            "to go on regardless, set error_if_nonfinite=False"
        )
    factor = min(limit / (float(total) + 1e-6), 1.0)  # in this order NaN stays NaN, as in PyTorch
    for engine, only in owned.items():
        engine.clip(factor, only)
    if factor != 1.0:
        for grad in loose:
            grad.mul_(factor)
    return total
