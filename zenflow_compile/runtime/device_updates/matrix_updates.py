"""Updates of whole matrices, whose rule changes a value of each as a matrix before it moves the weight: Muon."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow_compile.rules.rule import named
from zenflow_compile.runtime.update_rule import StepCoefficients, window_numbers


def moved_matrices(
    weights: Sequence[Tensor],
    arrays: Sequence[Sequence[Tensor]],
    gradients: Sequence[Tensor],
    steps: Sequence[int],
    coefficients: StepCoefficients,
) -> list[tuple[Tensor, list[Tensor]]]:
    """Return new weights and arrays of the rule. Nothing is written.

    Args:
        weights, arrays, gradients: of each matrix, all of one shape, fp32 or fp64; gradients are scaled.
        steps: gradients in the arrays of each, this one included.
    """
    rule, options = coefficients.rule, coefficients.options
    at, count = rule.values.index(rule.of_matrix), len(rule.arrays)
    values = []
    for weight, own, gradient, step in zip(weights, arrays, gradients, steps, strict=True):
        numbers = window_numbers([coefficients], step).of_gradient[0]
        state = named(rule.values, (*own, *(torch.zeros_like(weight) for _ in rule.window)))
        values.append(list(rule.accumulate(weight, state, gradient, named(rule.of_gradient, numbers))))
    changed = rule.on_matrices(torch.stack([own[at] for own in values]), options)
    for own, matrix in zip(values, changed.unbind(), strict=True):
        own[at] = matrix
    found = []
    for weight, own, step in zip(weights, values, steps, strict=True):
        numbers = window_numbers([coefficients], step).of_window
        moved = rule.apply(weight, named(rule.values, own), named(rule.of_window, numbers))
        found.append((moved, own[:count]))
    return found
