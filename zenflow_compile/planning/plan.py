"""The plan: where the optimizer state of every parameter lives, and when its updates run.

A plan is made before training and never changes a placement; passes and runtime carry it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from zenflow_compile.planning.cached_state import file_window_bytes, resident_in_window
from zenflow_compile.planning.dtypes import FLOAT32, TRAINED
from zenflow_compile.planning.shared_buffers import Lifetime, Packing, pack
from zenflow_compile.planning.weight_memory import WeightMemory
from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.rules.rule import Rule

if TYPE_CHECKING:
    import torch

FP32_BYTES = 4
ROW_BYTES = 4  # of the int32 index of a slice's row
STATE_BYTES = 3 * FP32_BYTES
"""Bytes per element of the fp32 master, exp_avg and exp_avg_sq of AdamW."""

QUANTIZATION_BLOCK = 32
"""Consecutive elements of a slice whose 8-bit moments share a scale of one byte, as in the OCP Microscaling formats."""

GRADIENT_RING = 2
"""Buffers of the device's ring of gradients, each as large as the largest parameter's deferred part: one is copied to
the host while the next gradient is split into the other."""

UPLOAD_RING = 3
"""Buffers of the device's ring of new weights: one is merged while two are copied."""

STREAM_BUFFERS = 3
"""Device buffers for streamed state: one subgroup is copied in, one is updated, one is written back."""

STACKED_ELEMENTS = 1 << 24
"""Most elements of matrices that a rule of matrices updates together, unless one matrix has more."""

ROUNDING_SCRATCH = 112 << 20
"""Bytes of device scratch for the conversion of rounded state: 4M elements are converted at a time."""

EXCHANGE_BUFFERS = 4
"""Buffers, on each side, for state that changes sides: a burst of re-selections keeps both copy lanes and the workers
busy."""

EXCHANGE_BYTES = 16 << 20
"""Most bytes of such a buffer, unless one slice needs more."""

GROUPS = (48, 24, 16, 8, 4, 2, 1)
"""Numbers of groups: as many as a parameter has slices for. 1, 2, 3, 4, 6, 8, 12, 16, 24 and 48 ranks share the first
one evenly."""

SELECTED_PER_GROUP = 4
"""Fewest slices that a group selects, and fewest that it defers; smaller parameters have fewer groups."""


def group_count(slices: int, k: int) -> int:
    """Number of groups that a parameter's slices are selected in, one of ``GROUPS``: slice ``i`` is in ``i % groups``.

    A group's selection depends on its own scores alone. So several ranks can share the groups of a parameter, select
    without communication, and select the same slices as one rank. Numbers of ranks that divide it share it evenly.

    Args:
        slices: slices of the parameter.
        k: selected slices. Group ``g`` selects ``k // groups`` of them, one more if ``g < k % groups``. The first
            ``k`` slices, which are selected before there are scores, are divided in the same way.
    """
    return next(groups for groups in GROUPS if groups == 1 or min(k, slices - k) >= SELECTED_PER_GROUP * groups)


def dividing_ranks(ranks: int) -> int:
    """Return how many of the ``ranks`` of a machine divide a copy of a model's state: the most that divide its groups.

    The other ranks have further copies.
    """
    return max(each for each in range(1, ranks + 1) if ranks % each == 0 and GROUPS[0] % each == 0)


