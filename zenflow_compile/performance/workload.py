"""The work of a plan's step: the model's blocks, their time, and the bytes that their parameters move.

Parameters are combined by block of the model: a timeline of every tensor takes longer and shows no more. Bytes are
those of one device. Each of several devices owns an equal share of all optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shapes import ModelShape, flops_per_token
from zenflow_compile.planning.model_blocks import repeated_blocks
from zenflow_compile.planning.plan import ParamPlan, Plan

HOST_PASS_BYTES = 28
"""Host memory per parameter that ``Hardware.adam_per_core`` counts: fp32 master and moments read and written, one bf16
gradient read, bf16 weights written."""

DEVICE_UPDATE_BYTES = 28
"""Device memory per parameter of AdamW: moments and master (fp32 weights are their own) read and written, 24 bytes;
gradient read, weights of the model's dtype written. With fp32 weights moments 16, weights 8, gradient 4: as many."""

COARSE_LAYERS = 128
"""Most blocks that a coarse workload makes of a model's layers."""

COARSE_CYCLE = 1600
"""Most steps of a coarse workload's cycle, times its blocks."""


@dataclass(frozen=True, slots=True)
class FlushedWindow:
    """The update windows of a part that are flushed in one step.

    Attributes:
        host: bytes of host memory that the host update reads and writes.
        upload: bytes of new weights for the device.
        file: bytes of state that are read from files, and written back; what stays in host memory is not counted.
        params: names of the parameters.
    """

    host: int
    upload: int
    file: int
    params: tuple[str, ...]


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
    flushes: tuple[FlushedWindow | None, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The work of one step for a block of the model.

    Attributes:
        forward, backward: seconds; the backward includes splitting the gradient.
        gradient: bytes that a device sends in the reduce-scatter of gradients.
        gathered: bytes of weights, updated on devices, that it receives in the all-gather.
    """

    name: str
    forward: float
    backward: float
    gradient: int
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
        update: seconds of the device's own updates per step.
        file_ring: bytes of host memory in which state from files takes turns.
        head, backward_head: seconds at the forward's end and the backward's start that belong to no block.
    """

    blocks: tuple[Block, ...]
    subgroups: tuple[Subgroup, ...]
    cycle: int
    update: float
    file_ring: int
    head: float
    backward_head: float

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
    named = _named_blocks(model, COARSE_LAYERS if coarse else len(model.params))
    steps = _spaced(cycle, COARSE_CYCLE // len(named) if coarse else cycle)
    devices = hardware.devices
    backward_factor = 3.0 if recompute else 2.0
    forwards, head = _forward_seconds(hardware, model, tokens, [indices for _, indices in named])
    in_turn = {param.index for param in plan.params_in_turn}
    blocks = []
    for (name, indices), forward in zip(named, forwards, strict=True):
        params = plan.params[indices.start : indices.stop]
        split = 2 * sum(param.weight_bytes for param in params if param.offloaded)
        blocks.append(
            Block(
                name=name,
                forward=forward,
                backward=backward_factor * forward + split / hardware.device_bandwidth,
                gradient=_sent(sum(param.weight_bytes for param in params), devices),
                gathered=_sent(sum(_own_elements(param) * param.dtype.itemsize for param in params), devices),
                parts=_parts(params, in_turn, devices, steps),
            )
        )
    own = sum(_own_elements(param) for param in plan.params if not param.streamed)
    return Workload(
        blocks=tuple(blocks),
        subgroups=_subgroups(plan, hardware),
        cycle=len(steps),
        update=own * DEVICE_UPDATE_BYTES / devices / hardware.device_bandwidth,
        file_ring=plan.file_ring_bytes // devices,
        head=head,
        backward_head=backward_factor * head,
    )


def _spaced(cycle: int, most: int) -> Sequence[int]:
    """At most ``most`` steps of a cycle, each in the middle of those it replaces: the first flushes the most bytes."""
    if cycle <= most:
        return range(cycle)
    return [(2 * number + 1) * cycle // (2 * most) for number in range(most)]


def _forward_seconds(
    hardware: Hardware, model: ModelShape, tokens: int, blocks: Sequence[range]
) -> tuple[list[float], float]:
    """Seconds of the forward: of each block with these indices of parameters, and of its end.

    A block's matrices do 2 FLOPs per element and token, its attention the share of ``flops_per_token`` that grows with
    the context. An embedding does none; one that is also the head does its work at the forward's end.
    """

    def seconds(flops_per_token: float) -> float:
        return flops_per_token * tokens / (hardware.device_flops * hardware.utilization)

    found = repeated_blocks([spec.shape for spec in model.params])
    repeated = range(found[0], found[2]) if found else range(len(model.params))
    # The forward is a third of a step's work (Kaplan et al. 2020, section 2.1: 2N of 6N FLOPs per token).
    attention = (flops_per_token(model, model.context) - flops_per_token(model, 0)) / 3 / len(repeated)
    times = []
    for indices in blocks:
        specs = model.params[indices.start : indices.stop]
        elements = sum(spec.numel for spec in specs if len(spec.shape) > 1 and spec.name not in model.embeddings)
        times.append(seconds(2.0 * elements + (attention * len(indices) if indices[0] in repeated else 0.0)))
    return times, seconds(2.0 * sum(spec.numel for spec in model.params if spec.name == model.tied))


def _named_blocks(model: ModelShape, most: int) -> list[tuple[str, range]]:
    """Names and parameter indices of blocks, in forward order; one block per parameter if nothing repeats.

    Consecutive layers are combined if there are more than ``most`` of them.
    """
    found = repeated_blocks([spec.shape for spec in model.params])
    count = len(model.params)
    if found is None:
        return [(model.params[index].name, range(index, index + 1)) for index in range(count)]
    start, period, stop = found
    together = period * max(1, math.ceil((stop - start) // period / most))
    layers = [range(index, min(index + together, stop)) for index in range(start, stop, together)]
    named = [(f"layers.{(indices.start - start) // period}", indices) for indices in layers]
    before = [(model.params[0].name, range(start))] if start else []
    after = [(model.params[-1].name, range(stop, count))] if stop < count else []
    return [*before, *named, *after]


def _own_elements(param: ParamPlan) -> int:
    """Elements that the device updates."""
    return param.k * param.length if param.offloaded else param.numel


def _sent(size: int, devices: int) -> int:
    """Bytes that each device sends in a ring's reduce-scatter, and receives in its all-gather (Thakur et al. 2005)."""
    return size * (devices - 1) // devices


def _parts(
    params: Sequence[ParamPlan], in_turn: Collection[int], devices: int, steps: Sequence[int]
) -> tuple[Part, ...]:
    alike: dict[tuple[bool, int], list[ParamPlan]] = {}
    for param in params:
        if param.offloaded and param.deferred:
            alike.setdefault((param.blocking, param.staleness), []).append(param)
    return tuple(
        Part(
            blocking=blocking,
            staleness=staleness,
            down=sum(param.buffer_bytes // devices for param in group if not param.keeps_gradient),
            pending=tuple(_pending_bytes(group, step, devices) for step in steps),
            flushes=tuple(_flushed(group, in_turn, step, devices) for step in steps),
        )
        for (blocking, staleness), group in alike.items()
    )


def _flushing(params: Sequence[ParamPlan], step: int) -> list[ParamPlan]:
    return [param for param in params if step % param.interval == param.phase]


def _pending_bytes(params: Sequence[ParamPlan], step: int, devices: int) -> int:
    """Compressed gradients are copied at every step, sums only when their update window is flushed."""
    going = [param for param in params if param.compressed]
    going += [param for param in _flushing(params, step) if param.summed]
    return sum(param.buffer_bytes // devices for param in going)


def _flushed(params: Sequence[ParamPlan], in_turn: Collection[int], step: int, devices: int) -> FlushedWindow | None:
    flushing = _flushing(params, step)
    if not flushing:
        return None
    return FlushedWindow(
        host=sum(param.update_bytes(param.interval) // devices for param in flushing),
        upload=sum(param.upload_bytes // devices for param in flushing),
        file=sum(param.file_bytes // devices for param in flushing if param.index in in_turn),
        params=tuple(param.name for param in flushing),
    )


def _subgroups(plan: Plan, hardware: Hardware) -> tuple[Subgroup, ...]:
    share = DEVICE_UPDATE_BYTES / hardware.devices / hardware.device_bandwidth
    return tuple(
        Subgroup(
            name=f"subgroup {number}",
            state=sum(param.whole_state_bytes for param in params) // hardware.devices,
            update=sum(param.numel for param in params) * share,
        )
        for number, params in plan.streamed_subgroups.items()
    )
