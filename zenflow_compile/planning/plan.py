"""The plan: for every parameter where its optimizer state lives and when its updates run.

A plan is decided before anything runs and never changes a placement afterwards; passes and runtime only realise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from zenflow_compile.planning.dtypes import FLOAT32
from zenflow_compile.planning.partition import group_count

if TYPE_CHECKING:
    import torch

FP32_BYTES = 4
STATE_TENSORS = 3  # fp32 master, exp_avg, exp_avg_sq
STATE_BYTES = STATE_TENSORS * FP32_BYTES
"""Of an element whose state is apart from the weights: fp32 master, exp_avg and exp_avg_sq."""

GRADIENT_RING = 2
"""Buffers of the device's ring of gradients, each as large as the largest parameter's deferred part: one is copied
while the next gradient is split into the other."""

UPLOAD_RING = 3
"""Likewise of its ring of new weights, unless ``Options.staging_bytes`` says otherwise: one is merged while two are on
their way."""

STREAM_BUFFERS = 3
"""Device buffers that subgroups' state is streamed through: one comes in, one is updated, one is flushed."""

FILE_WINDOW_BYTES = 64 << 20
"""Host memory that state in files passes through at least, unless options say otherwise: two blocks of a model of many
small matrices hold so little that every block is waited for."""


def file_window_bytes(sizes: Sequence[int], given: int | None) -> int:
    """Host memory that state in files passes through.

    Args:
        sizes: of the parameters' state, in bytes.
        given: the option ``host_window_bytes``.
    """
    largest = max(sizes, default=0)
    return min(max(2 * largest, FILE_WINDOW_BYTES) if given is None else max(given, largest), sum(sizes))


