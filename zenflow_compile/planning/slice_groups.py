"""Divides the slices of a parameter into groups: slice ``i`` belongs to group ``i % groups``.

Slices are selected inside each group, always the same number per group. A group's selection depends on its own scores
alone. So several ranks can share the groups of a parameter, select without communication, and select the same slices
as one rank. Any power-of-two number of ranks up to ``groups`` divides the groups evenly.
"""

from __future__ import annotations

MOST_GROUPS = 16
"""Groups of a parameter with many slices, and so the most ranks that can share it evenly."""

SELECTED_PER_GROUP = 4
"""Fewest slices that a group selects, and fewest that it defers; smaller parameters have fewer groups."""


def group_count(slices: int, k: int) -> int:
    """Number of groups, a power of two.

    Args:
        slices: slices of the parameter.
        k: selected slices. Group ``g`` selects ``k // groups`` of them, one more if ``g < k % groups``. The first
            ``k`` slices, which are selected before there are scores, are divided in the same way.
    """
    groups = MOST_GROUPS
    while groups > 1 and min(k, slices - k) < SELECTED_PER_GROUP * groups:
        groups //= 2
    return groups
