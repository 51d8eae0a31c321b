"""The bytes that a step of a plan moves, and what ranks send to each other, within nodes and between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from zenflow_compile.planning.plan import Plan, dividing_ranks
from zenflow_compile.planning.planners import divide

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of all devices together. Values without ``per`` in their name are per step, averaged over update windows.

    Attributes:
        host: read and written in host memory by host updates, see ``ParamPlan.update_bytes``.
        to_host, to_device: gradients down and weights up.
        host_per_window, host_per_gradient: the parts of ``host``: with update windows of S steps it is
            ``host_per_window / S + host_per_gradient``. The gradients of every step are ``host_per_gradient``.
        gradients_per_window: gradients that go down once per update window, as their mean.
        upload_per_window: weights that a flushed window sends up. Those of offloaded weights are not sent: the next
            load reads them.
        forward_loads, backward_loads: offloaded weights that forwards and backwards load. Not in ``to_device``, like
            ``rewritten``.
        rewritten: offloaded weights that ``step()`` loads for an update on the device, and as much written back.
        state: optimizer state that is streamed to the device, and as much back. Not in ``to_host`` and ``to_device``.
        files, files_per_window: optimizer state that is read from files, and as much written. What stays in host memory
            between update windows is not counted.
        blocking: the step waits for its host updates by design.
    """

    host: float = 0.0
    to_host: float = 0.0
    to_device: float = 0.0
    host_per_window: int = 0
    host_per_gradient: int = 0
    gradients_per_window: int = 0
    upload_per_window: int = 0
    forward_loads: int = 0
    backward_loads: int = 0
    rewritten: int = 0
    state: int = 0
    files: float = 0.0
    files_per_window: int = 0
    blocking: bool = False

    @property
    def loads(self) -> int:
        """Bytes of offloaded weights that cross to the device per step."""
        return self.forward_loads + self.backward_loads + self.rewritten

    def at_interval(self, interval: int, other: int) -> Traffic | None:
        """The traffic with update windows of ``other`` steps; None unless all windows have ``interval`` steps."""
        if not math.isclose(self.host, self.host_per_window / interval + self.host_per_gradient):
            return None
        return replace(
            self,
            host=self.host_per_window / other + self.host_per_gradient,
            to_host=self.gradients_per_window / other + self.host_per_gradient,
            to_device=self.upload_per_window / other,
            files=self.files_per_window / other,
        )


def traffic_of(plan: Plan) -> Traffic | None:
    """The traffic of ``plan`` after the first update window; None if all weights and state stay on the device."""
    offloaded = [param for param in plan.params if param.offloaded and param.deferred]
    state = sum(param.whole_state_bytes for param in plan.params if param.streamed)
    weights = plan.weights
    forward = plan.micro_batches * sum(plan.load_bytes(param) for param in plan.params)
    reloaded = [param for param in plan.params if weights is not None and param.index in weights.reloaded]
    backward = forward + plan.micro_batches * sum(plan.load_bytes(param) for param in reloaded)
    if not offloaded and not state and not forward:
        return None
    host = to_host = to_device = 0.0
    per_window = per_step = gradients = uploads = 0
    for param in offloaded:
        once, every = (param.gradient_buffers.nbytes, 0) if param.summed else (0, param.gradient_buffers.nbytes)
        window = param.update_bytes(0) + once
        per_window += window
        per_step += every
        gradients += once
        uploads += plan.sent_bytes(param)
        host += window / param.interval + every
        to_host += once / param.interval + every
        to_device += plan.sent_bytes(param) / param.interval
    return Traffic(
        host=host,
        to_host=to_host,
        to_device=to_device,
        host_per_window=per_window,
        host_per_gradient=per_step,
        gradients_per_window=gradients,
        upload_per_window=uploads,
        forward_loads=forward,
        backward_loads=backward,
        rewritten=sum(plan.load_bytes(param) for param in plan.params if plan.rewrites_weight(param)),
        state=state,
        files=sum(param.file_bytes / param.interval for param in plan.params_in_turn),
        files_per_window=plan.bytes_in_turn,
        blocking=all(param.blocking for param in offloaded),
    )


_INDEX_BYTES = 4