class Placement(StrEnum):
    """Where a parameter's optimizer state lives and its update runs."""

    DEVICE = "device"  # state and update on the device, every step: resident
    HOST = "host"  # state and update on the host; the step waits
    HOST_STREAMED = "host_streamed"  # state on the host, copied to the device for its update there and back
    FILE = "file"  # state in a file, cached in host memory; update on the host; the step waits
    SPLIT_COLUMNS = "split_columns"  # selected slices on the device, deferred ones on the host, asynchronously


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a parameter that one rank of several updates: the slices ``part``, ``part + parts``, ...

    A share is planned like a parameter ``[slices of the part, length]``: all but its gradient and its weight is.

    Attributes:
        whole: the plan of the whole parameter, as one device would have it.
        rank: of this process among the ``ranks`` that divide a copy of the state.
        parts: number of parts; it divides ``ranks``.
        replica: number of this copy.
    """

    whole: ParamPlan
    rank: int
    ranks: int
    parts: int
    replica: int = 0

    @property
    def part(self) -> int:
        """The part of this rank."""
        return self.rank % self.parts

    @property
    def first_holder(self) -> bool:
        """Whether this rank is the first one that has this part, and so the one that counts in sums over ranks."""
        return self.replica == 0 and self.rank < self.parts

    def count(self, slices: int, part: int | None = None) -> int:
        """How many of the first ``slices`` slices belong to a part, by default this rank's."""
        return len(range(self.part if part is None else part, slices, self.parts))

    @property
    def most_slices(self) -> int:
        """Slices of the largest part."""
        return self.count(self.whole.slices, 0)

    @property
    def most_selected(self) -> int:
        """Selected slices of the part that has most."""
        return self.count(self.whole.k, 0)

    def view(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter's 2-D view as [slices, length]; a strided view of its memory."""
        return self.by_slice(matrix)[self.part :: self.parts]

    def by_slice(self, matrix: torch.Tensor) -> torch.Tensor:
        """The parameter's 2-D view as [slices, length]."""
        return matrix if self.whole.dim == 0 else matrix.t()

    def in_parts(self, slices: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair views of all slices with views of the same ones by part: one pair, and one more if parts are uneven.

        Args:
            slices: [slices, ...].
            rows: [parts, slices of the largest part, ...], or several of these, [n, parts, ...].
        """
        each = len(slices) // self.parts
        even = slices[: each * self.parts].view(each, self.parts, *slices.shape[1:]).transpose(0, 1)
        several = rows.dim() - slices.dim() - 1
        return zip((even, slices[each * self.parts :]), self.of_parts(len(slices), rows, several), strict=False)

    def of_parts(self, slices: int, rows: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
        """View what ``rows`` has of the first ``slices`` slices: as many of each part, and one more of the first parts.

        Args:
            rows: [parts, slices of the largest part, ...].
            dim: the dimension of the parts, if it is not the first one.
        """
        each, rest = divmod(slices, self.parts)
        found = [rows.narrow(dim + 1, 0, each)]
        return [*found, rows.narrow(dim, 0, rest).select(dim + 1, each)] if rest else found


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShare:
    """The part of a streamed parameter whose state one rank of several has: consecutive elements of its memory.

    It is planned like a parameter ``[elements of the part]``. Its gradient and its weight are whole on each rank.

    Attributes:
        whole: the plan of the whole parameter, as one device would have it.
        rank: of this process among ``ranks``.
    """

    whole: ParamPlan
    rank: int
    ranks: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        return (len(self.bounds(self.rank)),)

    def bounds(self, rank: int) -> range:
        """The elements of a rank's part."""
        most = -(-self.whole.numel // self.ranks)
        return range(min(most * rank, self.whole.numel), min(most * (rank + 1), self.whole.numel))

    def view(self, tensor: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """View the part of a rank, by default this one, in a contiguous tensor of the parameter's shape: [elements]."""
        part = self.bounds(self.rank if rank is None else rank)
        # Hazard: a part of a weight must be a view. ``StreamedUpdates.check_weights`` refuses those that are copies.
        return tensor.reshape(-1)[part.start : part.stop]

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """View this rank's part in its own ``shape``."""
        return self.view(tensor).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixShare(FlatShare):
    """A matrix that is updated whole, by its ``owner``, which has all of its elements: others have no rows of it."""

    owner: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        rows, columns = self.whole.shape
        return (rows if self.rank == self.owner else 0, columns)

    def bounds(self, rank: int) -> range:
        """The elements of a rank's part."""
        return range(self.whole.numel if rank == self.owner else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of a parameter of a sharded model (FSDP2) that one rank has: consecutive rows, or columns.

    Its gradient and its weight are sharded in the same way. It is planned like a parameter of the part's shape.

    Attributes:
        whole: the plan of the whole parameter, as one device would have it.
        divides_slices: a slice belongs to one rank; otherwise each rank has a part of every slice.
        counted: this rank counts in sums over ranks of selected slices: it selects among its own, or is the first one.
        ranks: that have parts.
        members: numbers of these ranks in the run.
    """

    whole: ParamPlan
    divides_slices: bool
    counted: bool
    ranks: int
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamPlan:
    """The plan of one parameter.

    A *slice* is a column (``dim`` 1) or a row (``dim`` 0) of the parameter's 2-D view, whose rows are its first
    ``row_dims`` dimensions. All state of an offloaded parameter has the layout ``[slice, length]``, on the device and
    on the host.

    Attributes:
        index: position in the optimizer's list of parameters; it never changes.
        name: the parameter's name, or ``param<index>`` if it has none.
        slices: number of slices; length: elements per slice.
        k: slices with state on the device; ``deferred`` = slices - k have it on the host.
        interval: steps per update window (upper bound if the interval adapts).
        phase: the window is flushed at the steps t with t % interval == phase.
        staleness: whole steps by which a flushed window's update is applied late; 0: before the next forward.
        blocking: the step, not the parameter's next use, waits for the host update.
        fixed: the selected slices are always the first ``k``.
        in_file: the host's state lives in a file, and in host memory only around its update.
        weight_in_file: the buffers of new weights, which ``offload_weights`` loads, are in a file, too.
        subgroup: number of its subgroup, in update order; None: it has none.
        summed: the window's deferred gradients are summed on the device, and their mean is copied once.
        compressed: deferred gradients are copied as int8, with a scale per slice.
        moments: how arrays that may be rounded are stored, on either side: ``"fp32"``, ``"bf16"``, or ``"fp8"`` with
            scales.
        rule: the update rule.
        split_master: the host stores the masters of deferred slices as the bf16 weight in the upload buffer, and the 16
            bits that complete it.
        pool: number of the pool in which its gradient buffers share memory with those of other parameters; None: it has
            buffers of its own.
        in_place: the host writes an update window's new weights over the window's last gradient.
        share: set where several ranks divide an offloaded parameter; the other attributes are those of this rank's
            part.
        flat: set where several ranks divide a streamed parameter; ``shape`` is that of this rank's part.
        shard: set where the model is sharded; the other attributes are those of this rank's part.
        pieces: in which tensor and expert parallelism have divided the model's parameter: ``whole`` is one of them.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    row_dims: int = 1
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
    weight_in_file: bool = False
    subgroup: int | None = None
    summed: bool = False
    compressed: bool = False
    moments: str = "fp32"
    rule: Rule = ADAMW
    split_master: bool = False
    pool: int | None = None
    in_place: bool = False
    share: Share | None = None
    flat: FlatShare | None = None
    shard: Shard | None = None
    pieces: int = 1

    @property
    def whole(self) -> ParamPlan:
        """The plan of the whole parameter, of which this may be a rank's part."""
        divided = self.share or self.flat or self.shard
        return self if divided is None else divided.whole

    @property
    def of_weight(self) -> ParamPlan:
        """The plan of the weight that this rank stores: of the whole parameter, or of the shard of a sharded model."""
        return self if self.share is None else self.share.whole

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the 2-D view."""
        rows = math.prod(self.shape[: self.row_dims])
        return rows, math.prod(self.shape[self.row_dims :])

    @property
    def slice_dim(self) -> int:
        """The dimension of ``shape`` whose indices divide the slices: the first one of the rows, or of the columns."""
        return 0 if self.dim == 0 else self.row_dims

    @property
    def counted(self) -> bool:
        """Whether this rank counts in sums over ranks of the parameter's selected slices."""
        if self.share is not None:
            return self.share.first_holder
        return self.shard is None or self.shard.counted

    @property
    def deferred(self) -> int:
        """Number of slices with state on the host."""
        return self.slices - self.k

    @property
    def offloaded(self) -> bool:
        """Whether the host updates any slice, so that gradients are copied there."""
        return self.placement not in (Placement.DEVICE, Placement.HOST_STREAMED)

    @property
    def streamed(self) -> bool:
        """Whether the device updates it, with state that is on the host between updates."""
        return self.placement is Placement.HOST_STREAMED

    @property
    def divided(self) -> bool:
        """Whether the ranks of a process group divide its state. Resident state is on each of them."""
        return self.placement is not Placement.DEVICE

    @property
    def selects(self) -> bool:
        """Whether slices are selected, and the selection may change."""
        return self.k > 0 and self.deferred > 0 and not self.fixed

    @property
    def selecting_ranks(self) -> int:
        """Ranks that each select among their own slices, or pieces; 1 if all select as one device would."""
        return self.pieces * (self.shard.ranks if self.shard is not None and self.shard.divides_slices else 1)

    @property
    def most_swaps(self) -> int:
        """Most slices that a re-selection swaps."""
        return min(self.k, self.deferred) if self.selects else 0

    @property
    def swap_bytes(self) -> int:
        """Bytes that a swapped slice sends to the host: its state, and the row that it takes there."""
        return self.length * self.wide_tensors * FP32_BYTES + ROW_BYTES

    @property
    def groups(self) -> int:
        """Number of groups that slices are selected in, if ``selects``."""
        if self.share is not None:
            return self.share.whole.groups // self.share.parts
        return group_count(self.slices, self.k)

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def trained(self) -> bool:
        """Return whether the dtype can be optimized. Other parameters are frozen, and have no state."""
        return self.dtype in TRAINED

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameter itself."""
        return self.numel * self.dtype.itemsize

    @property
    def gradient_buffers(self) -> GradientBuffers:
        """The buffers of its update window's gradients on the host."""
        return GradientBuffers(self)

    @property
    def has_pending_gradient(self) -> bool:
        """Whether the deferred gradient is pending until it is final, because it is summed or compressed first."""
        return self.deferred > 0 and (self.summed or self.compressed)

    @property
    def deferred_numel(self) -> int:
        """Elements of the deferred slices."""
        return self.deferred * self.length

    @property
    def whole_rows(self) -> tuple[int, int]:
        """Rows of the moments of a parameter without slices, and elements of a row."""
        return (self.shape[0], math.prod(self.shape[1:])) if len(self.shape) > 1 else (1, self.numel)

    @property
    def deferred_state_bytes(self) -> int:
        """Bytes of the host's state of the ``deferred`` slices. Split masters are counted without their weights."""
        master = self.length * (2 if self.split_master else FP32_BYTES)
        return self.deferred * (master + self._array_bytes(self.length))

    @property
    def selected_state_bytes(self) -> int:
        """Bytes of the device's state of the selected slices."""
        return self.k * (self.length * FP32_BYTES + self._array_bytes(self.length))

    @property
    def device_update_bytes(self) -> float:
        return device_update_bytes(FP32_BYTES * self.wide_tensors)

    @property
    def wide_tensors(self) -> int:
        """Tensors of the state in fp32: the master and the rule's arrays."""
        return 1 + len(self.rule.arrays)

    def _array_bytes(self, elements: int) -> int:
        """Bytes of all arrays of ``elements`` consecutive elements."""
        return sum(moment_bytes(self.moments if array.rounded else "fp32", elements) for array in self.rule.arrays)

    @property
    def upload_bytes(self) -> int:
        """Bytes of new weights that a flushed update window sends to the device."""
        return self.deferred_numel * self.dtype.itemsize

    def update_bytes(self, gradients: int) -> int:
        """Bytes of host memory that the host update of one update window reads and writes, caches aside.

        The state is read and written, each gradient is read, and the new weights are written. Split masters read the
        weights, too.

        Args:
            gradients: steps of the window that have a gradient; those of a ``summed`` window share one buffer.
        """
        buffers = min(gradients, 1) if self.summed else gradients
        weights = self.upload_bytes * (2 if self.split_master else 1)
        return 2 * self.deferred_state_bytes + weights + buffers * self.gradient_buffers.nbytes

    @property
    def uploads(self) -> int:
        """Most upload buffers in flight."""
        return 1 + self.staleness

    @property
    def upload_buffers(self) -> int:
        """Upload buffers in host memory."""
        return 0 if self.in_place else self.uploads

    @property
    def whole_state_bytes(self) -> int:
        """State of all elements without slices: the arrays, and an fp32 master if the weights are not fp32."""
        if not self.trained:
            return 0
        rows, elements = self.whole_rows
        master = 0 if self.dtype == FLOAT32 else self.numel * FP32_BYTES
        return master + rows * self._array_bytes(elements)

    @property
    def file_bytes(self) -> int:
        """Bytes in a file: the state of the ``deferred`` slices."""
        return self.deferred_state_bytes if self.in_file else 0

    @property
    def host_state_bytes(self) -> int:
        """State in host memory, without the cache of files."""
        if self.streamed:
            return self.whole_state_bytes
        return self.deferred_state_bytes if self.offloaded and not self.in_file else 0

    @property
    def host_bytes(self) -> int:
        """Host memory: state, gradient buffers and upload buffers of the ``deferred`` slices.

        State and weights in a file are not counted: all parameters share their caches. Nor are gradient buffers in a
        pool.
        """
        if not self.offloaded:
            return self.host_state_bytes
        uploads = 0 if self.weight_in_file else self.upload_buffers * self.upload_bytes
        gradients = self.gradient_buffers.count * self.gradient_buffers.nbytes if self.pool is None else 0
        return self.host_state_bytes + uploads + gradients

    @property
    def device_bytes(self) -> int:
        """Device memory of the state: moments, and an fp32 master if the weights are not fp32 or slices are selected.

        With it, the fp32 sum of an update window's gradients, and the rounding error of compressed ones. Buffers for
        streamed state are not counted: all parameters share them.
        """
        if self.streamed:
            return 0
        if self.offloaded:
            per_deferred = FP32_BYTES * self.summed + self.dtype.itemsize * self.compressed
            return self.selected_state_bytes + self.deferred_numel * per_deferred
        return self.whole_state_bytes


@dataclass(frozen=True, slots=True)
class GradientBuffers:
    """The host's buffers for the deferred gradients of a parameter's update window."""

    plan: ParamPlan

    @property
    def count(self) -> int:
        """Their number: those of the update window, and one per step of staleness, for updates not applied yet.

        Shared ones of a window with staleness exist two times: a window and the next are in use together.
        """
        of_window, staleness = 1 if self.plan.summed else self.plan.interval, self.plan.staleness
        return of_window + staleness if self.plan.pool is None else of_window * (1 + staleness)

    def index(self, step: int) -> int:
        """The buffer of optimizer step ``step``; of a ``summed`` window, of the one that has this step.

        A buffer belongs to a step, not to a gradient: a missing one leaves its buffer and its place in the window
        empty. Moments, counts, rates and scores do not change then, and the window's position still advances.
        """
        since = step - self.plan.phase - 1  # a window begins behind the step that flushes the last one
        return (since // self.plan.interval if self.plan.summed else since) % self.count

    @property
    def period(self) -> int:
        """Steps after which shared buffers are in use as before."""
        return self.plan.interval * (1 + self.plan.staleness)

    @property
    def lifetimes(self) -> list[Lifetime]:
        """When each buffer is in use, if it is shared: see [Note: steps of a buffer] in ``shared_buffers``."""
        plan, nbytes, period, window = self.plan, self.nbytes, self.period, self.plan.interval
        if plan.summed:
            # Its only gradient comes when the window is flushed, which in warm-up may be any step.
            return [Lifetime.of(nbytes, 0, period)] * self.count
        return [
            Lifetime.of(nbytes, (plan.phase + 1 + index) % period, window - index % window + plan.staleness)
            for index in range(self.count)
        ]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a buffer, in ``dtype``."""
        return self.plan.deferred, self.plan.length + (FP32_BYTES if self.plan.compressed else 0)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a buffer: the model's, or int8 with the bytes of a scale in each slice."""
        if not self.plan.compressed:
            return self.plan.dtype
        import torch  # see ``planning.dtypes``

        return torch.int8

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer."""
        return self.shape[0] * self.shape[1] * (1 if self.plan.compressed else self.plan.dtype.itemsize)


def device_update_bytes(wide_bytes: float) -> float:
    """Bytes of device memory per element that an update there reads and writes; ``wide_bytes``: its state in fp32.

    Master (fp32 weights are their own) and arrays both ways, a gradient and a weight of two bytes each: AdamW's 28.
    With fp32 weights these are moments 16, weights 8, gradient 4: as many.
    """
    return 2 * wide_bytes + 4


def moment_bytes(moments: str, elements: int) -> int:
    """Bytes of one moment of ``elements`` consecutive elements: of a slice, or of a row of ``ParamPlan.whole_rows``."""
    if moments == "fp8":
        return elements + -(-elements // QUANTIZATION_BLOCK)
    return elements * (2 if moments == "bf16" else FP32_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plans of all parameters of one optimizer, in its order.

    Attributes:
        host_window_bytes: the option.
        adaptive: gradient values decide when update windows are flushed, after ``interval`` steps at the latest.
        rank: of this process among the ``ranks`` that divide the offloaded parameters.
        replica: number of these ranks among the ``replicas``, which have copies of all shares.
        weights: which weights are in host memory. Only predictions set it; None: all weights stay on the device.
        micro_batches: backwards of a step, as predictions assume them.
    """

    policy: str
    params: tuple[ParamPlan, ...]
    host_window_bytes: int | None = None
    adaptive: bool = False
    rank: int = 0
    ranks: int = 1
    replica: int = 0
    replicas: int = 1
    weights: WeightMemory | None = None
    micro_batches: int = 1

    @property
    def sums_over_ranks(self) -> bool:
        """Return whether gradients are summed up over ranks by the engine."""
        return self.ranks * self.replicas > 1

    @property
    def subgroup_bytes(self) -> list[int]:
        """Bytes of the state of each streamed subgroup."""
        return [sum(param.whole_state_bytes for param in group) for group in self.streamed_subgroups.values()]

    @property
    def streamed_subgroups(self) -> dict[int | None, list[ParamPlan]]:
        """Parameters whose state is streamed through the device together, by the number of their subgroup."""
        subgroups: dict[int | None, list[ParamPlan]] = {}
        for param in self.params:
            if param.streamed:
                subgroups.setdefault(param.subgroup, []).append(param)
        return subgroups

    def total(self, of: Callable[[ParamPlan], int]) -> int:
        """Sum ``of`` over all parameters."""
        return sum(map(of, self.params))

    @property
    def model_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.total(lambda param: param.whole.weight_bytes)

    def loads_weight(self, param: ParamPlan) -> bool:
        """Whether the parameter's weight is in host memory, and loaded around its uses."""
        return self.weights is not None and param.index in self.weights.offloaded

    def load_bytes(self, param: ParamPlan) -> int:
        """Bytes that cross to the device when the weight is loaded; 0 if it is kept.

        Selected slices do not cross: they are rebuilt from their fp32 masters, which are on the device.
        """
        if not self.loads_weight(param):
            return 0
        return param.upload_bytes if param.offloaded else param.weight_bytes

    def rewrites_weight(self, param: ParamPlan) -> bool:
        """Whether ``step()`` loads the weight for an update on the device, and writes it back to the host."""
        return self.loads_weight(param) and not param.offloaded

    def sent_bytes(self, param: ParamPlan) -> int:
        """Bytes of new weights that a flushed update window sends; 0 for a weight whose next load reads them."""
        return 0 if self.loads_weight(param) else param.upload_bytes

    @property
    def state_note(self) -> str | None:
        """How state is stored in fewer bytes, and whether that is exact, in words; None: as fp32."""
        on_host = [param for param in self.params if param.offloaded and param.deferred]
        notes = []
        for moments in dict.fromkeys(param.moments for param in self.params if param.moments != "fp32"):
            count = sum(param.moments == moments for param in self.params)
            notes.append(f'{moments} moments of {count} parameters: rounded, exact with state_dtype="fp32"')
        if split := sum(param.split_master for param in on_host):
            kept = len(on_host) - split
            others = f"; {kept} keep fp32 masters, their weights are not bf16" if kept else ""
            notes.append(f"split masters of {split} parameters: one fp32 ulp lower if halfway between bf16{others}")
        return "; ".join(notes) or None

    @property
    def offloaded_weight_bytes(self) -> int:
        """Bytes of the weights that are not kept on the device."""
        return self.total(lambda param: param.weight_bytes if self.loads_weight(param) else 0)

    @property
    def host_bytes(self) -> int:
        """Host memory of all parameters, with the pools of their gradient buffers."""
        return self.total(lambda param: param.host_bytes) + self.pool_bytes

    @property
    def pool_bytes(self) -> int:
        """The part of it that parameters share."""
        return _pool_bytes(self.params)

    @property
    def device_bytes(self) -> int:
        """Device memory of all optimizer state."""
        return self.total(lambda param: param.device_bytes)

    @property
    def exchange_buffer_bytes(self) -> int:
        """Bytes of a buffer for state that changes sides, which holds at least one slice of each parameter."""
        swapping = [param for param in self.params if param.selects]
        most = max((param.most_swaps * param.swap_bytes for param in swapping), default=0)
        return max(min(most, EXCHANGE_BYTES), max((param.swap_bytes for param in swapping), default=0))

    @property
    def exchange_bytes(self) -> int:
        """Memory for state that changes sides: so much on a device with streams, and as much on the host."""
        return EXCHANGE_BUFFERS * self.exchange_buffer_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of all state in files."""
        return self.total(lambda param: param.file_bytes)

    @property
    def file_window_bytes(self) -> int:
        """Bytes of host memory that cache this state, before rounding to whole pages."""
        return file_window_bytes([param.file_bytes for param in self.params], self.host_window_bytes)

    @property
    def params_in_turn(self) -> tuple[ParamPlan, ...]:
        """Parameters whose state is read from its file for each flushed update window, and written back."""
        filed = [param for param in self.params if param.file_bytes]
        resident = resident_in_window([param.file_bytes for param in filed], self.file_window_bytes)
        return tuple(param for param, stays in zip(filed, resident, strict=True) if not stays)

    @property
    def bytes_in_turn(self) -> int:
        """Bytes of their state."""
        return sum(param.file_bytes for param in self.params_in_turn)

    @property
    def file_ring_bytes(self) -> int:
        """The part of ``file_window_bytes`` in which this state takes turns."""
        return self.file_window_bytes - (self.file_bytes - self.bytes_in_turn)


def host_bytes_of(params: Sequence[ParamPlan]) -> int:
    """Host memory of parameters, with the pools of their gradient buffers, which no other parameter may use."""
    return sum(param.host_bytes for param in params) + _pool_bytes(params)


def pools_of(params: Iterable[ParamPlan]) -> list[list[ParamPlan]]:
    """Parameters whose gradient buffers share memory, pool by pool. All of a pool have one ``period``."""
    pools: dict[int, list[ParamPlan]] = {}
    for param in params:
        if param.pool is not None:
            pools.setdefault(param.pool, []).append(param)
    return list(pools.values())


def pool_packing(pool: Sequence[ParamPlan]) -> Packing:
    """Where the gradient buffers of a pool are, parameter by parameter."""
    (period,) = {param.gradient_buffers.period for param in pool}
    return pack(tuple(each for param in pool for each in param.gradient_buffers.lifetimes), period)


def _pool_bytes(params: Sequence[ParamPlan]) -> int:
    return sum(pool_packing(pool).nbytes for pool in pools_of(params))