class Placement(StrEnum):
    """Where a parameter's optimizer state lives and its update runs."""

    DEVICE = "device"  # state and update on the device, every step
    HOST = "host"  # state and update on the host, blocking at the step
    HOST_STREAMED = "host_streamed"  # state on the host, streamed through the device around an update there
    FILE = "file"  # state in a file behind a window of host memory, update on the host, blocking at the step
    SPLIT_COLUMNS = "split_columns"  # selected slices on the device, the rest on the host, asynchronously


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamPlan:
    """What happens to one parameter.

    A *slice* is a column (``dim`` 1) or a row (``dim`` 0) of the parameter's 2-D view ``[shape[0], -1]``. All state of
    an offloaded parameter is laid out ``[slice, length]``, on both sides.

    Attributes:
        index: position in the optimizer's list of parameters, for good.
        name: the parameter's name, or ``param<index>`` where none is known.
        slices: number of slices; length: elements per slice.
        k: slices whose state is on the device; ``deferred`` = slices - k are the host's.
        interval: steps per window (upper bound where the interval adapts).
        phase: the window closes at the steps t with t % interval == phase.
        staleness: whole steps after which a closed window becomes visible, beyond the next forward.
        blocking: the step waits for the host update instead of the parameter's next use.
        fixed: the device's slices are the first ``k`` for good.
        in_file: the host's state lives in a file, and in host memory only around its update.
        subgroup: which subgroup its update belongs to, in update order; None where there are none.
        summed: the window's deferred gradients are summed on the device, and their mean is copied once.
        compressed: deferred gradients are copied as int8, with a scale per slice.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    dim: int = 1
    slices: int = 0
    length: int = 0
    k: int = 0
    interval: int = 1
    phase: int = 0
    staleness: int = 0
    blocking: bool = False
    fixed: bool = False
    in_file: bool = False
    subgroup: int | None = None
    summed: bool = False
    compressed: bool = False

    @property
    def deferred(self) -> int:
        """Slices whose state lives on the host."""
        return self.slices - self.k

    @property
    def offloaded(self) -> bool:
        """Whether the host updates any of it, so that its gradient goes there."""
        return self.placement not in (Placement.DEVICE, Placement.HOST_STREAMED)

    @property
    def streamed(self) -> bool:
        """Whether the device updates it, with state that is the host's between updates."""
        return self.placement is Placement.HOST_STREAMED

    @property
    def selects(self) -> bool:
        """Whether there are slices to choose from, and the choice may move."""
        return self.k > 0 and self.deferred > 0 and not self.fixed

    @property
    def groups(self) -> int:
        """Groups of slices inside which slices are selected, where ``selects``."""
        return group_count(self.slices, self.k)

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def gradient_buffers(self) -> int:
        """Gradient slots of the window; one more per step of staleness, since those still wait for their merge."""
        return (1 if self.summed else self.interval) + self.staleness

    @property
    def keeps_gradient(self) -> bool:
        """Whether the deferred gradient stays on the device until it is final, because it is not copied as it is."""
        return self.deferred > 0 and (self.summed or self.compressed)

    @property
    def buffer_shape(self) -> tuple[int, int]:
        """Shape of a gradient slot, in ``buffer_dtype``."""
        return self.deferred, self.length + (FP32_BYTES if self.compressed else 0)

    @property
    def buffer_dtype(self) -> torch.dtype:
        """Of a gradient slot: the model's, or int8 with room for a scale per slice."""
        if not self.compressed:
            return self.dtype
        import torch  # see ``planning.dtypes``

        return torch.int8

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a gradient slot."""
        return self.buffer_shape[0] * self.buffer_shape[1] * (1 if self.compressed else self.dtype.itemsize)

    @property
    def deferred_numel(self) -> int:
        """Elements of the deferred slices."""
        return self.deferred * self.length

    @property
    def upload_bytes(self) -> int:
        """Bytes of new weights that a flushed window sends to the device."""
        return self.deferred_numel * self.dtype.itemsize

    def update_bytes(self, gradients: int) -> int:
        """Bytes of host memory that the host update of one window reads and writes, caches aside.

        The fp32 state is read and written, each gradient is read, and the new weights are written.

        Args:
            gradients: steps of the window that have a gradient; those of a ``summed`` window share one buffer.
        """
        buffers = min(gradients, 1) if self.summed else gradients
        return self.deferred_numel * 2 * STATE_BYTES + self.upload_bytes + buffers * self.buffer_bytes

    @property
    def uploads(self) -> int:
        """Upload buffers in flight at most."""
        return 1 + self.staleness

    @property
    def whole_state_bytes(self) -> int:
        """State of all elements: fp32 moments, and an fp32 master where the weights are not the master."""
        tensors = STATE_TENSORS - (self.dtype == FLOAT32)
        return self.numel * tensors * FP32_BYTES

    @property
    def file_bytes(self) -> int:
        """Bytes in a file: the fp32 state of the ``deferred`` slices."""
        return self.deferred * self.length * STATE_BYTES if self.in_file else 0

    @property
    def host_bytes(self) -> int:
        """Host memory: fp32 state, the window's gradient slots and the upload buffers of the ``deferred`` slices.

        State in a file is not counted: the window that it passes through is shared by all.
        """
        if self.streamed:
            return self.whole_state_bytes
        if not self.offloaded:
            return 0
        per_element = (0 if self.in_file else STATE_BYTES) + self.uploads * self.dtype.itemsize
        return self.deferred * self.length * per_element + self.gradient_buffers * self.buffer_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory of the state: fp32 moments, and an fp32 master where the weights are not the master.

        Where a window's gradients are summed, their sum in fp32, too; where they are compressed, what that lost.
        What state passes through on its way is shared by all, and not counted.
        """
        if self.streamed:
            return 0
        if self.offloaded:
            per_deferred = FP32_BYTES * self.summed + self.dtype.itemsize * self.compressed
            return self.k * self.length * STATE_BYTES + self.deferred * self.length * per_deferred
        return self.whole_state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plans of all parameters of one optimizer, in its order.

    Attributes:
        host_window_bytes: the option.
        adaptive: windows close when gradients say so, after ``interval`` steps at the latest.
    """

    policy: str
    params: tuple[ParamPlan, ...]
    host_window_bytes: int | None = None
    adaptive: bool = False

    @property
    def host_bytes(self) -> int:
        """Host memory of all parameters."""
        return sum(param.host_bytes for param in self.params)

    @property
    def device_bytes(self) -> int:
        """Device memory of all optimizer state."""
        return sum(param.device_bytes for param in self.params)

    @property
    def file_bytes(self) -> int:
        """Bytes of all state in files."""
        return sum(param.file_bytes for param in self.params)

    @property
    def file_window_bytes(self) -> int:
        """Host memory that this state passes through, up to the rounding to whole pages."""
        return file_window_bytes([param.file_bytes for param in self.params], self.host_window_bytes)
