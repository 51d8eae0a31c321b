"""The engine: backward, optimizer step and forward of one optimizer, as compiled graphs and autograd call them.

Order of a training step, for graph nodes and for hooks on ``.grad``:

1. backward: ``offload_gradients`` for every offloaded gradient that autograd was asked for;
2. optimizer step (``step_runner.py``): ``begin_update`` takes all gradients, ``update_parameters`` runs for all
   offloaded parameters, ``end_update`` updates resident parameters and advances the step;
3. next forward: ``fetch_parameters_`` before first uses, or ``before_unshard`` before FSDP2 gathers shards. Other
   updates of gradients that came through hooks are applied in ``end_update``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.options.options import Options
from zenflow_compile.runtime import errors, ops
from zenflow_compile.runtime.autograd_hooks import end_callback
from zenflow_compile.runtime.features.feature import OPEN_MOMENTS
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient
from zenflow_compile.runtime.moments import Calls, Moments, present, weakly
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.ranks.rank_group import RankGroup
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.runtime.step.backward_state import BackwardPass
from zenflow_compile.runtime.step_runner import StepRunner
from zenflow_compile.torch_internals import torch_private


class Engine(StepRunner):
    """Implements the ops of compiled graphs and the hooks on ``.grad``."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        options: Options,
        device: torch.device,
        *,
        in_backward: bool,
        ranks: RankGroup | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__(groups, options, device, in_backward=in_backward, ranks=ranks, sharded=sharded)
        self._end_callback = end_callback(weakref.ref(self))
        self.arrange()
        # Last: from here on graphs, and the handler of forks, find the engine.
        ops.register_engine(self)

    def arrange(self) -> None:
        """Make the moments of a step from the parts that the engine has now. The reason for a place is beside it."""
        with self.backward.lock:  # threads may add and take parts
            order, ranks, run_ahead = self.order, self.ranks, self.run_ahead
            exchange, weights = self.registry.transport.exchange, self.weights
            backward, recorder = self.backward, self.recorder
            streamed = self.streamed if self.streamed.params else None
            profiled = recorder.timeline is not None

            def phase(name: str) -> object:
                return profiled and partial(recorder.begin_phase, name)

            of_features = [feature.calls() for feature in self.features]
            if unknown := {moment for calls in of_features for moment in calls} - OPEN_MOMENTS:
                raise ValueError(f"features are called at {sorted(OPEN_MOMENTS)}, and not at {sorted(unknown)}")

            def features(moment: str) -> Calls:
                assert moment in OPEN_MOMENTS
                return present(*(calls.get(moment) for calls in of_features))

            enter = present(order and order.follow)
            use_memory = present(self.device_memory.given_back and weakly(self.bring_back))
            begin_updates = present(self.registry.check_groups, run_ahead and run_ahead.begin_step)
            self.moments = Moments(
                allocated=present(ranks and ranks.reduction.parameters_changed, *features("allocated")),
                enter=enter,
                enter_ahead=present(order and order.follow_step),
                use_memory=use_memory,
                enter_backward=present(
                    *enter,  # first: the others queue work
                    *use_memory,  # before all that reads the device's state
                    self.registry.check_unchanged,
                    backward.enter_thread,  # before the refusals of several threads
                    ranks and backward.refuse_concurrent,  # ranks send gradients in one order
                    ranks and ranks.begin_backward,
                ),
                begin_backward=present(
                    *features("begin_backward"),  # first: the others' work is not the forward's
                    phase("backward"),
                    # After the forward, whose weights come through the same lane.
                    exchange.overlaps and exchange.start_uploads,
                    streamed and streamed.prefetch,
                ),
                gradients=present(*enter, streamed and streamed.prefetch),
                contributed=present(ranks and partial(_receive_in_order, backward)),
                end_backward=present(profiled and recorder.end_phase),
                forward=present(phase("forward")),
                begin_updates=begin_updates,
                begin_step=present(
                    *enter,
                    *begin_updates,  # first of all that may raise: nothing has been changed then
                    weights.weights and weights.begin_step,
                    streamed and streamed.raise_failures,
                    streamed and streamed.check_weights,
                    phase("update"),
                ),
                final=features("final"),
                settle=present(exchange.overlaps and exchange.finish),
                end_step=present(
                    run_ahead and run_ahead.end_step,
                    *features("end_step"),  # before the profiler's own work
                    profiled and recorder.end_step,
                    self.sharded and order and order.end_step,  # last: it notes what the step has queued
                ),
                abandon=features("abandon"),
                close=features("close"),
            )

    # Ops of backward graphs, and hooks on ``.grad``.

    def begin_backward(self, arrived: int | None = None) -> None:
        """Begin a backward that is not known yet; ``arrived``: the parameter whose gradient showed it."""
        if self.failure is not None or self._closing:
            self._check()
        task = torch_private.current_graph_task()
        backward = self.backward
        if task == backward.task:
            return
        self.used = True
        for call in self.moments.enter_backward:
            call()
        if self.in_backward:
            self._begin_in_backward(arrived)
        # Only now: the checks above read the old task, which is None unless an earlier backward failed or still runs.
        backward.task = task
        backward.contributed = backward.received = False
        torch_private.queue_backward_callback(self._end_callback)
        for call in self.moments.begin_backward:
            call()

    def _begin_in_backward(self, arrived: int | None) -> None:
        """Begin a backward that steps at its end. Gradients of a failed one are dropped; that of ``arrived`` stays.

        Raises:
            RuntimeError: parameters were updated in that backward, and others were not. Or see ``StaleGradients``.
        """
        if torch_private.inside_compiled_autograd():
            raise RuntimeError(
                "a model compiled without an optimizer object steps at the end of its backward, and compiled autograd "
                "does not tell when that is; run the backward without compiled autograd, or create a ZenFlowAdamW and "
                "call its step()"
            )
        self.backward.refuse_concurrent()
        for call in self.moments.begin_updates:  # updates may run before ``begin_update`` does this
            call()
        if self.backward.task is not None:
            self._refuse_half_made_step()
            with self.stale.dropped(arrived):
                self.discard()
                self.backward.task = None  # nothing is left of it
        self._compare_samples()

    def _compare_samples(self) -> None:
        """Notice unseen writes before an update in this backward would undo them."""
        self.registry.unseen_writes.compare_unfrozen()
        for offloaded in self.offloaded.values():
            if offloaded.weights.unverified:
                offloaded.notice_external_write(self.step)
            if offloaded.host.flushed:  # no forward has fetched it
                self.uploads.apply(offloaded, offloaded.updates.due(self.step))
        self.registry.unseen_writes.begin_step()

    def end_backward(self, *, nested: bool) -> None:
        """End the backward, and with it the step of the optimizer-in-backward form.

        A backward that was asked for no gradient of the engine's (``torch.autograd.grad(loss, x)``) does not count.

        Raises:
            RuntimeError: the backward ran inside another one, which goes on: the step would come too early.
        """
        if nested:
            self.backward.task = None
            self.calls.refuse_nested_backward()
            if self.in_backward:
                raise RuntimeError(
                    "a backward inside another one (torch.utils.checkpoint with use_reentrant=True) does not tell when "
                    "the step may run; use use_reentrant=False, or create a ZenFlowAdamW and call its step()"
                )
            return
        for call in self.moments.end_backward:
            call()
        if self.backward.contributed:
            for call in self.moments.contributed:
                call()
            self.backward.count += 1
            if self.in_backward and self._on_backward_end is not None and (optimizer := self.optimizer) is not None:
                self._on_backward_end(optimizer)
        self.backward.task = None  # last: until here an interrupt leaves the same state as a backward that raised

    def offload_gradients(self, ps: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Take the gradients of the parameters ``ps`` from a graph, and start their copies."""
        split_now, chosen = self._split_now, [self.offloaded[p] for p in ps]
        contribute = self.calls.contribute
        with self.backward.lock:
            for call in self.moments.gradients:
                call()
            # Under the lock: a backward in another thread may bring a gradient of the same parameter.
            # The usual case, at every backward: every gradient was asked for, and goes into an empty ``.grad``.
            usual = torch_private.accumulates_all([offloaded.gradient.accumulate_node for offloaded in chosen])
            if usual:
                self.backward.contributed = True
            usual = usual and not self.in_backward
            for offloaded, grad in zip(chosen, grads, strict=True):
                param = offloaded.param
                free = usual and param.grad is None and not param._backward_hooks
                if not free and not self._takes(offloaded, grad):
                    continue
                contribute(offloaded, grad, send=split_now)

    def _takes(self, offloaded: OffloadedParam, grad: Tensor) -> bool:
        """Whether the engine takes a gradient of a graph.

        It does not where autograd was not asked for the gradient, and where hooks, a tensor of the user's in ``.grad``,
        or the caller of ``torch.autograd.grad`` must have it: then the compiled backward returns a copy to autograd.
        """
        asked = torch_private.asked_for(offloaded.gradient.accumulate_node)
        if asked is torch_private.Asked.NO and (asked := offloaded.gradient.asked_again()) is torch_private.Asked.NO:
            return False
        backward, accumulates = self.backward, asked is torch_private.Asked.ACCUMULATE
        if accumulates:
            backward.contributed = True
            if self.in_backward:
                errors.refuse_gradient_hooks(offloaded.param, offloaded.plan.name)
            param = offloaded.param
            if (param.grad is None and not param._backward_hooks) or not offloaded.gradient.leaves_to_autograd:
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
        backward = self.backward
        with backward.lock:
            known = torch_private.current_graph_task() == backward.task
            if not known or self.failure is not None or self._closing:
                self.begin_backward(p)
            for call in self.moments.gradients:
                call()
            param, offloaded = self.params[p], self.offloaded.get(p)
            if offloaded is None:
                backward.contributed = True
                if param.grad is not None and param.grad.is_sparse:
                    errors.refuse_sparse_grad(param, self.plan.params[p].name)
                if self.in_backward:
                    self.stale.note(p)
                self.calls.note_on_device(p)
                return
            if isinstance(param.grad, OffloadedGradient):
                return  # ``offload_gradients`` has taken it: that of a shard, which the hook sees as part of a DTensor
            backward.contributed = True
            errors.refuse_sparse_grad(param, offloaded.plan.name)
            if self.in_backward:
                errors.refuse_gradient_hooks(param, offloaded.plan.name)
            if backward.concurrent:
                errors.refuse_concurrent_backward()  # it may add to ``.grad`` while this thread takes the gradient out
            self._arrived_through_autograd(offloaded)
            # A tensor that users can see stays where it is, and the optimizer step takes it from there.
            if self.in_backward or _is_only_in_grad(param):
                grad, param.grad = param.grad, None
                assert grad is not None
                self.calls.contribute(offloaded, grad, send=self._split_now)
            else:
                self.calls.refuse_gradient_of_user(offloaded.plan.name)

    def accumulate_grad(self, p: int, record: GradientRecord, grad: Tensor) -> None:
        """Add ``grad``, which autograd accumulates into the gradient of parameter ``p`` in ``.grad``."""
        with self.backward.lock:
            self.begin_backward(p)
            for follow in self.moments.enter:
                follow()
            self.backward.contributed = True
            offloaded = self.offloaded[p]
            self._arrived_through_autograd(offloaded)
            if offloaded.gradient.takes_more(record):
                self.calls.contribute(offloaded, grad, send=self._split_now)
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
        in_flight = offloaded.updates.due(self.step) or offloaded.arriving is not None
        if offloaded.gradient.returned != self.backward.task and in_flight:
            raise RuntimeError(
                f"{offloaded.plan.name} was read outside of the compiled model while an update of it was in flight, so "
                "this gradient is of old weights; call optimizer.synchronize() before running the model uncompiled"
            )

    # The next forward.

    def declare_forward_order(self, order: Sequence[int]) -> None:
        """Set the order of parameters by first use in a forward graph; jobs and uploads run in this order."""
        self.uploads.declare_order(order)

    def fetch_parameters_(self, ps: Sequence[int], params: Sequence[Tensor]) -> None:
        """Make due updates of parameters that are about to be read visible, and start the uploads that follow."""
        if self.failure is not None or self._closing:
            self._check()
        for call in self.moments.forward:
            call()
        step, own, uploads = self.step, self.params, self.uploads
        for p, param in zip(ps, params, strict=True):
            if param is not own[p]:
                self.registry.check_storage(p, param)
            offloaded = self.offloaded[p]
            offloaded.uses += 1
            weights = offloaded.weights
            # Without an update in flight the step notices writes in time, unless updates run in the backward.
            in_flight = offloaded.host.flushed or offloaded.arriving is not None
            if in_flight or weights.counter.shared or (self.in_backward and weights.written_by_others):
                for follow in self.moments.enter:
                    follow()
                uploads.before_use(offloaded, step)

    def begin_weights(self, graph: int) -> None:
        """A graph that loads weights begins: start the copies of those that it loads first."""
        if self._closing or self.failure is not None:
            return
        for follow in self.moments.enter:
            follow()
        self.weights.begin(graph)

    def load_weight_(self, p: int, inputs: Sequence[Tensor]) -> None:
        """Load a weight, which ``inputs`` of the graph have, unless the device has it."""
        if torch_private.saves_tensors_elsewhere():
            raise RuntimeError(
                "saved_tensors_hooks (or save_on_cpu) are active, and would read weights that offload_weights keeps "
                "in host memory; run the compiled model outside of them, or pass offload_weights=False"
            )
        for follow in self.moments.enter:
            follow()
        self.weights.load(p, inputs)

    def unload_weight_(self, p: int) -> None:
        """Give the device's memory of a weight back, which a graph has read for the last time for now."""
        for follow in self.moments.enter:
            follow()
        self.weights.unload(p)

    def inference(self) -> AbstractContextManager[None]:
        return self.recorder.inference()


def _receive_in_order(ended: BackwardPass) -> None:
    """Receive the gradients of the backward that has ``ended``, those of all engines in an order that all ranks have.

    Ranks may call the engines in other orders: each engine learns of the end by its first gradient.
    """
    found: dict[int, Engine] = {}
    for engine in ops.live_engines():
        if isinstance(engine, Engine) and engine.ranks is not None and engine.backward.task == ended.task:
            found[engine.ranks.group.number] = engine
    for _, engine in sorted(found.items()):
        backward, ranks = engine.backward, engine.ranks
        if ranks is not None and backward.contributed and not backward.received and engine._split_now:
            backward.received = True
            ranks.end_backward()


def _is_only_in_grad(param: Parameter) -> bool:
    """Whether the gradient that has reached ``.grad`` is autograd's, and code of the user's does not refer to it."""
    if isinstance(param, LocalShard):  # FSDP2 made the tensor, and refers to it until its hooks have run
        return not torch_private.adds_to_sharded_grad()
    return torch_private.only_parameter_holds_grad(param)
