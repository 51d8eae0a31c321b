"""What a param group may say, whether a user or a saved state says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zenflow_compile.options import OPTION_NAMES
from zenflow_compile.validate import check_number


def check_group(group: Mapping[str, Any]) -> None:
    """
    Args:
        group: with every default filled in.

    Raises:
        ValueError: a value out of range, or an option of the whole optimizer.
        TypeError: a value of the wrong kind.
    """
    for name in OPTION_NAMES:
        if name in group:
            raise ValueError(
                f"a param group has {name}={group[name]!r}, an option of the whole optimizer: pass it to ZenFlowAdamW "
                "itself, or give those parameters an optimizer of their own; groups may differ in lr, betas, eps and "
                "weight_decay"
            )
    lr = group["lr"]
    check_number("lr", lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr, 0.0)
    check_number("eps", group["eps"], 0.0)
    check_number("weight_decay", group["weight_decay"], 0.0)
    _check_betas(group["betas"])


def _check_betas(betas: Any) -> None:
    if isinstance(betas, (tuple, list)) and len(betas) == 2:
        first, second = (beta.item() if isinstance(beta, Tensor) and beta.numel() == 1 else beta for beta in betas)
        if check_number("betas[0]", first, 0.0) < 1.0 and check_number("betas[1]", second, 0.0) < 1.0:
            return
    raise ValueError(f"betas={betas!r} must be two numbers in [0, 1), such as (0.9, 0.999)")
