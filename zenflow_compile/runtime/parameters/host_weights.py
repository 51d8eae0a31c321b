"""Weights in host memory, each on the device only while something reads it.

The storage of such a weight is empty in between. It is resized in place: autograd may have saved the parameter, or
views of it, and finds them loaded in the backward. A weight stays on the device until a compiled graph, which loads it
for its uses, unloads it for the first time.

The host's copy is what the optimizer reads and writes (``Weights.matrix``). Nothing writes it between a forward and its
backward: host updates are merged in front of a forward, and slices are updated in ``step()``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.checks.user_frame import user_stacklevel
from zenflow_compile.native.storage_reads import allow_reads, refuse_reads
from zenflow_compile.planning.offloaded_weights import SMALLEST_WEIGHT_BYTES, OffloadedWeights, weight_budget
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.torch_internals.torch_private import storage_identity

_NOTICED_AFTER = 2  # steps: by then a loop has compiled what it runs
_NAMED = 4
_REFUSED = (
    "{} is in host memory, and code outside of the compiled graphs reads or writes it: do that inside of `with "
    "optimizer.loaded_weights():`, or behind optimizer.synchronize()"
)


class HostWeight:
    """One weight.

    Args:
        note: called with each change of the bytes on the device.

    Attributes:
        values: of the parameter's shape and dtype, in host memory; valid if ``offloaded``.
        served: a compiled graph loads it for its uses.
        offloaded: the host's copy counts, and the device may have another one.
        loaded: the device has the values.
        readers: graphs that have loaded it, and not unloaded: several run at a time in threads, or inside each other.
        held: code without an unload of its own reads the weight: it stays loaded until the next optimizer step.
    """

    def __init__(
        self,
        plan: ParamPlan,
        param: Parameter,
        counter: VersionCounter,
        values: Tensor,
        note: Callable[[int], None],
    ) -> None:
        self.plan = plan
        self.param = param
        self.values = values
        self.served = False
        self.offloaded = False
        self.loaded = True
        self.readers = 0
        self.held = False
        self._counter = counter
        self._note = note
        self._storage = storage_identity(param.untyped_storage())
        self._bumps = 0  # external ones, at the last load

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.values.nbytes

    @property
    def matrix(self) -> Tensor:
        """View the host's copy as [rows, columns]."""
        return self.values.view(self.values.shape[0], -1)

    @property
    def replaced(self) -> bool:
        """Whether the parameter has other memory than at the last look (``param.data = ...``)."""
        return storage_identity(self.param.untyped_storage()) != self._storage

    def is_read_by(self, inputs: Sequence[Tensor]) -> bool:
        """Whether these tensors have the parameter's memory: are the parameter, or views of it."""
        own = storage_identity(self.param.untyped_storage())
        return all(storage_identity(each.untyped_storage()) == own for each in inputs)

    def load(self) -> None:
        """Fill the device's memory. The version of the parameter does not move: its values are what they were."""
        if self.replaced:
            self.adopt()
            return
        storage = self.param.untyped_storage()
        allow_reads(storage)
        storage.resize_(self.nbytes)
        self.param.data.copy_(self.values)  # ``.data`` has a version counter of its own
        self._is_loaded()

    def unload(self) -> None:
        """Give the device's memory back. Values that other code has written are kept."""
        if not self.offloaded or self.replaced or self._counter.external_bumps(self.param) != self._bumps:
            self.adopt()
        storage = self.param.untyped_storage()
        storage.resize_(0)
        refuse_reads(storage, self.nbytes, _REFUSED.format(self.plan.name))
        self.offloaded, self.loaded, self.held = True, False, False
        self._note(-self.nbytes)

    def adopt(self) -> None:
        """Copy the device's values to the host."""
        self.values.copy_(self.param.detach())
        self._storage = storage_identity(self.param.untyped_storage())
        self._is_loaded()

    def _is_loaded(self) -> None:
        self._bumps = self._counter.external_bumps(self.param)
        if not self.loaded:
            self.loaded = True
            self._note(self.nbytes)

    def refresh(self) -> None:
        """Copy the host's values, which the optimizer has written, to the device, if it has some."""
        if self.loaded:
            self.load()


