"""Updates with state in host memory, copied to the device for each update (Deep Optimizer States, section 4).

[Note: chain] A few device buffers of equal size take turns. A buffer holds one subgroup: from the copy in, through the
update, to the write-back. The next copy into that buffer is queued behind the write-back. So one subgroup is written
back while the next one is copied in, and the only waits are those of this chain: copy in, update, write back, copy in.
The next step's copy in of the same subgroup is queued behind its write-back, too, so no step waits for the last ones.
The first buffers are filled when a backward begins, so that the step finds them full.

To the passes such a parameter is resident: its gradient arrives in ``.grad``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.plan import FP32_BYTES, STREAM_BUFFERS, ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.copy_lanes import CopyLane, Ticket
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device_updates.resident_updates import ResidentState, Update, update_on_device
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.state_forms import StateForm
from zenflow_compile.runtime.update_rule import StepCoefficients

CoefficientsOf = Callable[[int], StepCoefficients]
"""Returns a parameter's current coefficients, by its index."""


class WriteBack(NamedTuple):
    number: int
    ticket: Ticket


@dataclass(slots=True)
class StreamBuffer:
    """Device memory for the state of one subgroup at a time, f32[elements], and the last copy out of it."""

    tensor: Tensor
    write_back: WriteBack | None = None


class Loaded(NamedTuple):
    buffer: StreamBuffer
    ticket: Ticket


