"""What a plan asks of a machine in each step: the model's blocks, their work, and the bytes that their parameters move.

Parameters are taken together by block of the model, since a timeline of every tensor says no more and takes longer.
Bytes are those of one device. Each of several devices owns an equal share of all optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.models import ModelShape, flops_per_token
from zenflow_compile.planning.model_blocks import repeated_blocks
from zenflow_compile.planning.plan import ParamPlan, Plan

HOST_PASS_BYTES = 28
"""Host memory per parameter that ``Hardware.adam_per_core`` counts: fp32 master and moments read and written, one bf16
gradient read, bf16 weights written."""

DEVICE_UPDATE_BYTES = 28
"""Device memory per parameter of AdamW: moments and master (fp32 weights are their own) read and written, 24 bytes;
gradient read, weights of the model's dtype written. With fp32 weights moments 16, weights 8, gradient 4: as many."""

COARSE_LAYERS = 128
"""Blocks that a coarse workload makes of a model's layers at most."""

COARSE_CYCLE = 1600
"""Blocks times steps that a cycle of a coarse workload has at most."""

_FILES_AHEAD = 4  # blocks' state: one is read, one updated, one written, and one waits


@dataclass(frozen=True, slots=True)
class FlushedWindow:
    """The windows of a part that close in one step.

    Attributes:
        host: bytes of host memory that their update reads and writes.
        upload: bytes of weights that go to the device.
        file: bytes of state that are read from files, and written back.
        params: names of the parameters.
    """

    host: int
    upload: int
    file: int
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Offloaded parameters of a block that are treated alike.

    Attributes:
        down: bytes of gradient that are copied when they are produced, every step.
        held: bytes that are copied when they are final, by step within a cycle.
        closes: what closes, by step within a cycle; None where nothing does.
    """

    blocking: bool
    staleness: int
    down: int
    held: tuple[int, ...]
    closes: tuple[FlushedWindow | None, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the model: what one step does for it.

    Attributes:
        forward, backward: seconds; the backward includes splitting the gradient.
        gradient: bytes that a device sends to its peers, so that each has the sum of its share.
        gathered: bytes of weights that the device itself updated and receives from its peers.
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
    """All of it.

    Attributes:
        cycle: steps after which windows close in the same order again.
        update: seconds of the device's own updates per step.
        file_window: bytes of host memory that state in files passes through.
        head, backward_head: seconds at the forward's end and the backward's start that belong to no block.
    """

    blocks: tuple[Block, ...]
    subgroups: tuple[Subgroup, ...]
    cycle: int
    update: float
    file_window: int
    head: float
    backward_head: float


def workload_of(
    plan: Plan,
    hardware: Hardware,
    model: ModelShape,
    *,
    tokens: int,
    recompute: bool,
    overlap: bool,
    coarse: bool = False,
) -> Workload:
    """See ``simulate`` for the other arguments.

    Args:
        coarse: take hardly more time for deep models and long windows than for others. Of more layers than
            ``COARSE_LAYERS`` equally many that follow each other become one block. Of a cycle that is longer than
            ``COARSE_CYCLE`` allows there are evenly spaced steps, since about as many bytes close in each; their window
            of files is smaller by the state that they leave out.
    """
    flops = _Flops(hardware, model, tokens, recompute)
    cycle = math.lcm(*(param.interval for param in plan.params if param.offloaded))
    named = _named_blocks(model, COARSE_LAYERS if coarse else len(model.params))
    steps = _spaced(cycle, COARSE_CYCLE // len(named) if coarse else cycle)
    devices = hardware.devices
    blocks = []
    for name, indices in named:
        params = [plan.params[index] for index in indices]
        forward = flops.forward_seconds(indices)
        split = 2 * sum(param.numel * param.dtype.itemsize for param in params if param.offloaded)
        blocks.append(
            Block(
                name=name,
                forward=forward,
                backward=flops.backward_factor * forward + split / hardware.device_bandwidth,
                gradient=_to_peers(sum(param.numel * param.dtype.itemsize for param in params), devices),
                gathered=_to_peers(sum(_own_elements(param) * param.dtype.itemsize for param in params), devices),
                parts=_parts(params, devices, steps, overlap),
            )
        )
    own = sum(_own_elements(param) for param in plan.params if not param.streamed)
    return Workload(
        blocks=tuple(blocks),
        subgroups=_subgroups(plan, hardware),
        cycle=len(steps),
        update=own * DEVICE_UPDATE_BYTES / devices / hardware.device_bandwidth,
        file_window=_file_window(blocks, plan, devices),
        head=flops.head_seconds,
        backward_head=flops.backward_factor * flops.head_seconds,
    )


def _spaced(cycle: int, most: int) -> Sequence[int]:
    """At most so many steps of a cycle. Each is in the middle of those it stands for: the first closes the largest."""
    if cycle <= most:
        return range(cycle)
    return [(2 * number + 1) * cycle // (2 * most) for number in range(most)]


def _file_window(blocks: Sequence[Block], plan: Plan, devices: int) -> int:
    """Bytes of a device's window; of one that holds the same share where ``blocks`` close only some of the files."""
    window, whole = plan.file_window_bytes // devices, plan.file_bytes // devices
    closes = [close.file for block in blocks for part in block.parts for close in part.closes if close and close.file]
    if sum(closes) >= whole:
        return window
    return min(window, max(window * sum(closes) // whole, _FILES_AHEAD * max(closes, default=0)))


class _Flops:
    """Spreads the work of a token over the parameters that do it.

    A block's matrices do 2 FLOPs per element and token, its attention what ``flops_per_token`` says of the context. In
    an embedding tokens are only looked up; where it is the head, too, its work comes at the forward's end.
    """

    def __init__(self, hardware: Hardware, model: ModelShape, tokens: int, recompute: bool) -> None:
        shapes = [spec.shape for spec in model.params]
        found = repeated_blocks(shapes)
        self._repeated = range(found[0], found[2]) if found else range(len(shapes))
        self._multiplied = [
            spec.numel if len(spec.shape) > 1 and spec.name not in model.embeddings else 0 for spec in model.params
        ]
        self._speed = hardware.device_flops * hardware.utilization
        self._tokens = tokens
        # Of a step's work a third is the forward's (Kaplan et al. 2020, section 2.1: 2N of 6N FLOPs per token).
        attention = (flops_per_token(model, model.context) - flops_per_token(model, 0)) / 3
        self._attention = attention / len(self._repeated)
        self.backward_factor = 3.0 if recompute else 2.0
        self.head_seconds = self._seconds(2.0 * sum(spec.numel for spec in model.params if spec.name == model.tied))

    def forward_seconds(self, indices: Sequence[int]) -> float:
        """Of the parameters that make up a block."""
        elements = sum(self._multiplied[index] for index in indices)
        attention = self._attention * len(indices) if indices[0] in self._repeated else 0.0
        return self._seconds(2.0 * elements + attention)

    def _seconds(self, flops_per_token: float) -> float:
        return flops_per_token * self._tokens / self._speed


def _named_blocks(model: ModelShape, most: int) -> list[tuple[str, range]]:
    """Blocks with the indices of their parameters, in forward order; each parameter alone where nothing repeats.

    Layers that follow each other are one block where there are more than ``most`` of them.
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


def _to_peers(size: int, devices: int) -> int:
    """Bytes that each device sends in a ring's reduce-scatter, and receives in its all-gather (Thakur et al. 2005)."""
    return size * (devices - 1) // devices


def _parts(params: Sequence[ParamPlan], devices: int, steps: Sequence[int], overlap: bool) -> tuple[Part, ...]:
    alike: dict[tuple[bool, int], list[ParamPlan]] = {}
    for param in params:
        if param.offloaded and param.deferred:
            alike.setdefault((param.blocking or not overlap, param.staleness), []).append(param)
    return tuple(
        Part(
            blocking=blocking,
            staleness=staleness,
            down=sum(param.buffer_bytes // devices for param in group if not param.keeps_gradient),
            held=tuple(_held_bytes(group, step, devices) for step in steps),
            closes=tuple(_close(group, step, devices) for step in steps),
        )
        for (blocking, staleness), group in alike.items()
    )


def _closing(params: Sequence[ParamPlan], step: int) -> list[ParamPlan]:
    return [param for param in params if step % param.interval == param.phase]


def _held_bytes(params: Sequence[ParamPlan], step: int, devices: int) -> int:
    """Compressed gradients go down every step, sums only when their window closes."""
    going = [param for param in params if param.compressed]
    going += [param for param in _closing(params, step) if param.summed]
    return sum(param.buffer_bytes // devices for param in going)


def _close(params: Sequence[ParamPlan], step: int, devices: int) -> FlushedWindow | None:
    closing = _closing(params, step)
    if not closing:
        return None
    host = upload = file = 0
    for param in closing:
        host += param.update_bytes(param.interval) // devices
        upload += param.upload_bytes // devices
        file += param.file_bytes // devices
    return FlushedWindow(host=host, upload=upload, file=file, params=tuple(param.name for param in closing))


def _subgroups(plan: Plan, hardware: Hardware) -> tuple[Subgroup, ...]:
    members: dict[int | None, list[ParamPlan]] = {}
    for param in plan.params:
        if param.streamed:
            members.setdefault(param.subgroup, []).append(param)
    share = DEVICE_UPDATE_BYTES / hardware.devices / hardware.device_bandwidth
    return tuple(
        Subgroup(
            name=f"subgroup {number}",
            state=sum(param.whole_state_bytes for param in params) // hardware.devices,
            update=sum(param.numel for param in params) * share,
        )
        for number, params in members.items()
    )
