"""Gradients as int8 with a scale per slice: a block of a parameter's deferred slices on its way, and on the host.

A block is int8[deferred, length + 4]. Its memory is that of f32[deferred] scales and int8[deferred, length] values: one
contiguous piece, so that it is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_compile.planning.plan import FP32_BYTES, ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device import column_ops
from zenflow_compile.torch_internals import torch_private

EXPANDED_ELEMENTS = 1 << 16
"""Elements of each slot that the host expands to fp32 at a time: four slots are 1 MiB, which fits a core's L2 cache."""


@dataclass(slots=True)
class Residual:
    """What rounding to int8 has lost of a parameter's deferred slices and is still to be sent.

    Attributes:
        lost: [deferred, length], in units without loss scale and after clipping, since both change
            from step to step. fp32, or bf16 where the model's dtype has 16 bits: fp16 would underflow.
    """

    lost: Tensor

    @classmethod
    def allocate(cls, plan: ParamPlan, device: torch.device) -> Residual:
        """Nothing is lost yet."""
        dtype = torch.float32 if plan.dtype == torch.float32 else torch.bfloat16
        return cls(torch.zeros((plan.deferred, plan.length), dtype=dtype, device=device))

    def compress(self, gradient: Tensor, slot: StepCoefficients, block: Tensor) -> StepCoefficients:
        """Write a final gradient [deferred, length], and what was lost before, into ``block``; keep what that loses.

        Returns:
            The coefficients for what was written, which is scaled already.
        """
        scales, values = scales_and_values(block)
        column_ops.quantize_slices_(gradient, self.lost, slot.grad_scale, scales, values)
        return slot._replace(grad_scale=1.0)

    def drop(self, changed: Tensor) -> None:
        """Forget what the slices that left to the device had lost: the slices in their places have lost nothing.

        Args:
            changed: bool[deferred], on the device.
        """
        self.lost.masked_fill_(changed.unsqueeze(1), 0.0)


def scales_and_values(block: Tensor) -> tuple[Tensor, Tensor]:
    """f32[deferred] and int8[deferred, length] views of a block."""
    deferred, length = block.shape[0], block.shape[1] - FP32_BYTES
    flat = block.view(-1)
    return flat[: FP32_BYTES * deferred].view(torch.float32), flat[FP32_BYTES * deferred :].view(deferred, length)


def expanded(blocks: Sequence[Tensor], part: slice, length: int) -> list[Tensor]:
    """The elements ``part`` of compressed gradients on the host, in fp32, [n] each. Runs in one thread.

    Args:
        part: whole slices of ``length`` elements.
    """
    slices = slice(part.start // length, part.stop // length)
    with torch.no_grad(), torch_private.one_intra_op_thread():
        views = [scales_and_values(block) for block in blocks]
        return [(values[slices] * scales[slices].unsqueeze(1)).view(-1) for scales, values in views]
