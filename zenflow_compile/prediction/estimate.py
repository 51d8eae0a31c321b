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

from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import DEVICE_UPDATE_BYTES, HOST_PASS_BYTES, Hardware
from zenflow_compile.performance.memory import MemoryNeeds
from zenflow_compile.planning.plan import (
    FILES_IN_TURN,
    FP32_BYTES,
    ParamPlan,
    Plan,
    file_window_bytes,
    resident_in_window,
)
from zenflow_compile.planning.planners import check_state_forms, per_kind, place
from zenflow_compile.planning.weight_memory import RING_BLOCKS, WeightMemory
from zenflow_compile.prediction.forecast import (
    Forecast,
    Scenario,
    forecast,
    forecast_of,
    micro_batches,
    needs,
    needs_in,
    of_node,
    weight_memory,
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
    named_blocks,
    own_elements,
    sent_in_ring,
)

FEW_PARAMETERS = 64
"""Models with at most so many parameters are not estimated: their plans are forecast."""

BLOCKS = 16
"""Most blocks that stand for a model's layers, and most streamed subgroups."""

_NOT_PLANNED = ("gradient_accumulation_steps", "host_window_bytes")
"""Options that change no parameter's plan."""


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
        sizes = [param.file_bytes for param, count in zip(self.params, self.counts, strict=True) for _ in range(count)]
        return file_window_bytes(sizes, self.host_window_bytes)


def _mean_buffer_bytes(param: ParamPlan) -> int:
    if param.pool is None:
        return 0
    return sum(each.nbytes * each.steps for each in param.lifetimes) // param.period


@dataclass(frozen=True, slots=True)
class _Placed:
    """What is planned for one model.

    Attributes:
        params: by index; equal ones are one object.
        subgroups: elements of each streamed subgroup, and bytes of its state, by number.
        weights: which are loaded, by index.
        counted: the plan for memory, without what the options say of micro-batches and of the window of files.
    """

    params: Sequence[ParamPlan]
    subgroups: Mapping[int, tuple[int, int]]
    weights: WeightMemory | None
    counted: CountedPlan


