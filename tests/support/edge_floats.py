"""fp32 numbers whose casts to bf16 and fp16 are easily wrong."""

from __future__ import annotations

import torch
from torch import Tensor

_EDGE_BITS = (
    *(0x7FC00000, 0x7F800001, 0xFFC12345, 0xFF812345),  # NaN: quiet, signaling, with payloads
    *(0x7F800000, 0xFF800000, 0x00000000, 0x80000000),  # infinities and zeros
    *(0x00000001, 0x807FFFFF, 0x00008000, 0x80018000, 0x00008001),  # denormals, two of them ties in bf16
    *(0x3F808000, 0xBF818000, 0x3F807FFF, 0x3F808001),  # ties in bf16, and their neighbors
    *(0x7F7FFFFF, 0xFF7F8000, 0x7F7F7FFF),  # infinite in bf16, the second as a tie; the largest one in bf16
    *(0x3F801000, 0xBF803000, 0x3F800FFF, 0x3F801001),  # ties in fp16, and their neighbors
    *(0x477FF000, 0xC77FEFFF, 0x47800000),  # infinite in fp16 as a tie, the largest one there, infinite
    *(0x33000000, 0xB3C00000, 0x33000001, 0x387FE000, 0x387FF000),  # denormals in fp16, the first two are ties
)


def edge_floats(*shape: int, seed: int = 0) -> Tensor:
    """Edge cases in random places, and other numbers of random bits: f32[shape]."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.empty(shape, dtype=torch.int64).random_(-(2**31), 2**31, generator=generator).flatten()
    places = torch.randperm(bits.numel(), generator=generator)[: len(_EDGE_BITS)]
    edges = torch.tensor(_EDGE_BITS)
    edges = torch.where(edges < 2**31, edges, edges - 2**32)[torch.randperm(len(edges), generator=generator)]
    bits[places] = edges[: len(places)]
    return bits.int().view(torch.float32).view(shape)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether all bits are equal. In bf16 and fp16 those of NaN are not compared: PyTorch's own depend on the CPU."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[expected.dtype.itemsize]
    pair = [each.clone().view(integers) for each in (actual, expected)]
    if expected.dtype != torch.float32:
        nan = expected.isnan()
        if not torch.equal(actual.isnan(), nan):
            return False
        for each in pair:
            each[nan] = 0
    return actual.dtype == expected.dtype and torch.equal(*pair)
