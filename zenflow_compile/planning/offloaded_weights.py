"""Which weights are in host memory, and how much of them may be on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from zenflow_compile.planning.model_blocks import parts_without_slack, repeated_blocks

SMALLEST_WEIGHT_BYTES = 1 << 16
"""Smaller weights stay on the device: a copy of so many bytes takes as long as the call that starts it, at 16 GB/s."""

RING_BLOCKS = 2
"""Blocks of the model whose weights are loaded at a time, if the budget allows it: a backward that recomputes a block
reads each of its weights two times, and needs one load if the block is there as a whole."""


@dataclass(frozen=True, slots=True)
class OffloadedWeights:
    """Weights that are in host memory, and on the device only around their uses.

    Attributes:
        ps: indices in the plan.
        ring_bytes: of them on the device at a time, where uses allow it: what one operator reads is there together.
        strict: an operator that reads more than that together is an error.
    """

    ps: frozenset[int]
    ring_bytes: int
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A weight that can be offloaded: its index in the plan, its name, and its bytes."""

    index: int
    name: str
    nbytes: int


class DividedBudget(NamedTuple):
    """What the device has of the weights that can be offloaded.

    Attributes:
        ring_bytes: of those that are loaded around their uses.
        kept: indices of those that stay.
    """

    ring_bytes: int
    kept: frozenset[int]


def weight_budget(option: float | Literal[False], candidates: Sequence[Candidate]) -> int:
    """Bytes of device memory for weights that can be offloaded.

    Args:
        option: ``offload_weights``.

    Raises:
        ValueError: the largest weight does not fit.
    """
    largest = max(candidates, key=lambda each: each.nbytes, default=Candidate(0, "", 0))
    if isinstance(option, float):
        return max(int((1.0 - option) * sum(each.nbytes for each in candidates)), largest.nbytes)
    if option < largest.nbytes:
        raise ValueError(
            f"offload_weights={option} bytes must be at least {largest.nbytes}, the size of {largest.name}, which is "
            "loaded as a whole; pass more, or a share such as 1.0, which loads as few weights at a time as operators "
            "read"
        )
    return int(option)


def divide_budget(
    budget_bytes: int, candidates: Sequence[Candidate], shapes: Sequence[tuple[int, ...]]
) -> DividedBudget:
    """Keep weights on the device as far as a budget goes beyond those that are loaded at a time.

    A kept weight saves two loads per training step. Kept first: first block, embeddings, head, as far as each of
    these parts fits; then single weights in the order of the forward.

    Args:
        budget_bytes: see ``weight_budget``.
        shapes: of all parameters of the plan, in its order.
    """
    size = {each.index: each.nbytes for each in candidates}
    ring = min(budget_bytes, RING_BLOCKS * _largest_block_bytes(size, shapes))
    spare = budget_bytes - ring
    kept: set[int] = set()
    parts = [[index for index in part if index in size] for part in parts_without_slack(shapes)]
    for part in [*parts, *([index] for index in size)]:
        needed = sum(size[index] for index in part if index not in kept)
        if needed <= spare:
            kept.update(part)
            spare -= needed
    return DividedBudget(ring, frozenset(kept))


def _largest_block_bytes(size: dict[int, int], shapes: Sequence[tuple[int, ...]]) -> int:
    """Bytes of a block's weights, or of the largest weight if that is more."""
    largest = max(size.values(), default=0)
    if (blocks := repeated_blocks(shapes)) is None:
        return largest
    start, period, _ = blocks
    return max(largest, sum(size.get(index, 0) for index in range(start, start + period)))
