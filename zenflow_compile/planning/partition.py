"""How the slices of a parameter are divided into groups: slice ``i`` belongs to group ``i % groups``.

Slices are selected inside each group, always the same number per group. A group's selection depends on its own scores
alone, so that the groups of a parameter can be shared among several ranks that exchange nothing to select, and that
select together what one rank selects. Any power-of-two number of ranks up to ``groups`` divides the groups evenly.
"""

from __future__ import annotations

MOST_GROUPS = 16
"""Groups of a parameter with many slices: as many ranks can share it evenly."""

SELECTED_PER_GROUP = 4
"""A group selects at least so many slices, and leaves as many, or there are fewer groups."""


def group_count(slices: int, k: int) -> int:
    """Number of groups, a power of two.

    Args:
        slices: slices of the parameter.
        k: selected slices. Group ``g`` selects ``k // groups`` of them, one more where ``g < k % groups``; so do the
            first ``k`` slices, which are selected before there are scores.
    """
    groups = MOST_GROUPS
    while groups > 1 and min(k, slices - k) < SELECTED_PER_GROUP * groups:
        groups //= 2
    return groups
