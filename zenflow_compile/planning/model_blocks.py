"""Finds the repeated blocks (layers) of a model in the list of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import eq

LONGEST_BLOCK = 512
"""Parameters of the longest block that is looked for. A block with 128 experts of three matrices has 390."""

Shapes = tuple[tuple[int, ...], ...]


def repeated_blocks(shapes: Sequence[tuple[int, ...]]) -> tuple[int, int, int] | None:
    """Find the longest run of equal blocks.

    Args:
        shapes: of the parameters, in forward order.

    Returns:
        (start, period, stop): the blocks are ``shapes[start:stop]``, each ``period`` parameters long; the shortest
        period of the longest repetition. None if no block of 2 to ``LONGEST_BLOCK`` parameters repeats.
    """
    return _repeated_blocks(tuple(shapes))


def block_ranges(shapes: Sequence[tuple[int, ...]]) -> list[range]:
    """Divide all parameters: those before the repeated blocks, each block, those behind. Each alone without blocks."""
    found = repeated_blocks(shapes)
    if found is None:
        return [range(index, index + 1) for index in range(len(shapes))]
    start, period, stop = found
    blocks = [range(first, first + period) for first in range(start, stop, period)]
    return [part for part in (range(start), *blocks, range(stop, len(shapes))) if part]


def parts_without_slack(shapes: Sequence[tuple[int, ...]]) -> tuple[range, ...]:
    """The parts of a model whose weights are read early in a forward or updated late in a backward.

    In order: the first block, the parameters before it (embeddings), those behind the last block (head). This is the
    order of the measured damage from late updates (the project's convergence study). Empty without repeated blocks.

    Args:
        shapes: of the parameters, in forward order.
    """
    if (blocks := repeated_blocks(shapes)) is None:
        return ()
    start, period, stop = blocks
    return range(start, start + period), range(start), range(stop, len(shapes))


@lru_cache(maxsize=8)  # policies are compared on the same model many times
def _repeated_blocks(shapes: Shapes) -> tuple[int, int, int] | None:
    numbers: dict[tuple[int, ...], int] = {}
    numbered = [numbers.setdefault(shape, len(numbers)) for shape in shapes]  # faster to compare
    best: tuple[int, int, int] | None = None
    longest = 0
    for period in range(2, min(len(shapes) // 2, LONGEST_BLOCK) + 1):
        # Byte i: whether shape i is the same one period later. A run of n periods of such bytes makes n + 1 blocks.
        same = bytes(map(eq, numbered, numbered[period:])) + b"\0"
        end = 0
        while (start := same.find(b"\1" * (max(1, longest // period) * period), end)) >= 0:
            end = same.index(b"\0", start)
            longest = (1 + (end - start) // period) * period
            best = (start, period, start + longest)
    return best
