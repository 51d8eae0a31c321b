"""The updates of one offloaded parameter, from the flush of their windows until the weight has them:

1. flush: the window's gradients become a job of the host's workers;
2. upload: the job's result starts for the device, ahead of the forward that reads the weight;
3. apply: the result is merged into the weight, and the selection follows the window.
"""

from __future__ import annotations

from dataclasses import dataclass

from zenflow_compile.runtime.device.copy_lanes import CopyError, Ticket
from zenflow_compile.runtime.device.staging_ring import StagingBuffer
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.selection import Selection, Wanted, reselect
from zenflow_compile.runtime.ops import annotated
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.host_state import FlushedWindow, HostState
from zenflow_compile.runtime.parameters.host_values import Place
from zenflow_compile.runtime.parameters.host_weight import HostWeight
from zenflow_compile.runtime.parameters.shown_gradient import ShownGradient
from zenflow_compile.runtime.parameters.transport import Transport
from zenflow_compile.runtime.parameters.weight_sync import Weights


@dataclass(slots=True)
class Upload:
    """An update on its way to the device."""

    window: FlushedWindow
    buffer: StagingBuffer
    ticket: Ticket


class FlushedUpdates:
    """The flushed update windows of one parameter, until the weight has their updates.

    Attributes:
        upload: of the oldest one; None: it has not started.
        deadline: position among the first uses of the next forward; jobs and uploads run in this order.
        merged: an update window was applied that other ranks have not seen yet.
    """

    def __init__(
        self, host: HostState, device: DeviceState, weights: Weights, shown: ShownGradient, transport: Transport
    ) -> None:
        self.plan = host.plan
        self.host = host
        self.device = device
        self.weights = weights
        self.shown, self.parts = shown, shown.parts
        self.transport = transport
        self.upload: Upload | None = None
        self.deadline = self.plan.index
        self.merged = False
        self._block = (self.plan.deferred, self.plan.length), self.plan.dtype  # shape and dtype of an upload
        self._kept: tuple[Wanted, Selection] | None = None  # of the last re-selection, see ``_reselect``
        self._partially_applied: BaseException | None = None

    # 1. Flush.

    @annotated("flush", lambda updates, **_: (updates.plan.name,))
    def flush(self, *, at: int, selection: Wanted | None, promptly: bool) -> FlushedWindow | None:
        """Flush the update window; the caller submits the job. A window of missing gradients does nothing.

        Args:
            at: the optimizer step, from 0.
            selection: the slices to select from here on; None: the selection stays.
            promptly: visible in the next forward, whatever the staleness.
        """
        try:
            self.parts.end_window()
        except BaseException as error:  # the sum may have been taken, and not all of its gradients be in the window
            self.note_half_done(error)
            raise
        if not self.host.open:
            return None
        if not self.host.flushed and (self.weights.counter.shared or self.weights.counter.exposed):
            self.weights.remember(self.device.selection)
        try:
            window = self.host.flush_window(at=at, deadline=self.deadline)
        except BaseException as error:  # the gradients have left the update window, and may have no job
            self.note_half_done(error)
            raise
        if self.transport.recorder.timeline is not None:
            window.final = self.transport.recorder.now()
        if selection is not None:
            window.selection = selection
            self.device.selected_at = at
            promptly = True  # state that changes sides must be the newest on both
        if promptly:
            window.visible_at = at + 1
        return window

    # 2. Upload.

    def due(self, now: int) -> int:
        """How many of the flushed update windows, oldest first, a forward after ``now`` steps must see."""
        count = 0
        for number, window in enumerate(self.host.flushed, start=1):
            if window.visible_at <= now:  # also those before it: they are applied in their order
                count = number
        return count

    def start_upload(self, *, waits: bool = False) -> bool:
        """Queue the upload of the next update window, which is due, behind its job. Returns whether it was queued.

        Where the lane cannot wait for the job, or for the read of a buffer in a file, nothing is queued before that is
        done, unless ``waits``: then the calling thread waits. After a failed job, nothing is queued.

        Raises:
            RuntimeError: the job, or the read, failed, and ``waits``.
        """
        transport, window = self.transport, self.host.flushed[0]
        if (home := self.weights.home) is not None and home.values.place is Place.SLICES:
            return False  # the next load of the weight brings the update
        job = window.upload.bring(window.job, step=transport.recorder.step)
        if job is not None and (job.error is not None or not (job.is_set or transport.to_device.can_wait_for(job))):
            if not waits:
                return False
            with transport.recorder.compute("wait", param=self.plan.name, on_host=True):
                job.wait()
        buffer = transport.up_ring.next_free(self._block)
        try:
            ticket = transport.to_device.submit(
                buffer.tensor, window.upload.content(), step=transport.recorder.step, param=self.plan.name, after=job
            )
            if window.buffer is not None:
                self.host.uploading[window.buffer] = ticket
            if self.plan.weight_in_file:
                self.host.copied_by(window.upload, ticket, job)
            upload = Upload(window, buffer, ticket)
        except BaseException:
            transport.to_device.settle()  # an interrupt may have come after the submission, and the buffer stays free
            if window.buffer is not None:
                self.host.uploading[window.buffer] = None
            raise
        self.upload, buffer.in_use = upload, True
        return True

    # 3. Apply.

    def apply_next(self) -> FlushedWindow:
        """Apply the oldest flushed update window, which is due, to the weight, waiting for it. Returns the window."""
        recorder = self.transport.recorder
        window = self.host.flushed[0]
        if window.final is not None:
            recorder.slack(window.final, step=window.flushed_at, param=self.plan.name)
        if self.weights.home is not None:
            self.weights.guard.allow()  # first: this may copy the weight to the host
            if (home := self.weights.put_into_slices()) is not None:
                self._apply_in_host_memory(window, home)
                return window
        if self.upload is None:
            self.start_upload(waits=True)
        upload = self.upload
        assert upload is not None
        try:
            if not (upload.ticket.completed or upload.ticket.done()):
                self.transport.wait_on_device(upload.ticket, self.plan.name)
        except CopyError:
            self.drop_upload()
            window.job.wait()  # re-raise the job's error if it failed: it is the root cause
            raise
        try:
            self._merge(window, upload)
        except BaseException as error:
            self.note_half_done(error)
            raise
        return window

    @annotated("apply", lambda updates, *_: (updates.plan.name,))
    def _merge(self, window: FlushedWindow, upload: Upload) -> None:
        """Write the update into the weight; the update window and the selection follow it."""
        recorder, weights = self.transport.recorder, self.weights
        if weights.home is not None:
            weights.home.begin_write()
        # Not before the wait for the update: an interrupt there leaves the update in flight, and reads refused.
        weights.guard.allow()
        with recorder.compute("merge", param=self.plan.name):
            column_ops.merge_columns(weights.matrix, self.plan.dim, self.device.selection, upload.buffer.tensor)
            weights.written()
        self.merged = True
        # The device may not have merged yet: the next copy into the buffer waits for the stream that is current here.
        self.upload, upload.buffer.in_use = None, False
        self.host.applied = upload.ticket
        self._end_window(window)

    @annotated("apply", lambda updates, *_: (updates.plan.name,))
    def _apply_in_host_memory(self, window: FlushedWindow, home: HostWeight) -> None:
        """Have the next load of the weight bring the update, which nothing waits for here."""
        try:
            self.drop_upload()  # of the time when the device had the weight
            self.host.note_applied(window)
            self.weights.written()
            self._end_window(window)
            if home.loaded:
                home.load()
        except BaseException as error:
            self.note_half_done(error)
            raise

    def _end_window(self, window: FlushedWindow) -> None:
        """Let the selection follow an update window whose update is visible."""
        recorder, host, weights = self.transport.recorder, self.host, self.weights
        host.flushed.pop(0)
        # The job is kept: if a stream has waited for it, and no thread, its error is still to be raised.
        host.applied_job = window.job
        if host.flushed and (weights.counter.shared or weights.counter.exposed):
            weights.remember(self.device.selection)
        if window.selection is not None:
            with recorder.compute("select", param=self.plan.name):
                self._reselect(window, window.selection)

    def _reselect(self, window: FlushedWindow, wanted: Wanted) -> None:
        self.shown.leave_parts()
        device, before = self.device, self.device.selection
        try:
            # Hazard: this may run in another stream than the optimizer step, whose stream owns the memory of both and
            # would reuse it before this stream has read it. The next re-selection drops them: until then the stream of
            # a step has waited for this one.
            self._kept = wanted, before
            change = reselect(before, wanted)
            home = self.weights.home
            uploads = self.host.applied_upload if home is not None and home.values.place is Place.SLICES else None
            if self.host.form.split:
                # The masters that change sides are completed by them. No later window is in flight at a re-selection.
                assert uploads is None or uploads is self.host.newest_upload
                uploads = self.host.newest_upload
            reads, before_it = None if uploads is None else self.host.applied, self.host.last_job
            self.transport.exchange.start(
                device, self.host, change, step=window.flushed_at, deadline=self.deadline, weights=uploads, reads=reads
            )
            if uploads is not None and self.host.last_job is not before_it:
                self.host.upload_writer = self.host.last_job
            device.selection = change.selection
        except BaseException as error:
            self.note_half_done(error)
            raise
        self.parts.slices_changed(before.deferred, device.selection.deferred)

    def wait_for_state(self) -> None:
        """Wait until no job uses the state; device operators that follow find its device side complete."""
        self.host.wait()
        self.transport.exchange.finish()

    def drop_upload(self) -> None:
        """Wait for the copy of the upload in flight, and forget the upload."""
        if (upload := self.upload) is not None:
            # Before the buffer is free: the copy may still write it.
            upload.ticket.settle()
            self.upload, upload.buffer.in_use = None, False

    # Dropped updates, and failures.

    def drop(self) -> bool:
        """Drop the updates in flight, but let the selection follow them. Returns whether there were any."""
        self.wait_for_state()
        self.weights.guard.allow()
        dropped = bool(self.host.flushed)
        self.drop_upload()
        for window in self.host.flushed:
            if window.selection is not None:
                self._reselect(window, window.selection)
        if (home := self.weights.home) is not None:
            home.values.updates_dropped()
        self.host.flushed.clear()
        self.wait_for_state()  # for the exchanges that were started above
        return dropped

    def raise_failures(self) -> None:
        """Raise the error of the upload if it has failed by now."""
        if self.upload is not None and self.upload.ticket.error is not None:
            self.upload.ticket.wait()

    def note_half_done(self, error: BaseException) -> None:
        """Note that an update, or an exchange of slices, failed or was interrupted half-way."""
        self._partially_applied, self.transport.interrupted = error, True

    def raise_if_partially_applied(self) -> None:
        """Raise if an update, or an exchange of slices between the sides, failed or was interrupted half-way.

        Raises:
            RuntimeError: so it was; chained to the original error.
        """
        if self._partially_applied is None and (error := self.host.applied_failure) is not None:
            # A failed job raises its flag, too. A stream that waited for it has gone on with what was in the buffer.
            self.note_half_done(error)
        if self._partially_applied is not None:
            raise RuntimeError(
                f"an update of {self.plan.name} failed or was interrupted half-way; load the last saved state"
            ) from self._partially_applied

    def forget_failure(self) -> None:
        """Forget what was half done: a state is loaded, which replaces it."""
        self._partially_applied = None

    def forget_ended(self) -> None:
        """Forget what only work in flight needs. All of it has ended."""
        self.host.forget_ended()
        self._kept = None
