"""Weights as code reads and writes them: graphs, FSDP2, and readers outside of compiled graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zenflow_compile.planning.weight_memory import OffloadedWeights
from zenflow_compile.runtime.engine_core import EngineCore
from zenflow_compile.runtime.parameters.host_values import Place
from zenflow_compile.torch_internals import torch_private


class WeightAccess:
    """Makes due updates visible, and weights in host memory present, before they are read or written."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.in_backward = core.in_backward
        self.registry, self.params, self.offloaded = core.registry, core.params, core.offloaded
        self.streamed, self.weights = core.streamed, core.weights
        self.uploads, self.calls = core.uploads, core.calls

    # Graphs.

    def declare_forward_order(self, order: Sequence[int]) -> None:
        """Set the order of parameters by first use in a forward graph; jobs and uploads run in this order."""
        self.uploads.declare_order(order)

    def fetch_parameters_(self, ps: Sequence[int], params: Sequence[Tensor]) -> None:
        """Make due updates of parameters that are about to be read visible, and start the uploads that follow."""
        core = self.core
        if core.failure is not None or core.closing:
            core.check()
        for call in core.moments.forward:
            call()
        step, own, uploads = core.step, self.params, self.uploads
        for p, param in zip(ps, params, strict=True):
            if param is not own[p]:
                self.registry.check_storage(p, param)
            offloaded = self.offloaded[p]
            offloaded.uses += 1
            weights = offloaded.weights
            # Without an update in flight the step notices writes in time, unless updates run in the backward.
            in_flight = offloaded.host.flushed or offloaded.arriving is not None
            if in_flight or weights.counter.shared or (self.in_backward and weights.written_by_others):
                for follow in core.moments.enter:
                    follow()
                uploads.before_use(offloaded, step)

    def begin_weights(self, graph: int) -> None:
        """Start the copies of the weights that ``graph``, which begins, loads first."""
        core = self.core
        if core.closing or core.failure is not None:
            return
        for follow in core.moments.enter:
            follow()
        self.weights.begin(graph)

    def load_weight_(self, p: int, inputs: Sequence[Tensor]) -> None:
        """Load a weight, which ``inputs`` of the graph have, unless the device has it."""
        if torch_private.saves_tensors_elsewhere():
            raise RuntimeError(
                "saved_tensors_hooks (or save_on_cpu) are active, and would read weights that offload_weights keeps "
                "in host memory; run the compiled model outside of them, or pass offload_weights=False"
            )
        for follow in self.core.moments.enter:
            follow()
        self.weights.load(p, inputs)

    def unload_weight_(self, p: int) -> None:
        """Give the device's memory of a weight back, which a graph has read for the last time for now."""
        for follow in self.core.moments.enter:
            follow()
        self.weights.unload(p)

    def before_load(self) -> None:
        """Apply due updates before weights are loaded into the model, so that the loaded weights win."""
        self.uploads.before_load(self.core.step)

    def synchronize(self) -> None:
        """Wait for work in flight, which may raise, and make due updates visible. The trajectory stays as it was."""
        core = self.core
        core.check()
        core.check_backward()
        self.registry.follow_shards()
        self.uploads.apply_due(core.step)
        for offloaded in self.uploads.by_deadline():
            offloaded.host.wait()
            offloaded.host.wait_for_copies()
        for call in core.moments.settle:
            call()
        self.streamed.wait()

    def apply_due(self, params: Iterable[Tensor] | None = None) -> None:
        """Make due updates, of all parameters or of ``params``, visible to code that reads weights without a fetch.

        Cheap when nothing is due. It runs as outside of inference mode, tracing, functorch transforms and dispatch
        modes, which belong to the reader and not to the updates.

        Raises:
            RuntimeError: work in flight failed, a weight was written while an update of it was in flight, or an update
                is due in a forked child.
        """
        core = self.core
        core.check()
        if not self.uploads.is_current(core.step):
            only = None
            if params is not None:
                only = {index for param in params if (index := self.registry.index_of(param)) is not None}
            with torch_private.outside_of_transforms():
                self.uploads.apply_due(core.step, only)

    def apply_due_of(self, index: int) -> None:
        """Make due updates of one parameter visible, which a graph is going to fetch."""
        if (offloaded := self.offloaded.get(index)) is not None and offloaded.host.flushed:
            self.uploads.before_use(offloaded, self.core.step)

    def before_unshard(self, sharded: Sequence[Tensor]) -> None:
        """Make due updates of parameters that FSDP2 is about to gather visible, and start the uploads that follow.

        Raises RuntimeError as ``apply_due`` does.
        """
        core = self.core
        if core.failure is not None or core.closing:
            core.check()
        chosen = [self.offloaded[p] for each in sharded if (p := self.registry.index_of(each)) in self.offloaded]
        if torch_private.current_graph_task() == -1:  # weights are gathered for backwards, too
            self.uploads.extend_order([offloaded.plan.index for offloaded in chosen])
            if torch.is_grad_enabled():
                for call in core.moments.forward:
                    call()
        for offloaded in chosen:
            offloaded.uses += 1
        if not any(offloaded.host.flushed for offloaded in chosen):
            return
        for follow in core.moments.enter_ahead:
            follow()
        with self.calls.announcing(), torch_private.outside_of_transforms():
            for offloaded in chosen:
                self.registry.follow_storage(offloaded.plan.index)
                self.uploads.before_use(offloaded, core.step)

    @property
    def offloaded_weights(self) -> OffloadedWeights | None:
        """What graphs load and unload; None without any."""
        return self.weights.offloaded

    def keep_weights(self, reasons: Mapping[int, str]) -> None:
        """Keep weights on the device from now on, for ``reasons`` by index of the parameter."""
        core = self.core
        marked = [self.offloaded[p] for p in reasons if p in self.offloaded]
        with torch_private.outside_of_transforms():  # a graph is being compiled, with fake tensors
            self.uploads.apply_due(core.step, reasons.keys())
            unwritten = [each for each in marked if each.weights.home and not each.weights.written_by_others]
            self.weights.keep(reasons)
            core.arrange()
        for offloaded in unwritten:
            offloaded.weights.accept()  # it may have other memory now

    def hold_weights(self, params: Iterable[Tensor] | None = None, *, to_write: bool = False) -> None:
        """Load weights, None: all, for code that is no graph of ours, until the next optimizer step.

        Args:
            to_write: that code overwrites them: values that a file has lost do not raise.
        """
        core = self.core
        if not self.weights.weights:
            return
        if core.failure is not None:
            # Hazard: weights in files take turns in memory. A load would wait for the job of another parameter, which
            # an interrupted step has never queued.
            self.uploads.withdraw(core.failure)
        for follow in core.moments.enter:
            follow()
        ps = None if params is None else [p for param in params if (p := self.registry.index_of(param)) is not None]
        with torch_private.outside_of_transforms():
            self.weights.hold(ps, to_write=to_write)

    def weight_on_host(self, param: Tensor) -> Tensor | None:
        """Copy the values of a weight that is in host memory, in the parameter's shape; None of any other tensor."""
        if (index := self.registry.index_of(param)) is None:
            return None
        home = self.weights.weights.get(index)
        if home is None or home.is_on_device():
            return None
        values = self.registry.weight_of(index)
        return values.clone() if home.values.place is Place.WHOLE else values  # of slices it is a copy already

    def release_weights(self, params: Iterable[Tensor] | None = None) -> None:
        """Unload weights that are held. None: all."""
        for follow in self.core.moments.enter:
            follow()
        self.weights.release(
            None if params is None else [p for each in params if (p := self.registry.index_of(each)) is not None]
        )

    def write_weight(self, index: int, values: Tensor) -> None:
        """Overwrite a weight, where it is, below autograd."""
        if (home := self.weights.weights.get(index)) is not None:
            home.write(values)
        else:
            self.params[index].data.copy_(values)
