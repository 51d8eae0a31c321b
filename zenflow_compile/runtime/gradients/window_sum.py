"""The sum of an update window's deferred gradients, kept on the device until the window is flushed.

A gradient is added at the optimizer step, with that step's clip factor and loss scale. The sum is in fp32. For random
bf16 gradients, the mean of 4 (8) has a relative error of 2.7e-3 (3.7e-3) if they are summed in bf16, and 1.7e-3
(1.7e-3) if they are summed in fp32 and rounded one time, which is the error of a bf16 number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.late_number import LateNumber, Number, largest_magnitude
from zenflow_compile.runtime.device.memory_list import MemoryList


class Scales:
    """Arithmetic with the scales of gradients, in fp64 on the host and on the device.

    Parameters share scales, so a step computes few late numbers: they are cached, since a number on the device costs
    some launches.
    """

    def __init__(self) -> None:
        self._largest_late = lru_cache(maxsize=64)(_largest_late)
        self._late_quotient = lru_cache(maxsize=64)(_late_quotient)

    def forget(self) -> None:
        """Drop cached numbers, which the device has."""
        self._largest_late.cache_clear()
        self._late_quotient.cache_clear()

    def largest(self, coefficients: Sequence[StepCoefficients]) -> Number:
        """Return the largest magnitude of the scales that can be divided by; 1 if there is none.

        Clipping by an infinite norm makes a scale 0, by a NaN norm NaN. ``maximize`` makes scales negative.
        """
        scales = tuple(each.grad_scale for each in coefficients)
        if any(isinstance(scale, LateNumber) for scale in scales):
            return self._largest_late(scales)
        return largest_magnitude([float(scale) for scale in scales])

    def quotient(self, number: Number, by: Number, count: int = 1) -> float | Tensor:
        """Return ``number / by / count`` for operators on fp32 tensors: a float, or f32[] on the device."""
        if isinstance(number, float) and isinstance(by, float):
            return number / by / count
        return self._late_quotient(number, by, count)


@dataclass(slots=True)
class WindowSum:
    """The open update window of one parameter.

    Attributes:
        total: f32[deferred, length], the sum of ``gradient * grad_scale`` over the window, divided by ``unit``;
            arbitrary while the window is empty.
        scales: arithmetic with the scales, which the parameters of an engine share.
        coefficients: the coefficients of each gradient, oldest first; a missing gradient has none.
    """

    total: Tensor
    scales: Scales
    coefficients: list[StepCoefficients] = field(default_factory=list)

    @classmethod
    def allocate(cls, plan: ParamPlan, device: torch.device, scales: Scales) -> WindowSum:
        """Make an empty update window."""
        return cls(torch.zeros((plan.deferred, plan.length), dtype=torch.float32, device=device), scales)

    @property
    def unit(self) -> Number:
        """Scale of the update window's first gradient: while it stays the same, raw gradients are summed unscaled."""
        return self.scales.largest(self.coefficients[:1])

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory."""
        (found.content if self.coefficients else found.scratch)(self.total)
        found.numbers(each.grad_scale for each in self.coefficients)

    def add(self, gradient: Tensor, coefficients: StepCoefficients) -> None:
        """Add a final gradient ``[deferred, length]``, of any floating dtype."""
        # First: the unit is the scale of the update window's first gradient, which may be this one.
        self.coefficients.append(coefficients)
        factor = self.scales.quotient(coefficients.grad_scale, self.unit)
        unscaled = isinstance(factor, float) and factor == 1.0
        if len(self.coefficients) == 1:
            self.total.copy_(gradient)
            if not unscaled:
                self.total.mul_(factor)
        elif unscaled:
            self.total.add_(gradient)
        else:
            # Not ``add_(alpha=)``, which takes no factor from device memory: one operator for all factors, so that none
            # rounds otherwise. Its bits are those of ``add_(alpha=)`` where the CPU has fused multiply-adds.
            if isinstance(factor, float):
                factor = torch.full((), factor, dtype=torch.float32, device=self.total.device)
            self.total.addcmul_(gradient, factor)

    def take_mean(self, out: Tensor) -> list[StepCoefficients]:
        """Empty the update window, and write the mean gradient into ``out`` [deferred, length] of the model's dtype.

        The mean is divided by the window's largest scale, so that it overflows no more than the raw gradients did.

        Returns:
            The coefficients of each gradient of the window, which apply to the mean and have that scale.
        """
        scale = self.scales.largest(self.coefficients)
        torch.mul(self.total, self.scales.quotient(self.unit, scale, len(self.coefficients)), out=out)
        coefficients, self.coefficients = [each._replace(grad_scale=scale) for each in self.coefficients], []
        return coefficients


def _largest_late(scales: tuple[Number, ...]) -> LateNumber:
    late = [scale for scale in scales if isinstance(scale, LateNumber)]
    like = late[0].on_device
    magnitudes = torch.stack([_on(each, like) for each in scales]).abs_()
    usable = torch.where((magnitudes > 0.0) & (magnitudes < math.inf), magnitudes, 0.0).amax()
    copies = list(dict.fromkeys(copy for each in late for copy in each.copies))
    cells = [_cell(scale) for scale in scales]
    return LateNumber(torch.where(usable > 0.0, usable, 1.0), copies, cells, factor=0.0)


def _cell(scale: Number) -> Tensor:
    """The number in host memory, up to its sign."""
    if not isinstance(scale, LateNumber):
        return torch.tensor(scale, dtype=torch.float64, device="cpu")
    assert abs(scale.factor) == 1.0
    return scale.cells[0]


def _late_quotient(number: Number, by: Number, count: int) -> Tensor:
    like = next(each.on_device for each in (number, by) if isinstance(each, LateNumber))
    # Tensors only: with a float on either side, PyTorch may multiply by a reciprocal, which rounds two times.
    dividend, divisor, last = (_on(each, like) for each in (number, by, float(count)))
    return (dividend / divisor / last).float()


def _on(number: Number, like: Tensor) -> Tensor:
    return number.on_device if isinstance(number, LateNumber) else torch.full_like(like, number)
