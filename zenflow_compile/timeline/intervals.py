"""Set operations on time: sorted, disjoint, half-open ``(start, end)`` pairs in nanoseconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

Interval = tuple[int, int]
Intervals = list[Interval]
_Key = TypeVar("_Key", bound=Hashable)


def union(pairs: Iterable[Interval]) -> Intervals:
    """Return the time covered by any of ``pairs``, which may overlap, be empty and come in any order."""
    merged: Intervals = []
    for start, end in sorted(pairs):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Return the time in both sets."""
    common: Intervals = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """Return the time in ``left`` that is not in ``right``."""
    if not left:
        return []
    gaps: Intervals = []
    cursor = left[0][0]
    for start, end in right:
        if start > cursor:
            gaps.append((cursor, start))
        cursor = max(cursor, end)
    if left[-1][1] > cursor:
        gaps.append((cursor, left[-1][1]))
    return intersect(left, gaps)


def length_ns(intervals: Intervals) -> int:
    """Return the total time of a set."""
    return sum(end - start for start, end in intervals)


def exclusive(layers: Iterable[tuple[_Key, Intervals]]) -> dict[_Key, Intervals]:
    """Make sets disjoint: time that is in several of them goes to the first."""
    own: dict[_Key, Intervals] = {}
    taken: Intervals = []
    for key, intervals in layers:
        own[key] = subtract(intervals, taken)
        taken = union([*taken, *own[key]])
    return own
