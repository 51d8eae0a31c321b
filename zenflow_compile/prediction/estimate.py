"""Estimates of a search: memory and time of many plans of one model, each in a millisecond or a few.

A forecast plans every parameter and simulates every layer. An estimate uses that most of them are equal. Its memory
counts each kind of parameter once, and differs from a forecast's in one item: gradient buffers that share host memory
take as little as any packing could. Its time is that of a simulation in which at most ``BLOCKS`` blocks stand for all
layers, and each step flushes an equal share of all update windows. Measured differences of the step: see
tests/prediction/test_estimate.py. A search compares estimates, and forecasts what it returns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from zenflow_compile.options.options import OPTION_NAMES, Options
from zenflow_compile.performance.hardware import HOST_PASS_BYTES, Hardware
from zenflow_compile.performance.memory import MemoryNeeds, activation_bytes
from zenflow_compile.planning.cached_state import file_window_bytes, resident_in_window
from zenflow_compile.planning.plan import FP32_BYTES, ParamPlan, Plan
from zenflow_compile.planning.planners import Kinds, Layout, Side, check_state_forms, lay_out, with_views
from zenflow_compile.planning.weight_memory import RING_BLOCKS, WeightMemory
from zenflow_compile.prediction.forecast import (
    Forecast,
    Scenario,
    forecast,
    forecast_of,
    micro_batches,
    needs,
    needs_in,
    weight_memory,
    window_of_node,
)
from zenflow_compile.prediction.simulate import steady_step_of, threads_of
from zenflow_compile.prediction.workload import (
    CONVERTED_PER_CORE,
    Block,
    Flush,
    Load,
    Part,
    Rewrite,
    Stage,
    Subgroup,
    Workload,
    forward_seconds,
    gathered_bytes,
    named_blocks,
    own_elements,
    sent_across,
    sent_in_ring,
    update_seconds,
)

FEW_PARAMETERS = 64
"""Models with at most so many parameters are not estimated: their plans are forecast."""

BLOCKS = 16
"""Most blocks that stand for a model's layers, and most streamed subgroups."""

_ALIKE = 1e-2  # relative difference below which two steps take the same time

_LAYING_OUT = attrgetter("policy", "device_share", "ratio", "update_stride", "state_dtype", "min_offload_size")
"""Options that decide on which side a parameter is."""

_NOT_OF_KINDS = {"device_share", "ratio", "update_stride", "gradient_accumulation_steps", "host_window_bytes"}
_OF_KINDS = attrgetter(*(name for name in OPTION_NAMES if name not in _NOT_OF_KINDS))
"""Options that decide how a parameter on one side is planned."""

_Group = tuple[int, Side, bool]


