"""Updates of whole matrices, whose rule changes a value of each as a matrix before it moves the weight: Muon.

Matrices of one shape are stacked for that, as far as the stack is small; everything else is done one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow_compile.rules.rule import named
from zenflow_compile.runtime.device_updates.column_ops import bounded_batches
from zenflow_compile.runtime.update_rule import StepCoefficients, window_numbers

_STACKED_ELEMENTS = 1 << 25  # at a time, unless one matrix has more: 64 MiB in bf16, of which there are some


def moved_matrices(
    weights: Sequence[Tensor],
    arrays: Sequence[Sequence[Tensor]],
    gradients: Sequence[Tensor],
    steps: Sequence[int],
    coefficients: StepCoefficients,
) -> list[tuple[Tensor, list[Tensor]]]:
    """Return new weights and arrays of the rule. Nothing is written.

    Args:
        weights, arrays, gradients: of each matrix, of its shape, fp32 or fp64; gradients are scaled.
        steps: gradients in the arrays of each, this one included.
    """
    rule, options = coefficients.rule, coefficients.options
    at, count = rule.values.index(rule.of_matrix), len(rule.arrays)
    values = []
    for weight, own, gradient, step in zip(weights, arrays, gradients, steps, strict=True):
        numbers = window_numbers([coefficients], step).of_gradient[0]
        state = named(rule.values, (*own, *(torch.zeros_like(weight) for _ in rule.window)))
        values.append(list(rule.accumulate(weight, state, gradient, named(rule.of_gradient, numbers))))
    for alike in _alike(weights):
        changed = rule.on_matrices(torch.stack([values[index][at] for index in alike]), options)
        for index, matrix in zip(alike, changed.unbind(), strict=True):
            values[index][at] = matrix
    found = []
    for weight, own, step in zip(weights, values, steps, strict=True):
        numbers = window_numbers([coefficients], step).of_window
        moved = rule.apply(weight, named(rule.values, own), named(rule.of_window, numbers))
        found.append((moved, own[:count]))
    return found


def _alike(weights: Sequence[Tensor]) -> list[list[int]]:
    """Indices of matrices of one shape and dtype, in stacks of a bounded size."""
    by_shape: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for index, weight in enumerate(weights):
        by_shape.setdefault((weight.shape, weight.dtype), []).append(index)
    return [
        batch
        for indices in by_shape.values()
        for batch in bounded_batches(indices, [weights[index].numel() for index in indices], _STACKED_ELEMENTS)
    ]
