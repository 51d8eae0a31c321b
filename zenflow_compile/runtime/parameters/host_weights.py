"""The weights of an engine that are in host memory, each on the device only while something reads it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.planning.plan import ParamPlan, Plan
from zenflow_compile.planning.weight_memory import (
    SMALLEST_WEIGHT_BYTES,
    GraphLoads,
    OffloadedWeights,
    divide_budget,
    weight_budget,
)
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes
from zenflow_compile.runtime.parameters.host_values import HostValues, SliceStates
from zenflow_compile.runtime.parameters.host_weight import HostWeight
from zenflow_compile.runtime.parameters.moved_weights import SHARED, is_left_on_host, leave_on_host, not_emptied
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.shared_memory import overlapping
from zenflow_compile.runtime.parameters.transport import Transport
from zenflow_compile.runtime.parameters.weight_prefetch import WeightPrefetch
from zenflow_compile.torch_internals.torch_private import storage_identity

RESERVE = 20  # one of so many parts of the limit stays free: later steps differ, and allocators round up
_MEASURED = 3  # the optimizer step that begins behind a measured one: the first compiles, the second makes buffers
_NOTICED_AFTER = 2  # steps: by then a loop has compiled what it runs
_NAMED = 4
WITHIN_BUDGET = "the budget of offload_weights has room for it"


class WeightRoom:
    """What the peak of one step leaves of the device memory that this process may use.

    The peak is that of the allocator's statistics, which are reset. A number never depends on it: training is
    bit-identical with any weights kept, so a measurement that differs between runs is harmless.

    Raises:
        ValueError: see ``check_room``.

    Attributes:
        limit_bytes: of device memory: what is free when this is made, and what PyTorch has reserved.
    """

    def __init__(self, device: Device) -> None:
        check_room(device)
        self._device = device
        self._steps = 0
        device.reset_peak()  # the peak is what is allocated now
        free, allocated = device.free_bytes(), device.peak_bytes()
        assert free is not None
        assert allocated is not None
        self.limit_bytes = free + device.unused_bytes() + allocated

    def restart(self) -> None:
        """Measure again: there are other weights."""
        self._steps = 0

    def begin_step(self, *, steady: bool) -> int | None:
        """An optimizer step begins.

        Args:
            steady: since the last one, graphs have loaded weights, and no other code has held them.

        Returns:
            Bytes for weights besides what the device has had at the peak, behind the step that is measured; else None.
        """
        self._steps += 1
        if self._steps > _MEASURED:
            return None
        if self._steps < _MEASURED or not steady:
            self._steps = min(self._steps, _MEASURED - 1)
            self._device.reset_peak()
            return None
        peak = self._device.peak_bytes()
        assert peak is not None
        return self.limit_bytes - peak - self.limit_bytes // RESERVE


def check_room(device: Device) -> None:
    """
    Raises:
        ValueError: the device does not count allocated memory, or has none of its own.
    """
    if device.peak_bytes() is None or device.free_bytes() is None:
        raise ValueError(
            f'offload_weights="auto" needs a device that counts its own memory, which {device.torch_device} does '
            "not; pass the bytes that loaded weights may take, or the share of them that leaves the device, such as 0.5"
        )


@dataclass(eq=False)
class NewWeights:
    """Parameters whose weights are about to be offloaded.

    Attributes:
        offloaded: their plans, by index.
        kept: why others stay on the device, by index.
        weights: those that were made, by index.
        shapes: of all parameters of the plan.
        arena: host memory of those without host state.
    """

    _transport: Transport
    _note: Callable[[int], None]
    offloaded: dict[int, ParamPlan] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)
    weights: dict[int, HostWeight] = field(default_factory=dict)
    ring_bytes: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    arena: HostArena | None = None

    def make(
        self, index: int, param: Parameter, counter: VersionCounter, on_host: OffloadedParam | None, *, unloaded: bool
    ) -> None:
        """Make the weight of a parameter, if it is one of these.

        ``on_host``: the parameter, if it has host state. ``unloaded``: it begins with the values in host memory alone.
        """
        if (plan := self.offloaded.get(index)) is None:
            return
        assert self.arena is not None
        whole, states = None, None
        if on_host is None:
            whole = self.arena.take(plan.shape, plan.dtype)
        else:
            weights = on_host.weights
            states = SliceStates(on_host.host, on_host.device, lambda: weights.written_by_others)
        values = HostValues(plan, self._transport, device_of(param.device), whole, states)
        weight = self.weights[index] = HostWeight(param, counter, values, self._note)
        self._note(weight.nbytes)
        if on_host is not None:
            on_host.weights.home = weight
        if unloaded:
            weight.served = True
            weight.unload()

    def discard(self) -> None:
        """Do not count these weights, behind an error."""
        for weight in self.weights.values():
            if weight.loaded:
                self._note(-weight.nbytes)

    def leave_again(self, index: int, param: Parameter) -> None:
        """Leave the values of a parameter on the host again, behind an error."""
        weight = self.weights.get(index)
        if weight is None or weight.loaded:
            leave_on_host(param, param.detach().to("cpu", copy=True))
            return
        weight.leave_on_host()


class HostWeights:
    """The weights of one engine that may be offloaded.

    Args:
        option: ``offload_weights``; False: there are none.
        apply_due: makes due updates of a parameter visible, by index.

    Attributes:
        kept: why a weight stays on the device all the time, by index.
        fitting: what ``offload_weights="auto"`` keeps on the device from this step on, with the reason, for ``keep``.
            Nothing is recompiled: their loads and unloads in compiled graphs do nothing from then on.
        ring_bytes: of loaded weights.
        loaded_bytes: of weights that may be unloaded, now; peak_bytes: at most since the last optimizer step began.
        held_bytes: of those that are held, since then; loads: since then.
        room: as given.
    """

    def __init__(
        self,
        option: float | Literal[False, "auto"],
        transport: Transport,
        device: Device,
        apply_due: Callable[[int], None],
        room: WeightRoom | None = None,
    ) -> None:
        self.weights: dict[int, HostWeight] = {}
        self.kept: dict[int, str] = {}
        self.fitting: dict[int, str] = {}
        self.ring_bytes = 0
        self.loaded_bytes = self.peak_bytes = self.held_bytes = self.loads = 0
        self.prefetch = WeightPrefetch(transport, self.weights, apply_due)
        self._steps = 0
        self._option = option
        self._transport = transport
        self._device = device
        self.room = room
        self._shapes: list[tuple[int, ...]] = []  # of all parameters
        self._lock = threading.RLock()
        self._arenas: list[HostArena] = []

    def decide(
        self, plan: Plan, new: Sequence[tuple[ParamPlan, Parameter, VersionCounter]], hosts: Container[int]
    ) -> NewWeights:
        """Decide which of the ``new`` parameters are offloaded: those that can be, and that the budget does not keep.

        ``plan`` is of all parameters, and ``hosts`` has the indices of those with host state.

        Raises:
            ValueError: see ``weight_budget``.
        """
        decided = NewWeights(self._transport, self._count)
        if self._option is False:
            return decided
        chosen: dict[int, ParamPlan] = {}
        overlap = set(chain.from_iterable(overlapping([param for _, param, _ in new])))
        for position, (each, param, counter) in enumerate(new):
            if position in overlap:
                decided.kept[each.index] = SHARED
            elif (reason := _refusal(each, param, counter)) is None:
                chosen[each.index] = each
            else:
                decided.kept[each.index] = reason
        plans = [*(each.plan for each in self.weights.values()), *chosen.values()]
        if not plans:
            return decided
        budget = weight_budget(self._option, {each.name: each.weight_bytes for each in plans})
        if self.room is None:  # a measured peak has those that are kept already
            kept = (p for p, reason in self.kept.items() if reason == WITHIN_BUDGET)
            budget -= sum(plan.params[p].weight_bytes for p in kept)
        sizes = {each.index: each.weight_bytes for each in plans}
        decided.shapes = [each.shape for each in plan.params]
        largest = max(sizes.values())
        ring_bytes = largest if budget < largest else None  # kept weights have taken the budget of a ring
        streamed, decided.ring_bytes = divide_budget(budget, decided.shapes, sizes, ring_bytes=ring_bytes)
        decided.kept.update(dict.fromkeys(chosen.keys() - streamed, WITHIN_BUDGET))
        decided.offloaded = {index: each for index, each in chosen.items() if index in streamed}
        staged = [each.values.staged_bytes for each in self.weights.values()]
        staged += [each.upload_bytes if p in hosts else each.weight_bytes for p, each in decided.offloaded.items()]
        largest = max(staged, default=0)
        on_device = [each for p, each in decided.offloaded.items() if p not in hosts]
        asynchronous = self._device.streams is not None
        decided.arena = HostArena(
            carved_bytes([(each.shape, each.dtype) for each in on_device]), self._device if asynchronous else None
        )
        if decided.arena.total_bytes and asynchronous:
            decided.arena.pin(self._device, "a larger offload_weights, which keeps more weights on the device")
        self.prefetch.drop()
        self._transport.up_ring.fit(largest)
        return decided

    def add(self, decided: NewWeights) -> None:
        """Serve what was decided and made. Cannot fail."""
        if decided.arena is not None:
            self._arenas.append(decided.arena)
            self.ring_bytes = decided.ring_bytes
            self.prefetch.resize(decided.ring_bytes)
            self._shapes = decided.shapes
            if self.room is not None:
                self.room.restart()
        self.kept.update(decided.kept)
        self.weights.update(decided.weights)

    @property
    def offloaded(self) -> OffloadedWeights | None:
        """What graphs load and unload; None without any."""
        ps = frozenset(self.weights)
        strict = isinstance(self._option, int)
        return OffloadedWeights(ps, self.ring_bytes, strict) if ps else None

    @property
    def host_bytes(self) -> int:
        """Host memory of weights without host state: those of the others are in upload buffers."""
        return sum(arena.total_bytes for arena in self._arenas)

    def keep(self, reasons: Mapping[int, str]) -> None:
        """Keep these on the device from now on. They may be loaded or not, without due updates."""
        for p, reason in reasons.items():
            if (weight := self.weights.get(p)) is not None:
                self._bring_in(weight)
                self.weights.pop(p)
                self.kept[p] = reason
                weight.values.discard()
                self._count(-weight.nbytes)

    # Around uses.

    def declare(self, graph: int, loads: GraphLoads) -> None:
        """Note the loads of a compiled graph, in their order."""
        with self._lock:
            self.prefetch.declare(graph, loads)

    def begin(self, graph: int) -> None:
        """A graph with loads begins to run."""
        with self._lock:
            for p in self.prefetch.begin(graph):
                weight = self.weights.get(p)
                if weight is not None and weight.loaded and not weight.readers and not weight.held:
                    weight.unload()

    def load(self, p: int, inputs: Sequence[Tensor]) -> None:
        """Load a weight, unless the device has it. ``inputs``: what a graph reads.

        Raises:
            RuntimeError: these tensors have other memory than the parameter.
        """
        if (weight := self.weights.get(p)) is None:
            return
        own = storage_identity(weight.param.untyped_storage())
        if any(storage_identity(each.untyped_storage()) != own for each in inputs):
            raise RuntimeError(
                f"the compiled graph reads a copy of {weight.plan.name}, which is in host memory; please report this, "
                "and train with offload_weights=False until then"
            )
        with self._lock:
            weight.served = True
            self._bring_in(weight)
            weight.readers += 1  # not before: a load that fails is no reader
            self.prefetch.go_on()

    def unload(self, p: int) -> None:
        """Give a weight's device memory back, unless other code reads it."""
        if (weight := self.weights.get(p)) is None:
            return
        with self._lock:
            weight.readers = max(0, weight.readers - 1)
            if weight.loaded and not weight.readers and not weight.held:
                if self.prefetch.carries(p):
                    self.prefetch.carried.add(p)
                else:
                    weight.unload()

    def hold(self, ps: Iterable[int] | None = None, *, to_write: bool = False) -> None:
        """Load weights for code that does not unload them, until the next optimizer step. None: all.

        ``to_write``: that code overwrites them, so that lost ones do not raise.
        """
        for p in self.weights if ps is None else ps:
            if (weight := self.weights.get(p)) is not None:
                with self._lock:
                    self._bring_in(weight, to_write=to_write)
                self.held_bytes += 0 if weight.held else weight.nbytes
                weight.hold()

    def release(self, ps: Iterable[int] | None = None) -> None:
        """Unload weights that are held, or that were left behind by a forward that failed. None: all."""
        for p in self.weights if ps is None else ps:
            if (weight := self.weights.get(p)) is not None and weight.served:
                weight.check_held()
                weight.held, weight.readers = False, 0
                with self._lock:
                    if weight.loaded:
                        weight.unload()

    @contextmanager
    def loaded(self, ps: Iterable[int]) -> Iterator[None]:
        """Load weights for an update on the device inside of the block, which writes them."""
        chosen = [weight for p in ps if (weight := self.weights.get(p)) is not None and weight.values.offloaded]
        for weight in chosen:
            self._bring_in(weight)
        try:
            yield
        finally:
            for weight in chosen:
                weight.write_back()
            for weight in chosen:
                self.unload(weight.plan.index)

    def in_turns(self, ps: Sequence[int]) -> Iterator[Sequence[int]]:
        """Cut parameters into runs whose weights fit the budget, or are one."""
        run: list[int] = []
        room = self.ring_bytes
        for p in ps:
            weight = self.weights.get(p)
            size = weight.nbytes if weight is not None and weight.values.offloaded else 0
            if run and size > room:
                yield run
                run, room = [], self.ring_bytes
            run.append(p)
            room -= size
        if run:
            yield run

    def begin_step(self) -> None:
        """An optimizer step begins: whatever read weights has ended."""
        self.release()
        self.fitting = self._fitting()
        self._steps += 1
        if self._steps == _NOTICED_AFTER:
            self._warn_of_unread()
        self.peak_bytes, self.held_bytes, self.loads = self.loaded_bytes, 0, 0

    def _fitting(self) -> dict[int, str]:
        if self.room is None:
            return {}
        # Those that no graph loads are on the device already, and in its peak.
        sizes = {p: weight.nbytes for p, weight in self.weights.items() if weight.served}
        spare = self.room.begin_step(steady=bool(sizes) and not self.held_bytes)
        if spare is None or spare <= 0:
            return {}
        # Graphs that are compiled load within their ring: a larger one would be of no use to them.
        streamed, _ = divide_budget(self.ring_bytes + spare, self._shapes, sizes, ring_bytes=self.ring_bytes)
        # Copies that are on their way would keep their buffers if a weight found no memory.
        self.prefetch.drop()
        return dict.fromkeys(sorted(sizes.keys() - streamed), WITHIN_BUDGET)

    def _warn_of_unread(self) -> None:
        names = [each.plan.name for each in self.weights.values() if not each.served]
        if names:
            listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            warnings.warn(
                f"offload_weights: {len(names)} weights stay on the device, because no graph that torch.compile(..., "
                f'backend="zenflow") made reads them: {listed}',
                UserWarning,
                stacklevel=user_stacklevel(),
            )

    def end_step(self) -> None:
        """An optimizer step has ended: the next forward's first loads may begin."""
        with self._lock:
            self.prefetch.end_step()

    def _bring_in(self, weight: HostWeight, *, to_write: bool = False) -> None:
        staged = self.prefetch.take(weight.plan.index)
        if staged is not None and (weight.loaded or to_write):
            staged.drop()
            staged = None
        if weight.loaded:
            if not to_write:
                weight.check_not_lost()
            return
        if to_write:
            weight.load_to_write()
        else:
            weight.load(staged)
        self.loads += 1

    def _count(self, change: int) -> None:
        self.loaded_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.loaded_bytes)

    # The end.

    def restore(self) -> None:
        """Load all weights for good; those that the device has no room for are left in host memory. Idempotent.

        Raises:
            RuntimeError: work in flight has failed. Each weight has the values that are left, all the same.
        """
        self.prefetch.drop()
        failure: Exception | None = None
        for p in tuple(self.weights):
            try:
                self.keep({p: "the optimizer is closed"})
            except torch.OutOfMemoryError:
                self.weights.pop(p).leave_on_host()
            except Exception as error:
                failure = failure or error
                self.weights[p].values.updates_failed(on_device=self.weights[p].loaded)
                self.keep({p: "the optimizer is closed"})
        if failure is not None:
            raise failure

    def free(self) -> None:
        """Free the host memory, behind ``restore``. Idempotent."""
        for arena in self._arenas:
            arena.close()


def _refusal(plan: ParamPlan, param: Parameter, counter: VersionCounter) -> str | None:
    """Why a weight stays on the device; None if it can be offloaded."""
    if param.nbytes < SMALLEST_WEIGHT_BYTES:
        return f"it is small: {param.nbytes} bytes"
    if counter.shared or counter.exposed:
        return SHARED
    if not is_left_on_host(param) and (reason := not_emptied(param)) is not None:
        return reason
    if type(param) is not Parameter or plan is not plan.whole:
        return "it is sharded, or a tensor subclass"
    if plan.streamed:
        return "its optimizer state is streamed through the device"
    return None
