"""The work of a plan's step: the model's blocks, their time, and the bytes that their parameters move.

Parameters are combined by block of the model: a timeline of every tensor takes longer and shows no more. Bytes are
those of one device. Each of several devices of a node has all resident state, and an equal share of the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shape import ModelShape, flops_per_token
from zenflow_compile.planning.model_blocks import Run, runs_of_blocks
from zenflow_compile.planning.plan import FP32_BYTES, ParamPlan, Plan

CONVERTED_PER_CORE = {"fp32": math.inf, "bf16": 1.2e9, "fp8": 0.72e9}
"""Most parameters/s that one core updates, by dtype of the moments. Conversion limits a core where memory bandwidth
does not. Measured on one AVX-512 core (benchmarks/results/host_adam.json: split masters, 1 gradient; of 4 gradients it
updates 0.79e9 and 0.57e9)."""

COARSE_LAYERS = 128
"""Most blocks that a coarse workload makes of a model's layers."""

COARSE_CYCLE = 1600
"""Most steps of a coarse workload's cycle, times its blocks."""


@dataclass(frozen=True, slots=True)
class Flush:
    """The update windows of a part that are flushed in one step.

    Attributes:
        host: bytes of host memory that the host update reads and writes.
        converting: seconds that one core needs to convert the state, without the time of memory.
        upload: bytes of new weights for the device, without those that the next loads read.
        file: bytes of state that are read from files, and written back; what stays in host memory is not counted.
        params: names of the parameters.
    """

    host: int
    upload: int
    file: int
    params: tuple[str, ...]
    converting: float = 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """Offloaded parameters of a block with the same schedule.

    Attributes:
        down: bytes of gradient that are copied when they are produced, every step.
        pending: bytes that are copied when they are final, by step within a cycle.
        flushes: the update window that is flushed, by step within a cycle; None where none is.
    """

    blocking: bool
    staleness: int
    down: int
    pending: tuple[int, ...]
    flushes: tuple[Flush | None, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """A copy of an offloaded weight to the device.

    Attributes:
        name: of the parameter.
        size: bytes over the link; the selected slices are rebuilt on the device.
        weight: bytes of the whole weight, in the ring of loaded weights.
        merge: seconds of device memory to move it out of its staging buffer, and to rebuild these slices.
    """

    name: str
    size: int
    weight: int
    merge: float


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of a block's forward or backward that reads at most one more offloaded weight than the one before.

    Attributes:
        seconds: of computation, in all micro-batches of a step.
        load: of the weight, in front of it; None: it is loaded.
        freed: bytes of the ring that are given back behind it.
    """

    seconds: float
    load: Load | None = None
    freed: int = 0


@dataclass(frozen=True, slots=True)
class Rewrite:
    """An update on the device of an offloaded weight, which ``step()`` loads and writes back; ``update``: seconds."""

    load: Load
    update: float


@dataclass(frozen=True, slots=True)
class Block:
    """The work of one step for a block of the model.

    Attributes:
        forward, backward: stretches in order, each with its seconds.
        split: seconds that splitting the gradient takes, after the last backward.
        gradient: bytes that a device sends in the reduce-scatter of gradients; all-reduces are two of them.
        across: bytes that it then sends to devices of other nodes.
        gathered: bytes of weights, updated on the devices that have their state, that it receives in the all-gather.
    """

    name: str
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    split: float
    gradient: int
    across: int
    gathered: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Subgroup:
    """Parameters whose state is streamed through the device together.

    Attributes:
        state: bytes each way; update: seconds on the device.
    """

    name: str
    state: int
    update: float


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step does on one device.

    Attributes:
        cycle: steps after which update windows are flushed in the same order again.
        update: seconds of the device's own updates per step, without those of ``rewrites``.
        file_ring: bytes of host memory in which state from files takes turns.
        head, backward_head: seconds at the forward's end and the backward's start that belong to no block.
        micro_batches: forwards and backwards of a step; each takes an equal part of all seconds.
        rewrites: updates on the device of offloaded weights.
        ring: bytes of device memory for loaded weights.
    """

    blocks: tuple[Block, ...]
    subgroups: tuple[Subgroup, ...]
    cycle: int
    update: float
    file_ring: int
    head: float
    backward_head: float
    micro_batches: int
    rewrites: tuple[Rewrite, ...]
    ring: int

    @property
    def loads_weights(self) -> bool:
        """Whether any weight is loaded around its uses."""
        return self.ring > 0

    @property
    def in_files(self) -> bool:
        """Whether any flushed update window reads its state from files."""
        return any(each.file for block in self.blocks for part in block.parts for each in part.flushes if each)

    @property
    def staleness(self) -> int:
        """The largest staleness of all parts, in steps."""
        return max((part.staleness for block in self.blocks for part in block.parts), default=0)


def workload_of(
    plan: Plan,
    hardware: Hardware,
    model: ModelShape,
    *,
    tokens: int,
    recompute: bool,
    coarse: bool = False,
) -> Workload:
    """See ``simulate`` for the other arguments.

    Args:
        coarse: bound the time of simulating deep models and long update windows. If there are more layers than
            ``COARSE_LAYERS``, equally many consecutive ones become one block. A cycle that is longer than
            ``COARSE_CYCLE`` allows is replaced by evenly spaced steps of it, since each flushes about as many bytes.
    """
    cycle = math.lcm(*(param.interval for param in plan.params if param.offloaded))
    # Layers that are combined would need a larger ring than each of them does.
    most = COARSE_LAYERS if coarse and plan.weights is None else len(model.params)
    named = named_blocks(model, most)
    steps = _spaced(cycle, max(1, COARSE_CYCLE // len(named)) if coarse else cycle)
    devices = hardware.devices
    backward_factor = 3.0 if recompute else 2.0
    forwards, head = forward_seconds(hardware, model, tokens, [indices for _, indices in named])
    in_turn = {param.index for param in plan.params_in_turn}
    blocks = []
    for (name, indices), forward in zip(named, forwards, strict=True):
        params = plan.params[indices.start : indices.stop]
        reduced = sum(param.weight_bytes for param in params if param.offloaded)
        all_reduced = sum(param.weight_bytes for param in params) - reduced
        loads = [(_load(plan, param, hardware), param) for param in params if plan.loads_weight(param)]
        blocks.append(
            Block(
                name=name,
                forward=_stages(loads, forward),
                backward=_backward_stages(plan, loads, forward, recompute=recompute),
                split=2 * reduced / hardware.device_bandwidth,
                gradient=sent_in_ring(reduced + 2 * all_reduced, devices),
                across=sent_across(reduced, all_reduced, hardware),
                gathered=sent_in_ring(sum(map(gathered_bytes, params)), devices),
                parts=_parts(plan, params, in_turn, steps, devices),
            )
        )
    rewritten = [param for param in plan.params if plan.rewrites_weight(param)]
    others = [param for param in plan.params if not param.streamed and not plan.rewrites_weight(param)]
    return Workload(
        blocks=tuple(blocks),
        subgroups=_subgroups(plan, hardware),
        cycle=len(steps),
        update=sum(update_seconds(param, hardware, own_elements(param, devices)) for param in others),
        file_ring=plan.file_ring_bytes // devices,
        head=head,
        backward_head=backward_factor * head,
        micro_batches=plan.micro_batches,
        rewrites=tuple(
            Rewrite(
                _load(plan, param, hardware), 0.0 if param.streamed else update_seconds(param, hardware, param.numel)
            )
            for param in rewritten
        ),
        ring=0 if plan.weights is None else plan.weights.ring_bytes,
    )


_Loads = Sequence[tuple[Load, ParamPlan]]


def _load(plan: Plan, param: ParamPlan, hardware: Hardware) -> Load:
    """Its staging buffer is read and the weight written; selected slices are written from their fp32 masters."""
    size = plan.load_bytes(param)
    rebuilt = param.k * param.length * (FP32_BYTES + param.dtype.itemsize)
    return Load(param.name, size, param.weight_bytes, (2 * size + rebuilt) / hardware.device_bandwidth)


def _stages(loads: _Loads, seconds: float, *, load: bool = True, free: bool = True) -> tuple[Stage, ...]:
    """Computation of a block, in shares of its offloaded weights' elements.

    Args:
        load: each weight is loaded in front of its stretch. free: it is unloaded behind it.
    """
    if not loads:
        return (Stage(seconds),)
    elements = sum(param.numel for _, param in loads)
    return tuple(
        Stage(seconds * param.numel / elements, each if load else None, each.weight if free else 0)
        for each, param in loads
    )


def _backward_stages(plan: Plan, loads: _Loads, forward: float, *, recompute: bool) -> tuple[Stage, ...]:
    """The backward of a block, in reversed order. A recomputed block stays loaded in between if it fits the ring."""
    backward = 2.0 * forward
    if not recompute:
        return _stages(loads[::-1], backward)
    if not loads:
        return (Stage(forward + backward),)
    again = plan.weights is not None and any(param.index in plan.weights.reloaded for _, param in loads)
    return (*_stages(loads, forward, free=again), *_stages(loads[::-1], backward, load=again))


def _spaced(cycle: int, most: int) -> Sequence[int]:
    """At most ``most`` steps of a cycle, each in the middle of those it replaces: the first flushes the most bytes."""
    if cycle <= most:
        return range(cycle)
    return [(2 * number + 1) * cycle // (2 * most) for number in range(most)]


def forward_seconds(
    hardware: Hardware, model: ModelShape, tokens: int, blocks: Sequence[range]
) -> tuple[list[float], float]:
    """Seconds of the forward: of each block with these indices of parameters, and of its end.

    A block's matrices do 2 FLOPs per element and token, its attention the share of ``flops_per_token`` that grows with
    the context. An embedding does none; one that is also the head does its work at the forward's end.
    """

    def seconds(flops_per_token: float) -> float:
        return flops_per_token * tokens / (hardware.device_flops * hardware.utilization)

    runs = runs_of_blocks([spec.shape for spec in model.params])
    layers = [run for run in runs if run.period] or [Run(range(len(model.params)), 1)]
    count = sum(run.blocks for run in layers)
    # The forward is a third of a step's work (Kaplan et al. 2020, section 2.1: 2N of 6N FLOPs per token).
    attention = (flops_per_token(model, model.context) - flops_per_token(model, 0)) / 3 / count
    times = []
    for indices in blocks:
        specs = model.params[indices.start : indices.stop]
        elements = sum(model.multiplied(spec) for spec in specs)
        period = next((run.period for run in layers if indices[0] in run.indices), 0)
        times.append(seconds(2.0 * elements + (attention * len(indices) / period if period else 0.0)))
    return times, seconds(2.0 * sum(spec.numel for spec in model.params if spec.name == model.tied))


def named_blocks(model: ModelShape, most: int) -> list[tuple[str, range]]:
    """Names and parameter indices of blocks, in forward order; one block per parameter if nothing repeats.

    Consecutive layers are combined if there are more than ``most`` of them.
    """
    runs = runs_of_blocks([spec.shape for spec in model.params])
    together = max(1, math.ceil(sum(run.blocks for run in runs) / most))
    if not any(run.blocks for run in runs):
        return [(spec.name, range(index, index + 1)) for index, spec in enumerate(model.params)]
    named: list[tuple[str, range]] = []
    layer = 0
    for run in runs:
        indices = run.indices
        if not run.blocks:
            outer = indices[-1] if indices.stop == len(model.params) else indices[0]
            named.append((model.params[outer].name, indices))
        for number in range(0, run.blocks, together):
            part = indices[number * run.period : (number + together) * run.period]
            named.append((f"layers.{layer + number}", part))
        layer += run.blocks
    return named


def own_elements(param: ParamPlan, devices: int) -> float:
    """Elements that one of the devices of a node updates."""
    return _device_elements(param) / (devices if param.divided else 1)


def gathered_bytes(param: ParamPlan) -> int:
    """Bytes of the weight that devices update, each its share."""
    return _device_elements(param) * param.dtype.itemsize if param.divided else 0


def _device_elements(param: ParamPlan) -> int:
    return param.k * param.length if param.offloaded else param.numel


def sent_in_ring(size: int, devices: int) -> int:
    """Bytes that each device sends in a ring's reduce-scatter, and receives in its all-gather (Thakur et al. 2005)."""
    return size * (devices - 1) // devices


def sent_across(reduced: int, all_reduced: int, hardware: Hardware) -> int:
    """Bytes that each device sends to other nodes.

    Args:
        reduced: of gradients of which each device averages its share with those of other nodes, in a ring over nodes.
        all_reduced: of gradients in a ring over all devices; those of a node divide what leaves it.
    """
    if hardware.nodes == 1:
        return 0
    whole = sent_in_ring(2 * all_reduced, hardware.all_devices) // hardware.devices
    return 2 * sent_in_ring(reduced // hardware.devices, hardware.nodes) + whole


def _parts(
    plan: Plan, params: Sequence[ParamPlan], in_turn: Collection[int], steps: Sequence[int], devices: int
) -> tuple[Part, ...]:
    alike: dict[tuple[bool, int], list[ParamPlan]] = {}
    for param in params:
        if param.offloaded and param.deferred:
            alike.setdefault((param.blocking, param.staleness), []).append(param)
    return tuple(
        Part(
            blocking=blocking,
            staleness=staleness,
            down=sum(param.gradient_buffers.nbytes // devices for param in group if not param.has_pending_gradient),
            pending=tuple(_pending_bytes(group, step, devices) for step in steps),
            flushes=tuple(_flushed(plan, group, in_turn, step, devices) for step in steps),
        )
        for (blocking, staleness), group in alike.items()
    )


def _flushing(params: Sequence[ParamPlan], step: int) -> list[ParamPlan]:
    return [param for param in params if step % param.interval == param.phase]


def _pending_bytes(params: Sequence[ParamPlan], step: int, devices: int) -> int:
    """Compressed gradients are copied at every step, sums only when their update window is flushed."""
    going = [param for param in params if param.compressed]
    going += [param for param in _flushing(params, step) if param.summed]
    return sum(param.gradient_buffers.nbytes // devices for param in going)


def _flushed(
    plan: Plan, params: Sequence[ParamPlan], in_turn: Collection[int], step: int, devices: int
) -> Flush | None:
    flushing = _flushing(params, step)
    if not flushing:
        return None
    return Flush(
        host=sum(param.update_bytes(param.interval) // devices for param in flushing),
        upload=sum(plan.sent_bytes(param) // devices for param in flushing),
        file=sum(param.file_bytes // devices for param in flushing if param.index in in_turn),
        params=tuple(param.name for param in flushing),
        converting=sum(param.deferred_numel / devices / CONVERTED_PER_CORE[param.moments] for param in flushing),
    )


def update_seconds(param: ParamPlan, hardware: Hardware, elements: float) -> float:
    """Seconds in which a device updates so many elements of a parameter, or a matrix whose rule takes it whole."""
    seconds = elements * param.device_update_bytes / hardware.device_bandwidth
    if param.rule.of_matrix:
        seconds += param.rule.matrix_flops(*param.whole_rows) / (hardware.device_flops * hardware.utilization)
    return seconds


def _subgroups(plan: Plan, hardware: Hardware) -> tuple[Subgroup, ...]:
    return tuple(
        Subgroup(
            name=f"subgroup {number}",
            state=sum(param.whole_state_bytes for param in params) // hardware.devices,
            update=sum(update_seconds(param, hardware, param.numel) for param in params) / hardware.devices,
        )
        for number, params in plan.streamed_subgroups.items()
    )