def _number(group: _Group) -> int:
    return 2 * (len(Side) * group[0] + group[1]) + group[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPlan(Plan):
    """A plan in which each parameter stands for as many equal ones as ``counts`` says, without their order.

    Attributes:
        counts: how many, by parameter.
        streamed: bytes of the state of each streamed subgroup.
    """

    counts: tuple[int, ...]
    streamed: tuple[int, ...]

    def total(self, of: Callable[[ParamPlan], int]) -> int:
        """Sum ``of`` over all parameters."""
        return sum(count * of(param) for param, count in zip(self.params, self.counts, strict=True))

    @property
    def subgroup_bytes(self) -> list[int]:
        """Bytes of the state of each streamed subgroup."""
        return list(self.streamed)

    @property
    def pool_bytes(self) -> int:
        """The mean of the bytes in use, which no packing of gradient buffers goes below."""
        return self.total(_mean_buffer_bytes)

    @property
    def file_window_bytes(self) -> int:
        """Bytes of host memory that cache state in files."""
        if not self.file_bytes:
            return 0
        sizes: list[int] = []
        for param, count in zip(self.params, self.counts, strict=True):
            sizes += [param.file_bytes] * count
        return file_window_bytes(sizes, self.host_window_bytes)


def _mean_buffer_bytes(param: ParamPlan) -> int:
    if param.pool is None:
        return 0
    buffers = param.gradient_buffers
    return sum(each.nbytes * each.steps for each in buffers.lifetimes) // buffers.period


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where state and weights of a model are.

    Attributes:
        layout: by parameter.
        weights: which are loaded, by index; None: none.
        groups: kind and side of each parameter, and whether its weight is loaded.
        counts: how many parameters a group has.
        streamed: subgroup and kind of each parameter whose state is streamed.
    """

    layout: Layout
    weights: WeightMemory | None
    groups: Sequence[_Group]
    counts: Mapping[_Group, int]
    streamed: Sequence[tuple[int, int]]


class Estimator:
    """Estimates plans of a scenario's model on its hardware, for any options and with or without recomputation."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._scenarios = {recompute: replace(scenario, recompute=recompute) for recompute in (False, True)}
        self.is_exact = len(scenario.model.params) <= FEW_PARAMETERS
        """Whether estimates are forecasts."""
        self._named = named_blocks(scenario.model, BLOCKS)
        self._forwards, self._head = forward_seconds(
            scenario.hardware, scenario.model, scenario.tokens, [indices for _, indices in self._named]
        )
        specs = with_views(scenario.model.params, scenario.options, extends=True)
        self._kinds = Kinds(specs, scenario.options)
        self._of_options: dict[tuple[object, ...], Kinds] = {}
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._weights: dict[tuple[object, ...], tuple[WeightMemory | None, Sequence[bool]]] = {}
        self._placed: dict[tuple[object, ...], _Placed] = {}
        self._numbers: dict[tuple[int, int], ParamPlan] = {}
        self._plans: dict[tuple[object, ...], CountedPlan] = {}
        self._plans_of_runs: dict[tuple[int, int | None, int], CountedPlan] = {}
        self._needs: dict[tuple[int, bool], MemoryNeeds] = {}  # but for activations and the window of files
        self._activations: dict[tuple[int, bool], int] = {}

    def needs(self, options: Options, *, recompute: bool) -> MemoryNeeds:
        """The memory of a plan, but for what packing gradient buffers adds.

        Raises:
            ValueError: the model cannot have the options.
        """
        scenario = self._scenarios[recompute]
        if self.is_exact:
            return needs(options, scenario)
        counted = self._counted(options, recompute=recompute)
        plan = self._of_run(counted, options)
        key = (id(counted), plan.micro_batches > 1)
        if key not in self._needs:
            self._needs[key] = needs_in(scenario, plan)
        found, tokens = self._needs[key], -(-scenario.tokens // plan.micro_batches)
        if (divided := (tokens, recompute)) not in self._activations:
            self._activations[divided] = activation_bytes(scenario.model, tokens=tokens, recompute=recompute)
        device = {**found.device, "activations": self._activations[divided]}
        return replace(found, device=device, host={**found.host, "window of files": plan.file_window_bytes})

    def forecast(
        self, options: Options, needed: MemoryNeeds, *, recompute: bool, within: float = math.inf
    ) -> Forecast | None:
        """The forecast of a plan that needs so much memory, with an estimated step.

        Args:
            within: seconds of a step that are of interest.

        Returns:
            None if the bytes that move, or the device's own work, take longer than ``within``.
        """
        scenario, hardware = self._scenarios[recompute], self._scenario.hardware
        if self.is_exact:
            return forecast(options, scenario)
        work = self.workload(options, recompute=recompute)
        workers = threads_of(hardware, options.threads(hardware.cores // hardware.devices))
        final_at_step = scenario.final_at_step(options)
        if within < math.inf and least_seconds(work, hardware, workers, final_at_step=final_at_step) > within:
            return None
        hardware.check_rates(in_files=work.in_files)
        step = steady_step_of(work, hardware, final_at_step=final_at_step, workers=workers, alike=_ALIKE)
        model_bytes = self._plan(options, recompute=recompute).model_bytes
        return forecast_of(options, scenario, needed, step, model_bytes=model_bytes)

    def kinds(self, options: Options) -> Kinds:
        """The plans of the model's kinds of parameters."""
        key = _OF_KINDS(options)
        if key not in self._of_options:
            self._of_options[key] = self._kinds.with_options(options)
        return self._of_options[key]

    def _plan(self, options: Options, *, recompute: bool) -> CountedPlan:
        return self._of_run(self._counted(options, recompute=recompute), options)

    def _of_run(self, counted: CountedPlan, options: Options) -> CountedPlan:
        window = window_of_node(options, self._scenario.hardware)
        key = (id(counted), window, micro_batches(options))  # a counted plan is kept
        if key not in self._plans_of_runs:
            self._plans_of_runs[key] = replace(counted, host_window_bytes=key[1], micro_batches=key[2])
        return self._plans_of_runs[key]

    def _counted(self, options: Options, *, recompute: bool) -> CountedPlan:
        placed, kinds = self._place(options, recompute=recompute), self.kinds(options)
        key = (id(placed), id(kinds))  # both are kept
        if key not in self._plans:
            weights = placed.weights
            params = tuple(self._numbered(kinds, group, placed.layout.cut) for group in placed.counts)
            check_state_forms(params, options)
            streamed: Counter[int] = Counter()
            of_kind = {kind for _, kind in placed.streamed}
            sizes = {kind: kinds.planned(kind, Side.STREAMED, 0).whole_state_bytes for kind in of_kind}
            for number, kind in placed.streamed:
                streamed[number] += sizes[kind]
            loaded = frozenset(_number(group) for group in placed.counts if group[2])
            self._plans[key] = CountedPlan(
                policy=options.policy,
                params=params,
                adaptive=options.adaptive,
                weights=None if weights is None else replace(weights, offloaded=loaded, reloaded=frozenset()),
                counts=tuple(placed.counts.values()),
                streamed=tuple(streamed.values()),
            )
        return self._plans[key]

    def _numbered(self, kinds: Kinds, group: _Group, cut: int) -> ParamPlan:
        """The plan of a group, whose number is its index."""
        param = kinds.planned(group[0], group[1], cut)
        key = (id(param), _number(group))
        if key not in self._numbers:
            self._numbers[key] = replace(param, index=key[1])
        return self._numbers[key]

    def _place(self, options: Options, *, recompute: bool) -> _Placed:
        where = _LAYING_OUT(options)
        loading = (options.offload_weights, recompute and options.offload_weights is not False)
        if (key := (where, loading)) not in self._placed:
            if where not in self._layouts:
                self._layouts[where] = lay_out(self.kinds(options), options)
            if loading not in self._weights:
                memory = weight_memory(options, self._scenarios[recompute])
                offloaded = frozenset[int]() if memory is None else memory.offloaded
                self._weights[loading] = memory, [index in offloaded for index in range(len(self._kinds.of))]
            layout, (weights, loads) = self._layouts[where], self._weights[loading]
            groups = list(zip(self._kinds.of, layout.sides, loads, strict=True))
            streamed = []
            if Side.STREAMED in layout.sides:
                numbered = zip(layout.subgroups, layout.sides, self._kinds.of, strict=True)
                streamed = [
                    (number, kind) for number, side, kind in numbered if number is not None and side is Side.STREAMED
                ]
            self._placed[key] = _Placed(layout, weights, groups, Counter(groups), streamed)
        return self._placed[key]

    def workload(self, options: Options, *, recompute: bool) -> Workload:
        """What a step does, in few blocks; each step flushes an equal share of all update windows."""
        hardware = self._scenario.hardware
        placed, plan = self._place(options, recompute=recompute), self._plan(options, recompute=recompute)
        reloaded = frozenset[int]() if placed.weights is None else placed.weights.reloaded
        plans = dict(zip(placed.counts, plan.params, strict=True))
        in_turn = _in_turn([plans[group].file_bytes for group in placed.groups], plan) if plan.file_bytes else []
        turns = in_turn or [False] * len(placed.groups)
        works: dict[tuple[_Group, bool], _Work] = {}
        totals = []
        for _, indices in self._named:
            members = Counter((placed.groups[index], turns[index]) for index in indices)
            for group, turn in members.keys() - works.keys():
                works[group, turn] = _work_of(plans[group], hardware, loads=group[2], in_turn=turn)
            totals.append(_sum([(works[key], count) for key, count in members.items()]))
        blocks, rewrites = [], []
        for (name, indices), forward, work in zip(self._named, self._forwards, totals, strict=True):
            load = _load(name, work.load, work.load_weight, work.rebuilt, hardware)
            blocks.append(
                Block(
                    name=name,
                    forward=(Stage(forward, load, round(work.load_weight)),),
                    backward=_backward(load, forward, recompute=recompute, again=not reloaded.isdisjoint(indices)),
                    split=2 * work.offloaded / hardware.device_bandwidth,
                    gradient=sent_in_ring(round(work.reduced + 2 * work.all_reduced), hardware.devices),
                    across=sent_across(round(work.reduced), round(work.all_reduced), hardware),
                    gathered=sent_in_ring(round(work.gathered), hardware.devices),
                    parts=_parts(name, work, plan, hardware.devices),
                )
            )
            if (rewritten := _load(name, work.rewritten, work.rewritten, 0.0, hardware)) is not None:
                rewrites.append(Rewrite(rewritten, work.updated_rewritten))
        turning = sum(work.file_turns for work in totals)
        return Workload(
            blocks=tuple(blocks),
            subgroups=_subgroups(placed, plans, hardware),
            cycle=1,
            update=sum(work.updated for work in totals),
            file_ring=round(plan.file_window_bytes - plan.file_bytes + turning) // hardware.devices,
            head=self._head,
            backward_head=(3.0 if recompute else 2.0) * self._head,
            micro_batches=plan.micro_batches,
            rewrites=tuple(rewrites),
            # The ring of a forecast has space for two layers; here a block is several of them.
            ring=RING_BLOCKS * max(round(work.load_weight) for work in totals),
        )


def least_seconds(work: Workload, hardware: Hardware, workers: int, *, final_at_step: bool) -> float:
    """Seconds of a step that no schedule goes below: the device's own work, and what each lane moves."""
    parts = [part for block in work.blocks for part in block.parts]
    flushed = [flush for part in parts for flush in part.flushes if flush is not None]
    stages = [stage for block in work.blocks for stage in (*block.forward, *block.backward)]
    loads = work.micro_batches * sum(stage.load.size for stage in stages if stage.load is not None)
    merged = work.micro_batches * sum(stage.load.merge for stage in stages if stage.load is not None)
    state, rewritten = sum(group.state for group in work.subgroups), sum(each.load.size for each in work.rewrites)
    device = sum(stage.seconds for stage in stages) + sum(block.split for block in work.blocks) + merged
    device += work.head + work.backward_head
    updating = work.update + sum(group.update for group in work.subgroups) + sum(each.update for each in work.rewrites)
    host, files = sum(flush.host for flush in flushed), sum(flush.file for flush in flushed)
    down = sum(part.down + part.pending[0] for part in parts) + state + rewritten
    up = sum(flush.upload for flush in flushed) + loads + state + rewritten
    pool = max(
        host / (workers * hardware.adam_per_core * HOST_PASS_BYTES),
        sum(flush.converting for flush in flushed) / workers,
    )
    memory = (host + down + up) * hardware.devices / hardware.host_bandwidth
    disk = sum(files / rate for rate in (hardware.disk_read, hardware.disk_write) if rate) * hardware.devices
    blocking = final_at_step and any(part.blocking for part in parts)
    return max(
        device + (max(updating, pool) if blocking else updating),
        pool,
        memory,
        down / hardware.link_to_host,
        up / hardware.link_to_device,
        disk,
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What parameters add to a block: bytes per step of all devices together, means over an update window.

    Attributes:
        reduced, all_reduced: of gradients; offloaded: of parameters that the host updates; gathered: see ``Block``.
        down: of gradients, copied when they are produced; pending: when they are final.
        host, upload, file: see ``Flush``; converting: its seconds. file_turns: of all its update windows together.
        load: over the link for a loaded weight; load_weight: of it; rebuilt: written from selected slices' masters.
        rewritten: of loaded weights that the device updates.
        updated_rewritten: seconds of updates of those without streamed state; updated: of others on one device.
    """

    reduced: float = 0
    all_reduced: float = 0
    offloaded: float = 0
    gathered: float = 0
    down: float = 0
    pending: float = 0
    host: float = 0
    upload: float = 0
    file: float = 0
    file_turns: float = 0
    converting: float = 0
    load: float = 0
    load_weight: float = 0
    rebuilt: float = 0
    rewritten: float = 0
    updated_rewritten: float = 0
    updated: float = 0


_WORK = tuple(each.name for each in fields(_Work))


def _sum(works: Sequence[tuple[_Work, int]]) -> _Work:
    return _Work(*(sum(count * getattr(work, name) for work, count in works) for name in _WORK))


def _work_of(param: ParamPlan, hardware: Hardware, *, loads: bool, in_turn: bool) -> _Work:
    size, updating = param.weight_bytes, update_seconds(param, hardware, own_elements(param, hardware.devices))
    if not (param.offloaded and param.deferred):
        rewrites = loads and not param.offloaded
        alone = not param.streamed and not rewrites
        return _Work(
            reduced=size if param.offloaded else 0,
            all_reduced=0 if param.offloaded else size,
            offloaded=size if param.offloaded else 0,
            gathered=gathered_bytes(param),
            load=size if loads else 0,
            load_weight=size if loads else 0,
            rewritten=size if rewrites else 0,
            updated_rewritten=update_seconds(param, hardware, param.numel) if rewrites and not param.streamed else 0,
            updated=updating if alone else 0,
        )
    flushed = 1 / param.interval
    return _Work(
        reduced=size,
        offloaded=size,
        gathered=gathered_bytes(param),
        down=0 if param.has_pending_gradient else param.gradient_buffers.nbytes,
        pending=param.gradient_buffers.nbytes * (param.compressed + param.summed * flushed),
        host=param.update_bytes(param.interval) * flushed,
        upload=0 if loads else param.upload_bytes * flushed,
        file=param.file_bytes * flushed if in_turn else 0,
        file_turns=param.file_bytes if in_turn else 0,
        converting=param.deferred_numel / CONVERTED_PER_CORE[param.moments] * flushed,
        load=param.upload_bytes if loads else 0,
        load_weight=size if loads else 0,
        rebuilt=param.k * param.length * (FP32_BYTES + param.dtype.itemsize) if loads else 0,
        updated=updating,
    )


def _in_turn(sizes: Sequence[int], plan: CountedPlan) -> list[bool]:
    """Return whether the state of each parameter, of so many bytes, is read from files and written back."""
    filed = [index for index, size in enumerate(sizes) if size]
    stays = resident_in_window([sizes[index] for index in filed], plan.file_window_bytes)
    turning = {index for index, resident in zip(filed, stays, strict=True) if not resident}
    return [index in turning for index in range(len(sizes))]


def _load(name: str, size: float, weight: float, rebuilt: float, hardware: Hardware) -> Load | None:
    if not weight:
        return None
    return Load(name, round(size), round(weight), (2 * size + rebuilt) / hardware.device_bandwidth)


def _backward(load: Load | None, forward: float, *, recompute: bool, again: bool) -> tuple[Stage, ...]:
    """The backward of a block. Recomputed, it stays loaded in between if its layers fit the ring."""
    if load is None:
        return (Stage((3.0 if recompute else 2.0) * forward),)
    if not recompute:
        return (Stage(2.0 * forward, load, load.weight),)
    if again:
        return Stage(forward, load, load.weight), Stage(2.0 * forward, load, load.weight)
    return Stage(forward, load), Stage(2.0 * forward, None, load.weight)


def _parts(name: str, work: _Work, plan: Plan, devices: int) -> tuple[Part, ...]:
    """The offloaded parameters of a block. All those of a plan have one schedule."""
    if not work.host:
        return ()
    schedule = next(param for param in plan.params if param.offloaded and param.deferred)
    flush = Flush(
        host=round(work.host / devices),
        upload=round(work.upload / devices),
        file=round(work.file / devices),
        params=(name,),
        converting=work.converting / devices,
    )
    down, pending = round(work.down / devices), round(work.pending / devices)
    return (Part(schedule.blocking, schedule.staleness, down, (pending,), (flush,)),)


def _subgroups(placed: _Placed, plans: Mapping[_Group, ParamPlan], hardware: Hardware) -> tuple[Subgroup, ...]:
    """Streamed subgroups, equally many consecutive ones as one."""
    of_kind = {kind: plan for (kind, side, _), plan in plans.items() if side is Side.STREAMED}
    sizes: dict[int, tuple[float, int]] = {}
    for number, kind in placed.streamed:
        (updating, size), param = sizes.get(number, (0, 0)), of_kind[kind]
        sizes[number] = updating + update_seconds(param, hardware, param.numel), size + param.whole_state_bytes
    all_sizes = [*sizes.values()]
    together = max(1, -(-len(all_sizes) // BLOCKS))
    parts = [all_sizes[first : first + together] for first in range(0, len(all_sizes), together)]
    return tuple(
        Subgroup(
            name=f"subgroup {number}",
            state=sum(size for _, size in part) // hardware.devices,
            update=sum(updating for updating, _ in part) / hardware.devices,
        )
        for number, part in enumerate(parts)
    )
