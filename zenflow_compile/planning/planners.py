"""Planners, one per policy: each assigns placements to parameters.

Planning reads only shapes, dtypes and the order of parameters, so that compiled, eager and resumed runs get the same
plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from zenflow_compile.checks.validate import printable
from zenflow_compile.options.options import Options
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT16, FLOAT32
from zenflow_compile.planning.model_blocks import parts_without_slack
from zenflow_compile.planning.plan import QUANTIZATION_BLOCK, FlatShare, ParamPlan, Placement, Plan, Shard, Share

if TYPE_CHECKING:
    import torch

OFFLOADABLE_DTYPES = (FLOAT32, BFLOAT16, FLOAT16)

LARGEST_SUB_GROUP = 100_000_000
"""Most elements of a subgroup: those of Deep Optimizer States (arXiv 2410.21316)."""

STRIDES = 4
"""A smaller model is divided into this many times ``update_stride`` subgroups, as far as its parameters allow."""

_LEAST_SLICES = 2
"""A rank with fewer slices could not select one and defer another one."""

_Plans = Sequence[ParamPlan]


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


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What planning reads of a parameter. ``splittable``: trained and contiguous, so that slices can be written.

    The name is for errors and reports. It is made printable: a model's names may have control characters.

    Attributes:
        shape: of the whole parameter.
        sharded: how the model is sharded; None: this rank has the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    splittable: bool = True
    sharded: ShardedBy | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def stride_weight_bytes(params: Sequence[ParamSpec | ParamPlan]) -> int:
    """Bytes of a weight that ``update_stride`` is chosen for: of the largest parameter with an offloadable dtype."""
    largest = max(params, key=lambda param: (param.dtype in OFFLOADABLE_DTYPES, param.numel), default=None)
    return 0 if largest is None else largest.dtype.itemsize


def make_plan(specs: Sequence[ParamSpec], options: Options) -> Plan:
    """Plan all parameters of a new optimizer."""
    return extend_plan(empty_plan(options), specs, options)


def empty_plan(options: Options, rank: int = 0, ranks: int = 1) -> Plan:
    """The plan of an optimizer without parameters.

    Args:
        rank: of this process among the ``ranks`` that divide the offloaded parameters.
    """
    return Plan(
        policy=options.policy,
        params=(),
        host_window_bytes=options.host_window_bytes,
        adaptive=options.adaptive,
        rank=rank,
        ranks=ranks,
    )


def extend_plan(plan: Plan, specs: Sequence[ParamSpec], options: Options) -> Plan:
    """Plan further parameters; the parameters of ``plan`` keep their placement and phase.

    Raises:
        ValueError: no planner has the name of the policy, or a parameter cannot have ``state_dtype`` or
            ``split_master``.
    """
    if options.policy not in _PLANNERS:
        raise ValueError(f"policy={options.policy!r} must be one of {', '.join(_PLANNERS)}")
    resident = [_resident(index, spec, options) for index, spec in enumerate(specs, start=len(plan.params))]
    pairs = zip(specs, resident, strict=True)
    on_host = [_on_host(param, options) if _offloadable(spec, options) else param for spec, param in pairs]
    new = _PLANNERS[options.policy](resident, on_host, options)
    subgroups = 1 + max((param.subgroup for param in plan.params if param.subgroup is not None), default=-1)
    new = _with_streaming(new, resident, subgroups, options)
    if options.weights_in_files:
        new = [replace(param, weight_in_file=param.in_file) for param in new]
    existing = [param.whole for param in plan.params]
    planned = [
        param if spec.sharded is None else shard_of(param, spec.sharded)
        for spec, param in zip(specs, _with_shared_buffers(_with_phases(existing, new), options), strict=True)
    ]
    _check_state_forms(planned, options)
    return divide(replace(plan, params=(*plan.params, *planned)))


# Planners take every new parameter two times: resident, and with all of its state on the host if it is offloadable.


def _plan_resident(resident: _Plans, on_host: _Plans, options: Options) -> _Plans:
    return resident


def _plan_zero_offload(resident: _Plans, on_host: _Plans, options: Options) -> _Plans:
    return on_host


def _plan_zero_infinity(resident: _Plans, on_host: _Plans, options: Options) -> _Plans:
    return [replace(plan, placement=Placement.FILE, in_file=True) if plan.offloaded else plan for plan in on_host]


def _plan_twinflow(resident: _Plans, on_host: _Plans, options: Options) -> _Plans:
    """The last ``1 - ratio`` of all elements are resident; the parameter at the cut is split by slices.

    The device's share is updated last, while the host updates its own (Deep Optimizer States, section 4.1).
    """
    plans = list(on_host)
    total = sum(plan.numel for plan in plans)
    left = round((1.0 - options.ratio) * total) - sum(plan.numel for plan in plans if not plan.offloaded)
    for offset in reversed(range(len(plans))):
        plan = plans[offset]
        if not plan.offloaded or left <= 0:
            continue
        if plan.numel <= left:
            plans[offset] = resident[offset]
        elif k := left // plan.length:
            plans[offset] = replace(plan, placement=Placement.SPLIT_COLUMNS, k=k, fixed=True)
        left -= plan.numel
    return plans


def _with_streaming(plans: _Plans, resident: _Plans, subgroup: int, options: Options) -> _Plans:
    """Group the offloaded parameters into subgroups, numbered from ``subgroup`` on; stream every ``stride``-th."""
    if options.stride is None:
        return plans
    counted = sum(plan.numel for plan in plans if plan.offloaded and not plan.fixed)
    size = min(LARGEST_SUB_GROUP, counted // (STRIDES * options.stride))
    elements = 0
    grouped = list(plans)
    for offset, plan in enumerate(plans):
        if not plan.offloaded or plan.fixed:
            continue
        if elements and elements + plan.numel > size:
            subgroup, elements = subgroup + 1, 0
        elements += plan.numel
        if subgroup % options.stride == options.stride - 1:
            plan = replace(resident[offset], placement=Placement.HOST_STREAMED)
        grouped[offset] = replace(plan, subgroup=subgroup)
    return grouped


def _check_state_forms(plans: _Plans, options: Options) -> None:
    """
    Raises:
        ValueError: slices are too short for 8-bit moments, or no weight can complete a split master.
    """
    offloaded = [plan for plan in plans if plan.offloaded]
    for plan in offloaded:
        if plan.moments == "fp8" and plan.length < QUANTIZATION_BLOCK:
            raise ValueError(
                f'state_dtype="fp8" needs slices of {QUANTIZATION_BLOCK} elements or more, and those of {plan.name} '
                f'have {plan.length}; pass state_dtype="bf16", or min_offload_size={plan.numel + 1}, which keeps '
                "parameters of this size on the device"
            )
    on_host = [plan for plan in offloaded if plan.deferred]
    if options.split_master and on_host and not any(plan.dtype == BFLOAT16 for plan in on_host):
        raise ValueError(
            f"split_master=True needs bf16 weights, and those that the host updates are {on_host[0].dtype}; convert "
            "the model with model.to(torch.bfloat16), or pass split_master=False"
        )


def _plan_zenflow(resident: _Plans, on_host: _Plans, options: Options) -> _Plans:
    extends = bool(on_host) and on_host[0].index > 0
    kept = set[int]() if extends else _kept_resident(resident, on_host, options)
    plans = []
    for offset, plan in enumerate(on_host):
        if offset in kept or not plan.offloaded:
            plans.append(resident[offset])
            continue
        k = _selection_size(plan.slices, options.topk_ratio)
        plans.append(
            replace(
                plan,
                placement=Placement.SPLIT_COLUMNS,
                k=k,
                interval=options.longest_window,
                staleness=options.staleness,
                blocking=not options.overlap_step,
                in_file=options.in_files and k < plan.slices,
                # An update window of one step has nothing to sum.
                summed=options.gradient_transfer == "mean" and options.longest_window > 1,
                compressed=options.gradient_transfer == "int8",
            )
        )
    return plans


_PLANNERS = {
    "resident": _plan_resident,
    "zero_offload": _plan_zero_offload,
    "twinflow": _plan_twinflow,
    "deep_optimizer_states": _plan_twinflow,  # ``_with_streaming`` does the rest
    "zenflow": _plan_zenflow,
    "zero_infinity": _plan_zero_infinity,
}


def _resident(index: int, spec: ParamSpec, options: Options) -> ParamPlan:
    """A parameter with all of its state on the device.

    Its moments are fp32 if the parameter cannot be offloaded, or if its rows are too short for 8-bit moments.
    """
    plan = ParamPlan(index=index, name=spec.name, shape=spec.shape, dtype=spec.dtype, placement=Placement.DEVICE)
    fits = options.state_dtype != "fp8" or plan.whole_rows[1] >= QUANTIZATION_BLOCK
    return replace(plan, moments=options.state_dtype) if fits and _offloadable(spec, options) else plan


def _on_host(plan: ParamPlan, options: Options) -> ParamPlan:
    """A resident parameter with all of its state on the host."""
    rows, columns = plan.shape[0], plan.numel // plan.shape[0]
    # Gradients of embeddings, heads, qkv and up-projections concentrate in rows, those of down-projections a little in
    # columns (the project's convergence study): always the longer side, which also gives the finer choice. Square
    # matrices use rows: gradients of queries, keys and values concentrate there, and rows are contiguous.
    dim = 0 if rows >= columns else 1
    slices, length = max(rows, columns), min(rows, columns)
    return replace(
        plan,
        placement=Placement.HOST,
        dim=dim,
        slices=slices,
        length=length,
        blocking=True,
        moments=options.state_dtype,
        split_master=options.split_master and plan.dtype == BFLOAT16,
    )


def _selection_size(slices: int, topk_ratio: float) -> int:
    """At least one slice for any ratio above zero: rounding down would turn selection off for small weights."""
    if topk_ratio == 0.0:
        return 0
    return min(slices, max(1, round(slices * topk_ratio)))


def _offloadable(spec: ParamSpec, options: Options) -> bool:
    return (
        len(spec.shape) >= 2
        and spec.numel >= max(1, options.min_offload_size)
        and spec.splittable
        and spec.dtype in OFFLOADABLE_DTYPES
        and (spec.sharded is None or spec.sharded.leaves_slices(spec.shape))
    )


def resident_order(plans: Sequence[ParamPlan]) -> list[int]:
    """Indices of the offloaded ``plans`` in the order in which ``device_share`` in bytes keeps parameters resident.

    Those that suffer most from rare updates come first, then the others in forward order.
    """
    without_slack = chain.from_iterable(sorted(part) for part in parts_without_slack([plan.shape for plan in plans]))
    return [index for index in dict.fromkeys((*without_slack, *range(len(plans)))) if plans[index].offloaded]


def _kept_resident(resident: _Plans, on_host: _Plans, options: Options) -> set[int]:
    """Indices of resident parameters: those that ``device_share`` has memory for."""
    assert options.device_share != "fill"
    if isinstance(options.device_share, float):
        return _without_slack(on_host, options.device_share)
    order = resident_order(on_host)
    taken = accumulate(resident[index].whole_state_bytes for index in order)
    return {index for index, size in zip(order, taken, strict=True) if size <= options.device_share}


def _without_slack(plans: _Plans, share: float) -> set[int]:
    """The parameters that suffer most from rare updates, as far as they fit in a share of all elements."""
    budget = share * sum(plan.numel for plan in plans)
    kept: set[int] = set()
    for part in parts_without_slack([plan.shape for plan in plans]):
        size = sum(plans[index].numel for index in part)
        if size <= budget:
            kept.update(part)
            budget -= size
    return kept


def _with_phases(existing: _Plans, new: _Plans) -> _Plans:
    """Give every new update window the phase with the fewest bytes so far, largest parameters first.

    The bytes flushed per step then differ by at most the largest parameter (list scheduling).
    """
    interval = max((plan.interval for plan in (*existing, *new) if plan.offloaded), default=1)
    if interval == 1:
        return new
    load = [0] * interval
    for plan in existing:
        if plan.offloaded:
            _add_load(load, plan, plan.phase)
    phases: dict[int, int] = {}
    for plan in sorted(new, key=lambda plan: -plan.deferred_numel):
        if plan.offloaded:
            phase = min(range(plan.interval), key=lambda phase: max(load[phase :: plan.interval]))
            _add_load(load, plan, phase)
            phases[plan.index] = phase
    return [replace(plan, phase=phase) if (phase := phases.get(plan.index, 0)) else plan for plan in new]


def _with_shared_buffers(plans: _Plans, options: Options) -> _Plans:
    """Let the gradient buffers of new parameters share memory, and new weights replace gradients."""
    if options.adaptive:  # gradients decide in which steps a buffer is in use
        return plans
    # A weight in host memory stays in its upload buffer, and so does one that completes a split master. A compressed
    # gradient is smaller than the weights.
    keeps_uploads = options.offload_weights is not False
    pools = {plan.period: plan.index for plan in reversed(plans) if plan.offloaded}
    return [
        replace(plan, pool=pools[plan.period], in_place=not (keeps_uploads or plan.split_master or plan.compressed))
        if plan.offloaded
        else plan
        for plan in plans
    ]


def _add_load(load: list[int], plan: ParamPlan, phase: int) -> None:
    for step in range(phase, len(load), plan.interval):
        load[step] += plan.upload_bytes


# [Note: parts of a parameter]
# Divides offloaded parameters by slices, and streamed ones by elements, among the ranks of a process group.
#
# Rank ``r`` updates the part ``r % parts`` of a parameter: every ``parts``-th slice. Slices are selected in groups,
# slice ``i`` in group ``i % groups``, and a part consists of whole groups. So a rank selects its slices without
# communication, and all ranks together select the slices that one device would select.
#
# Nothing is selected in a streamed parameter: each rank has the state of consecutive elements, which one kernel
# updates.
#
# A model may be sharded already (FSDP2). Then each rank has consecutive rows or columns of a parameter, and updates
# them. A row of a matrix that is sharded by rows belongs to one rank, which selects among its own. Of a column each
# rank has a part: norms are added up over ranks, and all of them select the same columns.


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
