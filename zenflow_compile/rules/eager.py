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
    values = [accumulate_window(rule, weight, arrays, gradients, of_gradient)]
    if rule.of_matrix:
        update_matrices_(rule, values, options)
    return apply_window(rule, weight, values[0], of_window), values[0][: len(rule.arrays)]


def accumulate_window(
    rule: Rule,
    weight: Tensor,
    arrays: Sequence[Tensor],
    gradients: Sequence[Tensor],
    of_gradient: Sequence[Sequence[float]],
) -> list[Tensor]:
    """The arrays, and values of the window, after the last of ``gradients``; see ``run_window``."""
    values = (*arrays, *(weight.new_zeros(()).expand_as(weight) for _ in rule.window))
    for gradient, numbers in zip(gradients, of_gradient, strict=True):
        state = named(rule.values, values)
        values = rule.accumulate(weight, state, gradient, named(rule.of_gradient, numbers))
    return [*values]


def update_matrices_(rule: Rule, values: Sequence[list[Tensor]], options: Any) -> None:
    """Change the values ``of_matrix`` between the last gradient and ``apply_window``, for matrices of one shape."""
    at = rule.values.index(rule.of_matrix)
    matrices = [each.pop(at) for each in values]
    stack = torch.stack(matrices) if len(matrices) > 1 else matrices[0].unsqueeze(0)
    del matrices  # frees them while the iterations run
    for each, matrix in zip(values, rule.on_matrices(stack, options), strict=True):
        each.insert(at, matrix)


def apply_window(rule: Rule, weight: Tensor, values: Sequence[Tensor], of_window: Sequence[float]) -> Tensor:
    """The new weight."""
    moved: Tensor = rule.apply(weight, named(rule.values, values), named(rule.of_window, of_window))
    return moved
