"""Compresses deferred gradients to int8 with a scale per slice before the D2H copy, and expands them on the host.

A block is int8[deferred, length + 4]. It holds f32[deferred] scales, then int8[deferred, length] values, contiguously,
so that one copy moves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_compile.planning.plan import FP32_BYTES, ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.late_number import on_device
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.torch_internals import torch_private

EXPANDED_ELEMENTS = 1 << 16
"""Elements of each gradient buffer that the host expands to fp32 at a time: four buffers are 1 MiB, which fits into a
core's L2 cache."""


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


def scales_and_values(block: Tensor) -> tuple[Tensor, Tensor]:
    """View a block as f32[deferred] scales and int8[deferred, length] values."""
    deferred, length = block.shape[0], block.shape[1] - FP32_BYTES
    flat = block.view(-1)
    return flat[: FP32_BYTES * deferred].view(torch.float32), flat[FP32_BYTES * deferred :].view(deferred, length)


def expanded(blocks: Sequence[Tensor], part: slice, length: int) -> list[Tensor]:
    """Expand the elements ``part`` of compressed gradients on the host to fp32, [n] each. Runs in the calling thread.

    Args:
        part: covers whole slices of ``length`` elements.
    """
    slices = slice(part.start // length, part.stop // length)
    with torch.no_grad(), torch_private.one_intra_op_thread():
        views = [scales_and_values(block) for block in blocks]
        return [(values[slices] * scales[slices].unsqueeze(1)).view(-1) for scales, values in views]
