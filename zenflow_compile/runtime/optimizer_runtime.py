"""The runtime of one optimizer: what it owns, what code outside of compiled graphs asks of it, and how it ends."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import Plan
from zenflow_compile.planning.weight_memory import OffloadedWeights
from zenflow_compile.runtime import errors, ops, shard_hooks
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.features import FEATURES
from zenflow_compile.runtime.moments import Moments
from zenflow_compile.runtime.parameters.capacity import free_device_bytes
from zenflow_compile.runtime.parameters.claim import Claim, Holders
from zenflow_compile.runtime.parameters.host_weight import Place
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.ranks.rank_group import Call, RankGroup
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.backward_state import BackwardPass, StaleGradients
from zenflow_compile.runtime.step.one_rank import OneRank
from zenflow_compile.runtime.step.rank_calls import RankCalls, ShardCalls
from zenflow_compile.runtime.step.run_ahead import RunAhead
from zenflow_compile.runtime.step.schedule import Schedule
from zenflow_compile.runtime.step.upload_scheduler import UploadScheduler
from zenflow_compile.timeline import AdaptiveWindows, Timeline
from zenflow_compile.torch_internals import torch_private

_ids = itertools.count()


class OptimizerRuntime(ABC):
    """Owns streams, workers, host memory and update windows of one optimizer.

    Attributes:
        id: by which graph nodes name the engine.
        groups: the optimizer's ``param_groups``, read at every optimizer step.
        params: all parameters, in the plan's order.
        offloaded, streamed: those that the host updates, and those whose state the device streams, by index.
        weights: those that are in host memory between their uses.
        calls: what all ranks do together; of those that divide the parameters it is ``ranks``, too.
        step: number of optimizer steps so far.
        graphs: what the backend rewrote for this engine, for ``explain``.
        failure: the error that interrupted a step half-way; every further step raises it until a state is loaded.
        used: a graph, a gradient or an optimizer step depends on this engine.
        features: those of ``FEATURES`` that this engine has.
        moments: what the parts do at each moment of a step.
        sharded: the parameters are those of a model that FSDP2 shards, over one rank or several.
    """

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
        self.id = next(_ids)
        self.moments: Moments
        self.groups = groups
        self.options = options
        self.in_backward = in_backward
        self.device = device
        self.sharded = sharded
        served = device_of(device)
        self.recorder = Recorder(served.streams, served)
        self.registry = ParamRegistry(
            groups,
            options,
            device,
            self.recorder,
            weakref.ref(self),
            visible_gradients=not in_backward,
            ranks=None if sharded else ranks,
        )
        self.order = self.registry.transport.order
        self.params = self.registry.params
        self.offloaded = self.registry.offloaded
        self.streamed = self.registry.streamed
        self.weights = self.registry.weights
        self.device_memory = self.registry.transport.device_memory
        self.uploads = UploadScheduler(self.registry, self.recorder)
        self.ranks: RankCalls | None = None
        self.calls = OneRank()
        if ranks is not None and sharded:
            self.calls = ShardCalls(ranks, self.registry, self.recorder)
        elif ranks is not None:
            self.calls = self.ranks = RankCalls(ranks, self.registry, device, options, self.recorder)
        self.stale = StaleGradients(self.registry)
        self.holders = Holders(self.registry.given)
        self.schedule = Schedule(options, device, self.recorder, ranks)
        self.run_ahead = None if served.streams is None else RunAhead(served, served.streams, self.recorder)
        self.backward = BackwardPass()
        self.step = 0
        self.windows_flushed = 0
        self.graphs: list[Any] = []
        self.closed = False
        self.used = False
        self.failure: BaseException | None = None
        self._closing = False  # close() has begun; after an interrupt in it only another close() may follow
        self._finished = False  # in close(): all work has ended
        self._module_hooks: list[shard_hooks.Removable] = []
        self.features = [feature for kind in FEATURES if (feature := kind.of(self)) is not None]
        self._claim: Claim | None = None
        self._on_backward_end: Callable[[Any], None] | None = None
        self._updating = False  # between begin_update and end_update: all gradients are final

    @abstractmethod
    def arrange(self) -> None:
        """Make the moments of a step again: a part has come or gone."""

    def attach(self, claim: Claim, on_backward_end: Callable[[Any], None]) -> None:
        """Serve the optimizer that made ``claim``; ``on_backward_end(optimizer)`` runs after each backward."""
        self._claim = claim
        self._on_backward_end = on_backward_end
        claim.serving = weakref.ref(self)

    def detach(self) -> None:
        """Serve no optimizer any longer: ``close()`` leaves the parameters to the engine that replaces this one."""
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
        """Plan and allocate further parameters, by param group, of which the first has the index ``first_group``.

        Those that exist keep their phases. Raises ValueError, before any change, if the host has too little memory.
        """
        if self.params:
            self.synchronize()
            self._bring_back()
        known = len(self.params)
        try:
            self.registry.add(named, first_group)
        finally:
            self.arrange()
        self.schedule.make_room(len(self.params))
        self.keep_hooks(shard_hooks.hook_shards(self.registry.given[known:], self.id))
        for call in self.moments.allocated:
            call()

    @property
    def plan(self) -> Plan:
        return self.registry.plan

    def index_of(self, param: Tensor) -> int | None:
        """The index of ``param`` in the plan; None if it is not this engine's."""
        return self.registry.index_of(param)

    @property
    def model_bytes(self) -> int:
        return self.registry.model_bytes

    @property
    def adaptive_windows(self) -> AdaptiveWindows | None:
        """Limits of adaptive update window lengths; None where the length is fixed."""
        return self.schedule.adaptive_windows

    @property
    def report_rows(self) -> list[tuple[str, str]]:
        """Rows of a report that features add."""
        return [row for feature in self.features for row in feature.rows()]

    @property
    def worker_cores(self) -> tuple[int, ...]:
        return self.registry.transport.workers.cores

    @property
    def finalizes_in_backward(self) -> bool:
        """Whether updates may run inside of a backward.

        Not with clipping, whose norm needs all gradients, nor where ranks divide updates and may lack contributions.
        """
        return self.in_backward and self.options.max_grad_norm is None and not self.calls.divides

    @property
    def weight_grad_bytes(self) -> int:
        """Device memory for the inputs of reordered weight gradients; 0: they are not reordered."""
        given = self.options.weight_grad_bytes
        return free_device_bytes(self.device) // 4 if given == "auto" else given

    @property
    def timeline(self) -> Timeline | None:
        return self.recorder.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self.registry.transport.land()  # what has ended so far belongs to the timeline before
        self.recorder.attach(timeline)
        self.arrange()

    # Models, and readers of weights outside of compiled graphs.

    def remember_models(self, models: Sequence[nn.Module]) -> None:
        self.used = True
        self.holders.remember(models, {id(param): index for index, param in enumerate(self.registry.given)})

    def keep_hooks(self, hooks: Iterable[shard_hooks.Removable]) -> None:
        """Remove these hooks of modules in ``close()``."""
        self._module_hooks += hooks

    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Raise RuntimeError if one of ``models`` that is compiled has a parameter that was replaced."""
        self.holders.check_models(self.plan.params, models)

    def check_parameters(self) -> None:
        """``check_unchanged``, and ``check_models`` of the modules that hold the parameters directly: cheap enough for
        every step.
        """
        self.registry.check_unchanged()
        self.holders.check(self.registry.plan.params)

    def before_load(self) -> None:
        """Apply due updates before weights are loaded into the model, so that the loaded weights win."""
        self.uploads.before_load(self.step)

    def synchronize(self) -> None:
        """Wait for work in flight, which may raise, and make due updates visible. The trajectory stays as it was."""
        self._check()
        self._check_backward()
        self.registry.follow_shards()
        self.uploads.apply_due(self.step)
        for offloaded in self.uploads.by_deadline():
            offloaded.host.wait()
            offloaded.host.wait_for_copies()
        for call in self.moments.settle:
            call()
        self.streamed.wait()

    def offload_all(self) -> None:
        """Give the device's memory of all state and buffers back until their next use, which brings them back.

        Raises:
            RuntimeError: work in flight failed, or a backward or an optimizer step runs.
            MemoryError: the host has no room for the values. Nothing has been moved then.
        """
        self._check()
        backward = self.backward
        if backward.task is not None or self._updating or torch_private.current_graph_task() != -1:
            raise RuntimeError(
                "offload_all() was called while a backward or an optimizer step runs, which uses the memory; call it "
                "behind them (after a backward that raised, call optimizer.zero_grad() first)"
            )
        with backward.lock:  # a backward that begins in another thread waits, and brings everything back
            self.synchronize()
            if self.device_memory.given_back:
                self.arrange()  # an interrupt may have come before
                return
            if self.weights.weights:
                self.weights.prefetch.drop()
                self.weights.release()
            # Before the memory is listed: what only work in flight needs is dropped there.
            self.device_memory.settle()
            self.registry.transport.land()
            found = MemoryList()
            self.registry.list_memory(found)
            self.schedule.list_memory(found)
            self.calls.list_memory(found)
            try:
                self.device_memory.offload(found)
            finally:
                self.arrange()

    def reload_all(self) -> None:
        """Have everything on the device that ``offload_all`` has moved, or raise torch.OutOfMemoryError."""
        self._check()
        self._bring_back()

    def _bring_back(self) -> None:
        if self.device_memory.given_back:
            self.bring_back()

    def bring_back(self) -> None:
        """Bring back what ``offload_all`` has moved, before work that needs it is queued: a moment's call."""
        for follow in self.moments.enter:
            follow()
        with self.calls.announcing():
            self.device_memory.bring_back()
        self.arrange()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a parameter has another shape, dtype or device than the plan."""
        self.registry.check_unchanged()

    def apply_due(self, params: Iterable[Tensor] | None = None) -> None:
        """Make due updates, of all parameters or of ``params``, visible to code that reads weights without a fetch.

        Cheap when nothing is due. It runs as outside of inference mode, tracing, functorch transforms and dispatch
        modes, which belong to the reader and not to the updates.

        Raises:
            RuntimeError: work in flight failed, a weight was written while an update of it was in flight, or an update
                is due in a forked child.
        """
        self._check()
        if not self.uploads.is_current(self.step):
            only = None
            if params is not None:
                only = {index for param in params if (index := self.index_of(param)) is not None}
            with torch_private.outside_of_transforms():
                self.uploads.apply_due(self.step, only)

    def apply_due_of(self, index: int) -> None:
        """Make due updates of one parameter visible, which a graph is going to fetch."""
        if (offloaded := self.offloaded.get(index)) is not None and offloaded.host.flushed:
            self.uploads.before_use(offloaded, self.step)

    def before_unshard(self, sharded: Sequence[Tensor]) -> None:
        """Make due updates of parameters that FSDP2 is about to gather visible, and start the uploads that follow.

        Raises RuntimeError as ``apply_due`` does.
        """
        if self.failure is not None or self._closing:
            self._check()
        chosen = [self.offloaded[p] for each in sharded if (p := self.index_of(each)) in self.offloaded]
        if torch_private.current_graph_task() == -1:  # weights are gathered for backwards, too
            self.uploads.extend_order([offloaded.plan.index for offloaded in chosen])
            if torch.is_grad_enabled():
                for call in self.moments.forward:
                    call()
        for offloaded in chosen:
            offloaded.uses += 1
        if not any(offloaded.host.flushed for offloaded in chosen):
            return
        for follow in self.moments.enter_ahead:
            follow()
        with self.calls.announcing(), torch_private.outside_of_transforms():
            for offloaded in chosen:
                self.registry.follow_storage(offloaded.plan.index)
                self.uploads.before_use(offloaded, self.step)

    # Weights in host memory.

    @property
    def offloaded_weights(self) -> OffloadedWeights | None:
        """What graphs load and unload; None without any."""
        return self.weights.offloaded

    def keep_weights(self, reasons: Mapping[int, str]) -> None:
        """Keep weights on the device from now on, for ``reasons`` by index of the parameter."""
        marked = [self.offloaded[p] for p in reasons if p in self.offloaded]
        with torch_private.outside_of_transforms():  # a graph is being compiled, with fake tensors
            self.uploads.apply_due(self.step, reasons.keys())
            unwritten = [each for each in marked if each.weights.home and not each.weights.written_by_others]
            self.weights.keep(reasons)
            self.arrange()
        for offloaded in unwritten:
            offloaded.weights.accept()  # it may have other memory now

    def hold_weights(self, params: Iterable[Tensor] | None = None, *, to_write: bool = False) -> None:
        """Load weights, None: all, for code that is no graph of ours, until the next optimizer step.

        Args:
            to_write: that code overwrites them: values that a file has lost do not raise.
        """
        if not self.weights.weights:
            return
        if self.failure is not None:
            # Hazard: weights in files take turns in memory. A load would wait for the job of another parameter, which
            # an interrupted step has never queued.
            self.uploads.withdraw(self.failure)
        for follow in self.moments.enter:
            follow()
        ps = None if params is None else [p for param in params if (p := self.index_of(param)) is not None]
        with torch_private.outside_of_transforms():
            self.weights.hold(ps, to_write=to_write)

    def weight_on_host(self, param: Tensor) -> Tensor | None:
        """Copy the values of a weight that is in host memory, in the parameter's shape; None of any other tensor."""
        if (index := self.index_of(param)) is None:
            return None
        home = self.weights.weights.get(index)
        if home is None or home.is_on_device():
            return None
        values = self.registry.weight_of(index)
        return values.clone() if home.place is Place.WHOLE else values  # of slices it is a copy already

    def release_weights(self, params: Iterable[Tensor] | None = None) -> None:
        """Unload weights that are held. None: all."""
        for follow in self.moments.enter:
            follow()
        self.weights.release(
            None if params is None else [p for each in params if (p := self.index_of(each)) is not None]
        )

    def write_weight(self, index: int, values: Tensor) -> None:
        """Overwrite a weight, where it is, below autograd."""
        if (home := self.weights.weights.get(index)) is not None:
            home.write(values)
        else:
            self.params[index].data.copy_(values)

    # Lifetime.

    def flush(self) -> None:
        """Apply the gradients in update windows and make every update visible. Training may continue.

        Raises:
            RuntimeError: work in flight failed; no step runs then until a state is loaded. Or a weight was written
                while an update of it was in flight; training may continue then.
            ValueError, TypeError: an eps in ``param_groups`` that no step can use. Nothing has been changed then.
        """
        self._check()
        self._check_backward()
        self.registry.check_unchanged(
            index for index, each in self.offloaded.items() if each.host.flushed or each.window_gradients
        )
        self.holders.check(self.plan.params)
        for index in self.offloaded:
            self.registry.eps(index)
        self._bring_back()
        try:
            self.schedule.restart_windows()
            with self.calls.ending(Call.FLUSH, self.step) as written:
                self.uploads.finish(self.step, flush=True, written=written)
            self.streamed.wait()
        except errors.LostUpdateError:
            raise
        except BaseException as error:
            self.failure = error
            raise

    def abandon(self) -> None:
        """Drop everything in flight, gradients and failed work too, before a state is loaded."""
        self.failure = None
        self._check()
        self._bring_back()
        self._updating = False
        self.backward.reset()
        self.backward.task = None
        self.calls.forget()
        # Before ``registry.abandon``, which would wait forever for a job that was never queued.
        self.uploads.abandon()
        self.schedule.forget()
        for call in self.moments.abandon:
            call()
        self.registry.drop_grads()
        self.stale.forget()
        self.registry.abandon()

    def _check(self) -> None:
        """Raise if the engine must not be used: closed, or failed. Its work follows that of the last call."""
        if self.closed or self._closing:
            raise RuntimeError("this optimizer is closed; create a new one, and compile the model again")
        if self.failure is not None:
            errors.refuse_failed(self.failure)
        for follow in self.moments.enter:
            follow()

    def _check_backward(self) -> None:
        """Raise if the last backward of the optimizer-in-backward form failed half-way; not inside of a backward."""
        if self.in_backward and self.backward.task is not None and torch_private.current_graph_task() == -1:
            self._refuse_half_made_step()

    def _refuse_half_made_step(self) -> None:
        """Raise if parameters were updated in a backward that has failed, and others were not."""
        if updated := self.stale.updated():
            self.failure = RuntimeError(
                "a backward failed or was interrupted after some parameters had been updated in it, "
                f"{len(updated)} of {len(self.params)} ({updated[0]}, ...)"
            )
            errors.refuse_failed(self.failure)

    def close(self, *, flush: bool) -> None:
        """Apply all updates, stop the threads, free host memory. Safe to call twice.

        After an interrupt (``KeyboardInterrupt``) only another call of ``close`` may follow, which completes it.

        Args:
            flush: apply the gradients in update windows, too.

        Raises:
            RuntimeError: work in flight failed. The engine is closed all the same.
        """
        if self.closed:
            return
        if flush and not self._closing:
            try:
                self._bring_back()
            except torch.OutOfMemoryError:
                raise  # nothing is lost: the call may be repeated when the device has room
            except Exception:
                pass  # of a device that has died: raised again below, when the rest is closed
        self._closing = True
        for hook in self._module_hooks:
            hook.remove()
        error: Exception | None = None
        # Each part may be repeated.
        # In this order: gradients that stay in ``.grad`` copy their values from host memory, which the last part frees.
        parts: list[Callable[[], object]] = [
            partial(self._finish, flush=flush), self.uploads.allow_reads, self._release_gradients, self.weights.restore,
            *self.moments.close, self.registry.close,
        ]  # fmt: skip
        for part in parts:
            try:
                part()
            except Exception as raised:
                error = error or raised
                with suppress(Exception):  # threads and files must not stay for an error that has passed
                    part()
        ops.unregister_engine(self.id)
        self.calls.end()
        if self._claim is not None:
            self.calls.close()
            self._claim.release()
        self.closed = True  # last: an interrupt above leaves the rest to the next call
        if error is not None:
            raise error

    def _finish(self, *, flush: bool) -> None:
        if not self._finished:
            if self.failure is None:
                self._check_backward()
            for follow in self.moments.enter:
                follow()
            try:
                self._bring_back()
                flush = flush and self.failure is None and not self.calls.failed
                if flush:
                    with self.calls.ending(Call.CLOSE, self.step) as written:
                        self.uploads.finish(self.step, flush=True, written=written)
                elif not self.calls.divides:
                    self.uploads.finish(self.step, flush=False, interrupt=self.failure)
                else:
                    # The other ranks would not see the updates in flight, and have other weights than this one.
                    self.uploads.abandon()
                    for offloaded in self.offloaded.values():
                        with suppress(Exception):  # of a failed job
                            offloaded.host.wait()
                self.streamed.wait()
            # Not on an interrupt: the next ``close`` has to finish the work.
            except Exception:
                self._finished = True
                raise
            self._finished = True

    def _release_gradients(self) -> None:
        # Of several ranks, each closes its engine when it comes to that, and none may wait for the others' values.
        self.registry.release_gradients(keep=self.failure is None and not self.calls.divides)
