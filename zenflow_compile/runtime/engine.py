"""The engine: owns everything alive of one optimizer, and does what the graph's nodes ask for.

Order of a step, whatever the entry (graph nodes, or hooks on ``.grad``):

1. backward: ``offload_gradient`` for every offloaded gradient;
2. the final moment: ``begin_update`` fixes the coefficients, ``update_parameters`` runs for all offloaded parameters,
   ``end_update`` updates what lives on the device whole and advances the step;
3. the next forward: ``fetch_parameters_`` before first uses. What came through hooks lands in ``end_update``.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile import torch_private
from zenflow_compile.options import Options
from zenflow_compile.planning.plan import Plan
from zenflow_compile.profiling.timeline import AdaptiveWindows, Timeline
from zenflow_compile.runtime import entry, ops
from zenflow_compile.runtime.cleared_grads import ClearedGrads
from zenflow_compile.runtime.landing import Landing
from zenflow_compile.runtime.leftovers import Leftovers
from zenflow_compile.runtime.norms import clip_waiting, record_norms, scale_waiting, waiting_norm
from zenflow_compile.runtime.offloaded import OffloadedParam
from zenflow_compile.runtime.readable import ReadableNodes
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.roster import Roster, free_device_bytes
from zenflow_compile.runtime.schedule import Schedule
from zenflow_compile.runtime.time_bound import TimeBound
from zenflow_compile.runtime.updates import Coefficients, end_on_host, update_columns
from zenflow_compile.runtime.windows import Close

_ids = itertools.count()


class Engine(ReadableNodes):
    """Streams, workers, arenas and windows of one optimizer.

    Attributes:
        id: what graph nodes call the engine by.
        groups: the optimizer's ``param_groups``, read at every final moment.
        step: attempted steps so far.
        graphs: what the backend rewrote for this engine, for ``explain``.
        failure: what interrupted a step half-way; nothing goes on until a state is loaded.
    """

    def __init__(self, groups: list[dict[str, Any]], options: Options, device: torch.device, *, implicit: bool) -> None:
        self.id = next(_ids)
        self.groups = groups
        self.options = options
        self.implicit = implicit
        self.device = device
        self.recorder = Recorder(device)
        self.roster = Roster(groups, options, device, self.recorder)
        self.offloaded = self.roster.offloaded
        self.landing = Landing(self.roster, self.recorder)
        self.cleared = ClearedGrads(self.roster)
        self.leftovers = Leftovers(self.roster)
        self.schedule = Schedule(options, device, self.recorder)
        self.step = 0
        self.backwards = 0
        self.windows_closed = 0
        self.graphs: list[Any] = []
        self.closed = False
        self.failure: BaseException | None = None
        self._time_bound = TimeBound(self.roster, self.recorder, whole_step=self.finalizes_in_backward)
        self._process = os.getpid()
        self._optimizer: weakref.ref[Any] | None = None
        self._on_backward_end: Callable[[Any], None] | None = None
        self._graph_task: int | None = None
        self._updating = self._void = False
        self._unscale = 1.0
        self._resident_unscale = 1.0
        ops.register_engine(self)

    def attach(self, optimizer: Any, on_backward_end: Callable[[Any], None]) -> None:
        """Serve ``optimizer``, which owns this engine; ``on_backward_end(optimizer)`` runs after each backward."""
        self._optimizer = weakref.ref(optimizer)
        self._on_backward_end = on_backward_end

    @property
    def optimizer(self) -> Any:
        """The optimizer that this engine serves; None while it is being made, or when it was collected."""
        return None if self._optimizer is None else self._optimizer()

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
        self.roster.add(named, first_group, weakref.ref(self))
        self.schedule.make_room(len(self.params))

    @property
    def plan(self) -> Plan:
        """The plan of all parameters."""
        return self.roster.plan

    @property
    def params(self) -> list[Parameter]:
        """All parameters, in the plan's order."""
        return self.roster.params

    def index_of(self, param: Tensor) -> int | None:
        """The index of ``param`` in the plan; None if it is not this engine's."""
        return self.roster.index_of(param)

    @property
    def model_bytes(self) -> int:
        """Bytes of all parameters of the optimizer, in their own dtype."""
        return self.roster.model_bytes

    @property
    def adaptive_windows(self) -> AdaptiveWindows | None:
        """Between which lengths windows adapt; None where they are of fixed length."""
        return self.schedule.adaptive_windows

    @property
    def worker_cores(self) -> tuple[int, ...]:
        """The logical core of each worker."""
        return self.roster.transport.workers.cores

    @property
    def selections(self) -> int:
        """Re-selections so far."""
        return self.landing.selections

    @property
    def finalizes_in_backward(self) -> bool:
        """Whether updates may sit in the backward graph."""
        return self.implicit and self.options.max_grad_norm is None

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
            if self._graph_task is not None and self.implicit:
                self._drop_failed_backward(arrived)
            self._graph_task = task
            self.cleared.look(arrived)
            entry.listen_to_end(weakref.ref(self))
            if self.schedule.shortest_window is None:
                self.schedule.shortest_window = self._time_bound.begin_backward(len(self.graphs))
            self.recorder.begin_phase("backward")
            self.roster.interleaved.prefetch()  # behind the forward, whose weights come the same way

    def _drop_failed_backward(self, arrived: int | None) -> None:
        """Drop what the backward before this one left, beside what ``arrived`` of this one.

        Where parameters were updated on its tail the step counts as attempted: void for all the others. Raises: see
        ``Leftovers``.
        """
        with self.leftovers.dropped(arrived) as updated:
            self.discard()
            if updated:
                self.begin_update(void=True)
                self._update_on_host(self.offloaded.values(), self._in_force())
                self.end_update()
            self._graph_task = None  # nothing is left of it

    def end_backward(self, *, nested: bool) -> None:
        """Autograd's last callback: the backward is over; in the implicit form so is the step, if it was the last.

        Raises:
            RuntimeError: the backward ran inside another one, which goes on: the step would come too early.
        """
        if nested:
            self._graph_task = None
            if self.implicit:
                entry.refuse_nested_backward()
            return
        self.backwards += 1
        self.cleared.note()
        self.recorder.end_phase()
        if self._on_backward_end is not None and (optimizer := self.optimizer) is not None:
            self._on_backward_end(optimizer)
        self._graph_task = None  # last: an interrupt until here leaves what a backward that raised leaves

    def offload_gradient(self, p: int, grad: Tensor) -> None:
        """Take a gradient and start its copy: what ``column_norms`` to ``copy_to_host`` do one by one."""
        self.offloaded[p].offload(grad, split_now=self._split_now)

    @property
    def _split_now(self) -> bool:
        declared = self.options.gradient_accumulation_steps
        return declared is None or self.backwards == declared - 1

    def accept_grad(self, p: int) -> None:
        """The entry without a graph: the same nodes, for a gradient that reached ``.grad``.

        Raises:
            TypeError: it is sparse.
        """
        self.roster.interleaved.prefetch()
        name, param = self.plan.params[p].name, self.params[p]
        if p not in self.offloaded:
            entry.refuse_sparse_grad(param, name)
            self.leftovers.note(p)
            return
        if (grad := entry.take_grad(param, name)) is None:
            return
        offloaded = self.offloaded[p]
        offloaded.eager = True  # from here on it lands in step()
        if offloaded.due(self.step):
            entry.refuse_stale_grad(name)
        offloaded.offload(grad, split_now=self._split_now)

    def _accept_written(self, only: set[int] | None = None) -> None:
        """Take what was written into ``.grad`` by hand, which no backward has seen.

        Raises: see ``refuse_sparse_residents`` and ``written_grads``.
        """
        self.roster.refuse_sparse_residents(only)
        for p in self.roster.written_grads(only):
            self.offloaded[p].raise_failures()
            self.accept_grad(p)

    # The final moment.

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient that waits for its update."""
        return any(param.grad is not None for _, param in self.roster.whole) or any(
            o.contributions or o.updated or o.param.grad is not None for o in self.offloaded.values()
        )

    def gradient_norm(
        self, only: set[int] | None = None, *, unscale: float = 1.0, resident_unscale: float = 1.0
    ) -> Tensor:
        """L2 norm over all waiting gradients (of the parameters ``only``), 0-d f32; see ``waiting_norm``."""
        self._accept_written(only)
        return waiting_norm(self.roster, self.device, only, unscale=unscale, resident_unscale=resident_unscale)

    def begin_update(self, *, unscale: float = 1.0, residents_unscaled: bool = True, void: bool = False) -> None:
        """All gradients are final.

        Args:
            unscale: one over the loss scale of offloaded gradients.
            residents_unscaled: ``.grad`` of parameters on the device whole carries no loss scale any more.
            void: the step overflowed: it changes nothing.
        """
        self._check()
        self.cleared.look()
        self._accept_written()
        self.roster.interleaved.raise_failures()
        self.recorder.begin_phase("update")
        for offloaded in self.offloaded.values():
            offloaded.raise_failures()
            if not offloaded.updated:
                offloaded.notice_foreign_write(self.step)
                if offloaded.host.closes:
                    self.landing.land(offloaded, self.step)  # what no forward has fetched: its buffers are needed now
                offloaded.settle()
        resident_unscale = 1.0 if residents_unscaled else unscale
        if not void and (limit := self.options.max_grad_norm) is not None:
            clip_waiting(self.roster, self.device, limit, unscale=unscale, resident_unscale=resident_unscale)
        record_norms(self.roster, self.timeline, self.step)
        # Last, so that an error above leaves nothing set.
        self._updating, self._void, self._unscale = True, void, unscale
        self._resident_unscale = resident_unscale

    def clip(self, factor: float, only: set[int] | None = None) -> None:
        """Multiply all waiting gradients (of the parameters ``only``) by ``factor``; their norm was taken before."""
        scale_waiting(self.roster, factor, only)

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
        return Coefficients(self.roster, self._unscale)

    def _update_columns(self, columns: Sequence[OffloadedParam], params: Sequence[Tensor], now: Coefficients) -> None:
        for offloaded, param in zip(columns, params, strict=True):
            self.roster.check_storage(offloaded.plan.index, param)
        if self._void:
            return
        try:
            update_columns([each for each in columns if each.contributions and self._may_update(each)], now)
        except BaseException as error:
            self.failure = error
            raise

    def _update_on_host(self, params: Iterable[OffloadedParam], now: Coefficients) -> None:
        closes: list[Close] = []
        try:
            for offloaded in filter(self._may_update, params):
                if (close := end_on_host(offloaded, now, self.schedule, self.step, void=self._void)) is not None:
                    closes.append(close)
                    self.recorder.mark("close", param=offloaded.plan.name)
            self.roster.transport.workers.submit(*(close.job for close in closes))
        except BaseException as error:  # what closed and was not queued is withdrawn by ``Landing``, before any wait
            self.failure = error
            raise
        self.windows_closed += len(closes)

    def _may_update(self, offloaded: OffloadedParam) -> bool:
        if offloaded.updated or self._updating:
            return not offloaded.updated
        # Inside a backward only a parameter whose gradients were seen to arrive in one piece is final. If it shares its
        # version counter, its update would make the backward of an earlier graph, which saved a sharer, raise.
        single = offloaded.single and offloaded.uses == 1 and not offloaded.weights.counter.shared
        return self.finalizes_in_backward and single and self._split_now

    def end_update(self) -> None:
        """Update what lives on the device whole, land what must not wait, advance to the next step."""
        if not self._void:
            self.roster.update_residents(self._resident_unscale)
        self.step += 1
        self._begin_anew()
        for offloaded in self.offloaded.values():
            offloaded.finish_step()
        self.landing.end_step(self.step)
        if not self.offloaded:  # nothing comes up in the next forward, and no node will tell of its end
            self.roster.interleaved.prefetch()
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
        self.roster.drop_grads()
        self.leftovers.forget()
        self.roster.abandon()

    def discard(self) -> None:
        """Forget gradients that are not final, beside what ``.grad`` has."""
        self._begin_anew()
        self.leftovers.forget()
        for offloaded in self.offloaded.values():
            offloaded.discard()

    def _begin_anew(self) -> None:
        """No backward has been, and no update is under way."""
        self._updating = self._void = False
        self._unscale = 1.0
        self.backwards = 0
        self.cleared.forget()

    # The next forward.

    def declare_forward_order(self, order: Sequence[int]) -> None:
        """The parameters by first use in a forward graph: uploads are needed, and served, in this order."""
        self.landing.declare_order(order)

    def fetch_parameters_(self, ps: Sequence[int], params: Sequence[Tensor]) -> None:
        """These parameters are about to be read: make visible what is due, and start the uploads that follow."""
        self._check()
        self.recorder.begin_phase("forward")
        for p, param in zip(ps, params, strict=True):
            self.roster.check_storage(p, param)
            self.landing.before_use(self.offloaded[p], self.step)

    def before_load(self) -> None:
        """Weights are about to be loaded into the model: what is due lands first, so that they win."""
        self.landing.before_load(self.step)

    def synchronize(self) -> None:
        """Wait for work in flight and make visible what is due. The trajectory stays what it would have been.

        Raises:
            RuntimeError: work in flight failed.
        """
        self._check()
        for offloaded in self.landing.by_deadline():
            offloaded.raise_failures()
            if not offloaded.weights.to_be_compared:  # the weights that belong to a loaded state may be yet to come
                offloaded.notice_foreign_write(self.step)
            self.landing.land(offloaded, self.step)
            offloaded.host.wait()
            offloaded.host.wait_for_copies()
        self.roster.interleaved.wait()

    # Life and death.

    def _check(self) -> None:
        if self.closed:
            entry.refuse_closed()
        if self.failure is not None:
            entry.refuse_failed(self.failure)

    def close(self, *, flush: bool) -> None:
        """Land everything, stop the threads, free host memory. Safe to call twice.

        Args:
            flush: apply the gradients that wait in open windows, too.
        """
        if self.closed:
            return
        if os.getpid() != self._process:  # a forked child has neither the threads nor the memory
            self.closed = True
            return
        try:
            self.landing.finish(self.step, flush=flush and self.failure is None)
            self.roster.interleaved.wait()
        finally:
            self.closed = True
            ops.unregister_engine(self.id)
            self.roster.close()
