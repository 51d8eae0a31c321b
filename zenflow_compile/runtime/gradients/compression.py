"""Compresses deferred gradients to int8 with a scale per slice before the D2H copy, and keeps the rounding error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.late_number import on_device
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.host.host_adam import scales_and_values


@dataclass(slots=True)
class Residual:
    """The rounding error of a parameter's compressed gradients, which is added to the next one.

    Attributes:
        lost: [deferred, length], without loss scale and after clipping, because both change from step to step. fp32, or
            bf16 if the model's dtype has 16 bits: fp16 would underflow.
    """

    lost: Tensor

    @classmethod
    def allocate(cls, plan: ParamPlan, device: torch.device) -> Residual:
        """Make a residual of zeros."""
        dtype = torch.float32 if plan.dtype == torch.float32 else torch.bfloat16
        return cls(torch.zeros((plan.deferred, plan.length), dtype=dtype, device=device))

    def compress(self, gradient: Tensor, coefficients: StepCoefficients, block: Tensor) -> StepCoefficients:
        """Write a final gradient [deferred, length] plus the residual into ``block``, and keep the new rounding error.

        Returns:
            The coefficients for the written gradient, which is scaled already.
        """
        scales, values = scales_and_values(block)
        column_ops.quantize_slices_(gradient, self.lost, on_device(coefficients.grad_scale), scales, values)
        return coefficients._replace(grad_scale=1.0)

    def drop(self, changed: Tensor) -> None:
        """Clear the residual of rows that now hold other slices.

        Args:
            changed: bool[deferred], on the device.
        """
        self.lost.masked_fill_(changed.unsqueeze(1), 0.0)
