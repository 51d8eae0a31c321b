"""Planners, one per policy: each assigns placements to parameters.

Planning reads only shapes, dtypes and the order of parameters, so that compiled, eager and resumed runs get the same
plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, TypeVar

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
_Value = TypeVar("_Value")


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
    first = len(plan.params)
    subgroup = 1 + max((param.subgroup for param in plan.params if param.subgroup is not None), default=-1)
    new, subgroups = place(specs, options, first=first, subgroup=subgroup)
    phases = _phases([param.whole for param in plan.params], new)
    numbered = [
        replace(param, index=first + offset, name=spec.name, phase=phases[offset], subgroup=subgroups[offset])
        for offset, (spec, param) in enumerate(zip(specs, new, strict=True))
    ]
    planned = [
        param if spec.sharded is None else shard_of(param, spec.sharded)
        for spec, param in zip(specs, numbered, strict=True)
    ]
    check_state_forms(planned, options)
    return divide(replace(plan, params=(*plan.params, *planned)))


def place(
    specs: Sequence[ParamSpec], options: Options, *, first: int = 0, subgroup: int = 0
) -> tuple[list[ParamPlan], list[int | None]]:
    """Decide where the state of each parameter lives, without what numbers it: index, name, phase and subgroup.

    Equal parameters with equal decisions share one object, so that a model of many equal layers takes little time.

    Args:
        first: index of the first parameter; subgroup: number of the first subgroup.

    Returns:
        The plan and the number of the subgroup of each parameter; None without one.

    Raises:
        ValueError: no planner has the name of the policy.
    """
    if options.policy not in _PLANNERS:
        raise ValueError(f"policy={options.policy!r} must be one of {', '.join(_PLANNERS)}")
    kinds: dict[object, tuple[ParamPlan, ParamPlan]] = {}
    resident, on_host = [], []
    for spec in specs:
        kind = (spec.shape, spec.dtype, spec.splittable, spec.sharded)
        if (pair := kinds.get(kind)) is None:
            alone = _resident(first, spec, options)
            pair = kinds[kind] = alone, _on_host(alone, options) if _offloadable(spec, options) else alone
        resident.append(pair[0])
        on_host.append(pair[1])
    new = _PLANNERS[options.policy](resident, on_host, options)
    new, subgroups = _with_streaming(new, resident, subgroup, options)
    if options.weights_in_files:
        new = per_kind(new, lambda param: replace(param, weight_in_file=param.in_file))
    return _with_shared_buffers(new, first, options), subgroups


def per_kind(plans: _Plans, of: Callable[[ParamPlan], _Value]) -> list[_Value]:
    """Apply ``of`` to each plan, once where several parameters share it."""
    found: dict[int, _Value] = {}
    for plan in plans:
        if id(plan) not in found:
            found[id(plan)] = of(plan)
    return [found[id(plan)] for plan in plans]


# Planners take every new parameter two times: resident, and with all of its state on the host if it is offloadable.


def _plan_resident(resident: _Plans, on_host: _Plans, options: Options) -> _Plans:
    return resident


def _plan_zero_offload(resident: _Plans, on_host: _Plans, options: Options) -> _Plans:
    return on_host


def _plan_zero_infinity(resident: _Plans, on_host: _Plans, options: Options) -> _Plans:
    def in_file(plan: ParamPlan) -> ParamPlan:
        return replace(plan, placement=Placement.FILE, in_file=True) if plan.offloaded else plan

    return per_kind(on_host, in_file)


def _plan_twinflow(resident: _Plans, on_host: _Plans, options: Options) -> _Plans:
    """The last ``1 - ratio`` of all elements are resident; the parameter at the cut is split by slices.

    The device's share is updated last, while the host updates its own (Deep Optimizer States, section 4.1).
    """
    plans = list(on_host)
    numels = per_kind(plans, lambda plan: plan.numel)
    offloaded = [plan.offloaded for plan in plans]
    left = round((1.0 - options.ratio) * sum(numels))
    left -= sum(numel for numel, goes in zip(numels, offloaded, strict=True) if not goes)
    for offset in reversed(range(len(plans))):
        if left <= 0:
            break
        if not offloaded[offset]:
            continue
        if numels[offset] <= left:
            plans[offset] = resident[offset]
        elif k := left // plans[offset].length:
            plans[offset] = replace(plans[offset], placement=Placement.SPLIT_COLUMNS, k=k, fixed=True)
        left -= numels[offset]
    return plans


def _with_streaming(
    plans: _Plans, resident: _Plans, subgroup: int, options: Options
) -> tuple[_Plans, list[int | None]]:
    """Group the offloaded parameters into subgroups, numbered from ``subgroup`` on; stream every ``stride``-th."""
    numbers: list[int | None] = [None] * len(plans)
    if options.stride is None:
        return plans, numbers
    sizes = per_kind(plans, lambda plan: plan.numel if plan.offloaded and not plan.fixed else 0)
    streamed = per_kind(resident, lambda plan: replace(plan, placement=Placement.HOST_STREAMED))
    size = min(LARGEST_SUB_GROUP, sum(sizes) // (STRIDES * options.stride))
    elements = 0
    grouped = list(plans)
    for offset, numel in enumerate(sizes):
        if not numel:
            continue
        if elements and elements + numel > size:
            subgroup, elements = subgroup + 1, 0
        elements += numel
        if subgroup % options.stride == options.stride - 1:
            grouped[offset] = streamed[offset]
        numbers[offset] = subgroup
    return grouped, numbers


def check_state_forms(plans: _Plans, options: Options) -> None:
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
    def selecting(plan: ParamPlan) -> ParamPlan:
        if not plan.offloaded:
            return plan
        k = _selection_size(plan.slices, options.topk_ratio)
        return replace(
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

    extends = bool(on_host) and on_host[0].index > 0
    plans = per_kind(on_host, selecting)
    for offset in () if extends else _kept_resident(resident, on_host, options):
        plans[offset] = resident[offset]
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
    sizes = per_kind(resident, lambda plan: plan.whole_state_bytes)
    taken = accumulate(sizes[index] for index in order)
    return {index for index, size in zip(order, taken, strict=True) if size <= options.device_share}


def _without_slack(plans: _Plans, share: float) -> set[int]:
    """The parameters that suffer most from rare updates, as far as they fit in a share of all elements."""
    numels = per_kind(plans, lambda plan: plan.numel)
    budget = share * sum(numels)
    kept: set[int] = set()
    for part in parts_without_slack([plan.shape for plan in plans]):
        size = sum(numels[index] for index in part)
        if size <= budget:
            kept.update(part)
            budget -= size
    return kept


def _phases(existing: _Plans, new: _Plans) -> list[int]:
    """Give every new update window the phase with the fewest bytes so far, largest parameters first.

    The bytes flushed per step then differ by at most the largest parameter (list scheduling).
    """
    interval = max((plan.interval for plan in (*existing, *new) if plan.offloaded), default=1)
    phases = [0] * len(new)
    if interval == 1:
        return phases
    load = [0] * interval
    for plan in existing:
        if plan.offloaded:
            _add_load(load, plan, plan.phase)
    deferred = per_kind(new, lambda plan: plan.deferred_numel)
    for offset in sorted(range(len(new)), key=lambda offset: -deferred[offset]):
        plan = new[offset]
        if plan.offloaded:
            phase = min(range(plan.interval), key=lambda phase: max(load[phase :: plan.interval]))
            _add_load(load, plan, phase)
            phases[offset] = phase
    return phases


def _with_shared_buffers(plans: _Plans, first: int, options: Options) -> list[ParamPlan]:
    """Let the gradient buffers of new parameters share memory, and new weights replace gradients.

    ``first``: index of the first parameter. A pool has the number of its first one.
    """
    if options.adaptive:  # gradients decide in which steps a buffer is in use
        return list(plans)
    # A weight in host memory stays in its upload buffer, and so does one that completes a split master. A compressed
    # gradient is smaller than the weights.
    keeps_uploads = options.offload_weights is not False
    pools: dict[int, int] = {}
    for offset, period in enumerate(per_kind(plans, lambda plan: plan.period if plan.offloaded else 0)):
        if period:
            pools.setdefault(period, first + offset)

    def sharing(plan: ParamPlan) -> ParamPlan:
        if not plan.offloaded:
            return plan
        in_place = not (keeps_uploads or plan.split_master or plan.compressed)
        return replace(plan, pool=pools[plan.period], in_place=in_place)

    return per_kind(plans, sharing)


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
