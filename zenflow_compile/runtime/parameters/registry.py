"""The parameters of an engine: plan, param groups, runtime state, and whether the model still holds them as planned."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import Plan
from zenflow_compile.planning.planners import empty_plan
from zenflow_compile.rules.rule import Rule
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates.resident_updates import has_master
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter, counters_of
from zenflow_compile.runtime.gradients.engine_gradients import Gradients
from zenflow_compile.runtime.gradients.factors import UNSCALED, FinalFactors
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord
from zenflow_compile.runtime.nvme.cache import CacheBytes
from zenflow_compile.runtime.parameters.allocation import EngineMemory
from zenflow_compile.runtime.parameters.capacity import checked_plan, specs_of
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.device_updated import DeviceUpdated
from zenflow_compile.runtime.parameters.host_weights import HostWeights, WeightRoom
from zenflow_compile.runtime.parameters.moved_weights import take_host_values
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.param_groups import GroupNumbers, check_groups, values_of
from zenflow_compile.runtime.parameters.unseen_writes import SampledWeight, UnseenWrites
from zenflow_compile.runtime.ranks.rank_group import RankGroup
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.sharding import LocalShard, given
from zenflow_compile.runtime.update_rule import StepCoefficients
from zenflow_compile.torch_internals.torch_private import is_wrapper_subclass, same_memory


class ParamRegistry:
    """All parameters of an engine. Parameters can be added, and are never removed.

    Attributes:
        params: all parameters, in the plan's order; of sharded ones the part that this rank has.
        given: the same, as the optimizer and the model have them.
        groups: the optimizer's ``param_groups``.
        rules: of the groups.
        numbers: of the groups, at the last check.
        group_numbers: index of each parameter's group, in the plan's order.
        unseen_writes: notices writes to the others that move no version.
        gradients: shared by the offloaded parameters.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        options: Options,
        rules: Sequence[Rule],
        device: torch.device,
        recorder: Recorder,
        engine: weakref.ref[Any],
        *,
        visible_gradients: bool,
        ranks: RankGroup | None = None,
    ) -> None:
        self.plan = empty_plan(options) if ranks is None else ranks.divided(empty_plan(options))
        self.rules = rules
        self.params: list[Parameter] = []
        self.given: list[Parameter] = []
        self.counters: list[VersionCounter] = []
        self.groups = groups
        self.group_numbers: list[int] = []
        self.offloaded: dict[int, OffloadedParam] = {}
        self.gradients = Gradients(self.offloaded, engine, recorder, device, visible=visible_gradients, ranks=ranks)
        self.memory = EngineMemory(options, device, recorder)
        self.transport = self.memory.transport
        self.streamed = self.memory.streamed
        room = None
        if options.offload_weights == "auto":
            room = WeightRoom(device_of(device))
        self.weights = HostWeights(
            options.offload_weights, self.transport, device_of(device), partial(_apply_due, engine), room
        )
        self.unseen_writes = UnseenWrites(device_of(device), recorder)
        self.device_updated = DeviceUpdated(self.streamed, self.weights, self.group_numbers, self.coefficients)
        self._options = options
        self._device = device
        self._index_of: dict[int, int] = {}
        self._shards: list[LocalShard] = []
        self._checked_values: list[object] | None = None  # of param groups, at the last check
        self.numbers: list[GroupNumbers] = []  # of param groups, at the last check
        self._first_options: list[Any] = []  # of param groups, at the first one
        self._layouts: list[tuple[torch.dtype, torch.Size, torch.device]] = []

    # Parameters.

    def add(self, groups: Sequence[Sequence[tuple[str, Parameter]]], first_group: int) -> None:
        """Plan and allocate further parameters, by param group. Nothing may be in flight.

        Raises:
            ValueError: see ``checked_plan``, or ``nvme_path`` cannot hold the state. Nothing has been changed then.
        """
        plan = self.plan_with(groups, first_group)
        new = [param for group in groups for _, param in group]
        first, params = len(self.params), [*self.params, *new]
        counters = counters_of(params, self.counters)
        self.weights.prefetch.drop()  # first: the ring that copies end in is made anew
        with ExitStack() as undo:
            allocated = self.memory.allocate(plan, plan.params[first:], new, undo)
            added = [(plan.params[first + i], param, counters[first + i]) for i, param in enumerate(new)]
            weights = self.weights.decide(plan, added, allocated.hosts.keys())
            undo.callback(weights.discard)
            offloaded: dict[int, OffloadedParam] = {}
            for index, (param_plan, param, counter) in enumerate(added, start=first):
                # One at a time: the device may have no room for all of them.
                if was_left_on_host := take_host_values(param):
                    undo.callback(weights.leave_again, index, param)
                if (host := allocated.hosts.get(index)) is not None:
                    device = DeviceState.allocate(param_plan, self._device)
                    offloaded[index] = OffloadedParam(
                        param_plan, param, host, device, self.transport, self.gradients, counter
                    )
                weights.make(index, param, counter, offloaded.get(index), unloaded=was_left_on_host)
            undo.pop_all()
        # Nothing below can fail: an error above leaves the registry as it was.
        self.memory.keep(allocated)
        self.weights.add(weights)
        self.plan = plan
        self.offloaded.update(offloaded)
        self.group_numbers += [first_group + number for number, group in enumerate(groups) for _ in group]
        for index, param in enumerate(new, start=first):
            self.params.append(param)
            self.given.append(given(param))
            if isinstance(param, LocalShard):
                self._shards.append(param)
            self._index_of[id(given(param))] = index
            self._layouts.append((param.dtype, param.shape, self._device))
            self.counters.append(counters[index])
            counters[index].add(index, param)
            if index not in offloaded:
                self.device_updated.add(plan.params[index], param, counters[index])
            if index not in self.weights.weights and param.numel():  # ranks may have no row of a shard
                self._sample(index)

    def _sample(self, index: int) -> None:
        """Notice unseen writes to the weight of parameter ``index``, if it has a master."""
        plan, param, updated = self.plan.params[index], self.params[index], self.device_updated
        offloaded = self.offloaded.get(index)
        if not plan.trained or is_wrapper_subclass(param) or (offloaded is None and not has_master(param)):
            return
        sampled = SampledWeight(plan.name, param, self.counters[index])
        if offloaded is not None:
            offloaded.weights.sample = sampled
            compare = partial(offloaded.weights.expect, None, flushed_at_load=False)
            self.unseen_writes.add(sampled, None, compare)
        else:
            self.unseen_writes.add(sampled, lambda: updated.state(index) is not None, partial(updated.compare, index))

    def plan_with(self, groups: Sequence[Sequence[tuple[str, Parameter]]], first_group: int, *, freed: int = 0) -> Plan:
        """Plan further parameters, by param group, and check that the machine can hold them. Allocates nothing.

        Raises:
            ValueError: see ``checked_plan``.
        """
        return checked_plan(
            self.plan,
            [*self.params, *(param for group in groups for _, param in group)],
            specs_of(groups, self.rules[first_group : first_group + len(groups)]),
            self._options,
            allocated=len(self.params),
            freed=freed,
            caches=CacheBytes(*(0 if each is None else each.nbytes for each in self.transport.caches)),
            exchanges=self.transport.exchange.overlaps,
        )

    def index_of(self, param: Tensor) -> int | None:
        """The index of ``param`` in the plan; None if it is not one of the parameters."""
        index = self._index_of.get(id(param))
        return index if index is not None and self.given[index] is param else None

    def weight_of(self, index: int) -> Tensor:
        """The values of parameter ``index``, of its shape, to read: in host memory where the device has none."""
        home = self.weights.weights.get(index)
        return self.params[index].detach() if home is None or home.is_on_device() else home.values.read()

    @property
    def model_bytes(self) -> int:
        return sum(param.nbytes for param in self.params)

    # Param groups.

    def coefficients(self, index: int, grad_scale: Number) -> StepCoefficients:
        """The coefficients of parameter ``index``, as ``check_groups`` found them."""
        group = self.group_numbers[index]
        return self.numbers[group].coefficients(grad_scale, self.rules[group])

    def check_groups(self) -> None:
        """Check the current values of the param groups, and use them from here on.

        Raises:
            ValueError, TypeError: no step can use a value; the message has the group's number.
        """
        values = values_of(self.groups, self.rules)
        known = self._checked_values
        if values is None or known is None or len(values) != len(known) or not all(map(operator.is_, values, known)):
            numbers = check_groups(self.groups, self.rules)
            self._first_options += [each.options for each in numbers[len(self._first_options) :]]
            for first, now, rule in zip(self._first_options, numbers, self.rules, strict=True):
                rule.check_change(first, now.options)
            self.numbers = numbers
            self._checked_values = values

    # Storage.

    def changed(self, index: int) -> bool:
        """Whether parameter ``index`` has another dtype, shape or device than planned."""
        param = self.params[index]
        return (param.dtype, param.shape, param.device) != self._layouts[index]

    def check_unchanged(self, indices: Iterable[int] | None = None) -> None:
        """Check dtype, shape and device of parameters, None for all; cheap enough for every step.

        Raises:
            RuntimeError: a parameter changed since it was planned.
        """
        if self._shards:
            self.follow_shards()
        params, layouts = self.params, self._layouts
        for index in range(len(params)) if indices is None else indices:
            param = params[index]
            if (param.dtype, param.shape, param.device) != layouts[index]:
                errors.refuse_changed(param, self.plan.params[index], self._device)

    def follow_shards(self) -> None:
        """Take over the memory of sharded parameters that was replaced."""
        for shard in self._shards:
            shard.follow()

    def follow_storage(self, index: int) -> None:
        """Take over the memory of a sharded parameter, if that was replaced."""
        if isinstance(shard := self.params[index], LocalShard):
            shard.follow()

    def check_storage(self, index: int, param: Tensor) -> None:
        """Check that ``param``, which a graph passed, is parameter ``index``: a graph never sees updates of a copy.

        Raises:
            RuntimeError: it has other memory.
        """
        own = self.params[index]
        if param is not own and not same_memory(param, own):
            raise RuntimeError(
                f"the compiled graph has a copy of {self.plan.params[index].name} instead of the parameter; if the "
                "model was moved or its storage replaced, create the optimizer and compile again, else report this"
            )

    # Gradients.

    def check_gradients(self) -> tuple[bool, list[OffloadedParam]]:
        """Check the gradients in ``.grad`` before an optimizer step.

        Returns:
            Whether any parameter has a gradient, and the parameters whose gradient was not split and copied in the
            backward: the step must take it from ``.grad``.

        Raises:
            TypeError: a gradient is sparse.
            RuntimeError: a gradient was consumed by an earlier optimizer step. Nothing has been changed then.
        """
        present = self.device_updated.check_gradients(self.plan.params)
        untaken: list[OffloadedParam] = []
        for offloaded in self.offloaded.values():
            if offloaded.gradient.copied:  # the usual case, at every step
                present = True
            else:
                present = offloaded.shown.check_gradient() or present
                untaken.append(offloaded)
        return present, untaken

    def finish_factors(self) -> None:
        """Make the factors on all gradients of the optimizer step final, without a wait for the device."""
        on_device: list[GradientRecord] = []
        for offloaded in self.offloaded.values():
            if (record := offloaded.shown.record) is None:
                continue
            clip, unscale = record.clip, record.unscale
            if isinstance(clip, float) and isinstance(unscale, float):
                record.final = UNSCALED
                if not clip == unscale == 1.0:
                    record.final = FinalFactors(Number.known(clip * unscale), Number.known(unscale))
            else:
                on_device.append(record)
        if (factors := self.gradients.factors).deferred:
            step = self.transport.recorder.step
            factors.finish(on_device, self.transport.to_host, device_of(self._device), step=step)

    def drop_grads(self) -> None:
        for param in self.params:
            param.grad = None

    def leave_gradients(self) -> None:
        """Leave unused gradients in ``.grad`` as dense tensors; those that a step has used refuse a further use."""
        for offloaded in self.offloaded.values():
            offloaded.shown.leave_gradient()

    def release_gradients(self, *, keep: bool) -> None:
        """Leave no gradient in ``.grad`` that needs the engine. ``keep``: unused ones become dense there."""
        for offloaded in self.offloaded.values():
            offloaded.shown.release_gradient(keep=keep)

    # Memory, failures and the end.

    @property
    def device_bytes(self) -> int:
        """Device bytes of optimizer state, selections and buffers of staging and streaming; 0 while given back."""
        if self.transport.device_memory.given_back:
            return 0
        offloaded = sum(each.nbytes for each in self.offloaded.values())
        return self.device_updated.nbytes + self.memory.staging_bytes + offloaded

    @property
    def host_bytes(self) -> int:
        """Host bytes of optimizer state, gradient and upload buffers, weights, and of the cache of state in files."""
        return self.memory.host_bytes + self.weights.host_bytes

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory, between steps, behind all work in flight. Nothing refers to that work any longer."""
        self.gradients.forget_numbers()
        self.memory.list_memory(found)
        self.device_updated.resident.list_memory(found)
        self.unseen_writes.list_memory(found)
        for offloaded in self.offloaded.values():
            offloaded.list_memory(found)

    def abandon(self) -> None:
        """Drop everything in flight, failed work too."""
        self.weights.prefetch.drop()
        self.unseen_writes.forget()
        for offloaded in self.offloaded.values():
            offloaded.abandon()
        self.memory.abandon()

    def close(self) -> None:
        """Stop all threads, free host memory, remove files. All updates must have been applied.

        Idempotent; may be repeated after an interrupt.
        """
        with ExitStack() as others:  # after an error of a device or a thread, too
            others.callback(self.memory.free)
            others.callback(self.weights.free)
            others.callback(self.offloaded.clear)  # its tensors are views of the arenas
            # First: these threads read and write the memory that is freed afterwards.
            self.memory.stop_threads()


def _apply_due(engine: weakref.ref[Any], index: int) -> None:
    if (found := engine()) is not None:
        found.access.apply_due_of(index)
