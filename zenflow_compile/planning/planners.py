"""Planners, one per policy: each assigns placements to parameters.

Planning reads only shapes, dtypes and the order of parameters, so that compiled, eager and resumed runs get the same
plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zenflow_compile.checks.printable import printable
from zenflow_compile.options.options import Options
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT16, FLOAT32
from zenflow_compile.planning.model_blocks import repeated_blocks
from zenflow_compile.planning.plan import ParamPlan, Placement, Plan

if TYPE_CHECKING:
    import torch

OFFLOADABLE_DTYPES = (FLOAT32, BFLOAT16, FLOAT16)

LARGEST_SUB_GROUP = 100_000_000
"""Most elements of a subgroup if ``sub_group_size`` is None: those of Deep Optimizer States (arXiv 2410.21316)."""

STRIDES = 4
"""A smaller model is divided into this many times ``update_stride`` subgroups, as far as its parameters allow."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What planning reads of a parameter. ``splittable``: trained and contiguous, so that slices can be written.

    The name is for errors and reports. It is made printable: a model's names may have control characters.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    splittable: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def stride_weight_bytes(params: Sequence[ParamSpec | ParamPlan]) -> int:
    """Bytes of a weight that ``update_stride`` is chosen for: of the largest parameter with an offloadable dtype."""
    largest = max(params, key=lambda param: (param.dtype in OFFLOADABLE_DTYPES, param.numel), default=None)
    return 0 if largest is None else largest.dtype.itemsize


def make_plan(specs: Sequence[ParamSpec], options: Options) -> Plan:
    """Plan all parameters of a new optimizer."""
    return extend_plan(empty_plan(options), specs, options)


def empty_plan(options: Options) -> Plan:
    """The plan of an optimizer without parameters."""
    return Plan(
        policy=options.policy, params=(), host_window_bytes=options.host_window_bytes, adaptive=options.adaptive
    )


def extend_plan(plan: Plan, specs: Sequence[ParamSpec], options: Options) -> Plan:
    """Plan further parameters; the parameters of ``plan`` keep their placement and phase.

    Raises:
        ValueError: no planner has the name of the policy.
    """
    if options.policy not in _PLANNERS:
        raise ValueError(f"policy={options.policy!r} must be one of {', '.join(_PLANNERS)}")
    new = _PLANNERS[options.policy](specs, len(plan.params), options)
    subgroups = 1 + max((param.subgroup for param in plan.params if param.subgroup is not None), default=-1)
    new = _with_streaming(new, subgroups, options)
    return replace(plan, params=(*plan.params, *_with_phases(plan.params, new)))


def _plan_resident(specs: Sequence[ParamSpec], first: int, options: Options) -> list[ParamPlan]:
    return [_on_device(spec, first + offset) for offset, spec in enumerate(specs)]


def _plan_zero_offload(specs: Sequence[ParamSpec], first: int, options: Options) -> list[ParamPlan]:
    return [_on_host(spec, first + offset, options) for offset, spec in enumerate(specs)]


def _plan_zero_infinity(specs: Sequence[ParamSpec], first: int, options: Options) -> list[ParamPlan]:
    plans = _plan_zero_offload(specs, first, options)
    return [replace(p, placement=Placement.FILE, in_file=True) if p.offloaded else p for p in plans]


def _plan_twinflow(specs: Sequence[ParamSpec], first: int, options: Options) -> list[ParamPlan]:
    """The last ``1 - ratio`` of all elements are resident; the parameter at the cut is split by slices.

    The device's share is updated last, while the host updates its own (Deep Optimizer States, section 4.1).
    """
    plans = _plan_zero_offload(specs, first, options)
    total = sum(plan.numel for plan in plans)
    left = round((1.0 - options.ratio) * total) - sum(plan.numel for plan in plans if not plan.offloaded)
    for offset in reversed(range(len(plans))):
        plan = plans[offset]
        if not plan.offloaded or left <= 0:
            continue
        if plan.numel <= left:
            plans[offset] = _on_device(specs[offset], first + offset)
        elif k := left // plan.length:
            plans[offset] = replace(plan, placement=Placement.SPLIT_COLUMNS, k=k, fixed=True)
        left -= plan.numel
    return plans


