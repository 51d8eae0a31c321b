"""The plan: for every parameter where its optimizer state lives and when its updates run.

A plan is decided before anything runs and never changes a placement afterwards; passes and runtime only realise it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

FP32_BYTES = 4
STATE_TENSORS = 3  # fp32 master, exp_avg, exp_avg_sq


class Placement(StrEnum):
    """Where a parameter's optimizer state lives and its update runs."""

    DEVICE = "device"  # state and update on the device, every step
    HOST = "host"  # state and update on the host, blocking at the step
    SPLIT_COLUMNS = "split_columns"  # selected lines on the device, the rest on the host, asynchronously


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamPlan:
    """What happens to one parameter.

    A *line* is a column (``dim`` 1) or a row (``dim`` 0) of the parameter's 2-D view ``[shape[0], -1]``. All state of
    an offloaded parameter is laid out ``[line, length]``, on both sides.

    Attributes:
        index: position in the optimizer's list of parameters, for good.
        name: the parameter's name, or ``param<index>`` where none is known.
        lines: number of lines; length: elements per line.
        k: lines whose state is on the device; ``rest`` = lines - k are the host's.
        interval: attempted steps per window (upper bound where the interval adapts).
        phase: the window closes at the attempted steps t with t % interval == phase.
        staleness: whole steps after which a closed window becomes visible, beyond the next forward.
        blocking: the step waits for the host update instead of the parameter's next use.
        summed: the window's remaining gradients are summed on the device, and their mean is copied once.
        compressed: remaining gradients are copied as int8, with a scale per line.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    dim: int = 1
    lines: int = 0
    length: int = 0
    k: int = 0
    interval: int = 1
    phase: int = 0
    staleness: int = 0
    blocking: bool = False
    summed: bool = False
    compressed: bool = False

    @property
    def rest(self) -> int:
        """Lines whose state lives on the host."""
        return self.lines - self.k

    @property
    def offloaded(self) -> bool:
        """Whether any of the state lives on the host."""
        return self.placement is not Placement.DEVICE

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def slots(self) -> int:
        """Gradient slots of the window; one more per step of staleness, since those still wait for their merge."""
        return (1 if self.summed else self.interval) + self.staleness

    @property
    def held(self) -> bool:
        """Whether the remaining gradient stays on the device until it is final, because it is not copied as it is."""
        return self.rest > 0 and (self.summed or self.compressed)

    @property
    def slot_shape(self) -> tuple[int, int]:
        """Shape of a gradient slot, in ``slot_dtype``."""
        return self.rest, self.length + (FP32_BYTES if self.compressed else 0)

    @property
    def slot_dtype(self) -> torch.dtype:
        """Of a gradient slot: the model's, or int8 with room for a scale per line."""
        return torch.int8 if self.compressed else self.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of a gradient slot."""
        return self.slot_shape[0] * self.slot_shape[1] * self.slot_dtype.itemsize

    @property
    def uploads(self) -> int:
        """Upload buffers in flight at most."""
        return 1 + self.staleness

    @property
    def host_bytes(self) -> int:
        """Host memory: fp32 state, the window's gradient slots and the upload buffers of the ``rest`` lines."""
        if not self.offloaded:
            return 0
        per_element = STATE_TENSORS * FP32_BYTES + self.uploads * self.dtype.itemsize
        return self.rest * self.length * per_element + self.slots * self.slot_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory of the state: fp32 moments, and an fp32 master where the weights are not the master.

        Where a window's gradients are summed, their sum in fp32, too; where they are compressed, what that lost.
        """
        if self.offloaded:
            per_rest = FP32_BYTES * self.summed + self.dtype.itemsize * self.compressed
            return self.k * self.length * STATE_TENSORS * FP32_BYTES + self.rest * self.length * per_rest
        tensors = STATE_TENSORS - (self.dtype == torch.float32)
        return self.numel * tensors * FP32_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plans of all parameters of one optimizer, in the optimizer's order."""

    policy: str
    params: tuple[ParamPlan, ...]

    @property
    def host_bytes(self) -> int:
        """Host memory of all parameters."""
        return sum(param.host_bytes for param in self.params)

    @property
    def device_bytes(self) -> int:
        """Device memory of all optimizer state."""
        return sum(param.device_bytes for param in self.params)
