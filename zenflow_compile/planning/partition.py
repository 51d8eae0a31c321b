"""Divides offloaded parameters by slices, and streamed ones by elements, among the ranks of a process group.

Rank ``r`` updates the part ``r % parts`` of a parameter: every ``parts``-th slice. Slices are selected in groups, slice
``i`` in group ``i % groups``, and a part consists of whole groups. So a rank selects its slices without communication,
and all ranks together select the slices that one device would select.

Nothing is selected in a streamed parameter: each rank has the state of consecutive elements, which one kernel updates.
"""

from __future__ import annotations

import math
from dataclasses import replace

from zenflow_compile.planning.plan import FlatShare, ParamPlan, Plan, Share


def divide(plan: Plan) -> Plan:
    """Replace each parameter of ``plan`` that is divided by its share of ``plan.rank``; shares stay as they are."""
    if plan.ranks == 1:
        return plan
    return replace(plan, params=tuple(_share_of(param, plan.rank, plan.ranks) for param in plan.params))


def parts_of(whole: ParamPlan, ranks: int) -> int:
    """Number of parts that a parameter is divided into; with fewer parts than ranks, several ranks have the same one.

    That is so where the number of ranks does not divide the groups of slices: small parameters, and numbers of ranks
    that are no power of two. These ranks make the same updates.
    """
    most = whole.groups if whole.selects else whole.slices
    if whole.selects:
        return math.gcd(ranks, most)
    return max(parts for parts in range(1, ranks + 1) if ranks % parts == 0 and parts <= most)


def _share_of(whole: ParamPlan, rank: int, ranks: int) -> ParamPlan:
    if whole is not whole.whole:  # a share already
        return whole
    if whole.streamed and whole.numel >= ranks**2:  # the last rank has some elements then
        flat = FlatShare(whole=whole, rank=rank, ranks=ranks)
        elements = min(flat.most_elements, whole.numel - rank * flat.most_elements)
        return replace(whole, shape=(elements,), flat=flat)
    if not whole.offloaded:
        return whole
    share = Share(whole=whole, rank=rank, ranks=ranks, parts=parts_of(whole, ranks))
    slices, k = share.count(whole.slices), share.count(whole.k)
    return replace(whole, shape=(slices, whole.length), dim=0, slices=slices, k=k, share=share)
