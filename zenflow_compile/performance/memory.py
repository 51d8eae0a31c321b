"""The memory that a plan takes, by item, and the shortages of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zenflow_compile.performance.equations import ACTIVATIONS, RECOMPUTED_ACTIVATIONS
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shape import ModelShape
from zenflow_compile.planning.plan import (
    GRADIENT_RING,
    ROUNDING_SCRATCH,
    STACKED_ELEMENTS,
    STREAM_BUFFERS,
    UPLOAD_RING,
    ParamPlan,
    Plan,
)

SLICE_BYTES = 12  # per slice of an offloaded parameter: fp32 squared norm, int32 number and position
SCORE_BYTES = 4  # likewise, where slices are selected: fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Bytes by item: ``device`` of one device, ``host`` and ``disk`` of the node."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]

    def sums(self) -> dict[str, int]:
        """Bytes by memory."""
        return {"device": sum(self.device.values()), "host": sum(self.host.values()), "disk": sum(self.disk.values())}

    def shortages(self, hardware: Hardware) -> dict[str, int]:
        """Missing bytes, by memory that is too small. Empty if the plan fits."""
        has = {"device": hardware.device_bytes, "host": hardware.host_bytes, "disk": hardware.disk_bytes or 0.0}
        missing = {memory: size - int(min(has[memory], size)) for memory, size in self.sums().items()}
        return {memory: count for memory, count in missing.items() if count > 0}

    def lack(self, hardware: Hardware) -> float:
        """Missing bytes as shares of the memories that are too small, added up. Of plans, the least is the nearest."""
        has = {"device": hardware.device_bytes, "host": hardware.host_bytes, "disk": hardware.disk_bytes or 1.0}
        return sum(size / has[memory] for memory, size in self.shortages(hardware).items())


def needs_of(
    plan: Plan,
    model: ModelShape,
    *,
    devices: int,
    tokens: int,
    recompute: bool,
) -> MemoryNeeds:
    """The memory that training with ``plan`` takes.

    Several micro-batches have the activations of one, and accumulate gradients on the device until the last of them.

    Args:
        devices: of the node; each has all weights, all resident state, and an equal share of the other state.
        tokens: per device and step; they decide activations, which are an estimate.
        recompute: activations are computed again in the backward, and only each layer's input is kept.
    """
    host_state = plan.total(lambda param: param.host_state_bytes)
    return MemoryNeeds(
        device={
            "weights": plan.model_bytes - plan.offloaded_weight_bytes,
            "loaded weights": 0 if plan.weights is None else plan.weights.ring_bytes,
            "gradients": _gradients(plan, devices),
            "activations": activation_bytes(model, tokens=-(-tokens // plan.micro_batches), recompute=recompute),
            "optimizer state": plan.total(lambda param: param.device_bytes // (devices if param.divided else 1)),
            "rings and buffers": _rings(plan) // devices + _streaming_buffers(plan, devices) + plan.exchange_bytes,
            "selection": plan.total(_selection_bytes) // devices,
            "scratch of matrices": _matrix_scratch(plan),
        },
        host={
            "optimizer state": host_state,
            "gradients and uploads": plan.host_bytes - host_state,
            # Upload buffers of the others are their weights.
            "weights": plan.total(lambda param: param.weight_bytes if plan.rewrites_weight(param) else 0),
            "buffers of exchanges": devices * plan.exchange_bytes,
            "window of files": plan.file_window_bytes,
        },
        disk={"optimizer state": plan.file_bytes},
    )


def _matrix_scratch(plan: Plan) -> int:
    """Bytes of device scratch of the largest update of a rule of matrices."""
    matrices = [param for param in plan.params if param.rule.of_matrix]
    stacked = min(STACKED_ELEMENTS, plan.total(lambda param: param.numel if param.rule.of_matrix else 0))
    rounded = any(param.moments != "fp32" for param in matrices)
    largest = max((param.rule.matrix_scratch * max(stacked, param.numel) for param in matrices), default=0)
    return largest + rounded * ROUNDING_SCRATCH


def _selection_bytes(param: ParamPlan) -> int:
    each = SLICE_BYTES + (SCORE_BYTES if param.selects else 0)
    return each * param.slices if param.offloaded else 0


def activation_bytes(model: ModelShape, *, tokens: int, recompute: bool) -> int:
    """An estimate for a Transformer, see ``equations``."""
    equation = RECOMPUTED_ACTIVATIONS if recompute else ACTIVATIONS
    return int(equation.of(activation_values(model, tokens)))


def activation_values(model: ModelShape, tokens: int) -> dict[str, float]:
    """The numbers of the equations of activations."""
    vocabulary = max(next(iter(spec.shape), 1) for spec in (model.params[0], model.params[-1]))  # scalars have no sizes
    return {"tokens": tokens, "layers": model.layers, "hidden": model.hidden, "vocabulary": vocabulary}


def _gradients(plan: Plan, devices: int) -> int:
    """Gradients that stay until the step, and the largest one while it is computed.

    Of an offloaded parameter the share's selected slices stay, and the deferred ones only if they are pending. Of
    several micro-batches the last one splits gradients, which stay whole until then.
    """
    largest = max((param.weight_bytes for param in plan.params), default=0)
    if plan.micro_batches > 1:
        return plan.model_bytes + largest

    def kept(param: ParamPlan) -> int:
        split = param.k + (param.deferred if param.has_pending_gradient else 0)
        elements = split * param.length // devices if param.offloaded else param.numel
        return elements * param.dtype.itemsize

    return plan.total(kept) + largest


def _rings(plan: Plan) -> int:
    """Rings of gradients, and of uploads and loads, of all devices together. Pending gradients use no ring."""
    offloaded = [param for param in plan.params if param.offloaded and param.deferred]
    gradients = GRADIENT_RING * max(
        (param.upload_bytes for param in offloaded if not param.has_pending_gradient), default=0
    )
    return gradients + UPLOAD_RING * largest_staged_bytes(plan)


def _streaming_buffers(plan: Plan, devices: int) -> int:
    """Buffers for streamed state: of a subgroup a device has an equal share, and up to a whole matrix more."""
    matrices = (param.whole_state_bytes for param in plan.params if param.streamed and param.rule.of_matrix)
    more = max(matrices, default=0)
    largest = max((min(size, size // devices + more) for size in plan.subgroup_bytes), default=0)
    return min(STREAM_BUFFERS, len(plan.subgroup_bytes)) * largest


def largest_staged_bytes(plan: Plan) -> int:
    """Bytes of the largest upload, or load of an offloaded weight, which a staging buffer has space for."""
    staged = (max(param.upload_bytes if param.offloaded else 0, plan.load_bytes(param)) for param in plan.params)
    return max(staged, default=0)
