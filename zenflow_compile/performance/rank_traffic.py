"""The bytes that ranks of one node send and store in a step, by the way in which they share the work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from zenflow_compile.performance.traffic import Traffic, traffic_of
from zenflow_compile.planning.partition import divide
from zenflow_compile.planning.plan import Plan

_INDEX_BYTES = 4


class Exchange(StrEnum):
    """What ranks exchange in a step.

    ``ALL_REDUCE``: all gradients; each rank has an optimizer of its own, as under ``DistributedDataParallel``.
    ``WHOLE_WEIGHTS``: gradients go to the rank that updates them, and all weights come from there: ZeRO-2 (Rajbhandari
    et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").
    ``CHANGED_SLICES``: likewise, but only weights that the step has changed come: ``process_group=``.
    ``SHARDED``: weights are gathered in the forward and in the backward, and gradients go to the rank that has the
    weight: ``fully_shard`` (FSDP2), ZeRO-3 (the same paper).
    """

    ALL_REDUCE = "all_reduce"
    WHOLE_WEIGHTS = "whole_weights"
    CHANGED_SLICES = "changed_slices"
    SHARDED = "sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """Bytes per step, averaged over update windows.

    Attributes:
        ranks: of the node, one per device.
        all_reduced: of gradients that each rank gets whole.
        reduced: of gradients of which each rank gets its part.
        gathered: of weights that all ranks get from the ones that have updated them.
        to_host, to_device: that one rank copies over its link; the one that has most, if they are not equal.
        host_bytes: memory of the node for state, gradients and uploads.
        selection_bytes: that all ranks gather when every parameter re-selects; 0 if selections are not exchanged.
    """

    ranks: int
    all_reduced: float
    reduced: float
    gathered: float
    to_host: float
    to_device: float
    host_bytes: int
    selection_bytes: int

    @property
    def sent(self) -> float:
        """Bytes that one rank sends in rings: an all-reduce is a reduce-scatter and an all-gather."""
        return (2 * self.all_reduced + self.reduced + self.gathered) * (self.ranks - 1) / self.ranks


def rank_traffic(plan: Plan, ranks: int, exchange: Exchange) -> RankTraffic:
    """The traffic of ``ranks`` that train with ``plan``, the plan of the whole model.

    Raises:
        ValueError: ``ranks`` is not positive.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1; give the number of devices of the node")
    if exchange is Exchange.CHANGED_SLICES:
        return _traffic_of_shares(plan, ranks)
    own = traffic_of(plan) or Traffic()
    alone = exchange is Exchange.ALL_REDUCE
    divided = 1 if alone else ranks
    weights = sum(param.weight_bytes for param in plan.params)
    gathers = 0 if alone else 2 if exchange is Exchange.SHARDED else 1
    return RankTraffic(
        ranks=ranks,
        all_reduced=weights if alone else 0,
        reduced=0 if alone else weights,
        gathered=gathers * weights,
        to_host=own.to_host / divided,
        to_device=own.to_device / divided,
        host_bytes=plan.host_bytes * (ranks if alone else 1),
        selection_bytes=0,
    )


def _traffic_of_shares(plan: Plan, ranks: int) -> RankTraffic:
    """The traffic under ``process_group=``, where several ranks may have the same share: see ``parts_of``."""
    shares = [divide(replace(plan, rank=rank, ranks=ranks)) for rank in range(ranks)]
    first = traffic_of(shares[0]) or Traffic()  # no share is larger
    all_reduced = reduced = selections = 0
    gathered = 0.0
    for param in shares[0].params:
        if (share := param.share) is None:  # its gradient is averaged whole on each rank
            all_reduced += param.whole.weight_bytes
            if param.flat is not None:
                gathered += ranks * param.flat.most_elements * param.dtype.itemsize
            continue
        slice_bytes = param.length * param.dtype.itemsize
        deferred = share.most_slices - share.most_selected
        reduced += ranks * share.most_slices * slice_bytes
        gathered += ranks * (share.most_selected + deferred / param.interval) * slice_bytes
        selections += ranks * share.most_selected if param.selects else 0
    return RankTraffic(
        ranks=ranks,
        all_reduced=all_reduced,
        reduced=reduced,
        gathered=gathered,
        to_host=first.to_host,
        to_device=first.to_device,
        host_bytes=sum(share.host_bytes for share in shares),
        selection_bytes=_INDEX_BYTES * selections,
    )