class Estimator:
    """Estimates plans of a scenario's model on its hardware, for any options and with or without recomputation."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.is_exact = len(scenario.model.params) <= FEW_PARAMETERS
        """Whether estimates are forecasts."""
        self._named = named_blocks(scenario.model, BLOCKS)
        self._forwards, self._head = forward_seconds(
            scenario.hardware, scenario.model, scenario.tokens, [indices for _, indices in self._named]
        )
        self._placed: dict[tuple[object, ...], _Placed] = {}
        self._weights: dict[tuple[object, ...], WeightMemory | None] = {}

    def needs(self, options: Options, *, recompute: bool) -> MemoryNeeds:
        """The memory of a plan, but for what packing gradient buffers adds.

        Raises:
            ValueError: the model cannot have the options.
        """
        scenario = replace(self._scenario, recompute=recompute)
        if self.is_exact:
            return needs(options, scenario)
        return needs_in(scenario, self._plan(options, recompute=recompute))

    def forecast(
        self, options: Options, needed: MemoryNeeds, *, recompute: bool, within: float = math.inf
    ) -> Forecast | None:
        """The forecast of a plan that needs so much memory, with an estimated step.

        Args:
            within: seconds of a step that are of interest.

        Returns:
            None if the bytes that move, or the device's own work, take longer than ``within``.
        """
        scenario, hardware = replace(self._scenario, recompute=recompute), self._scenario.hardware
        if self.is_exact:
            return forecast(options, scenario)
        work = self.workload(options, recompute=recompute)
        workers = threads_of(hardware, options.threads(hardware.cores // hardware.devices))
        final_at_step = scenario.final_at_step(options)
        if within < math.inf and least_seconds(work, hardware, workers, final_at_step=final_at_step) > within:
            return None
        hardware.check_rates(in_files=work.in_files)
        step = steady_step_of(work, hardware, final_at_step=final_at_step, workers=workers)
        model_bytes = self._of(options, recompute=recompute).counted.model_bytes
        return forecast_of(options, scenario, needed, step, model_bytes=model_bytes)

    def _plan(self, options: Options, *, recompute: bool) -> CountedPlan:
        placed = self._of(options, recompute=recompute)
        return replace(
            placed.counted, host_window_bytes=options.host_window_bytes, micro_batches=micro_batches(options)
        )

    def _of(self, options: Options, *, recompute: bool) -> _Placed:
        values = tuple(getattr(options, each.name) for each in fields(options) if each.name not in _NOT_PLANNED)
        key = (*values, recompute and options.offload_weights is not False)
        if key not in self._placed:
            self._placed[key] = self._place(options, recompute=recompute)
        return self._placed[key]

    def _place(self, options: Options, *, recompute: bool) -> _Placed:
        scenario = self._scenario
        params, numbers = place(scenario.model.params, of_node(options, scenario.hardware))
        kinds = {id(param): param for param in params}
        check_state_forms(list(kinds.values()), options)
        key = (options.offload_weights, recompute)
        if key not in self._weights:
            self._weights[key] = weight_memory(options, replace(scenario, recompute=recompute))
        weights = self._weights[key]
        loaded = frozenset[int]() if weights is None else weights.offloaded
        subgroups: dict[int, tuple[int, int]] = {}
        for param, number in zip(params, numbers, strict=True):
            if param.streamed and number is not None:
                elements, size = subgroups.get(number, (0, 0))
                subgroups[number] = elements + param.numel, size + param.whole_state_bytes
        counts = Counter(zip(map(id, params), [index in loaded for index in range(len(params))], strict=True))
        return _Placed(
            params=params,
            subgroups=subgroups,
            weights=weights,
            counted=CountedPlan(
                policy=options.policy,
                params=tuple(replace(kinds[kind], index=number) for number, (kind, _) in enumerate(counts)),
                adaptive=options.adaptive,
                weights=None if weights is None else _of_kinds(weights, [loads for _, loads in counts]),
                counts=tuple(counts.values()),
                streamed=tuple(size for _, size in subgroups.values()),
            ),
        )

    def workload(self, options: Options, *, recompute: bool) -> Workload:
        """What a step does, in few blocks; each step flushes an equal share of all update windows."""
        hardware = self._scenario.hardware
        placed, plan = self._of(options, recompute=recompute), self._plan(options, recompute=recompute)
        loaded = frozenset[int]() if placed.weights is None else placed.weights.offloaded
        reloaded = frozenset[int]() if placed.weights is None else placed.weights.reloaded
        in_turn = _in_turn(placed.params, plan)
        works: dict[tuple[int, bool, bool], _Work] = {}
        totals = []
        for _, indices in self._named:
            members = Counter((id(placed.params[index]), index in loaded, index in in_turn) for index in indices)
            for index in indices:
                key = (id(placed.params[index]), index in loaded, index in in_turn)
                if key not in works:
                    works[key] = _work_of(placed.params[index], loads=key[1], in_turn=key[2])
            totals.append(_sum([(works[key], count) for key, count in members.items()]))
        device_update = DEVICE_UPDATE_BYTES / hardware.devices / hardware.device_bandwidth
        blocks, rewrites = [], []
        for (name, indices), forward, work in zip(self._named, self._forwards, totals, strict=True):
            load = _load(name, work.load, work.load_weight, work.rebuilt, hardware)
            blocks.append(
                Block(
                    name=name,
                    forward=(Stage(forward, load, round(work.load_weight)),),
                    backward=_backward(load, forward, recompute=recompute, again=not reloaded.isdisjoint(indices)),
                    split=2 * work.offloaded / hardware.device_bandwidth,
                    gradient=sent_in_ring(round(work.weights), hardware.devices),
                    gathered=sent_in_ring(round(work.own), hardware.devices),
                    parts=_parts(name, work, plan, hardware.devices),
                )
            )
            if (rewritten := _load(name, work.rewritten, work.rewritten, 0.0, hardware)) is not None:
                rewrites.append(Rewrite(rewritten, work.rewritten_elements * device_update))
        resident = sum(param.file_bytes for index, param in enumerate(placed.params) if index not in in_turn)
        return Workload(
            blocks=tuple(blocks),
            subgroups=_grouped(placed.subgroups, hardware.devices, device_update),
            cycle=1,
            update=sum(work.updated_elements for work in totals) * device_update,
            # As many turns as the window has of parameters: a block of the model is several of them.
            file_ring=max(
                (plan.file_window_bytes - resident) // hardware.devices,
                FILES_IN_TURN * max(round(work.file) // hardware.devices for work in totals),
            ),
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
        weights: of all parameters; offloaded: of those that the host updates; own: of what the device has updated.
        down: of gradients, copied when they are produced; pending: when they are final.
        host, upload, file: see ``Flush``; converting: its seconds.
        load: over the link for a loaded weight; load_weight: of it; rebuilt: written from selected slices' masters.
        rewritten: of loaded weights that the device updates; rewritten_elements: of those without streamed state.
        updated_elements: that the device updates otherwise.
    """

    weights: float = 0
    offloaded: float = 0
    own: float = 0
    down: float = 0
    pending: float = 0
    host: float = 0
    upload: float = 0
    file: float = 0
    converting: float = 0
    load: float = 0
    load_weight: float = 0
    rebuilt: float = 0
    rewritten: float = 0
    rewritten_elements: float = 0
    updated_elements: float = 0


