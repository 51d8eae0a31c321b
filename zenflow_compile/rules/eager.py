"""Runs a rule on tensors, operator by operator: what printed code is compared with, and updates of odd layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    options: Any = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the weight and the arrays after an update window. Nothing is written.

    Args:
        weight, arrays: of one shape and dtype.
        gradients: oldest first, of that shape and dtype, scaled.
        of_gradient: the rule's numbers, for each gradient. of_window: those of ``apply``.
        options: of the last gradient's optimizer step, which rules of matrices take.
    """
    values = (*arrays, *(torch.zeros_like(weight) for _ in rule.window))
    for gradient, numbers in zip(gradients, of_gradient, strict=True):
        state = named(rule.values, values)
        values = rule.accumulate(weight, state, gradient, named(rule.of_gradient, numbers))
    if rule.of_matrix:
        at = rule.values.index(rule.of_matrix)
        stack = values[at].view(-1, *weight.shape[-2:])
        values = (*values[:at], rule.on_matrices(stack, options).view_as(weight), *values[at + 1 :])
    moved = rule.apply(weight, named(rule.values, values), named(rule.of_window, of_window))
    return moved, list(values[: len(rule.arrays)])
