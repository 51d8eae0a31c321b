"""Gradients as they arrive: from graphs, from hooks on ``.grad``, and from autograd's accumulation into ``.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.runtime import errors
from zenflow_compile.runtime.autograd_hooks import end_callback
from zenflow_compile.runtime.engine_core import EngineCore
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.torch_internals import torch_private


class GradientIntake:
    """Takes the gradients of each backward, and knows when one begins and ends."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.registry, self.params, self.offloaded = core.registry, core.params, core.offloaded
        self.backward, self.stale = core.backward, core.stale
        self.uploads, self.calls = core.uploads, core.calls
        self._end_callback = end_callback(weakref.ref(self))

    def begin_backward(self, arrived: int | None = None) -> None:
        """Begin a backward that is not known yet; ``arrived``: the parameter whose gradient showed it."""
        core = self.core
        if core.failure is not None or core.closing:
            core.check()
        task = torch_private.current_graph_task()
        backward = self.backward
        if task == backward.task:
            return
        core.used = True
        for call in core.moments.enter_backward:
            call()
        self.prepare(arrived)
        # Only now: the checks above read the old task, which is None unless an earlier backward failed or still runs.
        backward.task = task
        backward.contributed = backward.received = False
        torch_private.queue_backward_callback(self._end_callback)
        for call in core.moments.begin_backward:
            call()

    def prepare(self, arrived: int | None) -> None:
        """Prepare for a backward that begins: nothing where ``step()`` follows."""

    def end_backward(self, *, nested: bool) -> None:
        """End the backward, and with it the step of the optimizer-in-backward form.

        A backward that was asked for no gradient of the engine's (``torch.autograd.grad(loss, x)``) does not count.

        Raises:
            RuntimeError: the backward ran inside another one, which goes on: the step would come too early.
        """
        core = self.core
        if nested:
            self.backward.task = None
            self.refuse_nested()
            return
        for call in core.moments.end_backward:
            call()
        if self.backward.contributed:
            for call in core.moments.contributed:
                call()
            self.backward.count += 1
            self.after_backward()
        self.backward.task = None  # last: until here an interrupt leaves the same state as a backward that raised

    def offload_gradients(self, ps: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Take the gradients of the parameters ``ps`` from a graph, and start their copies."""
        core = self.core
        split_now, chosen = core.splits_now, [self.offloaded[p] for p in ps]
        contribute = self.calls.contribute
        with self.backward.lock:
            for call in core.moments.gradients:
                call()
            # Under the lock: a backward in another thread may bring a gradient of the same parameter.
            # The usual case, at every backward: every gradient was asked for, and goes into an empty ``.grad``.
            usual = self.all_accumulate(chosen)
            for offloaded, grad in zip(chosen, grads, strict=True):
                param = offloaded.param
                free = usual and param.grad is None and not param._backward_hooks
                if not free and not self._takes(offloaded, grad):
                    continue
                contribute(offloaded, grad, send=split_now)

    def _takes(self, offloaded: OffloadedParam, grad: Tensor) -> bool:
        """Return whether the engine takes a gradient of a graph.

        It does not where autograd was not asked for the gradient, and where hooks, a tensor of the user's in ``.grad``,
        or the caller of ``torch.autograd.grad`` must have it: then the compiled backward returns a copy to autograd.
        """
        asked = torch_private.asked_for(offloaded.gradient.accumulate_node)
        if asked is torch_private.Asked.NO and (asked := offloaded.gradient.asked_again()) is torch_private.Asked.NO:
            return False
        backward, accumulates = self.backward, asked is torch_private.Asked.ACCUMULATE
        if accumulates:
            backward.contributed = True
            self.refuse_hooks(offloaded)
            param = offloaded.param
            if (param.grad is None and not param._backward_hooks) or not offloaded.shown.leaves_to_autograd:
                return True
        offloaded.gradient.returned = backward.task if accumulates else None
        # A copy, since the graph reuses the gradient's memory.
        backward.returned[torch_private.current_graph_task(), offloaded.plan.index] = grad.detach().clone()
        return False

    def returned_gradients(self, ps: Sequence[int]) -> dict[int, Tensor]:
        """Gradients of ``ps`` that the ending compiled backward returns to autograd, by parameter."""
        returned = self.backward.returned
        if not returned:
            return {}
        # Without the lock: no other backward has keys with this task.
        task = torch_private.current_graph_task()
        return {p: returned.pop((task, p)) for p in ps if (task, p) in returned}

    def accept_grad(self, p: int) -> None:
        """Take a gradient that has reached ``.grad``: the entry without a graph.

        Raises:
            TypeError: it is sparse.
            RuntimeError: it belongs to weights before an update that was in flight; or see ``refuse_gradient_hooks``.
        """
        core = self.core
        backward = self.backward
        with backward.lock:
            known = torch_private.current_graph_task() == backward.task
            if not known or core.failure is not None or core.closing:
                self.begin_backward(p)
            for call in core.moments.gradients:
                call()
            param, offloaded = self.params[p], self.offloaded.get(p)
            if offloaded is None:
                self.accept_on_device(p, param)
                return
            if isinstance(param.grad, OffloadedGradient):
                return  # ``offload_gradients`` has taken it: that of a shard, which the hook sees as part of a DTensor
            backward.contributed = True
            errors.refuse_sparse_grad(param, offloaded.plan.name)
            self.refuse_hooks(offloaded)
            if backward.concurrent:
                errors.refuse_concurrent_backward()  # it may add to ``.grad`` while this thread takes the gradient out
            self._arrived_through_autograd(offloaded)
            # A tensor that users can see stays where it is, and the optimizer step takes it from there.
            if self.takes_out_of_grad(param):
                grad, param.grad = param.grad, None
                assert grad is not None
                self.calls.contribute(offloaded, grad, send=core.splits_now)
            else:
                self.calls.refuse_gradient_of_user(offloaded.plan.name)

    def accumulate_grad(self, p: int, record: GradientRecord, grad: Tensor) -> None:
        """Add ``grad``, which autograd accumulates into the gradient of parameter ``p`` in ``.grad``."""
        core = self.core
        with self.backward.lock:
            self.begin_backward(p)
            for follow in core.moments.enter:
                follow()
            self.backward.contributed = True
            offloaded = self.offloaded[p]
            self._arrived_through_autograd(offloaded)
            if offloaded.shown.takes_more(record):
                self.calls.contribute(offloaded, grad, send=core.splits_now)
            elif record.state is GradientState.CONSUMED:
                record.state = GradientState.SPOILED
            elif record.state is not GradientState.SPOILED:
                self.calls.refuse_gradient_of_user(offloaded.plan.name)
                record.make_dense().add_(grad)

    def _arrived_through_autograd(self, offloaded: OffloadedParam) -> None:
        """Note that first uses of the weight may be unknown, so that its updates are applied in ``step()``.

        Autograd may have added the gradient of an uncompiled use to one that a graph has returned.

        Raises:
            RuntimeError: an update of the weight was in flight, so that the gradient belongs to old weights.
        """
        if isinstance(offloaded.param, LocalShard):
            return  # FSDP2 says when it gathers weights; one that stayed gathered over a step has not seen its update
        offloaded.gradient.through_autograd = True
        in_flight = offloaded.updates.due(self.core.step) or offloaded.arriving is not None
        if offloaded.gradient.returned != self.backward.task and in_flight:
            raise RuntimeError(
                f"{offloaded.plan.name} was read outside of the compiled model while an update of it was in flight, so "
                "this gradient is of old weights; call optimizer.synchronize() before running the model uncompiled"
            )

    def discard(self) -> None:
        """Forget gradients that are not in ``.grad``."""
        core = self.core
        core.updating = False
        for call in core.moments.discard:
            call()
        self.backward.reset()
        self.backward.task = None  # of a backward that failed
        self.stale.forget()
        self.calls.drop_gradients()
        for offloaded in self.offloaded.values():
            offloaded.shown.look()  # drops what is not in ``.grad``

    def accept_on_device(self, p: int, param: Parameter) -> None:
        """Note the gradient in ``.grad`` of the parameter ``p``, which the device updates."""
        self.backward.contributed = True
        if param.grad is not None and param.grad.is_sparse:
            errors.refuse_sparse_grad(param, self.registry.plan.params[p].name)
        self.calls.note_on_device(p)

    # What differs where the optimizer steps at the end of the backward: see ``in_backward``.

    def refuse_nested(self) -> None:
        """Raise RuntimeError if a backward inside of another one, which has ended, cannot be used."""
        self.calls.refuse_nested_backward()

    def after_backward(self) -> None:
        """Take note that a backward has brought gradients, and is over: nothing to do where ``step()`` follows."""

    def all_accumulate(self, chosen: Sequence[OffloadedParam]) -> bool:
        """Return whether autograd accumulates the gradients of all of ``chosen``, so that few questions remain."""
        usual = torch_private.accumulates_all([offloaded.gradient.accumulate_node for offloaded in chosen])
        if usual:
            self.backward.contributed = True
        return usual

    def refuse_hooks(self, offloaded: OffloadedParam) -> None:
        """Raise RuntimeError if the parameter has hooks that would not see its gradient."""

    def takes_out_of_grad(self, param: Parameter) -> bool:
        """Return whether a gradient that has reached ``.grad`` is taken out at once."""
        return _is_only_in_grad(param)


def _is_only_in_grad(param: Parameter) -> bool:
    """Return whether the gradient in ``.grad`` is autograd's, and code of the user's does not refer to it."""
    if isinstance(param, LocalShard):  # FSDP2 made the tensor, and refers to it until its hooks have run
        return not torch_private.adds_to_sharded_grad()
    return torch_private.only_parameter_holds_grad(param)
