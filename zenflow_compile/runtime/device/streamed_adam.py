"""State that is the host's between updates, and passes through the device for them (Deep Optimizer States, section 4).

[Note: chain] A few equal device buffers take turns. One holds a subgroup from its copy in, through its update, to its
flush; the next subgroup's copy in is queued behind that flush. So while one subgroup is flushed the next one comes in,
and nobody waits but through this chain: in, update, flush, in. A subgroup's state is read from the host again behind
its own flush, which the next step need not have waited for either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.plan import FP32_BYTES, STREAM_BUFFERS, ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.resident_adam import ResidentState, Update, update_on_device
from zenflow_compile.runtime.host.arena import ALIGNMENT_BYTES, HostArena, carved_bytes
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.transfer.copy_lanes import CopyLane, Ticket

InForce = Callable[[int], tuple[StepCoefficients, float]]
"""Of a parameter's index: its coefficients at this moment, and eps."""


class Flush(NamedTuple):
    """A copy back to the host: the how manyth, and how it goes."""

    number: int
    ticket: Ticket


@dataclass(slots=True)
class Buffer:
    """Device memory that one subgroup's state at a time is in, f32[elements]."""

    tensor: Tensor
    flush: Flush | None = None


class Loaded(NamedTuple):
    """A subgroup's state on the device, or on its way there."""

    buffer: Buffer
    ticket: Ticket


@dataclass(slots=True)
class StreamedParam:
    """One parameter of a subgroup.

    Attributes:
        state: what the host has; its ``step`` alone is on the device.
        places: where in the subgroup's memory the tensors of the state are, without ``step``, in elements.
    """

    plan: ParamPlan
    param: Parameter
    state: ResidentState
    places: tuple[int, ...]

    @property
    def ever_updated(self) -> bool:
        """Whether a gradient has been taken: before that there is nothing to save."""
        return bool(self.state.step > 0)

    def state_in(self, memory: Tensor) -> ResidentState:
        """The state in ``memory``, f32[elements of the subgroup]; its ``step`` is this parameter's own."""
        parts = [memory[first : first + self.plan.numel].view(self.plan.shape) for first in self.places]
        return replace(self.state, exp_avg=parts[0], exp_avg_sq=parts[1], master=parts[2] if len(parts) > 2 else None)


