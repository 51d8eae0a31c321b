"""Refuses offloaded parameters whose memory overlaps. Disjoint views of one storage are allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.torch_internals.torch_private import address


def refuse_overlap(plans: Sequence[ParamPlan], params: Sequence[Tensor]) -> None:
    """Refuse an offloaded parameter that shares memory with another one; ``plans`` of ``params``, in their order.

    Raises:
        ValueError: the memory of two parameters overlaps, and the optimizer state of one of them is offloaded.
    """
    for first, second in overlapping(params):
        if plans[first].offloaded or plans[second].offloaded:
            one, other = sorted((first, second))
            raise ValueError(
                f"the memory of {plans[one].name} and {plans[other].name} overlaps, and an update of an offloaded "
                "parameter would overwrite the other's: give one of them memory of its own with "
                "torch.nn.Parameter(weight.clone()), use one parameter in both places, pass only one of them to the "
                'optimizer, or choose policy="resident"'
            )


def overlapping(params: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield positions of two parameters that have a byte in common, for each such pair."""
    # One pass over the extents in the order of ``begin``.
    open_extents: list[tuple[int, int, int]] = []
    for begin, end, position in sorted(_extents(params)):
        open_extents = [each for each in open_extents if each[1] > begin]
        for _, _, other in open_extents:
            if _overlap(params[other], params[position]):
                yield other, position
        open_extents.append((begin, end, position))


def _extents(params: Sequence[Tensor]) -> Iterator[tuple[int, int, int]]:
    """Addresses from the first byte of each parameter to the end of its last element, and its position."""
    for index, param in enumerate(params):
        begin = address(param) if param.numel() else 0  # a weight in host memory has none
        if begin:
            last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            yield begin, begin + (last + 1) * param.element_size(), index


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, whose extents intersect, have a byte in common."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    # For views with holes: mark the elements of one in a mask of the memory, and read the mask through the other.
    begin = min(one.data_ptr(), other.data_ptr())
    sizes = one.element_size(), other.element_size()
    unit = math.gcd(*sizes, one.data_ptr() - begin, other.data_ptr() - begin)
    units = max(end for _, end, _ in _extents((one, other))) - begin
    mask = torch.zeros(units // unit, dtype=torch.bool, device="cpu")
    _through(mask, one, begin, unit).fill_(True)
    return bool(_through(mask, other, begin, unit).any())


def _through(mask: Tensor, tensor: Tensor, begin: int, unit: int) -> Tensor:
    """View the elements of ``tensor`` in a mask with one element per ``unit`` bytes from address ``begin``."""
    width = tensor.element_size() // unit
    stride = [each * width for each in tensor.stride()]
    return mask.as_strided((*tensor.shape, width), (*stride, 1), (tensor.data_ptr() - begin) // unit)
