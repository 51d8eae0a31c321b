"""Which gradient buffers share host memory: those that are in use in different steps.

An update window of S steps has S gradient buffers. The first is in use for S steps, the last for one. Windows of
parameters have different phases, so in each step the buffers in use take about (S + 1) / 2 gradients, and not S. The
steps in which a buffer is in use are known when the plan is made. So memory is divided then, one time, and no gradient
ever waits for memory.

[Note: steps of a buffer] It is in use from the step whose gradient it gets to the step that flushes the window, or with
staleness one step longer. Then the next forward waits for the update, and the gradients of the backward that follows
may take the memory. A parameter that this forward does not read is the exception: see ``HostState.users_of``. Update
windows that are flushed early, in warm-up and by ``flush()``, use their buffers for fewer steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

ALIGNMENT_BYTES = 64
"""A cache line, and the widest vector load of current CPUs: no two tensors share a cache line."""


class Lifetime(NamedTuple):
    """The memory of one buffer, and when it is in use.

    Attributes:
        nbytes: of the buffer, rounded up to ``ALIGNMENT_BYTES``.
        first: the step, modulo the period, from which on it is in use.
        steps: for so many steps, at most the period.
    """

    nbytes: int
    first: int
    steps: int

    @classmethod
    def of(cls, nbytes: int, first: int, steps: int) -> Lifetime:
        """With rounded bytes."""
        return cls(-(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, first, steps)

    def mask(self, period: int) -> int:
        """The steps in which it is in use: bit s for the steps that are s modulo the period."""
        bits: int = ((1 << self.steps) - 1) << self.first
        return (bits | bits >> period) & ((1 << period) - 1)


class Packing(NamedTuple):
    """Where each buffer is in memory.

    Attributes:
        offsets: bytes from the start, in the order of the buffers.
        nbytes: of all memory.
        least: bytes in use in the step with most of them, which no packing goes below.
    """

    offsets: tuple[int, ...]
    nbytes: int
    least: int


@lru_cache(maxsize=64)  # predictions ask for the bytes of one plan many times
def pack(buffers: tuple[Lifetime, ...], period: int) -> Packing:
    """Give each buffer memory that no other buffer has in the same step.

    The largest come first. Each takes the smallest piece of memory that is large enough and is not in use in its steps,
    and leaves the rest of the piece to others. Of several such pieces it takes the one that is in use most.
    """
    pieces = _Pieces(period)
    offsets, end = [0] * len(buffers), 0
    order = sorted(range(len(buffers)), key=lambda number: (-buffers[number].nbytes, -buffers[number].steps))
    for number in order:
        if not (nbytes := buffers[number].nbytes):
            continue
        mask = buffers[number].mask(period)
        if (piece := pieces.take(nbytes, mask)) is None:
            piece = _Piece(nbytes, end, 0)
            end += nbytes
        offsets[number] = piece.offset
        pieces.put(_Piece(piece.nbytes - nbytes, piece.offset + nbytes, piece.used))
        pieces.put(_Piece(nbytes, piece.offset, piece.used | mask))
    live = [sum(each.nbytes for each in buffers if each.mask(period) >> step & 1) for step in range(period)]
    return Packing(tuple(offsets), end, max(live, default=0))


class _Piece(NamedTuple):
    """A piece of memory, and the steps in which it is in use, as a mask."""

    nbytes: int
    offset: int
    used: int


class _Pieces:
    """Pieces of memory that are not in use in some steps."""

    def __init__(self, period: int) -> None:
        self._period = period
        # By number of steps in use, and by these steps; of equal use in the order of bytes.
        self._free: list[dict[int, list[_Piece]]] = [{} for _ in range(period)]

    def take(self, nbytes: int, mask: int) -> _Piece | None:
        """Take the smallest piece that has so many bytes and is not in use in the steps ``mask``; None without one."""
        best: tuple[_Piece, int] | None = None
        for by_use in reversed(self._free[: self._period - mask.bit_count() + 1]):
            for used, pieces in by_use.items():
                if used & mask or (place := bisect_left(pieces, (nbytes,))) == len(pieces):
                    continue
                if best is None or pieces[place].nbytes < best[0].nbytes:
                    best = pieces[place], place
                    if best[0].nbytes == nbytes:
                        return self._remove(*best)
        return None if best is None else self._remove(*best)

    def _remove(self, piece: _Piece, place: int) -> _Piece:
        by_use = self._free[piece.used.bit_count()]
        del by_use[piece.used][place]
        if not by_use[piece.used]:
            del by_use[piece.used]
        return piece

    def put(self, piece: _Piece) -> None:
        """Add a piece, unless it is empty or in use in all steps."""
        if piece.nbytes and (steps := piece.used.bit_count()) < self._period:
            insort(self._free[steps].setdefault(piece.used, []), piece)


def overlaps(buffers: Sequence[Lifetime], packing: Packing) -> list[list[int]]:
    """For each buffer the numbers of all others that have some of its memory."""
    found: list[list[int]] = [[] for _ in buffers]
    begun: list[int] = []
    for number in sorted(range(len(buffers)), key=lambda number: packing.offsets[number]):
        if not buffers[number].nbytes:
            continue
        begun = [each for each in begun if packing.offsets[each] + buffers[each].nbytes > packing.offsets[number]]
        for other in begun:
            found[number].append(other)
            found[other].append(number)
        begun.append(number)
    return found
