"""The layout of compressed gradients, and their expansion on the host.

A block is int8[deferred, length + 4]. It holds f32[deferred] scales, then int8[deferred, length] values, contiguously,
so that one copy moves both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_compile.planning.plan import FP32_BYTES
from zenflow_compile.torch_internals import torch_private

EXPANDED_ELEMENTS = 1 << 16
"""Elements of each gradient buffer that the host expands to fp32 at a time: four buffers are 1 MiB, which fits into a
core's L2 cache."""


def scales_and_values(block: Tensor) -> tuple[Tensor, Tensor]:
    """View a block as f32[deferred] scales and int8[deferred, length] values."""
    deferred, length = block.shape[0], block.shape[1] - FP32_BYTES
    flat = block.view(-1)
    return flat[: FP32_BYTES * deferred].view(torch.float32), flat[FP32_BYTES * deferred :].view(deferred, length)


def expanded(block: Tensor, part: slice) -> Tensor:
    """Expand the elements ``part`` of a compressed gradient on the host to fp32[n]. Runs in the calling thread.

    Args:
        part: covers whole slices.
    """
    scales, values = scales_and_values(block)
    length = values.shape[1]
    slices = slice(part.start // length, part.stop // length)
    with torch.no_grad(), torch_private.one_intra_op_thread():
        return (values[slices] * scales[slices].unsqueeze(1)).view(-1)
