"""How much host memory caches state and weights in files, and which state stays there."""

from __future__ import annotations

from collections.abc import Sequence

FILES_IN_TURN = 4
"""How many of the largest states from files have memory at the same time, if there is so much: one is read, one
updated, one written, and one is ready."""

FILE_WINDOW_BYTES = 64 << 20
"""Smallest default of the host memory that caches state in files. The state of two small matrices is too little: the
step would wait for every read."""


def file_window_bytes(sizes: Sequence[int], given: int | None) -> int:
    """Bytes of host memory that cache state in files.

    Args:
        sizes: bytes of each parameter's state.
        given: the option ``host_window_bytes``.
    """
    largest = max(sizes, default=0)
    return min(max(2 * largest, FILE_WINDOW_BYTES) if given is None else max(given, largest), sum(sizes))


def weight_window_bytes(weights: Sequence[int], state: Sequence[int], given: int | None) -> int:
    """Bytes of host memory that cache weights in files: a part of ``host_window_bytes``, or more where that is None.

    State and weights are needed at other times, and in another order: in one memory, each would drive out what was read
    ahead of the other.

    Args:
        weights: bytes of each weight, once for each of its buffers.
        state: bytes of each parameter's state.
        given: the option ``host_window_bytes``; at least the largest of both together.
    """
    largest, total = max(weights, default=0), sum(weights)
    in_turn = FILES_IN_TURN * largest
    if given is None:
        return min(max(in_turn, FILE_WINDOW_BYTES), total)
    left = given - sum(state)
    return min(max(largest, left, min(in_turn, given - max(state, default=0))), total)


def resident_in_window(sizes: Sequence[int], window: int) -> list[bool]:
    """Which state stays in the host memory that caches files, so that it is neither read nor written.

    The first ones do, which the next forward needs first, as far as memory for the others is left. These take turns
    there: they are read, updated and written back.

    Args:
        sizes: bytes of each parameter's state; each of them fits into ``window``.
        window: see ``file_window_bytes``.
    """
    left = window if sum(sizes) <= window else window - min(window, FILES_IN_TURN * max(sizes))
    resident = []
    for size in sizes:
        resident.append(size <= left)
        left -= size if resident[-1] else 0
    return resident
