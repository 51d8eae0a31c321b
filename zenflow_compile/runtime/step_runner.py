"""The optimizer step of one engine: takes all gradients, updates selected slices, commits the deferred ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from zenflow_compile.runtime.engine_core import EngineCore
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.parameters.host_state import FlushedWindow
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.step.clipping import clip_gradients
from zenflow_compile.runtime.step.slice_updates import Member, members_of, update_slices
from zenflow_compile.runtime.weight_access import WeightAccess


class StepRunner:
    """Runs optimizer steps, as a whole or, with the optimizer in backward, parameter by parameter."""

    def __init__(self, core: EngineCore, access: WeightAccess) -> None:
        self.core = core
        self._access = access
        self.options = core.options
        self.registry, self.offloaded, self.streamed = core.registry, core.offloaded, core.streamed
        self.weights, self.uploads, self.calls = core.weights, core.uploads, core.calls
        self.schedule, self.recorder, self._backward = core.schedule, core.recorder, core.backward
        self.windows_flushed = 0

    @property
    def has_gradients(self) -> bool:
        """Return whether any parameter has a gradient for the optimizer step.

        Raises:
            RuntimeError: the engine is closed, or failed: a step without gradients must not hide that.
            TypeError, RuntimeError: see ``ParamRegistry.check_gradients``.
        """
        self.core.check()
        return self.registry.check_gradients()[0]

    def run_step(self) -> bool:
        """Run one optimizer step on all gradients. Returns False without any; nothing has been changed then.

        Raises: see ``has_gradients`` and ``begin_update``; after any other error no step runs until a state is loaded.
        """
        core = self.core
        core.check()
        for call in core.moments.enter_step:
            call()
        declared = core.options.gradient_accumulation_steps
        undeclared = 0 if declared is None else max(0, core.backward.count - declared)
        try:
            with self.calls.step(core.step, undeclared) as shortest_window:
                if self.schedule.shortest_window is None:
                    self.schedule.shortest_window = shortest_window
                present, untaken = self.registry.check_gradients()
                if not present:
                    return False
                self.begin_update(untaken)
                try:
                    self.update_parameters(list(self.offloaded))
                    self.end_update()
                except BaseException as error:
                    core.failure = error
                    raise
                return True
        except BaseException:
            self._backward.step_failed = True
            raise

    def begin_update(self, untaken: Sequence[OffloadedParam] = ()) -> None:
        """Take all gradients, also ``untaken`` ones from ``.grad``: they are final, and ``check_gradients`` has passed.

        Raises: see ``ParamRegistry.check_groups``, or work in flight failed; nothing has been changed then.
        """
        core = self.core
        core.used = True
        for call in core.moments.begin_step:
            call()
        if self.registry.unseen_writes.frozen:
            self.compare_samples()
        if self.registry.transport.may_have_failed:
            for offloaded in self.offloaded.values():
                offloaded.raise_failures()
        to_take = dict.fromkeys(self.to_update(untaken) if untaken else ())
        for offloaded in self.to_update(self.offloaded.values()):
            if offloaded.weights.written_by_others:
                offloaded.notice_external_write(core.step)
                to_take[offloaded] = None
            if offloaded.host.flushed:  # no forward has fetched it, and its buffers are needed now
                self.uploads.apply(offloaded, offloaded.updates.due(core.step))
                to_take[offloaded] = None  # a new selection has put its parts together again
            if offloaded.arriving is not None:
                offloaded.receive_weights()
        self.begin_samples()
        if fitting := self.weights.fitting:
            self.weights.fitting = {}
            self._keep_fitting(fitting)
        for offloaded in to_take:
            offloaded.gradient.take_from_grad(used=offloaded.uses > 0)
        if (limit := self.options.max_grad_norm) is not None:
            clip_gradients(self.registry, self.core.device, limit, self.calls)
        self.registry.finish_factors()
        for call in core.moments.final:
            call()
        core.updating = True  # last, so that an error above leaves it unset

    def _keep_fitting(self, fitting: Mapping[int, str]) -> None:
        """Keep weights that fit, which no update in flight overwrites: due ones have been applied."""
        for p, reason in fitting.items():
            if self.weights.weights[p].values.has_update_on_its_way:
                continue
            try:
                self._access.keep_weights({p: reason})
            except torch.OutOfMemoryError:  # other processes use the device, or free memory is in pieces
                return

    def update_parameters(self, ps: Sequence[int], params: Sequence[Tensor] | None = None) -> None:
        """Update those of ``ps`` whose gradients are final: selected slices now, deferred ones in their update windows.

        Args:
            params: those with columns on the device, in the order of ``ps``, as a graph has them; None: the engine's.
        """
        core = self.core
        if params is not None:
            on_device = [p for p in ps if self.offloaded[p].plan.k]
            for p, param in zip(on_device, params, strict=True):
                self.registry.check_storage(p, param)
        for follow in core.moments.enter:
            follow()
        warming_up = self.schedule.begin_step(core.step)
        members = self.taking_part(ps)
        try:
            self._update_slices(members)  # first: it feeds the scores by which a window flushed below re-selects
            self._update_on_host(members, warming_up)
        except BaseException as error:
            # Also an interrupt between the two: one side has taken the gradient. ``UploadScheduler`` withdraws jobs
            # that were not queued, before any wait.
            core.failure = error
            raise

    def taking_part(self, ps: Sequence[int]) -> list[Member]:
        """Return those of ``ps`` that the step updates, with their coefficients."""
        chosen = [self.offloaded[p] for p in ps]
        # A missing gradient takes part, too: update windows flush by the step's number.
        chosen = [
            each for each in chosen if (record := each.shown.record) is None or record.state is GradientState.PARTS
        ]
        return members_of(chosen, self.registry)

    def _update_slices(self, members: Sequence[Member]) -> None:
        for call in self.core.moments.settle:
            call()
        chosen = [each for each in members if each.offloaded.shown.record is not None and each.offloaded.plan.k]
        self.calls.sum_norms([each.offloaded for each in chosen])
        update_slices(chosen)

    def _update_on_host(self, members: Sequence[Member], warming_up: bool) -> None:
        """Add gradients, if any, to their update windows, and flush those that are due: all while warming up."""
        flushed: list[FlushedWindow] = []
        schedule, step = self.schedule, self.core.step
        params = [
            (each.plan, each.device, None if (record := each.shown.record) is None else record.final.unscale)
            for each, _ in members
        ]
        for (offloaded, coefficients), due in zip(members, schedule.due(params, step), strict=True):
            plan = offloaded.plan
            offloaded.gradient.commit(None if offloaded.shown.record is None else coefficients)
            if not due:
                continue
            selection = schedule.selection(plan, offloaded.device, step)
            window = offloaded.updates.flush(at=step, selection=selection, promptly=warming_up)
            if window is not None:
                flushed.append(window)
                if self.recorder.timeline is not None:
                    self.recorder.mark("flush", param=plan.name)
        if flushed:
            transport = self.registry.transport
            transport.workers.submit(*[window.job for window in flushed])
            if transport.files is not None:
                transport.files.read_ahead()
        self.windows_flushed += len(flushed)

    def end_update(self) -> None:
        """Update resident parameters, apply updates that must not wait, and advance to the next step.

        Host jobs are queued before this. Then the device updates what is streamed, then what is resident, while the
        host works. Updates for which the step waits come last.
        """
        core = self.core
        self.registry.device_updated.update()
        self.calls.gather_streamed(self.streamed.params.values())
        gather = self.calls.gather_of(core.step + 1, self.offloaded.values())  # first: it asks who has a gradient
        core.step += 1
        core.updating = False
        self.end_gradients()
        # Before weights are gathered: its sums over ranks would wait for them.
        self.schedule.end_step()
        self.uploads.end_step(core.step, gather)
        if self.weights.weights:
            self.weights.end_step()
        self.registry.unseen_writes.end_step()
        self.uploads.refuse_stale_reads(core.step)
        for offloaded in self.offloaded.values():
            if offloaded.uses:
                offloaded.announced, offloaded.uses = True, 0
        if not self.offloaded:  # the next forward uploads nothing, and no node will tell of its end
            self.streamed.prefetch()
        for call in core.moments.end_step:
            call()
        self.recorder.step = core.step

    # What differs where the optimizer steps at the end of the backward: see ``in_backward``.

    def compare_samples(self) -> None:
        """Notice unseen writes to weights that are no longer frozen, before the step would undo them."""
        self.registry.unseen_writes.compare_unfrozen()

    def begin_samples(self) -> None:
        """Take samples of the weights before the step writes them."""
        self.registry.unseen_writes.begin_step()

    def to_update(self, params: Collection[OffloadedParam]) -> Collection[OffloadedParam]:
        """Return those of ``params`` whose update has not begun: all, where no update runs before the step."""
        return params

    def end_gradients(self) -> None:
        """Forget the gradients, which the step has used."""
        self._backward.reset()
