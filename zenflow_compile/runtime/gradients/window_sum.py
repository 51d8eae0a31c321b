"""The sum of an update window's deferred gradients, kept on the device until the window is flushed.

A gradient is added at the optimizer step, with that step's clip factor and loss scale. The sum is in fp32. For random
bf16 gradients, the mean of 4 (8) has a relative error of 2.7e-3 (3.7e-3) if they are summed in bf16, and 1.7e-3
(1.7e-3) if they are summed in fp32 and rounded one time, which is the error of a bf16 number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients


@dataclass(slots=True)
class WindowSum:
    """The open update window of one parameter.

    Attributes:
        total: f32[deferred, length], the sum of ``gradient * grad_scale`` over the window, divided by ``unit``;
            arbitrary while the window is empty.
        coefficients: the coefficients of each gradient, oldest first; a missing gradient has none.
    """

    total: Tensor
    coefficients: list[StepCoefficients] = field(default_factory=list)

    @classmethod
    def allocate(cls, plan: ParamPlan, device: torch.device) -> WindowSum:
        """Make an empty update window."""
        return cls(torch.zeros((plan.deferred, plan.length), dtype=torch.float32, device=device))

    @property
    def unit(self) -> float:
        """Scale of the update window's first gradient: while it stays the same, raw gradients are summed unscaled."""
        return _largest_scale(self.coefficients[:1])

    def add(self, gradient: Tensor, coefficients: StepCoefficients) -> None:
        """Add a final gradient ``[deferred, length]``, of any floating dtype."""
        # First: the unit is the scale of the update window's first gradient, which may be this one.
        self.coefficients.append(coefficients)
        factor = coefficients.grad_scale / self.unit
        if len(self.coefficients) == 1:
            self.total.copy_(gradient)
            if factor != 1.0:
                self.total.mul_(factor)
        else:
            self.total.add_(gradient, alpha=factor)

    def take_mean(self, out: Tensor) -> list[StepCoefficients]:
        """Empty the update window, and write the mean gradient into ``out`` [deferred, length] of the model's dtype.

        The mean is divided by the window's largest scale, so that it overflows no more than the raw gradients did.

        Returns:
            The coefficients of each gradient of the window, which apply to the mean and have that scale.
        """
        scale = _largest_scale(self.coefficients)
        torch.mul(self.total, self.unit / scale / len(self.coefficients), out=out)
        coefficients, self.coefficients = [each._replace(grad_scale=scale) for each in self.coefficients], []
        return coefficients


def _largest_scale(coefficients: Sequence[StepCoefficients]) -> float:
    """Return the largest magnitude of the scales that can be divided by; 1 if there is none.

    Clipping by an infinite norm makes a scale 0, by a NaN norm NaN. ``maximize`` makes scales negative.
    """
    scales = (abs(each.grad_scale) for each in coefficients)
    return max((scale for scale in scales if 0.0 < scale < math.inf), default=1.0)
