"""The sum of a window's deferred gradients, kept on the device until the window closes.

A gradient is added when it is final, with the clip factor and loss scale of that moment. The sum is in fp32: of random
bf16 gradients, the mean of 4 (8) that were summed in bf16 has a relative error of 2.7e-3 (3.7e-3), of those summed in
fp32 and rounded once 1.7e-3 (1.7e-3), which is that of a bf16 number.
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
    """An open window of one parameter.

    Attributes:
        total: f32[deferred, length], sum of ``gradient * grad_scale`` over the window, in units of ``unit``;
            meaningless while there is none.
        slots: what each of the gradients was to be taken with, oldest first; a missing gradient has none.
    """

    total: Tensor
    slots: list[StepCoefficients] = field(default_factory=list)

    @classmethod
    def allocate(cls, plan: ParamPlan, device: torch.device) -> WindowSum:
        """Device memory for the sum of the deferred slices."""
        return cls(torch.zeros((plan.deferred, plan.length), dtype=torch.float32, device=device))

    @property
    def unit(self) -> float:
        """Scale of the window's first gradient: while it stays the same, raw gradients are summed, without rounding."""
        return _largest_scale(self.slots[:1])

    def add(self, gradient: Tensor, slot: StepCoefficients) -> None:
        """Take a final gradient ``[deferred, length]``, of any floating dtype."""
        self.slots.append(slot)
        factor = slot.grad_scale / self.unit
        if len(self.slots) == 1:
            self.total.copy_(gradient)
            if factor != 1.0:
                self.total.mul_(factor)
        else:
            self.total.add_(gradient, alpha=factor)

    def take_mean(self, out: Tensor) -> list[StepCoefficients]:
        """End the window: write the mean gradient into ``out`` [deferred, length] of the model's dtype.

        The mean is in units of the window's largest scale: no element of it is larger than the largest of the raw
        gradients, which the dtype held.

        Returns:
            The window's slots, each to be taken with that mean and that scale.
        """
        scale = _largest_scale(self.slots)
        torch.mul(self.total, self.unit / scale / len(self.slots), out=out)
        slots, self.slots = [slot._replace(grad_scale=scale) for slot in self.slots], []
        return slots


def _largest_scale(slots: Sequence[StepCoefficients]) -> float:
    """The largest magnitude that can be divided by, 1 if none can: clipped by an infinite norm it is 0, by NaN NaN.

    ``maximize`` makes scales negative.
    """
    scales = (abs(slot.grad_scale) for slot in slots)
    return max((scale for scale in scales if 0.0 < scale < math.inf), default=1.0)