class HostWeights:
    """The weights of one engine that may be offloaded.

    Args:
        option: ``offload_weights``; False: there are none.

    Attributes:
        weights: by index in the plan.
        kept: why a weight stays on the device all the time, by index.
        budget_bytes: of loaded weights.
        loaded_bytes: of weights that may be unloaded, now; peak_bytes: at most since the last optimizer step began.
        held_bytes: of those that are held, since then.
        loads: since then.
    """

    def __init__(self, option: float | bool, recorder: Recorder) -> None:
        self.weights: dict[int, HostWeight] = {}
        self.kept: dict[int, str] = {}
        self.budget_bytes = 0
        self.loaded_bytes = self.peak_bytes = self.held_bytes = self.loads = 0
        self._steps = 0
        self._option = option
        self._recorder = recorder
        self._lock = threading.RLock()
        self._arenas: list[HostArena] = []

    def add(self, params: Sequence[tuple[ParamPlan, Parameter, VersionCounter]]) -> None:
        """Allocate host memory for those of ``params`` that can be offloaded.

        Raises:
            ValueError: see ``weight_budget``.
        """
        if self._option is False:
            return
        chosen = []
        for plan, param, counter in params:
            if (reason := _refusal(plan, param, counter)) is None:
                chosen.append((plan, param, counter))
            else:
                self.kept[plan.index] = reason
        known = {each.plan.name: each.nbytes for each in self.weights.values()}
        self.budget_bytes = weight_budget(self._option, known | {plan.name: param.nbytes for plan, param, _ in chosen})
        arena = HostArena(carved_bytes([(plan.shape, plan.dtype) for plan, _, _ in chosen]))
        self._arenas.append(arena)
        for plan, param, counter in chosen:
            self.weights[plan.index] = HostWeight(plan, param, counter, arena.take(plan.shape, plan.dtype), self._count)
            self._count(param.nbytes)

    @property
    def offloaded(self) -> OffloadedWeights | None:
        """What graphs load and unload; None without any."""
        ps = frozenset(self.weights)
        return OffloadedWeights(ps, self.budget_bytes) if ps else None

    @property
    def host_bytes(self) -> int:
        """Host memory of the weights."""
        return sum(arena.total_bytes for arena in self._arenas)

    def keep(self, reasons: Mapping[int, str]) -> None:
        """Keep these on the device from now on. They may be loaded or not."""
        for p, reason in reasons.items():
            if (weight := self.weights.pop(p, None)) is not None:
                self.kept[p] = reason
                self._bring_in(weight)
                weight.offloaded = False
                self._count(-weight.nbytes)

    # Around uses.

    def load(self, p: int, inputs: Sequence[Tensor]) -> None:
        """Load a weight, unless the device has it.

        Args:
            inputs: what a graph reads.

        Raises:
            RuntimeError: these tensors have other memory than the parameter.
        """
        if (weight := self.weights.get(p)) is None:
            return
        if not weight.is_read_by(inputs):
            raise RuntimeError(
                f"the compiled graph reads a copy of {weight.plan.name}, which is in host memory; please report this, "
                "and train with offload_weights=False until then"
            )
        with self._lock:
            weight.served = True
            weight.readers += 1
            self._bring_in(weight)

    def unload(self, p: int) -> None:
        """Give a weight's device memory back, unless other code reads it."""
        if (weight := self.weights.get(p)) is None:
            return
        with self._lock:
            weight.readers = max(0, weight.readers - 1)
            if weight.loaded and not weight.readers and not weight.held:
                weight.unload()

    def hold(self, ps: Iterable[int] | None = None) -> None:
        """Load weights for code that does not unload them, until the next optimizer step. None: all."""
        for p in self.weights if ps is None else ps:
            if (weight := self.weights.get(p)) is not None:
                with self._lock:
                    self._bring_in(weight)
                self.held_bytes += 0 if weight.held else weight.nbytes
                weight.held = True

    def release(self, ps: Iterable[int] | None = None) -> None:
        """Unload weights that are held, or that were left behind by a forward that failed. None: all."""
        for p in self.weights if ps is None else ps:
            if (weight := self.weights.get(p)) is not None and weight.served:
                weight.held, weight.readers = False, 0
                self.unload(p)

    @contextmanager
    def loaded(self, ps: Iterable[int]) -> Iterator[None]:
        """Load weights for an update on the device inside of the block, which writes them."""
        chosen = [weight for p in ps if (weight := self.weights.get(p)) is not None and weight.offloaded]
        for weight in chosen:
            self._bring_in(weight)
        yield
        for weight in chosen:
            weight.adopt()
            self.unload(weight.plan.index)

    def in_turns(self, ps: Sequence[int]) -> Iterator[Sequence[int]]:
        """Cut parameters into runs whose weights fit the budget, or are one."""
        run: list[int] = []
        room = self.budget_bytes
        for p in ps:
            weight = self.weights.get(p)
            size = weight.nbytes if weight is not None and weight.offloaded else 0
            if run and size > room:
                yield run
                run, room = [], self.budget_bytes
            run.append(p)
            room -= size
        if run:
            yield run

    def begin_step(self) -> None:
        """An optimizer step begins: whatever read weights has ended."""
        self.release()
        self._steps += 1
        if self._steps == _NOTICED_AFTER:
            self._warn_of_unread()
        self.peak_bytes, self.held_bytes, self.loads = self.loaded_bytes, 0, 0

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

    def _bring_in(self, weight: HostWeight) -> None:
        if weight.loaded:
            return
        with self._recorder.compute("load", param=weight.plan.name):
            weight.load()
        self.loads += 1

    def _count(self, change: int) -> None:
        self.loaded_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.loaded_bytes)

    # The end.

    def restore(self) -> None:
        """Load all weights for good. Idempotent."""
        self.keep(dict.fromkeys(self.weights, "the optimizer is closed"))

    def free(self) -> None:
        """Free the host memory, behind ``restore``. Idempotent."""
        for arena in self._arenas:
            arena.close()


def _refusal(plan: ParamPlan, param: Parameter, counter: VersionCounter) -> str | None:
    """Why a weight stays on the device; None if it can be offloaded."""
    storage = param.untyped_storage()
    if param.nbytes < SMALLEST_WEIGHT_BYTES:
        return f"it is small: {param.nbytes} bytes"
    if not param.is_contiguous():
        return "its memory is not contiguous"
    if counter.shared or counter.exposed or param.storage_offset() or storage.nbytes() != param.nbytes:
        return "it shares memory with other tensors"
    if type(param) is not Parameter or plan is not plan.whole:
        return "it is sharded, or a tensor subclass"
    return None
