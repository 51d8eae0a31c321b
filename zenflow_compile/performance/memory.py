"""What a plan needs of each memory, item by item, and whether a machine has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.models import ModelShape
from zenflow_compile.planning.plan import GRADIENT_RING, STATE_BYTES, STREAM_BUFFERS, UPLOAD_RING, ParamPlan, Plan

SLICE_BYTES = 16  # of an offloaded parameter's slice: squared norm and score in fp32, its number and place in int32

LAYER_BYTES = 34
"""Bytes of activations per token and unit of width that a layer keeps for its backward, in 16 bits and without the
scores, which fused attention does not keep: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", equation 1."""

CHECKPOINT_BYTES = 2  # likewise where only a layer's input is kept, in 16 bits (the same paper, section 5)
LOGIT_BYTES = 6  # per token and word: 16-bit logits, and their softmax in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes by item: ``device`` of one device, ``host`` and ``disk`` of the node."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]

    def shortages(self, hardware: Hardware) -> dict[str, int]:
        """By memory that is too small for its items: how many bytes are missing. Empty where the plan fits."""
        has = {"device": hardware.device_bytes, "host": hardware.host_bytes, "disk": hardware.disk_bytes or 0.0}
        wanted = {"device": self.device, "host": self.host, "disk": self.disk}
        missing = {memory: sum(items.values()) - int(has[memory]) for memory, items in wanted.items()}
        return {memory: count for memory, count in missing.items() if count > 0}


def needs_of(
    plan: Plan,
    model: ModelShape,
    *,
    devices: int,
    tokens: int,
    recompute: bool,
    staging_bytes: int | None = None,
) -> Needs:
    """What training with ``plan`` takes. Gradients that accumulate over several backwards are not counted.

    Args:
        devices: of the node; each has all weights and an equal share of the optimizer state.
        tokens: per device and step; they decide activations, which are an estimate.
        recompute: a layer's activations are computed again in the backward, and only its input is kept.
        staging_bytes: the option, of each device.
    """
    weights = sum(param.numel * param.dtype.itemsize for param in plan.params)
    offloaded = [param for param in plan.params if param.offloaded and param.deferred]
    return Needs(
        device={
            "weights": weights,
            "gradients": _gradients(plan, devices),
            "activations": activation_bytes(model, tokens=tokens, recompute=recompute),
            "optimizer state": plan.device_bytes // devices,
            "rings and buffers": _device_buffers(plan, offloaded, devices, staging_bytes) // devices,
            "selection": SLICE_BYTES * sum(param.slices for param in plan.params if param.offloaded) // devices,
        },
        host={
            "optimizer state": sum(_host_state(param) for param in plan.params),
            "gradients and uploads": plan.host_bytes - sum(_host_state(param) for param in plan.params),
            "window of files": plan.file_window_bytes,
        },
        disk={"optimizer state": plan.file_bytes},
    )


def activation_bytes(model: ModelShape, *, tokens: int, recompute: bool) -> int:
    """An estimate for a Transformer: what all layers keep, and the logits; one layer in full where it is recomputed."""
    kept = model.layers * CHECKPOINT_BYTES + LAYER_BYTES if recompute else model.layers * LAYER_BYTES
    vocabulary = max(next(iter(spec.shape), 1) for spec in (model.params[0], model.params[-1]))  # scalars have no sizes
    return tokens * (kept * model.hidden + LOGIT_BYTES * vocabulary)


def _gradients(plan: Plan, devices: int) -> int:
    """Those that wait for the step, in shares, and the largest at its moment.

    Of an offloaded one the selected slices wait, and the others only where they are held.
    """
    largest = max((param.numel * param.dtype.itemsize for param in plan.params), default=0)
    waiting = 0
    for param in plan.params:
        split = param.k + (param.deferred if param.keeps_gradient else 0)
        elements = split * param.length if param.offloaded else param.numel
        waiting += elements * param.dtype.itemsize
    return waiting // devices + largest


def _device_buffers(plan: Plan, offloaded: list[ParamPlan], devices: int, staging_bytes: int | None) -> int:
    """Rings for gradients and uploads, and buffers for state that passes through; of all devices together.

    What is held passes through no ring of gradients.
    """
    gradients = GRADIENT_RING * max((param.upload_bytes for param in offloaded if not param.keeps_gradient), default=0)
    largest = max((param.upload_bytes for param in offloaded), default=0)
    slots = UPLOAD_RING
    if staging_bytes is not None and largest:
        uploads = sum(param.uploads for param in offloaded)  # each takes one buffer at most
        slots = min(max(1, staging_bytes * devices // largest), uploads)
    streamed: dict[int | None, int] = {}
    for param in plan.params:
        if param.streamed:
            streamed[param.subgroup] = streamed.get(param.subgroup, 0) + param.whole_state_bytes
    passing = min(STREAM_BUFFERS, len(streamed)) * max(streamed.values(), default=0)
    return gradients + slots * largest + passing


def _host_state(param: ParamPlan) -> int:
    """fp32 state that stays in host memory."""
    if param.streamed:
        return param.whole_state_bytes
    if not param.offloaded or param.in_file:
        return 0
    return param.deferred * param.length * STATE_BYTES
