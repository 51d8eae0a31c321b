"""The engine: owns everything alive of one optimizer, and does what the graph's nodes ask for.

Order of a step, whatever the entry (graph nodes, or hooks on ``.grad``):

1. backward: ``offload_gradient`` for every offloaded gradient that autograd was asked for;
2. the final moment: ``begin_update`` fixes the coefficients, ``update_parameters`` runs for all offloaded parameters,
   ``end_update`` updates what lives on the device whole and advances the step;
3. the next forward: ``fetch_parameters_`` before first uses. What came through hooks lands in ``end_update``.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import Plan
from zenflow_compile.runtime import autograd_hooks, errors, ops
from zenflow_compile.runtime.gradients.gradient_norm import clip_gradients, record_norms
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient
from zenflow_compile.runtime.gradients.stale_gradients import StaleGradients
from zenflow_compile.runtime.parameters.capacity import free_device_bytes
from zenflow_compile.runtime.parameters.claim import Claim
from zenflow_compile.runtime.parameters.host_state import FlushedWindow
from zenflow_compile.runtime.parameters.module_parameters import Holders
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.min_window import ShortestWindow
from zenflow_compile.runtime.step.optimizer_step import Coefficients, end_on_host, update_columns
from zenflow_compile.runtime.step.schedule import Schedule
from zenflow_compile.runtime.step.upload_scheduler import UploadScheduler
from zenflow_compile.runtime.unfused_ops import UnfusedOps
from zenflow_compile.timeline.events import AdaptiveWindows, Timeline
from zenflow_compile.torch_internals import torch_private

_ids = itertools.count()


class Engine(UnfusedOps):
    """Streams, workers, arenas and windows of one optimizer.

    Attributes:
        id: what graph nodes call the engine by.
        groups: the optimizer's ``param_groups``, read at every final moment.
        step: optimizer steps so far.
        graphs: what the backend rewrote for this engine, for ``explain``.
        failure: what interrupted a step half-way; nothing goes on until a state is loaded.
        closed: whether ``close`` is through.
        used: a graph, a gradient or the state of a step depends on this engine.
        in_child: whether this is a forked child's copy, which has neither the threads nor the host memory.
    """

    def __init__(
        self, groups: list[dict[str, Any]], options: Options, device: torch.device, *, in_backward: bool
    ) -> None:
        self.id = next(_ids)
        self.groups = groups
        self.options = options
        self.in_backward = in_backward
        self.device = device
        self.recorder = Recorder(device)
        self.registry = ParamRegistry(
            groups, options, device, self.recorder, weakref.ref(self), visible_gradients=not in_backward
        )
        self.offloaded = self.registry.offloaded
        self.landing = UploadScheduler(self.registry, self.recorder)
        self.leftovers = StaleGradients(self.registry)
        self.holders = Holders(self.registry.params)
        self.schedule = Schedule(options, device, self.recorder)
        self.step = 0
        self.backwards = 0
        self.windows_flushed = 0
        self.graphs: list[Any] = []
        self.closed = False
        self.used = False
        self._module_hooks: list[RemovableHandle] = []
        self.in_child = False
        self.failure: BaseException | None = None
        self._closing = False  # close() has begun; if an interrupt ended it, only another close() may follow
        self._finished = False  # in close(): all work has ended
        self._time_bound = ShortestWindow(self.registry, self.recorder, whole_step=self.finalizes_in_backward)
        self._claim: Claim | None = None
        self._on_backward_end: Callable[[Any], None] | None = None
        self._graph_task: int | None = None
        self._updating = False
        self._contributed = False  # a gradient was taken in the backward that runs, or ran last
        # Backwards of graphs may run in several threads. They accumulate one after the other.
        self._accumulating = threading.RLock()
        self._thread = threading.get_ident()  # of the last backward
        self._concurrent = False  # it began while one in another thread ran, or had failed
        # What compiled backwards that run are to return, by graph task and parameter.
        self._returned: dict[tuple[int, int], Tensor] = {}
        ops.register_engine(self)

    def attach(self, claim: Claim, on_backward_end: Callable[[Any], None]) -> None:
        """Serve the optimizer that made ``claim``; ``on_backward_end(optimizer)`` runs after each backward."""
        self._claim = claim
        self._on_backward_end = on_backward_end

    def detach(self) -> None:
        """Serve no optimizer any more: ``close()`` leaves the parameters to the engine that replaces this one."""
        self._claim = None

    @property
    def outdated(self) -> bool:
        """Whether the model was changed and nothing depends on this engine yet, so that another one may replace it."""
        return not self.used and self.timeline is None and any(map(self.registry.changed, range(len(self.params))))

    @property
    def optimizer(self) -> Any:
        """The optimizer that this engine serves; None while the engine is built, or when it was collected."""
        return None if self._claim is None else self._claim.optimizer

    # Parameters.

    def add_params(self, named: Sequence[Sequence[tuple[str, Parameter]]], first_group: int = 0) -> None:
        """Plan and allocate further parameters, by param group. Those that exist keep their phases.

        Args:
            first_group: index of the first of these groups among the optimizer's.

        Raises:
            ValueError: more host memory is needed than the machine has; nothing has been changed then.
        """
        if self.params:
            self.synchronize()
        self.registry.add(named, first_group)
        self.schedule.make_room(len(self.params))

    @property
    def plan(self) -> Plan:
        """The plan of all parameters."""
        return self.registry.plan

    @property
    def params(self) -> list[Parameter]:
        """All parameters, in the plan's order."""
        return self.registry.params

    def index_of(self, param: Tensor) -> int | None:
        """The index of ``param`` in the plan; None if it is not this engine's."""
        return self.registry.index_of(param)

    @property
    def model_bytes(self) -> int:
        """Bytes of all parameters of the optimizer, in their own dtype."""
        return self.registry.model_bytes

    @property
    def adaptive_windows(self) -> AdaptiveWindows | None:
        """Between which lengths windows adapt; None where they are of fixed length."""
        return self.schedule.adaptive_windows

    @property
    def worker_cores(self) -> tuple[int, ...]:
        """The logical core of each worker."""
        return self.registry.transport.workers.cores

    @property
    def selections(self) -> int:
        """Re-selections so far."""
        return self.landing.selections

    @property
    def finalizes_in_backward(self) -> bool:
        """Whether updates may sit in the backward graph."""
        return self.in_backward and self.options.max_grad_norm is None

    @property
    def weight_grad_bytes(self) -> int:
        """Device memory for what weight gradients are computed from when their order changes; 0: it does not."""
        if self.options.weight_grad_order == "asap":
            return 0
        given = self.options.weight_grad_bytes
        return free_device_bytes(self.device) // 4 if given is None else given

    @property
    def timeline(self) -> Timeline | None:
        """What is being recorded into; None unless somebody profiles."""
        return self.recorder.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self.recorder.attach(timeline)

    # Graph nodes: backward.

    def begin_backward(self, arrived: int | None = None) -> None:
        """A backward of ours runs, perhaps known by a gradient that has ``arrived``: learn when it ends."""
        self._check()
        task = torch_private.current_graph_task()
        if task != self._graph_task:
            self.used = True
            self.check_unchanged()
            thread = threading.get_ident()
            self._concurrent = self._graph_task is not None and thread != self._thread
            self._thread = thread
            if self.in_backward:
                self._begin_in_backward(arrived)
            self._graph_task = task
            self._contributed = False
            autograd_hooks.listen_to_end(weakref.ref(self))
            if self.schedule.shortest_window is None:
                self.schedule.shortest_window = self._time_bound.begin_backward(len(self.graphs))
            self.recorder.begin_phase("backward")
            self.registry.streamed.prefetch()  # behind the forward, whose weights come the same way

    def _begin_in_backward(self, arrived: int | None) -> None:
        """A backward begins that steps at its end: nothing may be left of the one before."""
        if torch_private.inside_compiled_autograd():
            errors.refuse_compiled_autograd()
        if self._concurrent:
            errors.refuse_concurrent_backward()
        self.registry.check_groups()  # updates may run before ``begin_update`` looks at them
        if self._graph_task is not None:
            self._drop_failed_backward(arrived)

    def _drop_failed_backward(self, arrived: int | None) -> None:
        """Drop what the backward before this one left, beside what ``arrived`` of this one.

        Where parameters were updated on its tail the step counts, without a gradient for all the others. Raises: see
        ``StaleGradients``.
        """
        with self.leftovers.dropped(arrived) as updated:
            self.discard()
            if updated:
                self.begin_update()
                self._update_on_host(self.offloaded.values(), self._in_force())
                self.end_update()
            self._graph_task = None  # nothing is left of it

    def end_backward(self, *, nested: bool) -> None:
        """Autograd's last callback: the backward is over, and so is the step of the optimizer-in-backward form.

        A backward that was asked for no gradient of ours (``torch.autograd.grad(loss, x)``) does not count.

        Raises:
            RuntimeError: the backward ran inside another one, which goes on: the step would come too early.
        """
        if nested:
            self._graph_task = None
            if self.in_backward:
                errors.refuse_nested_backward()
            return
        self.recorder.end_phase()
        if self._contributed:
            self.backwards += 1
            if self._on_backward_end is not None and (optimizer := self.optimizer) is not None:
                self._on_backward_end(optimizer)
        self._graph_task = None  # last: an interrupt until here leaves what a backward that raised leaves

    def offload_gradient(self, p: int, grad: Tensor) -> None:
        """Take a gradient and start its copy: what ``column_norms`` to ``copy_to_host`` do one by one."""
        with self._accumulating:
            if self._takes(p, grad):
                self.offloaded[p].offload(grad, split_now=self._split_now)

    def _takes(self, p: int, grad: Tensor) -> bool:
        """Whether the engine takes a gradient of a graph, now.

        It does not where autograd was not asked for it, and where hooks, a tensor of the user's in ``.grad``, or the
        caller of ``torch.autograd.grad`` must have it: then the compiled backward returns a copy to autograd.
        """
        offloaded = self.offloaded[p]
        asked = offloaded.asked_for()
        if asked is torch_private.Asked.NO:
            return False
        accumulates = asked is torch_private.Asked.ACCUMULATE
        if accumulates:
            self._contributed = True
            if self.in_backward:
                errors.refuse_gradient_hooks(offloaded.param, offloaded.plan.name)
        if accumulates and not offloaded.leaves_to_autograd:
            return True
        offloaded.returned = self._graph_task if accumulates else None
        # A copy, since the graph uses its own memory again.
        self._returned[torch_private.current_graph_task(), p] = grad.detach().clone()
        return False

    def returned_gradients(self, ps: Sequence[int]) -> dict[int, Tensor]:
        """Gradients of ``ps`` that the compiled backward that ends now is to return to autograd, by parameter."""
        if not self._returned:
            return {}
        task = torch_private.current_graph_task()
        return {p: self._returned.pop((task, p)) for p in ps if (task, p) in self._returned}

    @property
    def _split_now(self) -> bool:
        declared = self.options.gradient_accumulation_steps
        return declared is None or self.backwards == declared - 1

    def accept_grad(self, p: int) -> None:
        """A gradient has reached ``.grad``: the entry without a graph.

        Raises:
            TypeError: it is sparse.
            RuntimeError: it is of weights that an update was on its way to; or see ``refuse_gradient_hooks``.
        """
        with self._accumulating:
            self.begin_backward(p)
            self.registry.streamed.prefetch()
            name, param = self.plan.params[p].name, self.params[p]
            if p not in self.offloaded:
                self._contributed = True
                errors.refuse_sparse_grad(param, name)
                self.leftovers.note(p)
                return
            offloaded = self.offloaded[p]
            if isinstance(param.grad, OffloadedGradient):
                return  # a graph's node has taken it, or ``accumulate_grad``
            self._contributed = True
            errors.refuse_sparse_grad(param, name)
            if self.in_backward:
                errors.refuse_gradient_hooks(param, name)
            if self._concurrent:
                errors.refuse_concurrent_backward()  # it may add to what is in ``.grad`` while we take that out
            self._arrived_through_autograd(offloaded)
            # A tensor that others can see stays where it is, and the optimizer step takes it from there.
            if self.in_backward or torch_private.only_parameter_holds_grad(param):
                grad, param.grad = param.grad, None
                assert grad is not None
                offloaded.offload(grad, split_now=self._split_now)

    def accumulate_grad(self, p: int, record: GradientRecord, grad: Tensor) -> None:
        """Autograd adds ``grad`` to a gradient of parameter ``p`` that is in ``.grad``."""
        with self._accumulating:
            self._check()
            self.begin_backward(p)
            self._contributed = True
            offloaded = self.offloaded[p]
            self._arrived_through_autograd(offloaded)
            if offloaded.takes_more(record):
                offloaded.offload(grad, split_now=self._split_now)
            elif record.state is GradientState.CONSUMED:
                record.state = GradientState.SPOILED
            elif record.state is not GradientState.SPOILED:
                record.make_dense().add_(grad)

    def _arrived_through_autograd(self, offloaded: OffloadedParam) -> None:
        """Autograd delivers a gradient: first uses of its weight may be unknown, so updates land in ``step()``.

        Autograd may have added the gradient of an uncompiled use to one that a graph has returned.

        Raises:
            RuntimeError: an update of the weight was on its way, so that the gradient is of old weights.
        """
        offloaded.eager = True
        if offloaded.returned != self._graph_task and offloaded.due(self.step):
            errors.refuse_stale_grad(offloaded.plan.name)

    # The final moment.

    @property
    def windows_hold_gradients(self) -> bool:
        """Whether any update window is open, so that a flush would apply gradients."""
        return any(offloaded.window_holds_gradients for offloaded in self.offloaded.values())

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient that waits for its update.

        Raises:
            RuntimeError: the engine is closed, or failed: a step without gradients must not hide that.
        """
        self._check()
        return self.registry.device_updated.has_gradients or any(
            offloaded.has_gradient for offloaded in self.offloaded.values()
        )

    def begin_update(self) -> None:
        """All gradients are final.

        Raises: see ``ParamRegistry.check_groups`` and ``ParamRegistry.check_gradients``; nothing has been changed then.
        """
        self._check()
        self.used = True
        self.registry.check_groups()
        self.registry.check_gradients()
        self.registry.streamed.raise_failures()
        self.recorder.begin_phase("update")
        for offloaded in self.offloaded.values():
            offloaded.raise_failures()
            if offloaded.state is not GradientState.CONSUMED or not self.in_backward:  # else its step has begun
                offloaded.notice_external_write(self.step)
                if offloaded.host.flushed:
                    self.landing.land(offloaded, self.step)  # what no forward has fetched: its buffers are needed now
                offloaded.take_from_grad()
        self.registry.read_factors()
        if (limit := self.options.max_grad_norm) is not None:
            clip_gradients(self.registry, self.device, limit)
        record_norms(self.registry, self.timeline, self.step)
        self._updating = True  # last, so that an error above leaves nothing set

    def update_parameters(self, ps: Sequence[int], params: Sequence[Tensor]) -> None:
        """Update those of ``ps`` whose gradients are final now: ``adam_columns_`` and ``update_on_host`` of each.

        Args:
            params: those of them that have columns on the device, in the order of ``ps``.
        """
        final = [self.offloaded[p] for p in ps]
        now = self._in_force()
        self._update_columns([each for each in final if each.plan.k], params, now)
        self._update_on_host(final, now)

    def _in_force(self) -> Coefficients:
        return Coefficients(self.registry)

    def _update_columns(self, columns: Sequence[OffloadedParam], params: Sequence[Tensor], now: Coefficients) -> None:
        for offloaded, param in zip(columns, params, strict=True):
            self.registry.check_storage(offloaded.plan.index, param)
        try:
            update_columns([each for each in columns if self._may_update(each)], now)
        except BaseException as error:
            self.failure = error
            raise

    def _update_on_host(self, params: Iterable[OffloadedParam], now: Coefficients) -> None:
        flushed: list[FlushedWindow] = []
        try:
            for offloaded in params:
                if not (self._may_update(offloaded) or (self._updating and offloaded.record is None)):
                    continue
                if (close := end_on_host(offloaded, now, self.schedule, self.step)) is not None:
                    flushed.append(close)
                    self.recorder.mark("close", param=offloaded.plan.name)
            self.registry.transport.workers.submit(*(close.job for close in flushed))
        except BaseException as error:  # ``UploadScheduler`` withdraws what was not queued, before any wait
            self.failure = error
            raise
        self.windows_flushed += len(flushed)

    def _may_update(self, offloaded: OffloadedParam) -> bool:
        """Whether the parameter has a gradient that is final now."""
        if offloaded.state is not GradientState.PARTS:
            return False
        # Inside a backward only a parameter whose gradients were seen to arrive in one piece is final. If it shares its
        # version counter, its update would make the backward of an earlier graph, which saved a sharer, raise.
        single = offloaded.single and offloaded.uses == 1 and not offloaded.weights.counter.shared
        return self._updating or (self.finalizes_in_backward and single and self._split_now)

    def end_update(self) -> None:
        """Update what lives on the device whole, land what must not wait, advance to the next step."""
        self.registry.device_updated.update()
        self.step += 1
        self._begin_anew()
        for offloaded in self.offloaded.values():
            offloaded.finish_step()
        self.landing.end_step(self.step)
        if not self.offloaded:  # nothing comes up in the next forward, and no node will tell of its end
            self.registry.streamed.prefetch()
        self.schedule.end_step()
        if self.schedule.shortest_window is None:
            self._time_bound.end_step(len(self.graphs))
        self.recorder.end_step(self.step)

    def abandon(self) -> None:
        """Drop everything in flight, gradients and failed work too: a state is about to be loaded."""
        self.failure = None
        self._check()
        self._begin_anew()
        self._graph_task = None
        self.landing.abandon()
        self.schedule.forget()
        self._time_bound.forget()
        self.registry.drop_grads()
        self.leftovers.forget()
        self.registry.abandon()

    def show_consumed(self) -> None:
        """Let ``.grad`` of offloaded parameters say that the optimizer-in-backward form leaves no gradients."""
        for offloaded in self.offloaded.values():
            offloaded.show_consumed()

    def discard(self) -> None:
        """Forget gradients that are not in ``.grad``."""
        self._begin_anew()
        if not self.in_backward:
            self._graph_task = None  # of a backward that failed
        self.leftovers.forget()
        for offloaded in self.offloaded.values():
            offloaded.discard()

    def _begin_anew(self) -> None:
        """No backward has been, and no update is under way."""
        self._updating = self._contributed = False
        self._returned.clear()  # of backwards that failed
        self.backwards = 0

    # The next forward.

    def declare_forward_order(self, order: Sequence[int]) -> None:
        """The parameters by first use in a forward graph: uploads are needed, and served, in this order."""
        self.landing.declare_order(order)

    def fetch_parameters_(self, ps: Sequence[int], params: Sequence[Tensor]) -> None:
        """These parameters are about to be read: make visible what is due, and start the uploads that follow."""
        if self.in_child:
            self._check_weights_in_child()
            return
        self._check()
        self.recorder.begin_phase("forward")
        for p, param in zip(ps, params, strict=True):
            self.registry.check_storage(p, param)
            self.landing.before_use(self.offloaded[p], self.step)

    def remember_models(self, models: Sequence[nn.Module]) -> None:
        """These models are compiled: note where they hold parameters."""
        self.used = True
        self.holders.remember(models, {id(param): index for index, param in enumerate(self.params)})

    def keep_hooks(self, hooks: Iterable[RemovableHandle]) -> None:
        """Remove these hooks of modules in ``close()``."""
        self._module_hooks += hooks

    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Check that those of ``models`` that are compiled hold the engine's parameters.

        Raises:
            RuntimeError: a parameter was replaced.
        """
        self.holders.check_models(self.plan.params, models)

    def check_parameters(self) -> None:
        """As ``check_models``, of the modules alone that hold the parameters, and ``check_unchanged``: cheap enough for
        every step.
        """
        self.check_unchanged()
        self.holders.check(self.plan.params)

    def before_load(self) -> None:
        """Weights are about to be loaded into the model: what is due lands first, so that they win."""
        if self.in_child:
            return
        self.landing.before_load(self.step)

    def synchronize(self) -> None:
        """Wait for work in flight and make visible what is due. The trajectory stays what it would have been.

        Raises:
            RuntimeError: work in flight failed.
        """
        if self.in_child:
            self._check_weights_in_child()
            return
        self._check()
        self.check_unchanged()
        self.landing.apply_due(self.step)
        for offloaded in self.landing.by_deadline():
            offloaded.host.wait()
            offloaded.host.wait_for_copies()
        self.registry.streamed.wait()

    def check_unchanged(self) -> None:
        """
        Raises:
            RuntimeError: a parameter has another shape, dtype or device than the plan: the model was changed.
        """
        self.registry.check_unchanged()

    def apply_due(self, params: Iterable[Tensor] | None = None) -> None:
        """Make visible what is due before code that fetches nothing reads weights. Cheap when nothing is due.

        It runs as outside of inference mode, tracing, functorch transforms and dispatch modes, which belong to the
        reader and not to the updates.

        Args:
            params: only the updates of these; None: all.

        Raises:
            RuntimeError: work in flight failed, a weight was written while an update of it was in flight, or an update
                is due in a forked child.
        """
        if self.in_child:
            self._check_weights_in_child()
            return
        self._check()
        if not self.landing.is_current(self.step):
            only = None
            if params is not None:
                only = {index for param in params if (index := self.index_of(param)) is not None}
            with torch_private.outside_of_transforms():
                self.landing.apply_due(self.step, only)

    def apply_in_step(self) -> None:
        """From now on make due updates visible in ``step()``: code that fetches nothing, and calls no hook of ours,
        reads the weights.
        """
        self.landing.read_elsewhere = True
        self.apply_due()

    def flush(self) -> None:
        """Apply the gradients in open update windows and make every update visible. Training may go on.

        Raises:
            RuntimeError: work in flight failed; no step runs then until a state is loaded. Or a weight was written
                while an update of it was in flight; training may go on then.
            ValueError, TypeError: an eps in ``param_groups`` that no step can use. Nothing has been changed then.
        """
        self._check()
        self.check_parameters()
        for index in self.offloaded:
            self.registry.eps(index)
        try:
            self.schedule.restart_windows()
            self.landing.finish(self.step, flush=True)
            self.registry.streamed.wait()
        except errors.LostUpdateError:
            raise
        except BaseException as error:
            self.failure = error
            raise

    # Life and death.

    def _check(self) -> None:
        if self.in_child:
            errors.refuse_in_child()
        if self.closed or self._closing:
            errors.refuse_closed()
        if self.failure is not None:
            errors.refuse_failed(self.failure)

    def enter_child(self) -> None:
        """This process was forked from the engine's: from here on only weights can be read."""
        self.in_child = True
        self.registry.enter_child()

    def _check_weights_in_child(self) -> None:
        if any(offloaded.due(self.step) for offloaded in self.offloaded.values()):
            errors.refuse_in_child("an update of the weights was on its way when the process was forked")

    def close(self, *, flush: bool) -> None:
        """Land everything, stop the threads, free host memory. Safe to call twice.

        After an interrupt (``KeyboardInterrupt``) the engine is of no other use, and the next call completes the job.

        Args:
            flush: apply the gradients that wait in open windows, too.

        Raises:
            RuntimeError: work in flight failed. The engine is closed all the same.
        """
        if self.closed:
            return
        if self.in_child:
            self.closed = True
            return
        self._closing = True
        for hook in self._module_hooks:
            hook.remove()
        error: Exception | None = None
        # Each part may be repeated.
        for part in (partial(self._finish, flush=flush), self._release_gradients, self.registry.close):
            try:
                part()
            except Exception as raised:
                error = error or raised
        ops.unregister_engine(self.id)
        if self._claim is not None:
            self._claim.release()
        self.closed = True  # last: an interrupt above leaves the rest to the next call
        if error is not None:
            raise error

    def _finish(self, *, flush: bool) -> None:
        if not self._finished:
            try:
                self.landing.finish(self.step, flush=flush and self.failure is None)
                self.registry.streamed.wait()
            except Exception:
                self._finished = True
                raise
            self._finished = True

    def _release_gradients(self) -> None:
        self.registry.release_gradients(keep=self.failure is None)


def _enter_child() -> None:
    for engine in ops.live_engines():
        if isinstance(engine, Engine):
            engine.enter_child()


# Without this a child would run into memory that it does not have, or wait for threads that it does not have, and its
# share in the lock on ``nvme_path`` would outlive a parent that is killed.
os.register_at_fork(after_in_child=_enter_child)
