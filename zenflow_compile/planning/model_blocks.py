"""Finds the repeated blocks (layers) of a model in the list of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import eq
from typing import NamedTuple

LONGEST_BLOCK = 512
"""Parameters of the longest block that is looked for. A block with 128 experts of three matrices has 390."""

FEWEST_BLOCKS = 4
"""Equal blocks that are layers where a model has more of others. Fewer may be embeddings of one kind."""

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


class Run(NamedTuple):
    """Consecutive parameters, and how many of them are a block; 0: none repeats."""

    indices: range
    period: int

    @property
    def blocks(self) -> int:
        return len(self.indices) // self.period if self.period else 0

    @property
    def parts(self) -> list[range]:
        """Each block, or all of what does not repeat."""
        length = self.period or len(self.indices)
        return [self.indices[first : first + length] for first in range(0, len(self.indices), length)]


def runs_of_blocks(shapes: Sequence[tuple[int, ...]]) -> list[Run]:
    """Divide all parameters into runs of equal blocks, and what is between them.

    A model may have several kinds of layers: before and behind the longest run, others have ``FEWEST_BLOCKS`` at least.
    """

    def divided(part: range, fewest: int) -> list[Run]:
        found = repeated_blocks(shapes[part.start : part.stop])
        if found is None or found[2] - found[0] < fewest * found[1]:
            return [Run(part, 0)] if part else []
        start, stop = part.start + found[0], part.start + found[2]
        before, after = range(part.start, start), range(stop, part.stop)
        return [*divided(before, FEWEST_BLOCKS), Run(range(start, stop), found[1]), *divided(after, FEWEST_BLOCKS)]

    return divided(range(len(shapes)), 2)


def block_ranges(shapes: Sequence[tuple[int, ...]]) -> list[range]:
    """Divide all parameters: each block, and those around runs of blocks. Each alone without blocks."""
    runs = runs_of_blocks(shapes)
    if not any(run.blocks for run in runs):
        return [range(index, index + 1) for index in range(len(shapes))]
    return [part for run in runs for part in run.parts]


def parts_without_slack(shapes: Sequence[tuple[int, ...]]) -> tuple[range, ...]:
    """The parts of a model whose weights are read early in a forward or updated late in a backward.

    In order: the first block, the parameters before it (embeddings), those behind the last block (head). This is the
    order of the measured damage from late updates (the project's convergence study). Empty without repeated blocks.

    Args:
        shapes: of the parameters, in forward order.
    """
    layers = [run for run in runs_of_blocks(shapes) if run.blocks]
    if not layers:
        return ()
    first, last = layers[0], layers[-1].indices
    return first.parts[0], range(first.indices.start), range(last.stop, len(shapes))


@lru_cache(maxsize=32)  # policies are compared on the same model many times
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