def _with_streaming(plans: list[ParamPlan], subgroup: int, options: Options) -> list[ParamPlan]:
    """Group the offloaded parameters into subgroups, and stream every ``stride``-th of them.

    Args:
        subgroup: number of the first subgroup.
    """
    if options.stride is None:
        return plans
    size = options.sub_group_size
    if size is None:
        counted = sum(plan.numel for plan in plans if plan.offloaded and not plan.fixed)
        size = min(LARGEST_SUB_GROUP, counted // (STRIDES * options.stride))
    elements = 0
    grouped = []
    for plan in plans:
        if not plan.offloaded or plan.fixed:
            grouped.append(plan)
            continue
        if elements and elements + plan.numel > size:
            subgroup, elements = subgroup + 1, 0
        elements += plan.numel
        on_device = subgroup % options.stride == options.stride - 1
        grouped.append(replace(_streamed(plan) if on_device else plan, subgroup=subgroup))
    return grouped


def _streamed(plan: ParamPlan) -> ParamPlan:
    return ParamPlan(
        index=plan.index,
        name=plan.name,
        shape=plan.shape,
        dtype=plan.dtype,
        placement=Placement.HOST_STREAMED,
    )


def _plan_zenflow(specs: Sequence[ParamSpec], first: int, options: Options) -> list[ParamPlan]:
    kept = _kept_resident(specs, options) if first == 0 else frozenset[int]()
    plans = []
    for offset, spec in enumerate(specs):
        if offset in kept or not _offloadable(spec, options):
            plans.append(_on_device(spec, first + offset))
            continue
        plans.append(
            _split(
                spec,
                first + offset,
                Placement.SPLIT_COLUMNS,
                k=_selection_size(max(_two_dimensional(spec)), options.topk_ratio),
                interval=options.longest_window,
                staleness=options.staleness,
                blocking=not options.overlap_step,
                # A window of one step has nothing to sum.
                summed=options.accumulate_on_device and options.longest_window > 1,
                compressed=options.gradient_compression is not None,
            )
        )
    if options.offload_device == "nvme":
        return [replace(plan, in_file=plan.offloaded and plan.deferred > 0) for plan in plans]
    return plans


_PLANNERS = {
    "resident": _plan_resident,
    "zero_offload": _plan_zero_offload,
    "twinflow": _plan_twinflow,
    "deep_optimizer_states": _plan_twinflow,  # ``_with_streaming`` does the rest
    "zenflow": _plan_zenflow,
    "zero_infinity": _plan_zero_infinity,
}


def _on_host(spec: ParamSpec, index: int, options: Options) -> ParamPlan:
    if not _offloadable(spec, options):
        return _on_device(spec, index)
    return _split(spec, index, Placement.HOST, k=0, interval=1, staleness=0, blocking=True)


def _on_device(spec: ParamSpec, index: int) -> ParamPlan:
    return ParamPlan(index=index, name=spec.name, shape=spec.shape, dtype=spec.dtype, placement=Placement.DEVICE)


def _split(
    spec: ParamSpec,
    index: int,
    placement: Placement,
    *,
    k: int,
    interval: int,
    staleness: int,
    blocking: bool,
    summed: bool = False,
    compressed: bool = False,
) -> ParamPlan:
    rows, columns = _two_dimensional(spec)
    # Gradients of embeddings, heads, qkv and up-projections concentrate in rows, those of down-projections a little in
    # columns (the project's convergence study): always the longer side, which also gives the finer choice. Square
    # matrices use rows: gradients of queries, keys and values concentrate there, and rows are contiguous.
    dim = 0 if rows >= columns else 1
    return ParamPlan(
        index=index,
        name=spec.name,
        shape=spec.shape,
        dtype=spec.dtype,
        placement=placement,
        dim=dim,
        slices=max(rows, columns),
        length=min(rows, columns),
        k=k,
        interval=interval,
        staleness=staleness,
        blocking=blocking,
        summed=summed,
        compressed=compressed,
    )


def _two_dimensional(spec: ParamSpec) -> tuple[int, int]:
    return spec.shape[0], spec.numel // spec.shape[0]


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
    )


def _kept_resident(specs: Sequence[ParamSpec], options: Options) -> set[int]:
    """Indices of resident parameters: those without slack, then others in forward order, as memory allows."""
    kept = _without_slack(specs, options.device_share)
    spare = options.spare_device_bytes
    for index, spec in enumerate(specs):
        if index not in kept and _offloadable(spec, options):
            spare -= _on_device(spec, index).device_bytes
            if spare < 0:
                break
            kept.add(index)
    return kept


def _without_slack(specs: Sequence[ParamSpec], device_share: float) -> set[int]:
    """The parameters that suffer most from rare updates, as far as they fit in ``device_share`` of all elements.

    In order: first block, the parameters before it (embeddings), the parameters after the last block (head). This is
    the order of the measured damage from late updates (the project's convergence study).
    """
    blocks = repeated_blocks([spec.shape for spec in specs])
    if blocks is None:
        return set()
    start, period, stop = blocks
    budget = device_share * sum(spec.numel for spec in specs)
    kept: set[int] = set()
    for part in (range(start, start + period), range(start), range(stop, len(specs))):
        size = sum(specs[index].numel for index in part)
        if size <= budget:
            kept.update(part)
            budget -= size
    return kept


def _with_phases(existing: Sequence[ParamPlan], new: Sequence[ParamPlan]) -> list[ParamPlan]:
    """Give every new update window the phase with the fewest bytes so far, largest parameters first.

    The bytes flushed per step then differ by at most the largest parameter (list scheduling).
    """
    interval = max((plan.interval for plan in (*existing, *new) if plan.offloaded), default=1)
    if interval == 1:
        return list(new)
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


def _add_load(load: list[int], plan: ParamPlan, phase: int) -> None:
    for step in range(phase, len(load), plan.interval):
        load[step] += plan.upload_bytes
