"""Divides offloaded parameters by slices, and streamed ones by elements, among the ranks of a process group.

Rank ``r`` updates the part ``r % parts`` of a parameter: every ``parts``-th slice. Slices are selected in groups, slice
``i`` in group ``i % groups``, and a part consists of whole groups. So a rank selects its slices without communication,
and all ranks together select the slices that one device would select.

Nothing is selected in a streamed parameter: each rank has the state of consecutive elements, which one kernel updates.

A model may be sharded already (FSDP2). Then each rank has consecutive rows or columns of a parameter, and updates them.
A row of a matrix that is sharded by rows belongs to one rank, which selects among its own. Of a column each rank has a
part: norms are added up over ranks, and all of them select the same columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zenflow_compile.planning.plan import FlatShare, ParamPlan, Plan, Shard, Share

_LEAST_SLICES = 2
"""A rank with fewer slices could not select one and defer another one."""


@dataclass(frozen=True, slots=True)
class ShardedBy:
    """How a parameter is sharded: in chunks of equal size along one dimension, the last ones smaller or empty.

    Attributes:
        dim: the dimension.
        rank: of this process among ``ranks``.
    """

    dim: int
    rank: int
    ranks: int

    def part(self, size: int, rank: int | None = None) -> range:
        """The indices along the dimension, of ``size``, that a rank has, by default this one."""
        chunk = -(-size // self.ranks)
        number = self.rank if rank is None else rank
        return range(min(number * chunk, size), min((number + 1) * chunk, size))

    def leaves_slices(self, shape: tuple[int, ...]) -> bool:
        """Whether each rank has slices of a parameter of this shape, so that its state may be divided by them."""
        return self.dim < 2 and len(self.part(shape[self.dim], self.ranks - 1)) >= _LEAST_SLICES


def shard_of(whole: ParamPlan, by: ShardedBy) -> ParamPlan:
    """The plan of the part that this rank has of a sharded parameter."""
    own = by.part(whole.shape[by.dim])
    shape = (*whole.shape[: by.dim], len(own), *whole.shape[by.dim + 1 :])
    divides = whole.offloaded and by.dim == whole.dim
    shard = Shard(whole=whole, divides_slices=divides, counted=divides or by.rank == 0, ranks=by.ranks)
    if not whole.offloaded:
        return replace(whole, shape=shape, shard=shard)
    inner = math.prod(whole.shape[by.dim + 1 :]) if by.dim == 1 else 1  # columns of the 2-D view for each index
    if not divides:
        return replace(whole, shape=shape, length=len(own) * inner, shard=shard)
    slices, all_slices = len(own) * inner, whole.slices
    k = -(-whole.k * own.stop * inner // all_slices) - -(-whole.k * own.start * inner // all_slices)
    if whole.selects:
        k = min(max(k, 1), slices - 1)
    return replace(whole, shape=shape, slices=slices, k=k, shard=shard)


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