@dataclass(slots=True)
class Subgroup:
    """Parameters whose state is copied in and out at once.

    Attributes:
        host: f32[elements], the state of all of them, on the host.
        flush: of the last update.
    """

    number: int
    params: list[StreamedParam]
    host: Tensor
    flush: Flush | None = None
    views: dict[int, list[ResidentState]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the profiler calls it."""
        return f"subgroup {self.number}"

    @property
    def has_gradients(self) -> bool:
        """Whether any of its parameters has one."""
        return any(each.param.grad is not None for each in self.params)

    def states_in(self, buffer: Buffer) -> list[ResidentState]:
        """The states of all parameters in ``buffer``, which knows nothing of foreign writes since."""
        views = self.views.get(id(buffer))
        if views is None:  # several operators each, and the same few buffers come again and again
            views = self.views[id(buffer)] = [each.state_in(buffer.tensor) for each in self.params]
        for view, each in zip(views, self.params, strict=True):
            view.mark = each.state.mark
        return views


class StreamedAdam:
    """Streams the state of subgroups through the device, in their order, at every step.

    Attributes:
        params: by their index in the plan.
    """

    def __init__(self, to_host: CopyLane, to_device: CopyLane, recorder: Recorder, device: torch.device) -> None:
        self.params: dict[int, StreamedParam] = {}
        self._to_host = to_host
        self._to_device = to_device
        self._recorder = recorder
        self._device = device
        self._subgroups: list[Subgroup] = []
        self._expected: list[Subgroup] = []  # had a gradient in the last update: others are not prefetched
        self._buffers: list[Buffer] = []
        self._free: deque[Buffer] = deque()
        self._loaded: dict[int, Loaded] = {}
        self._flushes = 0

    # Memory.

    def make(self, pairs: Sequence[tuple[ParamPlan, Parameter]], arena: HostArena) -> list[Subgroup]:
        """Subgroups of new parameters, with state of zeros in ``arena``; they are not served before ``add``.

        A master of zeros is nobody's: the first update takes it from the weights, like one that was written over.
        """
        subgroups = []
        for number, members in groupby(pairs, key=lambda pair: pair[0].subgroup):
            assert number is not None
            together = list(members)
            host = arena.take((_elements([plan for plan, _ in together]),), torch.float32)
            params, first = [], 0
            for plan, param in together:
                tensors = plan.whole_state_bytes // (plan.numel * FP32_BYTES)
                places = tuple(first + each * _aligned(plan.numel) for each in range(tensors))
                first += tensors * _aligned(plan.numel)
                step = torch.zeros((), dtype=torch.float32, device=self._device)
                state = ResidentState(host, host, step, None)
                made = StreamedParam(plan, param, state, places)
                made.state = made.state_in(host)
                params.append(made)
            subgroups.append(Subgroup(number, params, host))
        return subgroups

    def fit(self, subgroups: Sequence[Subgroup]) -> None:
        """Have buffers for ``subgroups``, too, the largest of them whole; no flush may be in flight.

        Raises:
            torch.OutOfMemoryError: the device has no room; what was served before still is.
        """
        everything = [*self._subgroups, *subgroups]
        elements = max((each.host.numel() for each in everything), default=0)
        count = min(STREAM_BUFFERS, len(everything))
        if count == len(self._buffers) and (not count or elements <= self._buffers[0].tensor.numel()):
            return
        shape = (elements,)
        buffers = [Buffer(torch.empty(shape, dtype=torch.float32, device=self._device)) for _ in range(count)]
        self.abandon()
        for each in self._subgroups:
            each.views.clear()
        self._buffers, self._free = buffers, deque(buffers)

    def add(self, subgroups: Sequence[Subgroup]) -> None:
        """Serve these, too."""
        self._subgroups += subgroups
        self._expected = list(self._subgroups)
        self.params.update({each.plan.index: each for subgroup in subgroups for each in subgroup.params})

    @property
    def device_bytes(self) -> int:
        """Device memory of buffers and step counts."""
        return sum(buffer.tensor.nbytes for buffer in self._buffers) + FP32_BYTES * len(self.params)

    # A step.

    def prefetch(self) -> None:
        """Start to copy in what the next update begins with, as far as buffers go; the gradients may be far away."""
        if self._free:
            self._load(self._expected[: len(self._buffers)])

    def update(self, in_force: InForce) -> None:
        """One AdamW step on every parameter that has a gradient, subgroup by subgroup.

        Raises:
            CopyError: the state of a subgroup did not arrive.
        """
        due = [subgroup for subgroup in self._subgroups if subgroup.has_gradients]
        if not due:
            return
        self._expected = due
        # What was prefetched may come later than one that was not expected, which needs its buffer.
        first = {subgroup.number for subgroup in due[: len(self._buffers)]}
        for number in [number for number in self._loaded if number not in first]:
            self._drop(number)
        for position, subgroup in enumerate(due):
            self._load(due[position : position + len(self._buffers)])
            self._update(subgroup, in_force)

    def _load(self, upcoming: Sequence[Subgroup]) -> None:
        for subgroup in upcoming:
            if subgroup.number in self._loaded:
                continue
            if not self._free:
                return
            buffer = self._free[0]
            try:
                ticket = self._to_device.submit(
                    buffer.tensor[: subgroup.host.numel()],
                    subgroup.host,
                    step=self._recorder.step,
                    param=subgroup.name,
                    kind="state",
                    behind=_later(buffer.flush, subgroup.flush),
                )
                loaded, others = Loaded(buffer, ticket), deque(each for each in self._free if each is not buffer)
            except BaseException:
                self._to_device.settle()  # an interrupt may have come behind the submission, and the buffer stays free
                raise
            self._loaded[subgroup.number], self._free = loaded, others  # see [Note: one assignment] in ``staging``

    def _drop(self, number: int) -> None:
        """Its state is as the host has it: there is nothing to flush."""
        buffer, ticket = self._loaded.pop(number)
        ticket.wait_on_device()  # the copy that comes into the buffer next follows what the device does
        self._free.append(buffer)

    def _update(self, subgroup: Subgroup, in_force: InForce) -> None:
        buffer, ticket = self._loaded.pop(subgroup.number)
        with self._recorder.stall(not ticket.done(), param=subgroup.name):
            ticket.wait_on_device()
        together: dict[tuple[StepCoefficients, float], list[Update]] = {}
        states = subgroup.states_in(buffer)
        for each, state in zip(subgroup.params, states, strict=True):
            if (grad := each.param.grad) is not None:
                together.setdefault(in_force(each.plan.index), []).append((each.param, grad, state))
        for (slot, eps), updates in together.items():
            update_on_device(updates, slot, eps=eps)
        for each, state in zip(subgroup.params, states, strict=True):
            each.state.mark = state.mark
        self._flushes += 1
        block = buffer.tensor[: subgroup.host.numel()]
        ticket = self._to_host.submit(subgroup.host, block, step=self._recorder.step, param=subgroup.name, kind="state")
        buffer.flush = subgroup.flush = Flush(self._flushes, ticket)
        self._free.append(buffer)

    # Failures, and what the host has.

    def raise_failures(self) -> None:
        """Raise what failed by now; waits for nothing.

        Raises:
            CopyError: a copy failed; chained to the original error.
        """
        for ticket in self._tickets():
            if ticket.error is not None:
                ticket.wait()

    def wait(self) -> None:
        """Wait until the host has all state.

        Raises:
            CopyError: a copy failed; chained to the original error.
        """
        for ticket in self._tickets():
            ticket.wait()

    def abandon(self) -> None:
        """Wait for what is in flight, whether it failed or not, and forget it."""
        for ticket in self._tickets():
            ticket.settle()
        self._loaded.clear()
        for subgroup in self._subgroups:
            subgroup.flush = None
        for buffer in self._buffers:
            buffer.flush = None
        self._free = deque(self._buffers)

    def load(self, index: int, state: ResidentState | None) -> None:
        """Put back a checkpoint's state of parameter ``index``, or none at all; nothing may be in flight.

        Raises:
            ValueError: see :meth:`ResidentState.load`.
        """
        own = self.params[index].state
        if state is not None:
            own.load(state, self.params[index].param)
            return
        for tensor in own.tensors():
            tensor.zero_()
        own.mark = None

    def _tickets(self) -> Iterator[Ticket]:
        for loaded in self._loaded.values():
            yield loaded.ticket
        for subgroup in self._subgroups:
            if subgroup.flush is not None:
                yield subgroup.flush.ticket


def arena_bytes(plans: Sequence[ParamPlan]) -> int:
    """Bytes of an arena that ``make`` takes for those of ``plans`` that are interleaved."""
    streamed = [plan for plan in plans if plan.streamed]
    groups = [list(members) for _, members in groupby(streamed, key=lambda plan: plan.subgroup)]
    return carved_bytes(((_elements(members),), torch.float32) for members in groups)


def _elements(plans: Sequence[ParamPlan]) -> int:
    """Of fp32 memory for the state of a subgroup."""
    return sum(plan.whole_state_bytes // (plan.numel * FP32_BYTES) * _aligned(plan.numel) for plan in plans)


def _aligned(elements: int) -> int:
    per_slice = ALIGNMENT_BYTES // FP32_BYTES
    return -(-elements // per_slice) * per_slice


def _later(*flushes: Flush | None) -> Ticket | None:
    """The later one of those that are not done: copies that wait in a lane end in their order."""
    pending = [flush for flush in flushes if flush is not None and not flush.ticket.done()]
    return max(pending, key=lambda flush: flush.number).ticket if pending else None
