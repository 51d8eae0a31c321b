"""The values of compressed gradients in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_compile.runtime.host.host_kernel import scales_and_values


@torch.no_grad()
def expanded(block: Tensor, part: slice) -> Tensor:
    """Expand the elements ``part``, whole slices, to fp32[n]."""
    scales, values = scales_and_values(block)
    length = values.shape[1]
    slices = slice(part.start // length, part.stop // length)
    return (values[slices] * scales[slices].unsqueeze(1)).view(-1)
