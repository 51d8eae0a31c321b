"""When host updates become visible in the weights, and which uploads start ahead of their first use."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.runtime.errors import LostUpdateError
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.one_rank import Gather
from zenflow_compile.torch_internals.torch_private import profiler_active

_DEADLINE = attrgetter("updates.deadline")


class UploadScheduler:
    """Applies updates in the order of a forward's first uses.

    Attributes:
        selections: number of applied update windows that brought a new selection.
        read_elsewhere: graphs that fetch nothing read the weights, so every due update is applied in ``step()``.
    """

    def __init__(self, registry: ParamRegistry, recorder: Recorder) -> None:
        self.selections = 0
        self.read_elsewhere = False
        self._current_at: int | None = None
        self._registry = registry
        self._recorder = recorder
        self._order: list[int] = []
        self._in_flight: list[OffloadedParam] = []  # that have flushed update windows, the earliest deadline last

    def declare_order(self, order: Sequence[int]) -> None:
        """Set the order of parameters by first use in a forward graph; jobs and uploads run in this order."""
        new = set(order)
        # A recompiled graph takes the place of its predecessor; any other graph comes after those before it.
        place = next((i for i, p in enumerate(self._order) if p in new), len(self._order))
        others = [p for p in self._order if p not in new]
        self._order = [*others[:place], *order, *others[place:]]
        for position, p in enumerate(self._order):
            if p in self._registry.offloaded:
                self._registry.offloaded[p].updates.deadline = position

    def extend_order(self, first_uses: Sequence[int]) -> None:
        """Put those of these parameters that have no place in the order behind all that have one."""
        if new := [p for p in first_uses if p not in self._order]:
            self.declare_order(new)

    def by_deadline(self) -> list[OffloadedParam]:
        return sorted(self._registry.offloaded.values(), key=_DEADLINE)

    def end_step(self, now: int, among_ranks: Gather | None = None) -> None:
        """``now`` steps are over: apply updates that cannot wait for a first use, and start the first uploads.

        Args:
            among_ranks: brings the weights of all ranks up to date; its argument applies the due updates of a
                parameter. All ranks send their slices in one order, and so do not wait for first uses.
        """
        every = self._registry.offloaded.values()
        flushed = [offloaded for offloaded in every if offloaded.host.flushed]
        flushed.sort(key=_DEADLINE)
        self._in_flight = flushed[::-1]
        unguarded = self.read_elsewhere or profiler_active()
        unfetched = {
            offloaded for offloaded in every
            if unguarded or offloaded.gradient.through_autograd or offloaded.plan.blocking
            # An update window that was loaded may be due before any use in this process tells who reads the weight.
            or not (offloaded.announced or offloaded.uses)
            # Code may read the weight without an error that tells it of the update.
            or not offloaded.weights.can_be_guarded
        }  # fmt: skip
        if among_ranks is None:
            for offloaded in flushed:
                if offloaded in unfetched:
                    self.apply(offloaded, offloaded.updates.due(now))
        else:
            among_ranks(partial(self._apply_next_of_ranks, now))
            for offloaded in every:
                # Also parameters that only other ranks have used in this step: their first use here may be in any code.
                if offloaded.uses == 0 or offloaded in unfetched:
                    offloaded.receive_weights()
        self._prefetch(now)

    def refuse_stale_reads(self, now: int) -> None:
        """Have every access to a weight raise until its due update is applied, or its slices of other ranks arrive."""
        for offloaded in self._registry.offloaded.values():
            due = any(window.visible_at <= now for window in offloaded.host.flushed)
            if offloaded.arriving is not None or due:
                offloaded.weights.guard.refuse(storage := offloaded.param.untyped_storage(), storage.nbytes())

    def allow_reads(self) -> None:
        """Allow accesses to all weights: no due update will be applied any more. Idempotent."""
        for offloaded in self._registry.offloaded.values():
            offloaded.weights.guard.allow()

    def _apply_next_of_ranks(self, now: int, offloaded: OffloadedParam) -> None:
        self._prefetch(now)
        self.apply(offloaded, offloaded.updates.due(now))

    def before_use(self, offloaded: OffloadedParam, now: int) -> None:
        """Make the due updates of a parameter that is about to be read visible, and start the uploads that follow."""
        if self._registry.changed(offloaded.plan.index):
            self._check_readable(offloaded, now)
            return
        if offloaded.weights.written_by_others:
            # Before the update is applied: a merge into weights that other code has written would overwrite them.
            offloaded.notice_external_write(now)
        if windows := offloaded.updates.due(now):
            self._prefetch(now)
            self.apply(offloaded, windows)
        if offloaded.arriving is not None:
            offloaded.receive_weights()
        if offloaded.weights.counter.shared:
            # A later update of a sharer would move the version of these weights after a graph has saved them, and the
            # backward of that graph would raise.
            for index in offloaded.weights.counter.sharers:
                if index != offloaded.plan.index and (sharer := self._registry.offloaded.get(index)) is not None:
                    if self._registry.changed(index):
                        self._check_readable(sharer, now)
                        continue
                    if sharer.weights.written_by_others:
                        sharer.notice_external_write(now)
                    self.apply(sharer, sharer.updates.due(now))

    def is_current(self, now: int) -> bool:
        """Whether no update is due after ``now`` steps; False also where that is unknown."""
        return self._current_at == now

    def apply_due(self, now: int, only: Collection[int] | None = None) -> None:
        """Make every due update visible, or those of the parameters with the indices ``only``.

        Raises:
            RuntimeError: work in flight failed, or a weight was written, moved or cast while an update of it was in
                flight.
        """
        # Uncompiled modules ask one after another, for a few parameters each: do not look at all of them every time.
        every = self._registry.offloaded
        chosen = self.by_deadline() if only is None else [every[p] for p in sorted(only) if p in every]
        for offloaded in chosen:
            offloaded.raise_failures()
            if self._registry.changed(offloaded.plan.index):
                self._check_readable(offloaded, now)
                continue
            # The weights of a loaded state may come after it, unless it was flushed into those that were there.
            if not offloaded.weights.unverified or offloaded.weights.flushed_at_load:
                offloaded.notice_external_write(now)
            self.apply(offloaded, offloaded.updates.due(now))
            offloaded.receive_weights()
        if only is None:
            self._current_at = now  # an update becomes due only when a step ends

    def _check_readable(self, offloaded: OffloadedParam, now: int) -> None:
        """Raise RuntimeError if an update is due of a parameter with another dtype, shape or device than planned."""
        if offloaded.updates.due(now):
            self._registry.check_unchanged([offloaded.plan.index])

    def apply(self, offloaded: OffloadedParam, windows: int) -> None:
        """Make the updates of the ``windows`` oldest flushed update windows visible, waiting for them."""
        for _ in range(windows):
            if offloaded.updates.apply_next().selection is not None:
                self.selections += 1
                self._recorder.mark("select", param=offloaded.plan.name)

    def before_load(self, now: int) -> None:
        """Apply due updates before weights are loaded, except over weights that were written elsewhere already."""
        for offloaded in self.by_deadline():
            offloaded.receive_weights()
            offloaded.weights.guard.allow()
            windows = offloaded.updates.due(now)
            if windows and not offloaded.weights.written_by_others:
                with suppress(RuntimeError):  # failed work raises at the next step; loading may be the way out of it
                    self.apply(offloaded, windows)

    def finish(
        self, now: int, *, flush: bool, written: Collection[int] = (), interrupt: BaseException | None = None
    ) -> None:
        """Apply every update, due or not.

        Args:
            flush: apply the gradients in open update windows, too; these windows are empty afterwards.
            written: parameters whose weights were written on another rank, in slices that this one does not have.
            interrupt: what ended the last step half-way, if anything did.

        Raises:
            RuntimeError: work in flight failed, or a weight was written or moved to another dtype or device while an
                update of it was in flight (``LostUpdateError``, if nothing failed). The updates of the other parameters
                were applied all the same.
        """
        self.withdraw(interrupt)
        self._registry.unseen_writes.accept()
        errors: list[Exception] = []
        lost: list[Exception] = []
        dropped: list[str] = []
        changed: list[str] = []
        for offloaded in self.by_deadline():
            try:
                if self._registry.changed(offloaded.plan.index):  # moved or resized: not the weights of its updates
                    if offloaded.updates.due(now):
                        lost.append(
                            LostUpdateError(
                                f"{offloaded.plan.name} was moved to another dtype, device or shape while an update of "
                                "it was on its way, which is lost now; call optimizer.synchronize() or close() before "
                                "the model is changed"
                            )
                        )
                    elif offloaded.host.flushed or (flush and offloaded.window_gradients):
                        changed.append(offloaded.plan.name)
                    offloaded.abandon()
                    continue
                offloaded.updates.raise_if_partially_applied()
                # Weights written since the last step stay: the update window's gradients belong to the old ones.
                try:
                    was_written = offloaded.notice_external_write(now) or offloaded.plan.index in written
                except LostUpdateError as error:
                    was_written = True
                    lost.append(error)
                if was_written and flush:
                    if offloaded.drop_window():
                        dropped.append(offloaded.plan.name)
                elif flush:
                    window = offloaded.updates.flush(at=now, selection=None, promptly=True)
                    if window is not None:
                        self._registry.transport.workers.submit(window.job)
                offloaded.receive_weights()
                self.apply(offloaded, offloaded.updates.due(now + 1 + offloaded.plan.staleness))
            except Exception as error:
                errors.append(error)
        for offloaded in self._registry.offloaded.values():  # no thread may have waited for a job that a stream awaited
            try:
                offloaded.host.wait()
            except Exception as error:
                errors.append(error)
        if errors or lost:
            raise [*errors, *lost][0]
        by_hand = "written or loaded since the last step; to keep both, call optimizer.synchronize() after the write"
        moved = "moved to another dtype, device or shape; call optimizer.flush() or close() before that"
        for names, reason in ((dropped, by_hand), (changed, moved)):
            if names:
                warnings.warn(
                    f"the gradients in the update windows of {len(names)} parameters ({names[0]}, ...) were dropped, "
                    f"because these weights were {reason}",
                    UserWarning,
                    stacklevel=user_stacklevel(),
                )
        self._current_at = now

    def abandon(self) -> None:
        """End all work in flight, failed or not, and copies that an interrupt hid, before a state is loaded."""
        self._in_flight = []
        self._current_at = None
        self.withdraw()
        # After the jobs were withdrawn: an upload may wait for one of them on its lane.
        self._registry.transport.to_host.settle()
        self._registry.transport.to_device.settle()

    def withdraw(self, interrupt: BaseException | None = None) -> None:
        """Abort jobs that an interrupt kept from being queued, so that no thread and no lane waits for them."""
        jobs = [job for offloaded in self._registry.offloaded.values() for job in offloaded.host.jobs]
        self._registry.transport.workers.withdraw(jobs, interrupt)

    def _prefetch(self, now: int) -> None:
        in_flight = self._in_flight
        while in_flight and not in_flight[-1].host.flushed:
            in_flight.pop()
        free = self._registry.transport.up_ring.free
        for offloaded in reversed(in_flight):
            if offloaded.updates.upload is not None:
                continue
            if free < 2:  # the last buffer is for the parameter that is needed now
                return
            if offloaded.updates.due(now):
                free -= offloaded.updates.start_upload()
