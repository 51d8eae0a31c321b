"""The engine of one optimizer: its stages, and how it grows, gives memory back and ends.

Order of a training step, for graph nodes and for hooks on ``.grad``:

1. backward (``gradient_intake.py``): ``offload_gradients`` for every offloaded gradient that autograd was asked for;
2. optimizer step (``step_runner.py``): ``begin_update`` takes all gradients, ``update_parameters`` runs for all
   offloaded parameters, ``end_update`` updates resident parameters and advances the step;
3. next forward (``weight_access.py``): ``fetch_parameters_`` before first uses, or ``before_unshard`` before FSDP2
   gathers shards. Other updates of gradients that came through hooks are applied in ``end_update``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import Plan
from zenflow_compile.rules.rule import Rule
from zenflow_compile.runtime import errors, ops, shard_hooks
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.engine_core import EngineCore
from zenflow_compile.runtime.gradient_intake import GradientIntake
from zenflow_compile.runtime.in_backward import InBackwardIntake, InBackwardSteps
from zenflow_compile.runtime.ops import annotated
from zenflow_compile.runtime.parameters.capacity import free_device_bytes
from zenflow_compile.runtime.parameters.claim import Claim
from zenflow_compile.runtime.ranks.rank_group import Call, RankGroup
from zenflow_compile.runtime.step_runner import StepRunner
from zenflow_compile.runtime.weight_access import WeightAccess
from zenflow_compile.timeline import Timeline
from zenflow_compile.torch_internals import torch_private


class Engine:
    """What compiled graphs, hooks, an optimizer and a profiler know of one optimizer's runtime.

    Attributes:
        core: what the stages share; those of its parts that code outside asks for are attributes here, too.
        intake, steps, access: the stages: gradients, optimizer steps, and weights as others read and write them.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        options: Options,
        rules: Sequence[Rule],
        device: torch.device,
        *,
        in_backward: bool,
        ranks: RankGroup | None = None,
        sharded: bool = False,
    ) -> None:
        own = weakref.ref(self)
        self.core = core = EngineCore(
            own, groups, options, rules, device, in_backward=in_backward, ranks=ranks, sharded=sharded
        )
        self.id, self.options, self.device = core.id, options, device
        self.registry, self.params, self.offloaded = core.registry, core.params, core.offloaded
        self.weights, self.device_memory = core.weights, core.device_memory
        self.uploads, self.schedule, self.recorder = core.uploads, core.schedule, core.recorder
        self.calls, self.ranks, self.backward, self.graphs = core.calls, core.ranks, core.backward, core.graphs
        self.access = WeightAccess(core)
        intake, steps = (InBackwardIntake, InBackwardSteps) if in_backward else (GradientIntake, StepRunner)
        self.intake: GradientIntake = intake(core)
        self.steps: StepRunner = steps(core, self.access)
        self._finished = False  # in close(): all work has ended
        self._module_hooks: list[shard_hooks.Removable] = []
        core.arrange()
        # Last: from here on the handler of forks, graphs and other engines find the engine.
        core.register()
        ops.register_engine(self)

    def attach(self, claim: Claim, on_backward_end: Callable[[Any], None]) -> None:
        """Serve the optimizer that made ``claim``; ``on_backward_end(optimizer)`` runs after each backward."""
        core = self.core
        core.claim = claim
        core.on_backward_end = on_backward_end
        claim.serving = weakref.ref(self)

    def detach(self) -> None:
        """Serve no optimizer any longer: ``close()`` leaves the parameters to the engine that replaces this one."""
        self.core.claim = None

    @property
    def outdated(self) -> bool:
        """Return whether another engine may replace this one: the model was changed, and nothing depends on it yet."""
        return not self.core.used and self.timeline is None and any(map(self.registry.changed, range(len(self.params))))

    # Parameters, and what others ask about them.

    def add_params(self, named: Sequence[Sequence[tuple[str, Parameter]]], first_group: int = 0) -> None:
        """Plan and allocate further parameters, by param group, of which the first has the index ``first_group``.

        Those that exist keep their phases. Raises ValueError, before any change, if the host has too little memory.
        """
        core = self.core
        if self.params:
            self.access.synchronize()
            core.use_memory()
        known = len(self.params)
        try:
            self.registry.add(named, first_group)
        finally:
            core.arrange()
        self.schedule.make_room(len(self.params))
        self.keep_hooks(shard_hooks.hook_shards(self.registry.given[known:], self.id))
        for call in core.moments.allocated:
            call()

    @property
    def plan(self) -> Plan:
        return self.registry.plan

    def index_of(self, param: Tensor) -> int | None:
        """The index of ``param`` in the plan; None if it is not this engine's."""
        return self.registry.index_of(param)

    @property
    def step(self) -> int:
        """Number of optimizer steps so far."""
        return self.core.step

    @property
    def unapplied(self) -> list[int]:
        """For each parameter that a flush would change, the number of gradients at most that it would apply.

        Empty where no flush is possible; of several ranks, the first one answers.
        """
        core = self.core
        if core.closed or core.closing or core.failure is not None or self.calls.rank > 0:
            return []
        return [count for offloaded in self.offloaded.values() if (count := offloaded.unapplied(core.step))]

    @property
    def windows_hold_gradients(self) -> bool:
        return any(offloaded.window_gradients for offloaded in self.offloaded.values())

    @property
    def report_rows(self) -> list[tuple[str, str]]:
        """Rows of a report that features add."""
        return [row for feature in self.core.features for row in feature.rows()]

    @property
    def worker_cores(self) -> tuple[int, ...]:
        return self.registry.transport.workers.cores

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
        self.core.arrange()

    def record_collectives(self) -> Callable[[], None]:
        """Record what FSDP2 does with the engine's shards, until the call that is returned."""
        return torch_private.watch_collectives(self.registry.given, self.recorder.collective_of_shards)

    def inference(self) -> AbstractContextManager[None]:
        return self.recorder.inference()

    # Models.

    def remember_models(self, models: Sequence[nn.Module]) -> None:
        core = self.core
        core.used = True
        core.holders.remember(models, {id(param): index for index, param in enumerate(self.registry.given)})

    def keep_hooks(self, hooks: Iterable[shard_hooks.Removable]) -> None:
        """Remove these hooks of modules in ``close()``."""
        self._module_hooks += hooks

    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Raise RuntimeError if one of ``models`` that is compiled has a parameter that was replaced."""
        self.core.holders.check_models(self.registry.plan.params, models)

    def check_parameters(self) -> None:
        """Check the parameters, and the modules that hold them directly: cheap enough for every step.

        Raises as ``ParamRegistry.check_unchanged`` and ``check_models`` do.
        """
        self.registry.check_unchanged()
        self.core.holders.check(self.registry.plan.params)

    # Steps, memory and the end.

    @annotated("step", lambda engine: ())
    def run_step(self) -> bool:
        """Run one optimizer step on all gradients. Returns False without any; nothing has been changed then.

        The last one of ``total_steps`` flushes.

        Raises: see ``StepRunner.run_step``.
        """
        ran = self.steps.run_step()
        if ran and self.core.step == self.options.total_steps:
            self.flush()
        return ran

    def flush(self) -> None:
        """Apply the gradients in update windows and make every update visible. Training may continue.

        Raises:
            RuntimeError: work in flight failed; no step runs then until a state is loaded. Or a weight was written
                while an update of it was in flight; training may continue then.
        """
        core = self.core
        core.check()
        core.check_backward()
        self.registry.check_unchanged(
            index for index, each in self.offloaded.items() if each.host.flushed or each.window_gradients
        )
        core.holders.check(self.registry.plan.params)
        core.use_memory()
        try:
            self.schedule.restart_windows()
            with self.calls.ending(Call.FLUSH, core.step) as written:
                self.uploads.finish(core.step, flush=True, written=written)
            core.streamed.wait()
        except errors.LostUpdateError:
            raise
        except BaseException as error:
            core.failure = error
            raise

    def offload_all(self) -> None:
        """Give the device's memory of all state and buffers back until their next use, which brings them back.

        Raises:
            RuntimeError: work in flight failed, or a backward or an optimizer step runs.
            MemoryError: the host has no room for the values. Nothing has been moved then.
        """
        core = self.core
        core.check()
        backward = self.backward
        if backward.task is not None or core.updating or torch_private.current_graph_task() != -1:
            raise RuntimeError(
                "offload_all() was called while a backward or an optimizer step runs, which uses the memory; call it "
                "behind them (after a backward that raised, call optimizer.zero_grad() first)"
            )
        with backward.lock:  # a backward that begins in another thread waits, and brings everything back
            self.access.synchronize()
            if self.device_memory.given_back:
                core.arrange()  # an interrupt may have come before
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
                core.arrange()

    def reload_all(self) -> None:
        """Have everything on the device that ``offload_all`` has moved, or raise torch.OutOfMemoryError."""
        core = self.core
        core.check()
        core.use_memory()

    @property
    def unused_gradients(self) -> bool:
        """Whether backwards that ended well have brought gradients that no step has used, in ``.grad``."""
        return self._keeps_gradients and self.backward.count > 0

    @property
    def _keeps_gradients(self) -> bool:
        core, backward = self.core, self.backward
        failed = core.failure is not None or backward.task is not None or backward.step_failed or core.updating
        return not (failed or core.in_backward or self.registry.transport.may_have_failed)

    def abandon(self) -> None:
        """Drop everything in flight, failed work too, before a state is loaded.

        Gradients stay in ``.grad``, as PyTorch's optimizers leave them, unless a backward or a step has failed.
        """
        core = self.core
        kept, backwards = self._keeps_gradients, self.backward.count
        core.failure = None
        core.check()
        core.use_memory()
        core.updating = False
        if kept:
            self.registry.leave_gradients()
        self.backward.reset()
        self.backward.task = None
        self.calls.forget()
        # Before ``registry.abandon``, which would wait forever for a job that was never queued.
        self.uploads.abandon()
        self.schedule.forget()
        for call in core.moments.abandon:
            call()
        if kept:
            self.backward.count = backwards
        else:
            self.registry.drop_grads()
        core.stale.forget()
        self.registry.abandon()

    def close(self, *, flush: bool) -> None:
        """Apply all updates, stop the threads, free host memory. Safe to call twice.

        After an interrupt (``KeyboardInterrupt``) only another call of ``close`` may follow, which completes it.

        Args:
            flush: apply the gradients in update windows, too.

        Raises:
            RuntimeError: work in flight failed. The engine is closed all the same.
        """
        core = self.core
        if core.closed:
            return
        if flush and not core.closing:
            try:
                core.use_memory()
            except torch.OutOfMemoryError:
                raise  # nothing is lost: the call may be repeated when the device has room
            except Exception:
                pass  # of a device that has died: raised again below, when the rest is closed
        core.closing = True
        for hook in self._module_hooks:
            hook.remove()
        error: Exception | None = None
        # Each part may be repeated.
        # In this order: gradients that stay in ``.grad`` copy their values from host memory, which the last part frees.
        parts: list[Callable[[], object]] = [
            partial(self._finish, flush=flush), self.uploads.allow_reads, self._release_gradients, self.weights.restore,
            *core.moments.close, self.registry.close,
        ]  # fmt: skip
        for part in parts:
            try:
                part()
            except Exception as raised:
                error = error or raised
                with suppress(Exception):  # threads and files must not stay for an error that has passed
                    part()
        ops.unregister_engine(self.id)
        core.unregister()
        self.calls.end()
        if core.claim is not None:
            self.calls.close()
            core.claim.release()
        core.closed = True  # last: an interrupt above leaves the rest to the next call
        if error is not None:
            raise error

    def _finish(self, *, flush: bool) -> None:
        core = self.core
        if not self._finished:
            if core.failure is None:
                core.check_backward()
            core.follow()
            try:
                core.use_memory()
                flush = flush and core.failure is None and not self.calls.failed
                if flush:
                    with self.calls.ending(Call.CLOSE, core.step) as written:
                        self.uploads.finish(core.step, flush=True, written=written)
                elif not self.calls.divides:
                    self.uploads.finish(core.step, flush=False, interrupt=core.failure)
                else:
                    # The other ranks would not see the updates in flight, and have other weights than this one.
                    self.uploads.abandon()
                    for offloaded in self.offloaded.values():
                        with suppress(Exception):  # of a failed job
                            offloaded.host.wait()
                core.streamed.wait()
            # Not on an interrupt: the next ``close`` has to finish the work.
            except Exception:
                self._finished = True
                raise
            self._finished = True

    def _release_gradients(self) -> None:
        # Of several ranks, each closes its engine when it comes to that, and none may wait for the others' values.
        self.registry.release_gradients(keep=self.core.failure is None and not self.calls.divides)