@dataclass(slots=True)
class StreamedParam:
    """One parameter of a subgroup.

    Attributes:
        state: in host memory.
        offsets: of the state's tensors in the subgroup's memory, in fp32 elements.
        ever_updated: the parameter had a gradient: before that there is no state to save.
    """

    plan: ParamPlan
    param: Parameter
    state: ResidentState
    offsets: tuple[int, ...]
    ever_updated: bool = False

    @property
    def weight(self) -> Tensor:
        """The weight that the state belongs to: the parameter, or a view of this rank's part of it."""
        return self.param if self.plan.flat is None else self.plan.flat.part_of(self.param.detach())

    @property
    def has_gradient(self) -> bool:
        return self.param.grad is not None

    def gradient(self) -> Tensor | None:
        """The gradient of ``weight``; None if the parameter has none."""
        grad = self.param.grad
        return grad if grad is None or self.plan.flat is None else self.plan.flat.part_of(grad)

    def state_in(self, memory: Tensor) -> ResidentState:
        """View the state in ``memory``, f32[elements of the subgroup]."""
        parts = []
        for first, (shape, dtype) in zip(self.offsets, _state_tensors(self.plan), strict=True):
            size = math.prod(shape)
            words = -(-size * dtype.itemsize // FP32_BYTES)
            parts.append(memory[first : first + words].view(dtype)[:size].view(shape))
        count = len(self.plan.rule.arrays)
        return replace(self.state, arrays=parts[:count], master=parts[count] if len(parts) > count else None)


@dataclass(slots=True)
class StreamedGroup:
    """Parameters whose state is copied in and out together.

    Attributes:
        host: f32[elements] in host memory, the state of all of them.
        write_back: of the last update; None if it was abandoned, or before the first.
        views: of the state in each device buffer, by the buffer's id.
    """

    number: int
    params: list[StreamedParam]
    host: Tensor
    write_back: WriteBack | None = None
    views: dict[int, list[ResidentState]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"subgroup {self.number}"

    @property
    def has_gradients(self) -> bool:
        return any(each.has_gradient for each in self.params)

    def states_in(self, buffer: StreamBuffer) -> list[ResidentState]:
        """View the states of all parameters in ``buffer``, with their steps and write marks."""
        views = self.views.get(id(buffer))
        if views is None:  # cached: a view costs several operators, and there are few buffers
            views = self.views[id(buffer)] = [each.state_in(buffer.tensor) for each in self.params]
        for view, each in zip(views, self.params, strict=True):
            view.step, view.mark = each.state.step, each.state.mark
        return views


class StreamedUpdates:
    """Updates subgroups on the device, in their order at every step, and streams their state through it.

    Attributes:
        params: the streamed parameters, by index in the plan.
        subgroups, buffers: all of them; ``free`` buffers hold no state, ``loaded`` ones that of a subgroup, by number.
    """

    def __init__(self, to_host: CopyLane, to_device: CopyLane, recorder: Recorder, device: torch.device) -> None:
        self.params: dict[int, StreamedParam] = {}
        self._to_host = to_host
        self._to_device = to_device
        self._recorder = recorder
        self._device = device
        self.subgroups: list[StreamedGroup] = []
        self._expected: list[StreamedGroup] = []  # to prefetch: those that had a gradient in the last update
        self.buffers: list[StreamBuffer] = []
        self.free: deque[StreamBuffer] = deque()
        self.loaded: dict[int, Loaded] = {}
        self._write_backs = 0

    # Memory.

    def make(self, pairs: Sequence[tuple[ParamPlan, Parameter]], arena: HostArena) -> list[StreamedGroup]:
        """Make subgroups of new parameters, with state of zeros in ``arena``. ``add`` puts them to use.

        A zero master means uninitialized: its write mark is unknown, so the first update copies the weights into it.
        """
        subgroups: list[StreamedGroup] = []
        for number, members in groupby(sorted(pairs, key=_subgroup), key=_subgroup):
            together = list(members)
            host = arena.take((_elements([plan for plan, _ in together]),), torch.float32)
            params, first = [], 0
            for plan, param in together:
                sizes = [_aligned_elements(tensor) for tensor in _state_tensors(plan)]
                offsets = tuple(first + before for before in [*accumulate(sizes, initial=0)][:-1])
                first += sum(sizes)
                form = StateForm.of_whole(plan)
                state = ResidentState((), 0, None, form=form)  # its tensors are the views below
                made = StreamedParam(plan, param, state, offsets)
                made.state = made.state_in(host)
                params.append(made)
            last = subgroups[-1] if subgroups else None
            if last is None or (host.numel() and last.host.numel()):
                subgroups.append(StreamedGroup(number, params, host))
            else:  # one has matrices of other ranks alone, whose steps are counted: its turn would delay the next copy
                last.params += params
                last.host = host if host.numel() else last.host
        return subgroups

    def fit(self, subgroups: Sequence[StreamedGroup]) -> None:
        """Have buffers that hold the largest subgroup, ``subgroups`` included. No write-back may be in flight.

        At a torch.OutOfMemoryError the old buffers stay in use.
        """
        all_subgroups = [*self.subgroups, *subgroups]
        elements = max((each.host.numel() for each in all_subgroups), default=0)
        count = min(STREAM_BUFFERS, len(all_subgroups))
        if count == len(self.buffers) and (not count or elements <= self.buffers[0].tensor.numel()):
            return
        shape = (elements,)
        buffers = [StreamBuffer(torch.empty(shape, dtype=torch.float32, device=self._device)) for _ in range(count)]
        self.abandon()
        for each in self.subgroups:
            each.views.clear()
        self.buffers, self.free = buffers, deque(buffers)

    def add(self, subgroups: Sequence[StreamedGroup]) -> None:
        self.subgroups += subgroups
        self._expected = list(self.subgroups)
        self.params.update({each.plan.index: each for subgroup in subgroups for each in subgroup.params})

    @property
    def device_bytes(self) -> int:
        return sum(buffer.tensor.nbytes for buffer in self.buffers)

    def list_memory(self, found: MemoryList) -> None:
        loaded = [each.buffer.tensor for each in self.loaded.values()]
        found.content(*loaded)
        found.scratch(*(buffer.tensor for buffer in self.buffers))

    # Updates.

    def prefetch(self) -> None:
        """Start to copy in the first subgroups of the next update, one per buffer."""
        if self.free:
            self._load(self._expected[: len(self.buffers)])

    def update(self, coefficients_of: CoefficientsOf) -> None:
        """Do one step on every parameter that has a gradient, subgroup by subgroup.

        Raises CopyError if the copy of a subgroup's state failed.
        """
        due = [subgroup for subgroup in self.subgroups if subgroup.has_gradients]
        if not due:
            return
        self._expected = due
        # A prefetched subgroup may be due later than one that was not expected, which needs a buffer first.
        first = {subgroup.number for subgroup in due[: len(self.buffers)]}
        for number in [number for number in self.loaded if number not in first]:
            self._drop(number)
        for position, subgroup in enumerate(due):
            self._load(due[position : position + len(self.buffers)])
            self._update(subgroup, coefficients_of)

    def _load(self, upcoming: Sequence[StreamedGroup]) -> None:
        for subgroup in upcoming:
            if subgroup.number in self.loaded:
                continue
            if not self.free:
                return
            buffer = self.free[0]
            try:
                ticket = self._to_device.submit(
                    buffer.tensor[: subgroup.host.numel()],
                    subgroup.host,
                    step=self._recorder.step,
                    param=subgroup.name,
                    kind="state",
                    behind=_last(buffer.write_back, subgroup.write_back),
                )
                loaded, others = Loaded(buffer, ticket), deque(each for each in self.free if each is not buffer)
            except BaseException:
                # An interrupt may have come after the submission: end the copy, because the buffer stays free.
                self._to_device.settle()
                raise
            # One statement without calls, so that no interrupt finds the buffer both free and loaded, or neither.
            self.loaded[subgroup.number], self.free = loaded, others

    def _drop(self, number: int) -> None:
        """Give up a subgroup's buffer without an update: the state in host memory is current."""
        buffer, ticket = self.loaded.pop(number)
        ticket.wait_on_device()  # orders the next copy into the buffer behind this one
        self.free.append(buffer)

    def _update(self, subgroup: StreamedGroup, coefficients_of: CoefficientsOf) -> None:
        buffer, ticket = self.loaded.pop(subgroup.number)
        with self._recorder.stall(not ticket.done(), param=subgroup.name):
            ticket.wait_on_device()
        together: dict[StepCoefficients, list[Update]] = {}
        states = subgroup.states_in(buffer)
        for each, state in zip(subgroup.params, states, strict=True):
            if (grad := each.gradient()) is not None:
                together.setdefault(coefficients_of(each.plan.index), []).append((each.weight, grad, state))
                each.ever_updated = True
        for coefficients, updates in together.items():
            update_on_device(updates, coefficients)
        for each, state in zip(subgroup.params, states, strict=True):
            each.state.step, each.state.mark = state.step, state.mark
        self._write_backs += 1
        block = buffer.tensor[: subgroup.host.numel()]
        ticket = self._to_host.submit(subgroup.host, block, step=self._recorder.step, param=subgroup.name, kind="state")
        buffer.write_back = subgroup.write_back = WriteBack(self._write_backs, ticket)
        self.free.append(buffer)

    # Failures and checkpoints.

    def raise_failures(self) -> None:
        """Raise the CopyError of a copy that failed so far, without waiting."""
        for ticket in self._tickets():
            if ticket.error is not None:
                ticket.wait()

    def check_weights(self) -> None:
        """Raise RuntimeError if a parameter that ranks divide is not contiguous any longer: a part would be a copy."""
        for each in self.params.values():
            if each.plan.flat is not None and not each.param.is_contiguous():
                errors.refuse_reordered(each.plan.name)

    def wait(self) -> None:
        """Wait until all state is in host memory; raises CopyError of a copy that failed."""
        for ticket in self._tickets():
            ticket.wait()

    def abandon(self) -> None:
        """Wait for all copies in flight, ignore their failures, and free all buffers."""
        for ticket in self._tickets():
            ticket.settle()
        self.loaded.clear()
        for subgroup in self.subgroups:
            subgroup.write_back = None
        for buffer in self.buffers:
            buffer.write_back = None
        self.free = deque(self.buffers)

    def load(self, index: int, state: ResidentState | None) -> None:
        """Put back a checkpoint's state of parameter ``index``; None resets it. Nothing may be in flight.

        Raises ValueError as :meth:`ResidentState.load` does.
        """
        own = self.params[index].state
        self.params[index].ever_updated = state is not None
        if state is not None:
            own.load(state, self.params[index].weight)
            return
        for tensor in own.tensors():
            tensor.zero_()
        own.step, own.mark = 0, None

    def _tickets(self) -> Iterator[Ticket]:
        for loaded in self.loaded.values():
            yield loaded.ticket
        for subgroup in self.subgroups:
            if subgroup.write_back is not None:
                yield subgroup.write_back.ticket


def arena_bytes(plans: Sequence[ParamPlan]) -> int:
    """Bytes that ``make`` takes from an arena for the streamed ones of ``plans``."""
    streamed = [plan for plan in plans if plan.streamed]
    groups = [list(members) for _, members in groupby(streamed, key=lambda plan: plan.subgroup)]
    return carved_bytes(((_elements(members),), torch.float32) for members in groups)


def _subgroup(pair: tuple[ParamPlan, Parameter]) -> int:
    assert pair[0].subgroup is not None
    return pair[0].subgroup


def _elements(plans: Sequence[ParamPlan]) -> int:
    return sum(_aligned_elements(tensor) for plan in plans for tensor in _state_tensors(plan))


_TensorOfState = tuple[tuple[int, ...], torch.dtype]


def _state_tensors(plan: ParamPlan) -> list[_TensorOfState]:
    """Shapes and dtypes of a parameter's state, without ``step``: arrays, and a master unless the weights are fp32."""
    form, rows = StateForm.of_whole(plan), plan.whole_rows[0]
    arrays: list[_TensorOfState] = [*form.tensors(rows)[1:]]
    if form.plain:
        arrays = [(plan.shape, torch.float32) for _ in arrays]
    return arrays if plan.dtype == torch.float32 else [*arrays, (plan.shape, torch.float32)]


def _aligned_elements(tensor: _TensorOfState) -> int:
    """fp32 elements from one tensor of a parameter's state to the next."""
    return carved_bytes([tensor]) // FP32_BYTES


def _last(*write_backs: WriteBack | None) -> Ticket | None:
    """The ticket of the last write-back that has not ended: the copies of a lane end in the order of submission."""
    pending = [each for each in write_backs if each is not None and not each.ticket.done()]
    return max(pending, key=lambda each: each.number).ticket if pending else None