_WORK = tuple(each.name for each in fields(_Work))


def _sum(works: Sequence[tuple[_Work, int]]) -> _Work:
    return _Work(*(sum(count * getattr(work, name) for work, count in works) for name in _WORK))


def _work_of(param: ParamPlan, *, loads: bool, in_turn: bool) -> _Work:
    size, own = param.weight_bytes, own_elements(param)
    if not (param.offloaded and param.deferred):
        rewrites = loads and not param.offloaded
        alone = not param.streamed and not rewrites
        return _Work(
            weights=size,
            offloaded=size if param.offloaded else 0,
            own=own * param.dtype.itemsize,
            load=size if loads else 0,
            load_weight=size if loads else 0,
            rewritten=size if rewrites else 0,
            rewritten_elements=param.numel if rewrites and not param.streamed else 0,
            updated_elements=own if alone else 0,
        )
    flushed = 1 / param.interval
    return _Work(
        weights=size,
        offloaded=size,
        own=own * param.dtype.itemsize,
        down=0 if param.keeps_gradient else param.buffer_bytes,
        pending=param.buffer_bytes * (param.compressed + param.summed * flushed),
        host=param.update_bytes(param.interval) * flushed,
        upload=0 if loads else param.upload_bytes * flushed,
        file=param.file_bytes * flushed if in_turn else 0,
        converting=param.deferred_numel / CONVERTED_PER_CORE[param.moments] * flushed,
        load=param.upload_bytes if loads else 0,
        load_weight=size if loads else 0,
        rebuilt=param.k * param.length * (FP32_BYTES + param.dtype.itemsize) if loads else 0,
        updated_elements=own,
    )


def _of_kinds(weights: WeightMemory, loads: Sequence[bool]) -> WeightMemory:
    """The same memory, for parameters by kind, of which some are loaded."""
    offloaded = frozenset(number for number, is_loaded in enumerate(loads) if is_loaded)
    return replace(weights, offloaded=offloaded, reloaded=frozenset())


def _in_turn(params: Sequence[ParamPlan], plan: CountedPlan) -> frozenset[int]:
    """Indices of the parameters whose state is read from files and written back."""
    sizes = per_kind(params, lambda param: param.file_bytes)
    filed = [index for index, size in enumerate(sizes) if size]
    stays = resident_in_window([sizes[index] for index in filed], plan.file_window_bytes) if filed else []
    return frozenset(index for index, resident in zip(filed, stays, strict=True) if not resident)


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


def _grouped(subgroups: Mapping[int, tuple[int, int]], devices: int, device_update: float) -> tuple[Subgroup, ...]:
    """Streamed subgroups, equally many consecutive ones as one."""
    sizes = [subgroups[number] for number in sorted(subgroups)]
    together = -(-len(sizes) // BLOCKS)
    parts = [sizes[first : first + together] for first in range(0, len(sizes), together or 1)]
    return tuple(
        Subgroup(
            name=f"subgroup {number}",
            state=sum(size for _, size in part) // devices,
            update=sum(elements for elements, _ in part) * device_update,
        )
        for number, part in enumerate(parts)
    )
