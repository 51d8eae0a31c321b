"""Device memory under ``offload_weights``: which weights are kept, and the ring that the others are loaded into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zenflow_compile.planning.model_blocks import block_ranges, parts_without_slack, repeated_blocks
from zenflow_compile.planning.offloaded_weights import SMALLEST_WEIGHT_BYTES

RING_BLOCKS = 2
"""Blocks of the model that the ring of loaded weights has space for: a backward that recomputes a block reads its
weights two times, and the last block of a forward stays for its backward."""

FEWEST_STAGING_BUFFERS = 2
"""Staging buffers that loads need: one is copied while another one waits for space in the ring."""

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMemory:
    """Which weights are in host memory, and the device memory that they take while they are loaded.

    Attributes:
        offloaded: indices of the weights that are loaded around their uses; the others are kept.
        reloaded: those of them that cross twice in a backward: their block, which is recomputed, does not fit the ring.
        ring_bytes: most device memory of loaded weights.
        staging_buffers: device buffers that loads and uploads pass through.
    """

    offloaded: frozenset[int]
    reloaded: frozenset[int]
    ring_bytes: int
    staging_buffers: int


def offloadable_weights(shapes: Shapes, sizes: Sequence[int]) -> dict[int, int]:
    """Bytes of the weights that can be offloaded, by index: all but 1-D and small ones.

    Args:
        shapes, sizes: of all parameters, in forward order; sizes in bytes.
    """
    pairs = enumerate(zip(shapes, sizes, strict=True))
    return {index: size for index, (shape, size) in pairs if len(shape) >= 2 and size >= SMALLEST_WEIGHT_BYTES}


def divide_budget(
    budget: int, shapes: Shapes, sizes: Mapping[int, int], *, ring_bytes: int | None = None
) -> tuple[frozenset[int], int]:
    """Indices of the weights that are offloaded, and the bytes of the ring for them.

    The ring has space for two of the largest blocks. What the budget has beyond that keeps weights on the device: those
    of the first block, then those before all blocks (embeddings) and behind them (the head), then the others in forward
    order. A weight that no longer fits is passed over, so that kept bytes never decrease with the budget.

    Args:
        shapes: of all parameters, in forward order.
        sizes: bytes of each weight that can be offloaded, by index.
        ring_bytes: of the ring, if that is there already.
    """
    if budget >= sum(sizes.values()):
        return frozenset(), 0
    blocks = block_ranges(shapes)
    largest = max(sum(sizes.get(index, 0) for index in block) for block in blocks)
    ring = min(budget, RING_BLOCKS * largest) if ring_bytes is None else ring_bytes
    first = [index for part in parts_without_slack(shapes) for index in part]
    left, kept = budget - ring, set[int]()
    for index in dict.fromkeys([*first, *range(len(shapes))]):
        if (size := sizes.get(index)) is not None and size <= left:
            kept.add(index)
            left -= size
    return frozenset(sizes.keys() - kept), ring


def reloaded_weights(shapes: Shapes, sizes: Mapping[int, int], offloaded: frozenset[int], ring: int) -> frozenset[int]:
    """Weights of repeated blocks that do not fit the ring as a whole, so that recomputation loads them once more."""
    if (found := repeated_blocks(shapes)) is None:
        return frozenset()
    start, period, stop = found
    reloaded: set[int] = set()
    for first in range(start, stop, period):
        own = offloaded.intersection(range(first, first + period))
        if sum(sizes[index] for index in own) > ring:
            reloaded |= own
    return frozenset(reloaded)