class Sharing(StrEnum):
    """What ranks exchange in a step.

    ``ALL_REDUCE``: all gradients; each rank has an optimizer of its own, as under ``DistributedDataParallel``.
    ``WHOLE_WEIGHTS``: gradients go to the rank that updates them, and all weights come from there: ZeRO-2 (Rajbhandari
    et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").
    ``CHANGED_SLICES``: likewise, but only weights that the step has changed come, and within a node, each of which has
    a copy of the state: ``process_group=``.
    ``SHARDED``: weights are gathered in the forward and in the backward, and gradients go to the rank that has the
    weight: ``fully_shard`` (FSDP2), ZeRO-3 (the same paper).
    ``HYBRID``: likewise within a node; each node has a replica: ``fully_shard`` with a mesh of (nodes, ranks).
    """

    ALL_REDUCE = "all_reduce"
    WHOLE_WEIGHTS = "whole_weights"
    CHANGED_SLICES = "changed_slices"
    SHARDED = "sharded"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """Bytes per step, averaged over update windows.

    Attributes:
        ranks: of a node, one per device; nodes: equal ones; dividing: how many ranks divide a copy of the state.
        all_reduced: of gradients that each rank gets whole.
        reduced: of gradients of which each rank gets its part.
        gathered: of weights that all ranks get from the ones that have updated them.
        across: of a rank's part of the gradients, which the ranks that have this part of other copies average, too.
        to_host, to_device: that one rank copies over its link, streamed state included; the one that has most, if they
            are not equal.
        host_bytes: memory of a node for state, gradients and uploads.
        selection_bytes: that all ranks gather when every parameter re-selects; 0 if selections are not exchanged.
    """

    ranks: int
    nodes: int
    dividing: int
    all_reduced: float
    reduced: float
    gathered: float
    across: float
    to_host: float
    to_device: float
    host_bytes: int
    selection_bytes: int

    @property
    def sent(self) -> float:
        """Bytes that one rank sends in rings: an all-reduce is a reduce-scatter and an all-gather."""
        in_copies = _in_ring(self.reduced + self.gathered, self.dividing)
        return _in_ring(2 * self.all_reduced, self.all_ranks) + in_copies + self._sent_across

    @property
    def leaving(self) -> float:
        """Bytes that leave a node: in a ring over nodes, one of its ranks sends to the next node."""
        if self.nodes == 1:
            return 0.0
        spanning = 2 * self.all_reduced + (self.reduced + self.gathered if self.dividing > self.ranks else 0)
        return _in_ring(spanning, self.all_ranks) + min(self.dividing, self.ranks) * self._sent_across

    @property
    def all_ranks(self) -> int:
        return self.nodes * self.ranks

    @property
    def _sent_across(self) -> float:
        return _in_ring(2 * self.across, self.all_ranks // self.dividing)


def _in_ring(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring's reduce-scatter, or its all-gather (Thakur et al. 2005)."""
    return size * (ranks - 1) / ranks


def rank_traffic(plan: Plan, ranks: int, exchange: Sharing, *, nodes: int = 1) -> RankTraffic:
    """The traffic of ``nodes`` of ``ranks`` each that train with ``plan``, the plan of the whole model.

    Raises:
        ValueError: ``ranks`` or ``nodes`` is not positive.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1; give the number of devices of the node")
    if nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1; each has ranks={ranks} devices")
    if exchange is Sharing.CHANGED_SLICES:
        return _traffic_of_shares(plan, ranks, nodes)
    own = traffic_of(plan) or Traffic()
    alone = exchange is Sharing.ALL_REDUCE
    dividing = 1 if alone else ranks if exchange is Sharing.HYBRID else nodes * ranks
    weights = sum(param.weight_bytes for param in plan.params)
    gathers = 2 if exchange in (Sharing.SHARDED, Sharing.HYBRID) else 1
    return RankTraffic(
        ranks=ranks,
        nodes=nodes,
        dividing=dividing,
        all_reduced=weights if alone else 0,
        reduced=0 if alone else weights,
        gathered=0 if alone else gathers * weights,
        across=weights / ranks if exchange is Sharing.HYBRID else 0,
        to_host=(own.to_host + own.state) / dividing,
        to_device=(own.to_device + own.state) / dividing,
        host_bytes=plan.host_bytes * ranks // dividing,
        selection_bytes=0,
    )


def _traffic_of_shares(plan: Plan, ranks: int, nodes: int) -> RankTraffic:
    """The traffic under ``process_group=``, where several ranks may have the same share: see ``parts_of``."""
    dividing = dividing_ranks(ranks)
    copies = ranks // dividing  # in a node
    shares = [divide(replace(plan, rank=rank, ranks=dividing, replicas=nodes * copies)) for rank in range(dividing)]
    of_shares = [traffic_of(share) or Traffic() for share in shares]
    all_reduced = reduced = across = selections = 0
    gathered = float(_streamed_bytes(shares))
    for param in shares[0].params:
        if (share := param.share) is None:  # its gradient is averaged whole on each rank
            all_reduced += param.whole.weight_bytes
            continue
        slice_bytes = param.length * param.dtype.itemsize
        deferred = share.most_slices - share.most_selected
        across += share.most_slices * slice_bytes
        reduced += dividing * share.most_slices * slice_bytes
        gathered += dividing * (share.most_selected + deferred / param.interval) * slice_bytes
        selections += dividing * share.most_selected if param.selects else 0
    return RankTraffic(
        ranks=ranks,
        nodes=nodes,
        dividing=dividing,
        across=across,
        all_reduced=all_reduced,
        reduced=reduced,
        gathered=gathered,
        to_host=max(each.to_host + each.state for each in of_shares),
        to_device=max(each.to_device + each.state for each in of_shares),
        host_bytes=copies * sum(share.host_bytes for share in shares),
        selection_bytes=_INDEX_BYTES * selections,
    )


def _streamed_bytes(shares: Sequence[Plan]) -> int:
    """Bytes of the weights of streamed parameters that ranks gather: each sends as much as the one that has most."""
    rows: dict[torch.dtype, list[int]] = {}
    for rank, share in enumerate(shares):
        for param in share.params:
            if param.flat is not None:
                rows.setdefault(param.dtype, [0] * len(shares))[rank] += param.weight_bytes
    return len(shares) * sum(map(max, rows.values()))
