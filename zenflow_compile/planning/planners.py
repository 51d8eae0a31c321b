"""Planners, one per policy: each assigns placements to parameters.

Planning reads only shapes, dtypes and the order of parameters, so that compiled, eager and resumed runs get the same
plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import IntEnum
from fnmatch import fnmatchcase
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from zenflow_compile.checks.validate import printable
from zenflow_compile.options.options import Options
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT16, FLOAT32
from zenflow_compile.planning.model_blocks import parts_without_slack
from zenflow_compile.planning.plan import (
    QUANTIZATION_BLOCK,
    FlatShare,
    MatrixShare,
    ParamPlan,
    Placement,
    Plan,
    Shard,
    Share,
)
from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.rules.rule import Rule

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
        members: numbers of these ``ranks`` in the run, ascending.
        pieces: in which the model's parameter was divided before: this is one of them, by itself sharded like this.
        uneven: the shape of this rank's piece, if not all have one shape; None if they have. ``ParamSpec.shape`` is
            that of the largest one, so that all ranks plan alike.
        repeated: a rank in front of this one, among all ranks of the optimizer, has the same part.
    """

    dim: int
    rank: int
    ranks: int
    members: tuple[int, ...] = ()
    pieces: int = 1
    uneven: tuple[int, ...] | None = None
    repeated: bool = False

    def part(self, size: int, rank: int | None = None) -> range:
        """The indices along the dimension, of ``size``, that a rank has, by default this one."""
        chunk = -(-size // self.ranks)
        number = self.rank if rank is None else rank
        return range(min(number * chunk, size), min((number + 1) * chunk, size))

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """View what this rank has in a tensor of the parameter's shape."""
        part = self.part(tensor.shape[self.dim])
        return tensor.narrow(self.dim, part.start, len(part))

    def leaves_slices(self, shape: tuple[int, ...], row_dims: int) -> bool:
        """Return whether each rank has consecutive rows or columns of a parameter of this shape, and enough of them."""
        even, divides = self.uneven is None, self.dim in (0, row_dims)
        each = math.prod(shape[1:row_dims]) if self.dim == 0 else 1  # rows of an index
        return even and divides and each * len(self.part(shape[self.dim], self.ranks - 1)) >= _LEAST_SLICES


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What planning reads of a parameter. ``splittable``: trained and contiguous, so that slices can be written.

    The name is for errors and reports. It is made printable: a model's names may have control characters.

    Attributes:
        shape: of the whole parameter.
        sharded: how the model is sharded; None: this rank has the whole parameter.
        row_dims: dimensions that rows of its 2-D view combine; None: as its shape suggests.
        rule: that updates it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    splittable: bool = True
    sharded: ShardedBy | None = None
    row_dims: int | None = None
    rule: Rule = ADAMW

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def stride_param(params: Sequence[ParamSpec]) -> ParamSpec | None:
    """The parameter that ``update_stride`` is chosen for: the largest one with an offloadable dtype."""
    on_host = [param for param in params if not param.rule.of_matrix]
    return max(on_host, key=lambda param: (param.dtype in OFFLOADABLE_DTYPES, param.numel), default=None)


def make_plan(specs: Sequence[ParamSpec], options: Options) -> Plan:
    """Plan all parameters of a new optimizer."""
    return extend_plan(empty_plan(options), specs, options)


def empty_plan(options: Options) -> Plan:
    """The plan of an optimizer without parameters."""
    return Plan(
        policy=options.policy,
        params=(),
        host_window_bytes=options.host_window_bytes,
        adaptive=options.adaptive,
    )


def extend_plan(plan: Plan, specs: Sequence[ParamSpec], options: Options) -> Plan:
    """Plan further parameters; the parameters of ``plan`` keep their placement and phase.

    Raises:
        ValueError: no planner has the name of the policy, or a parameter cannot have ``state_dtype``,
            ``split_master`` or the view that ``row_dims`` gives it; or see ``check_matrices``.
    """
    if options.policy not in _PLANNERS:
        raise ValueError(f"policy={options.policy!r} must be one of {', '.join(_PLANNERS)}")
    check_matrices(specs)
    first = len(plan.params)
    subgroup = 1 + max((param.subgroup for param in plan.params if param.subgroup is not None), default=-1)
    kinds = Kinds(with_views(specs, options, extends=first > 0), options)
    layout = lay_out(kinds, options, extends=first > 0, subgroup=subgroup)
    new = [kinds.plan(index, layout) for index in range(len(specs))]
    phases = _phases([param.whole for param in plan.params], new)
    pools: dict[int, int] = {}
    for offset, param in enumerate(new):
        if param.pool is not None:
            pools.setdefault(param.gradient_buffers.period, first + offset)
    numbered = [
        replace(
            param,
            index=first + offset,
            name=spec.name,
            phase=phases[offset],
            subgroup=layout.subgroups[offset],
            pool=None if param.pool is None else pools[param.gradient_buffers.period],
        )
        for offset, (spec, param) in enumerate(zip(specs, new, strict=True))
    ]
    planned = [
        param if spec.sharded is None else shard_of(param, spec.sharded)
        for spec, param in zip(specs, numbered, strict=True)
    ]
    check_state_forms(planned, options)
    return divide(replace(plan, params=(*plan.params, *planned)))


class Side(IntEnum):
    """Where a planner puts a parameter, if it can be offloaded."""

    HOST = 0  # as the policy has parameters there
    DEVICE = 1
    STREAMED = 2
    CUT = 3  # the first slices on the device, the others on the host


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the state of each parameter lives.

    Attributes:
        sides, subgroups: by parameter; a subgroup is None without ``update_stride``.
        cut: slices on the device of the parameter on both sides.
    """

    sides: Sequence[Side]
    subgroups: Sequence[int | None]
    cut: int = 0


class Kinds:
    """Plans of parameters without what their order decides: index, name, phase, pool and subgroup.

    Equal parameters on the same side share one plan, so that a model of many equal layers takes little time.

    Attributes:
        of: number of the kind of each parameter.
        resident, on_host: by kind. A kind that cannot be offloaded is resident in both.
    """

    def __init__(self, specs: Sequence[ParamSpec], options: Options) -> None:
        numbers: dict[object, int] = {}
        firsts: list[ParamSpec] = []
        self.of: list[int] = []
        for spec in specs:
            key = spec.shape, spec.dtype, spec.splittable, spec.sharded, spec.row_dims, spec.rule
            number = numbers.setdefault(key, len(numbers))
            if number == len(firsts):
                firsts.append(spec)
            self.of.append(number)
        self._options = options
        self._firsts = firsts
        self.shapes = [spec.shape for spec in specs]
        self._plan()

    def _plan(self) -> None:
        options = self._options
        self.resident = [_resident(spec, options) for spec in self._firsts]
        self.on_host = [
            _on_host(plan, options) if _offloadable(spec, options) else plan
            for spec, plan in zip(self._firsts, self.resident, strict=True)
        ]
        self._made: dict[tuple[int, Side, int], ParamPlan] = {}

    def with_options(self, options: Options) -> Kinds:
        """The same parameters with other options."""
        other = copy(self)
        stored = attrgetter("state_dtype", "split_master", "min_offload_size")
        alike = stored(options) == stored(self._options)
        other._options, other._made = options, {}
        if not alike:
            other._plan()
        return other

    def plan(self, index: int, layout: Layout) -> ParamPlan:
        """The plan of a parameter."""
        return self.planned(self.of[index], layout.sides[index], layout.cut)

    def planned(self, kind: int, side: Side, cut: int) -> ParamPlan:
        """The plan of a kind on a side; ``cut``: see ``Layout``."""
        key = (kind, side, cut if side is Side.CUT else 0)
        if key not in self._made:
            self._made[key] = self._planned(*key)
        return self._made[key]

    def _planned(self, kind: int, side: Side, cut: int) -> ParamPlan:
        resident, plan = self.resident[kind], self.on_host[kind]
        if side is Side.DEVICE:
            return resident
        if side is Side.STREAMED:
            return replace(resident, placement=Placement.HOST_STREAMED)
        if not plan.offloaded:
            return plan
        if side is Side.CUT:
            plan = replace(plan, placement=Placement.SPLIT_COLUMNS, k=cut, fixed=True)
        else:
            plan = _PLANNERS[self._options.policy].of_kind(plan, self._options)
        if self._options.weights_in_files:
            plan = replace(plan, weight_in_file=plan.in_file)
        return _with_shared_buffers(plan, self._options)


def lay_out(kinds: Kinds, options: Options, *, extends: bool = False, subgroup: int = 0) -> Layout:
    """Decide where the state of each parameter lives.

    Args:
        extends: other parameters were planned before. subgroup: number of the first subgroup.
    """
    layout = _PLANNERS[options.policy].lay_out(kinds, options, extends)
    if options.stride is not None:
        layout = _with_streaming(layout, kinds, subgroup, options.stride)
    return _with_whole_matrices(layout, kinds, subgroup)


@dataclass(frozen=True, slots=True)
class _Planner:
    """``lay_out`` decides about parameters, ``of_kind`` about how the host has those that are there."""

    lay_out: Callable[[Kinds, Options, bool], Layout]
    of_kind: Callable[[ParamPlan, Options], ParamPlan]


def _on_one_side(side: Side) -> Callable[[Kinds, Options, bool], Layout]:
    def lay_out(kinds: Kinds, options: Options, extends: bool) -> Layout:
        return Layout([side] * len(kinds.of), [None] * len(kinds.of))

    return lay_out


def _as_it_is(plan: ParamPlan, options: Options) -> ParamPlan:
    return plan


def _in_file(plan: ParamPlan, options: Options) -> ParamPlan:
    return replace(plan, placement=Placement.FILE, in_file=True)


def _lay_out_twinflow(kinds: Kinds, options: Options, extends: bool) -> Layout:
    """The last ``1 - ratio`` of all elements are resident; the parameter at the cut is split by slices.

    The device's share is updated last, while the host updates its own (Deep Optimizer States, section 4.1).
    """
    sides, cut = [Side.HOST] * len(kinds.of), 0
    numels = [plan.numel for plan in kinds.on_host]
    offloaded = [plan.offloaded for plan in kinds.on_host]
    left = round((1.0 - options.ratio) * sum(numels[kind] for kind in kinds.of))
    left -= sum(numels[kind] for kind in kinds.of if not offloaded[kind])
    for index in reversed(range(len(sides))):
        kind = kinds.of[index]
        if left <= 0:
            break
        if not offloaded[kind]:
            continue
        if numels[kind] <= left:
            sides[index] = Side.DEVICE
        elif k := left // kinds.on_host[kind].length:
            sides[index], cut = Side.CUT, k
        left -= numels[kind]
    return Layout(sides, [None] * len(sides), cut)


def _with_streaming(layout: Layout, kinds: Kinds, subgroup: int, stride: int) -> Layout:
    """Group the offloaded parameters into subgroups, numbered from ``subgroup`` on; stream every ``stride``-th."""
    numels = [plan.numel if plan.offloaded and not plan.rule.of_matrix else 0 for plan in kinds.on_host]
    counted = [numels[kind] if side is Side.HOST else 0 for kind, side in zip(kinds.of, layout.sides, strict=True)]
    size = min(LARGEST_SUB_GROUP, sum(counted) // (STRIDES * stride))
    elements = 0
    sides, subgroups = list(layout.sides), list(layout.subgroups)
    for index, numel in enumerate(counted):
        if not numel:
            continue
        if elements and elements + numel > size:
            subgroup, elements = subgroup + 1, 0
        elements += numel
        if subgroup % stride == stride - 1:
            sides[index] = Side.STREAMED
        subgroups[index] = subgroup
    return Layout(sides, subgroups, layout.cut)


def _with_whole_matrices(layout: Layout, kinds: Kinds, subgroup: int) -> Layout:
    """Stream the state of offloaded matrices that are updated whole, in subgroups of their own."""
    numels = [plan.numel if plan.offloaded and plan.rule.of_matrix else 0 for plan in kinds.on_host]
    whole = [
        index
        for index, (kind, side) in enumerate(zip(kinds.of, layout.sides, strict=True))
        if numels[kind] and side is not Side.DEVICE
    ]
    if not whole:
        return layout
    sides, subgroups = list(layout.sides), list(layout.subgroups)
    size = min(LARGEST_SUB_GROUP, sum(numels[kinds.of[index]] for index in whole) // STRIDES)
    number, elements = 1 + max((each for each in subgroups if each is not None), default=subgroup - 1), 0
    for index in whole:
        numel = numels[kinds.of[index]]
        if elements and elements + numel > size:
            number, elements = number + 1, 0
        elements += numel
        sides[index], subgroups[index] = Side.STREAMED, number
    return Layout(sides, subgroups, layout.cut)


def check_matrices(specs: Sequence[ParamSpec]) -> None:
    """Refuse parameters that a rule of matrices cannot update.

    Raises:
        ValueError: a rule of matrices has a parameter that is none, or of which this rank has a part.
    """
    for spec in specs:
        kind = type(spec.rule).__name__
        if spec.rule.of_matrix and len(spec.shape) != 2:
            raise ValueError(
                f"{spec.name} has shape {list(spec.shape)}, and {kind} updates matrices; put it into a param group of "
                "another rule, as zenflow_compile.rules.muon_groups(model, ...) does"
            )
        if spec.rule.of_matrix and spec.sharded is not None:
            raise ValueError(
                f"{spec.name} is sharded by fully_shard, and {kind} needs whole matrices, which this version does not "
                "gather; train with process_group= instead of fully_shard, or give these parameters another rule"
            )


def check_state_forms(plans: _Plans, options: Options) -> None:
    """
    Raises:
        ValueError: slices are too short for 8-bit moments, or no weight can complete a split master.
    """
    offloaded = [plan for plan in plans if plan.offloaded]
    for plan in offloaded:
        if plan.moments == "fp8" and plan.length < QUANTIZATION_BLOCK:
            other_view = ", or row_dims, if it is a stack of matrices" if len(plan.shape) > 2 else ""
            raise ValueError(
                f'state_dtype="fp8" needs slices of {QUANTIZATION_BLOCK} elements or more, and those of {plan.name} '
                f'have {plan.length}; pass state_dtype="bf16", or min_offload_size={plan.numel + 1}, which keeps '
                f"parameters of this size on the device{other_view}"
            )
    on_host = [plan for plan in offloaded if plan.deferred]
    if options.split_master and on_host and not any(plan.dtype == BFLOAT16 for plan in on_host):
        raise ValueError(
            f"split_master=True needs bf16 weights, and those that the host updates are {on_host[0].dtype}; convert "
            "the model with model.to(torch.bfloat16), or pass split_master=False"
        )


def _lay_out_zenflow(kinds: Kinds, options: Options, extends: bool) -> Layout:
    sides = [Side.HOST] * len(kinds.of)
    for index in () if extends else _kept_resident(kinds, options):
        sides[index] = Side.DEVICE
    return Layout(sides, [None] * len(sides))


def _selecting(plan: ParamPlan, options: Options) -> ParamPlan:
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


_PLANNERS = {
    "resident": _Planner(_on_one_side(Side.DEVICE), _as_it_is),
    "zero_offload": _Planner(_on_one_side(Side.HOST), _as_it_is),
    "twinflow": _Planner(_lay_out_twinflow, _as_it_is),
    "deep_optimizer_states": _Planner(_lay_out_twinflow, _as_it_is),  # ``_with_streaming`` does the rest
    "zenflow": _Planner(_lay_out_zenflow, _selecting),
    "zero_infinity": _Planner(_on_one_side(Side.HOST), _in_file),
}


def _resident(spec: ParamSpec, options: Options) -> ParamPlan:
    """A parameter with all of its state on the device.

    Its moments are fp32 if the parameter cannot be offloaded, or if its rows are too short for 8-bit moments.
    """
    plan = ParamPlan(
        index=0,
        name=spec.name,
        shape=spec.shape,
        dtype=spec.dtype,
        placement=Placement.DEVICE,
        row_dims=_row_dims(spec),
        rule=spec.rule,
    )
    fits = options.state_dtype != "fp8" or plan.whole_rows[1] >= QUANTIZATION_BLOCK
    return replace(plan, moments=options.state_dtype) if fits and _offloadable(spec, options) else plan


_LEAST_SIDE = 32
"""Least rows and columns of stacked matrices. Kernels of convolutions have fewer taps in a dimension."""


def _row_dims(spec: ParamSpec) -> int:
    """How many dimensions the rows of a parameter's 2-D view combine: two, for a stack of matrices, or one.

    The experts of a layer are ``[experts, out, in]`` or ``[experts, in, out]``, and mostly fewer than a matrix has rows
    or columns. The kernel of a convolution, ``[out, in, taps]``, has that shape only with as many taps, and as many
    input channels, as output channels.
    """
    if spec.row_dims is not None:
        return spec.row_dims
    if len(spec.shape) != 3:
        return 1
    count, *sides = spec.shape
    is_stack = 2 <= count <= min(sides) and min(sides) >= _LEAST_SIDE
    return 2 if is_stack and _keeps_view(spec, 2) else 1


def _keeps_view(spec: ParamSpec, row_dims: int) -> bool:
    """Return whether each rank has equally many consecutive rows, or columns, of the 2-D view.

    Hazard: a state dict has a DTensor with a value for each row. PyTorch divides it by rows, and the parameter by its
    dimension: both are the same only if the division is even.
    """
    by = spec.sharded
    if by is None or row_dims == 1:
        return True
    return by.pieces == 1 and by.dim in (0, row_dims) and spec.shape[by.dim] % by.ranks == 0


def with_views(specs: Sequence[ParamSpec], options: Options, *, extends: bool) -> Sequence[ParamSpec]:
    """Give parameters the views of ``row_dims``.

    Raises ValueError for a view that does not fit, and for a pattern without a parameter, unless a plan is extended.
    """
    if options.row_dims is None:
        return specs
    stacks = [spec for spec in specs if len(spec.shape) > 2]
    used: set[str] = set()
    found: dict[str, int] = {}
    for spec in stacks:
        matches = [(each, count) for each, count in options.row_dims if fnmatchcase(spec.name, each)]
        used.update(each for each, _ in matches)
        if matches:
            _check_view(spec, *matches[0])
            found[spec.name] = matches[0][1]
    unused = [each for each, _ in options.row_dims if each not in used]
    if unused and not extends:
        names = ", ".join(repr(spec.name) for spec in stacks[:3]) or "none"
        raise ValueError(
            f"row_dims has the pattern {unused[0]!r}, which matches no parameter of three or more dimensions "
            f"(these are {names}{', ...' if len(stacks) > 3 else ''}); leave it out, or pass model.named_parameters()"
        )
    return [replace(spec, row_dims=found.get(spec.name)) for spec in specs]


def _check_view(spec: ParamSpec, pattern: str, count: int) -> None:
    unfit = f"row_dims={{{pattern!r}: {count}}} does not fit {spec.name} of shape {list(spec.shape)}"
    if count >= len(spec.shape):
        raise ValueError(f"{unfit}: rows combine 1 to {len(spec.shape) - 1} of its dimensions, and columns the others")
    if not _keeps_view(spec, count):
        raise ValueError(
            f"{unfit}, which is sharded so that a rank does not have as many consecutive rows or columns of that view "
            f"as the others; leave it out, or shard along dimension 0 or {count} alone, evenly"
        )


def _on_host(plan: ParamPlan, options: Options) -> ParamPlan:
    """A resident parameter with all of its state on the host."""
    rows, columns = plan.matrix_shape
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
        and (spec.sharded is None or spec.sharded.leaves_slices(spec.shape, _row_dims(spec)))
    )


def resident_order(kinds: Kinds) -> list[int]:
    """Indices of parameters that can be offloaded, in the order in which ``device_share`` in bytes keeps them resident.

    Those that suffer most from rare updates come first, then the others in forward order.
    """
    without_slack = chain.from_iterable(sorted(part) for part in parts_without_slack(kinds.shapes))
    offloaded = [plan.offloaded for plan in kinds.on_host]
    order = dict.fromkeys((*without_slack, *range(len(kinds.of))))
    return [index for index in order if offloaded[kinds.of[index]]]


def _kept_resident(kinds: Kinds, options: Options) -> set[int]:
    """Indices of resident parameters: those that ``device_share`` has memory for."""
    assert options.device_share != "fill"
    if isinstance(options.device_share, float):
        return _without_slack(kinds, options.device_share)
    order = resident_order(kinds)
    sizes = [plan.whole_state_bytes for plan in kinds.resident]
    taken = accumulate(sizes[kinds.of[index]] for index in order)
    return {index for index, size in zip(order, taken, strict=True) if size <= options.device_share}


def _without_slack(kinds: Kinds, share: float) -> set[int]:
    """The parameters that suffer most from rare updates, as far as they fit in a share of all elements."""
    numels = [plan.numel for plan in kinds.resident]
    budget = share * sum(numels[kind] for kind in kinds.of)
    kept: set[int] = set()
    for part in parts_without_slack(kinds.shapes):
        size = sum(numels[kinds.of[index]] for index in part)
        if size <= budget:
            kept.update(part)
            budget -= size
    return kept


def per_object(plans: _Plans, of: Callable[[ParamPlan], _Value]) -> list[_Value]:
    """Apply ``of`` to each plan, once where several parameters share it."""
    found: dict[int, _Value] = {}
    for plan in plans:
        if id(plan) not in found:
            found[id(plan)] = of(plan)
    return [found[id(plan)] for plan in plans]


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
    deferred = per_object(new, lambda plan: plan.deferred_numel)
    for offset in sorted(range(len(new)), key=lambda offset: -deferred[offset]):
        plan = new[offset]
        if plan.offloaded:
            phase = min(range(plan.interval), key=lambda phase: max(load[phase :: plan.interval]))
            _add_load(load, plan, phase)
            phases[offset] = phase
    return phases


def _with_shared_buffers(plan: ParamPlan, options: Options) -> ParamPlan:
    """Let the gradient buffers of a kind share memory, in a pool that gets its number later, and new weights replace
    gradients."""
    if options.adaptive:  # gradients decide in which steps a buffer is in use
        return plan
    # A weight in host memory stays in its upload buffer, and so does one that completes a split master. A compressed
    # gradient is smaller than the weights.
    keeps_uploads = options.offload_weights is not False
    return replace(plan, pool=0, in_place=not (keeps_uploads or plan.split_master or plan.compressed))


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
#
# What tensor and expert parallelism divide beforehand are pieces, each of which is planned and selected in by itself.


def shard_of(whole: ParamPlan, by: ShardedBy) -> ParamPlan:
    """The plan of the part that this rank has of a sharded parameter."""
    piece = by.uneven or whole.shape
    own = by.part(piece[by.dim])
    shape = (*piece[: by.dim], len(own), *piece[by.dim + 1 :])
    divides = whole.offloaded and by.dim == whole.slice_dim
    shard = Shard(
        whole=whole,
        divides_slices=divides,
        counted=(divides or by.rank == 0) and not by.repeated,
        ranks=by.ranks,
        members=by.members,
    )
    whole = replace(whole, pieces=by.pieces)
    if not whole.offloaded:
        return replace(whole, shape=shape, shard=shard)
    rows, columns = whole.matrix_shape
    inner = (rows if by.dim == 0 else columns) // whole.shape[by.dim]  # of the 2-D view, for each index
    if not divides:
        return replace(whole, shape=shape, length=len(own) * inner, shard=shard)
    slices, all_slices = len(own) * inner, whole.slices
    k = -(-whole.k * own.stop * inner // all_slices) - -(-whole.k * own.start * inner // all_slices)
    if whole.selects:
        k = min(max(k, 1), slices - 1)
    return replace(whole, shape=shape, slices=slices, k=k, shard=shard)


def divide(plan: Plan) -> Plan:
    """Replace each parameter of ``plan`` that is divided by its share of ``plan.rank``; shares stay as they are."""
    if not plan.sums_over_ranks:
        return plan
    owners = _owners(plan)
    return replace(plan, params=tuple(_share_of(param, plan, owners) for param in plan.params))


def _owners(plan: Plan) -> dict[int, int]:
    """Assign each streamed matrix to the rank that updates it, by its index; the work of ranks differs by one matrix.

    In each subgroup, the largest matrices are assigned first. A matrix goes to the rank with the least work in the
    subgroup; among equal ones, to the rank with the least work in all subgroups.
    """
    work, found = [0.0] * plan.ranks, dict[int, int]()
    for subgroup in plan.streamed_subgroups.values():
        matrices = [(param.rule.matrix_flops(*param.whole.shape), param) for param in subgroup if param.rule.of_matrix]
        here = [0.0] * plan.ranks
        for flops, param in sorted(matrices, key=lambda each: -each[0]):
            share = param.flat
            ranks = [share.owner] if isinstance(share, MatrixShare) else range(plan.ranks)
            owner = min(ranks, key=lambda rank: (here[rank], work[rank]))
            here[owner] += flops
            work[owner] += flops
            found[param.index] = owner
    return found


def parts_of(whole: ParamPlan, ranks: int) -> int:
    """Number of parts that a parameter is divided into; with fewer parts than ranks, several ranks have the same one.

    That is so where the number of ranks does not divide the groups of slices, as of small parameters, and where a part
    would have no deferred slices, while others do: ranks flush the windows of a parameter in the same steps. Ranks
    that have the same part make the same updates.
    """
    most = math.gcd(ranks, whole.groups) if whole.selects else min(ranks, whole.slices)
    possible = (parts for parts in range(most, 1, -1) if most % parts == 0 or not whole.selects)
    return next((parts for parts in possible if ranks % parts == 0 and _all_defer_alike(whole, parts)), 1)


def _all_defer_alike(whole: ParamPlan, parts: int) -> bool:
    """Whether each of ``parts`` of a parameter has deferred slices, or none has."""
    counts = ((len(range(part, whole.slices, parts)), len(range(part, whole.k, parts))) for part in range(parts))
    return len({slices > selected for slices, selected in counts}) == 1


def _share_of(whole: ParamPlan, plan: Plan, owners: Mapping[int, int]) -> ParamPlan:
    if whole is not whole.whole:  # a share already
        return whole
    rank, ranks = plan.rank, plan.ranks
    if whole.index in owners:
        owned = MatrixShare(whole=whole, rank=rank, ranks=ranks, owner=owners[whole.index])
        return replace(whole, shape=owned.shape, flat=owned)
    if whole.streamed and whole.numel >= ranks**2:  # the last rank has some elements then
        flat = FlatShare(whole=whole, rank=rank, ranks=ranks)
        return replace(whole, shape=flat.shape, row_dims=1, flat=flat)
    if not whole.offloaded:
        return whole
    share = Share(whole=whole, rank=rank, ranks=ranks, parts=parts_of(whole, ranks), replica=plan.replica)
    slices, k = share.count(whole.slices), share.count(whole.k)
    return replace(whole, shape=(slices, whole.length), row_dims=1, dim=0, slices=slices, k=k, share=share)
