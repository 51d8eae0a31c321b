"""Runs a rule on tensors, operator by operator: what printed code is compared with, and updates of odd layouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow_compile.rules.rule import Rule, named


@torch.no_grad()
def run_window(
    rule: Rule,
    weight: Tensor,
    arrays: Sequence[Tensor],
    gradients: Sequence[Tensor],
    of_gradient: Sequence[Sequence[float]],
    of_window: Sequence[float],
) -> tuple[Tensor, list[Tensor]]:
    """Return the weight and the arrays after an update window. Nothing is written.

    Args:
        weight, arrays: of one shape and dtype.
        gradients: oldest first, of that shape and dtype, scaled.
        of_gradient: the rule's numbers, for each gradient. of_window: those of ``apply``.
    """
    values = (*arrays, *(torch.zeros_like(weight) for _ in rule.window))
    for gradient, numbers in zip(gradients, of_gradient, strict=True):
        state = named(rule.values, values)
        values = rule.accumulate(weight, state, gradient, named(rule.of_gradient, numbers))
    moved = rule.apply(weight, named(rule.values, values), named(rule.of_window, of_window))
    return moved, list(values[: len(rule.arrays)])
