"""Notices writes that move no version, as those through ``.data`` do, by samples of the weights.

The optimizer would undo such a write: the weight's master does not know of it. Samples are kept as they were after the
optimizer's own last write, and a step compares them before it writes again. A sample has all of a small weight, and one
element or more of each line of a larger one, so that a write to a whole row, filter or expert is always noticed. One to
a random share q of the elements is noticed with probability 1 - (1 - q)^n, with n elements in the sample.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device.readback import LAG, Readback, Reading
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.torch_internals.torch_private import refusal_of, storage_identity

SAMPLED = 4096
"""Elements of a weight's sample, or more; smaller weights are in it whole."""
SHORTEST_LINE = 32
"""Elements of a line that is sampled for itself: a sample has at most a thirtieth of a large weight."""
_SCATTERED = 32  # elements of the sample of a weight that does not fill its memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample_of(weight: Tensor) -> Tensor:
    """View elements of ``weight`` as integers of their size: NaN is unequal to itself.

    In dense memory they have equal steps, from the first element to the last line. A line is what lies between two
    elements that follow each other along a dimension: a row of a matrix, also of an expert's, or a filter. Steps are
    shorter than a line, and prime to all strides, so that the elements are in all lines, and in different columns. In
    other memory they are on the diagonal.
    """
    bits = weight.detach().view(_INTEGERS[weight.element_size()])
    sizes, strides, elements = weight.shape, weight.stride(), weight.numel()
    if sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1 == elements:
        line = min((stride for stride in strides if SHORTEST_LINE <= stride < elements), default=elements)
        step = max(1, min(line - 1, elements // SAMPLED))
        while any(math.gcd(step, stride) > 1 for stride in strides):
            step -= 1
        count = (elements - 1) // step + 1
    else:
        count = min(_SCATTERED, max(sizes))
        step = sum(size // count * stride for size, stride in zip(sizes, strides, strict=True))
    return bits.as_strided((count,), (step,), weight.storage_offset())


class SampledWeight:
    """A weight that has a master. ``name``: for the error.

    Attributes:
        sample: view of the sampled elements.
        kept: their values after the optimizer's last write; None: unknown.
        bumps: external ones at that time.
        storage: identity of the weight's memory.
    """

    __slots__ = ("bumps", "counter", "kept", "name", "param", "sample", "storage")

    def __init__(self, name: str, param: Parameter, counter: VersionCounter) -> None:
        self.name = name
        self.param = param
        self.counter = counter
        self.kept: Tensor | None = None
        self.follow()

    def follow(self) -> None:
        """Keep the sample of a weight that other code may have written, or given other memory."""
        self.sample = sample_of(self.param)
        self.storage = storage_identity(self.param.untyped_storage())
        self.bumps = self.counter.external_bumps(self.param)
        if self.kept is not None:
            self.kept.copy_(self.sample)

    @property
    def tells(self) -> bool:
        """Whether the sample tells of writes: versions tell of others, and frozen weights belong to other code."""
        same = storage_identity(self.param.untyped_storage()) == self.storage and self.kept is not None
        return same and self.bumps == self.counter.external_bumps(self.param) and self.param.requires_grad


class _Master(NamedTuple):
    """What the owner of a weight's master tells; see ``UnseenWrites.add``."""

    exists: Callable[[], bool] | None
    compare: Callable[[], None]


class _Group:
    """The samples of weights whose elements have one size, one after the other."""

    def __init__(self, weights: Sequence[SampledWeight]) -> None:
        self.weights = weights
        self.samples = [each.sample for each in weights]
        sizes = [len(each) for each in self.samples]
        self.kept = torch.cat(self.samples)
        self.now = torch.empty_like(self.kept)
        self.positions = torch.arange(1, len(self.kept) + 1, dtype=torch.float32, device=self.kept.device)
        self._ends = [*accumulate(sizes)]
        for weight, part in zip(weights, torch.split(self.kept, sizes), strict=True):
            weight.kept = part

    def changed_at(self) -> Tensor:
        """f32[], the position of an element that differs, from 1; 0 if none does."""
        return ((self.now != self.kept) * self.positions).amax()

    def weight_at(self, position: float) -> SampledWeight:
        return self.weights[bisect_left(self._ends, position)]


class UnseenWrites:
    """The samples of one engine's weights. Each weight is in the device's memory, and has a master, or will have."""

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self._device = device
        self._masters: dict[SampledWeight, _Master] = {}
        self._compared: list[SampledWeight] = []
        self.frozen: list[SampledWeight] = []  # at the end of the last step
        self._groups: list[_Group] = []
        self._readback = Readback(1, device, recorder)
        self._readback.grow(len(_INTEGERS))
        self._coming: deque[tuple[list[_Group], Reading]] = deque()  # of the last steps, oldest first; at most ``LAG``

    def add(self, weight: SampledWeight, has_master: Callable[[], bool] | None, compare: Callable[[], None]) -> None:
        """Sample a further weight.

        Args:
            has_master: returns whether its master exists now: some are made with the first gradient. None: always.
            compare: has the weight compared with its master when that is used next.
        """
        self._masters[weight] = _Master(has_master, compare)
        if not weight.param.requires_grad:
            self.frozen.append(weight)

    def compare_unfrozen(self) -> None:
        """Have weights compared with their masters that any code may have written while they were frozen."""
        for weight in self.frozen:
            if weight.param.requires_grad:
                self._masters[weight].compare()

    def begin_step(self) -> None:
        """Compare the weights with their samples, before a step writes them.

        A device with streams compares without a wait, and what it found is read ``LAG`` steps later.

        Raises:
            RuntimeError: a weight was written in a way that moves no version.
        """
        for group in self._groups:
            for position, weight in enumerate(group.weights):
                # Without a call of ``tells``: each step asks for each weight.
                param = weight.param
                same = storage_identity(param.untyped_storage()) == weight.storage and param.requires_grad
                if not same or param._version - weight.counter.own_bumps != weight.bumps:
                    weight.follow()
                    group.samples[position] = weight.sample
        for row, group in enumerate(self._groups):
            torch.cat(group.samples, out=group.now)
            if self._device.streams is not None:
                self._readback.cell(row, 0).copy_(group.changed_at())
            elif not torch.equal(group.now, group.kept):
                errors.refuse_unseen_write(group.weight_at(float(group.changed_at())).name)
        if self._device.streams is None:
            return
        groups, reading = self._coming.popleft() if len(self._coming) == LAG else ([], None)
        found = {} if reading is None else reading.values()  # first: the next copy may overwrite what it reads
        self._coming.append((self._groups, self._readback.start()))
        for (number, _), at in found.items():
            if at:
                errors.refuse_unseen_write(groups[number].weight_at(at).name)

    def end_step(self) -> None:
        """Keep samples after the optimizer's own writes."""
        self.frozen = [weight for weight in self._masters if not weight.param.requires_grad]
        compared = [
            each for each, master in self._masters.items()
            if each.param.requires_grad and (master.exists is None or master.exists())
        ]  # fmt: skip
        if compared == self._compared:
            for group in self._groups:
                torch.cat(group.samples, out=group.kept)
            return
        for weight in self._compared:
            weight.kept = None
        by_size: dict[int, list[SampledWeight]] = {}
        for weight in compared:
            weight.follow()
            by_size.setdefault(weight.param.element_size(), []).append(weight)
        self._compared, self._groups = compared, [_Group(weights) for weights in by_size.values()]

    def accept(self) -> None:
        """Have weights that were written in a way that moves no version compared with their masters.

        Waits for the device. Weights whose reads are refused are left out: no code can have written them.
        """
        for weight in self._compared:
            if refusal_of(weight.param.untyped_storage()) is not None or weight.kept is None or not weight.tells:
                continue
            if not torch.equal(weight.sample, weight.kept):
                self._masters[weight].compare()

    def forget(self) -> None:
        """Drop all samples: a state is about to be loaded."""
        self._coming.clear()
        self._readback.forget()
        for weight in self._compared:
            weight.kept = None
        self._compared, self._groups = [], []

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory."""
        self._readback.list_memory(found)
        for group in (*self._groups, *(each for groups, _ in self._coming for each in groups)):
            found.content(group.kept, group.positions)
            found.scratch(group.now)
