"""Which weights are in host memory, the ring that they are loaded into, and when, for a known sequence of uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zenflow_compile.planning.model_blocks import block_ranges, parts_without_slack

SMALLEST_WEIGHT_BYTES = 1 << 16
"""Smaller weights stay on the device: a copy of so many bytes takes as long as the call that starts it, at 16 GB/s."""

RING_BLOCKS = 2
"""Blocks of the model that the ring of loaded weights has space for: a backward that recomputes a block reads its
weights two times, and the last block of a forward stays for its backward."""

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMemory:
    """Which weights are in host memory, and the device memory that they take while they are loaded.

    Attributes:
        offloaded: indices of the weights that are loaded around their uses; the others are kept.
        reloaded: those of them that cross twice in a backward: their block, which is recomputed, does not fit the ring.
        ring_bytes: most device memory of loaded weights.
    """

    offloaded: frozenset[int]
    reloaded: frozenset[int]
    ring_bytes: int


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
    """Weights of blocks that do not fit the ring as a whole, so that recomputation loads them once more."""
    reloaded: set[int] = set()
    for block in block_ranges(shapes):
        own = offloaded.intersection(block)
        if sum(sizes[index] for index in own) > ring:
            reloaded |= own
    return frozenset(reloaded)


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


def weight_budget(option: float | Literal[False, "auto"], weight_bytes: Mapping[str, int]) -> int:
    """Bytes of device memory for weights that can be offloaded: kept and loaded ones together.

    Args:
        option: ``offload_weights``; under ``"auto"``, the budget before anything is measured.
        weight_bytes: of each weight that can be offloaded, by name.

    Raises:
        ValueError: the largest weight does not fit.
    """
    name, largest = max(weight_bytes.items(), key=lambda item: item[1], default=("", 0))
    if option == "auto":
        return largest
    if isinstance(option, float):
        return max(int((1.0 - option) * sum(weight_bytes.values())), largest)
    if option < largest:
        raise ValueError(
            f"offload_weights={option} bytes must be at least {largest}, the size of {name}, which is loaded as a "
            "whole; pass more, or a share such as 1.0, which loads as few weights at a time as operators read"
        )
    return int(option)


@dataclass(frozen=True, slots=True)
class Turn:
    """What happens around one use.

    Attributes:
        evicted: weights that are unloaded in front of it, to make room.
        loaded: weights that are loaded in front of it, behind these.
        ended: weights that are unloaded behind it, because no later use reads them.
    """

    evicted: tuple[int, ...]
    loaded: tuple[int, ...]
    ended: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphLoads:
    """The loads of one graph.

    Attributes:
        order: parameters, one for each load.
        peak_bytes: of loaded weights, at most.
        reads_updates: the graph fetches parameters, so due updates are applied before they are loaded.
    """

    order: tuple[int, ...]
    peak_bytes: int
    reads_updates: bool


def schedule_weights(uses: Sequence[frozenset[int]], sizes: Mapping[int, int], budget_bytes: int) -> list[Turn]:
    """Load each weight as late, and unload it as rarely, as a byte budget allows.

    Where there is no room, the weight that is used furthest away is unloaded: with equal sizes no other choice needs
    fewer loads (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966). A use of weights
    that are larger than the budget together has them together all the same.

    Args:
        uses: the weights that each use reads, in order.
        sizes: bytes of each weight.
    """
    following: list[dict[int, int]] = [{} for _ in uses]  # the next use of each weight behind a use
    next_use: dict[int, int] = {}
    for position in reversed(range(len(uses))):
        following[position] = {p: next_use[p] for p in next_use}
        next_use.update(dict.fromkeys(uses[position], position))
    turns: list[Turn] = []
    present: dict[int, int] = {}  # weights on the device, with their next use
    for position, needed in enumerate(uses):
        loaded = tuple(sorted(needed - present.keys()))
        room = budget_bytes - sum(sizes[p] for p in (*present, *loaded))
        evicted = []
        for p in sorted(present.keys() - needed, key=lambda p: (-present[p], p)):
            if room >= 0:
                break
            room += sizes[p]
            evicted.append(p)
            del present[p]
        later = following[position]
        present.update({p: later[p] for p in needed if p in later})
        ended = tuple(sorted(p for p in needed if p not in later))
        for p in ended:
            present.pop(p, None)
        turns.append(Turn(tuple(evicted), loaded, ended))
    return turns


def peak_bytes(turns: Sequence[Turn], sizes: Mapping[int, int]) -> int:
    """Most bytes of weights on the device at a time."""
    now = peak = 0
    for turn in turns:
        now += sum(sizes[p] for p in turn.loaded) - sum(sizes[p] for p in turn.evicted)
        peak = max(peak, now)
        now -= sum(sizes[p] for p in turn.ended)
    return peak
