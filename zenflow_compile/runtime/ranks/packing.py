"""Blocks of several parameters in one tensor, with a row for each rank: what one collective sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan

_T = TypeVar("_T")


class Packing(NamedTuple):
    """Where the blocks of parameters are in a row of ``elements`` elements; the same in each row.

    Attributes:
        offsets: of each parameter's block.
    """

    offsets: tuple[int, ...]
    elements: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Packing:
        """Put blocks of these sizes, in elements, behind each other."""
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + size)
        return cls(tuple(offsets[:-1]), offsets[-1])


def block(row: Tensor, offset: int, plan: ParamPlan, slices: int) -> Tensor:
    """View ``slices`` slices of a parameter in a row: [slices, length]."""
    return row[offset : offset + slices * plan.length].view(slices, plan.length)


def blocks_of_ranks(packed: Tensor, offset: int, plan: ParamPlan) -> Iterator[tuple[int, Tensor]]:
    """View the part of a parameter in each rank's row of ``packed``: (part, [slices of the part, length])."""
    share = plan.share
    assert share is not None
    for rank, row in enumerate(packed):
        part = share.part_of(rank)
        yield part, block(row, offset, plan, share.count(share.whole.slices, part))


def cut(items: Sequence[_T], bytes_of: Sequence[int], dtypes: Sequence[torch.dtype], limit: int) -> list[list[_T]]:
    """Cut ``items`` into consecutive pieces of one dtype and at most ``limit`` bytes; a larger item is alone."""
    pieces: list[list[_T]] = []
    left, last = 0, None
    for item, size, dtype in zip(items, bytes_of, dtypes, strict=True):
        if dtype != last or size > left:
            pieces.append([])
            left = limit
        pieces[-1].append(item)
        left, last = left - size, dtype
    return pieces
