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
    def uploads(self) -> int:
        """Upload buffers in flight at most."""
        return 1 + self.staleness

    @property
    def host_bytes(self) -> int:
        """Host memory: fp32 state, the window's gradient slots and the upload buffers of the ``rest`` lines."""
        if not self.offloaded:
            return 0
        per_element = STATE_TENSORS * FP32_BYTES + (self.slots + self.uploads) * self.dtype.itemsize
        return self.rest * self.length * per_element

    @property
    def device_bytes(self) -> int:
        """Device memory of the state: fp32 moments, and an fp32 master where the weights are not the master.

        Where a window's gradients are summed, their sum in fp32, too.
        """
        if self.offloaded:
            state = self.k * self.length * STATE_TENSORS * FP32_BYTES
            return state + (self.rest * self.length * FP32_BYTES if self.summed else 0)
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
