"""The values of one weight in host memory: where they are, and their copies to the device and back.

[Note: places] Where the values are that count, whether the device has a copy of them or not:

- ``DEVICE``: in the parameter's memory. So it begins, and so it is after code of others has written the parameter.
- ``SLICES``: those of the deferred slices in the upload buffer that was applied last, those of the selected slices in
  their masters on the device. A host update reaches the weight without a copy of its own: the next load brings it.
- ``WHOLE``: in a tensor of the parameter's shape in host memory. So it is for parameters without host state, whose
  updates are written back, and between the load of a checkpoint and the comparison of weights and masters.
- ``LOST``: nowhere, because a file could not be read or written. Until a checkpoint's values are written, every read
  raises.

[Note: reads of uploads] A load copies from the upload buffer, so the job of a later update window, which writes the
buffer, waits for that copy (``HostState.applied``). The load in turn waits for the job whose result it reads. Upload
buffers may be in a file: then a load reads its buffer first, if it is not in memory (``UploadBuffer``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device.copy_lanes import CopyError, Ticket
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.staging_ring import Block, StagingBuffer
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.host.state_store import InMemory, UploadBuffer
from zenflow_compile.runtime.host.workers import Job
from zenflow_compile.runtime.nvme.cache import Cached
from zenflow_compile.runtime.nvme.chunk import Chunk
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.parameters.transport import Transport


class Place(enum.Enum):
    """See [Note: places]."""

    DEVICE = enum.auto()
    SLICES = enum.auto()
    WHOLE = enum.auto()
    LOST = enum.auto()


class SliceStates(NamedTuple):
    """The two sides of a parameter with host state.

    ``written_by_others``: whether the weight may have values that the masters do not know.
    """

    host: HostState
    device: DeviceState
    written_by_others: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Staged:
    """Values of a weight on their way into a buffer of the upload ring.

    Attributes:
        writer: the job that wrote ``source``, which is copied, last.
        stored: how often it had been written otherwise. While all three are the weight's, the copy is current.
        after: the job that the copy waits for, if it is a read of a file.
    """

    source: UploadBuffer
    writer: Job | None
    stored: int
    after: Job | None
    buffer: StagingBuffer
    ticket: Ticket

    def drop(self) -> None:
        """Give the buffer of a copy back that no load takes."""
        with suppress(Exception):  # a failure of the copy belongs to the load that would have taken it
            self.ticket.settle()
        self.buffer.in_use = False


@dataclass(eq=False)
class HostValues:
    """Keeps the values of one weight in host memory, and copies them to the device and back.

    Attributes:
        whole: the values where they are whole. A parameter without host state begins with memory for them, of its shape
            and dtype, which lanes can copy.
        place: of the values that count.
        steady_place: where the values are in a steady step, of the places that lanes can copy.
        stored: writes to the values by other than jobs.
        written_back: the last copy into ``whole``.
        staged_bytes: of one load in the upload ring.
    """

    plan: ParamPlan
    _transport: Transport
    _device: Device
    whole: Tensor | None
    _states: SliceStates | None
    place: Place = Place.DEVICE
    stored: int = 0
    written_back: Ticket | None = None
    _lost: BaseException | None = None  # why the values are, where ``place`` says so

    def __post_init__(self) -> None:
        plan, whole = self.plan, self.whole
        self.steady_place = Place.SLICES if whole is None else Place.WHOLE
        rows, columns = (plan.deferred, plan.length) if whole is None else plan.matrix_shape
        self._block: Block = (rows, columns), plan.dtype
        self.staged_bytes = rows * columns * plan.dtype.itemsize
        self._whole_matrix = None if whole is None else InMemory(whole.view(rows, columns))

    @property
    def _sides(self) -> SliceStates:
        assert self._states is not None
        return self._states

    @property
    def offloaded(self) -> bool:
        """Return whether the values in host memory count; the device may have a copy."""
        return self.place is not Place.DEVICE

    @property
    def has_update_on_its_way(self) -> bool:
        """Return whether a job overwrites the values with an update that has not been applied."""
        if self._states is None or self.place is not Place.SLICES:
            return False
        host = self._states.host
        return any(window.upload is host.applied_upload for window in host.flushed)

    @property
    def unreadable(self) -> bool:
        """Return whether the upload buffer does not have the values any more, or never got them."""
        if self._states is None:
            return False
        host = self._states.host
        failed = host.applied_upload is not None and host.applied_upload.error is not None
        return failed or host.applied_failure is not None or self.has_update_on_its_way

    @property
    def chunk(self) -> Chunk | None:
        """What the next load reads, if that is in a file."""
        source = self._source()
        return source.chunk if isinstance(source, Cached) else None

    def _source(self) -> UploadBuffer | None:
        """What a lane copies; None where the values are in memory that it cannot copy, or on the device."""
        if self.place is not self.steady_place:
            return None
        return self._whole_matrix if self._states is None else self._states.host.applied_upload

    # To the device.

    def stage(self, *, waits: bool) -> Staged | None:
        """Queue the copy of the values into a free buffer of the upload ring, of which there is one.

        The buffer stays free until its user takes it: see [Note: one assignment] in ``staging_ring``.

        Args:
            waits: where the lane cannot wait for the job that writes the values, the calling thread does.

        Returns:
            None if that wait, or a failure of the job, is left to the load, or the values are not there to be copied.

        Raises:
            RuntimeError: the job failed.
        """
        if (source := self._source()) is None:
            return None
        transport, states, step = self._transport, self._states, self._transport.recorder.step
        writer = None if states is None else states.host.upload_writer
        if transport.device_memory.given_back:  # asked here, without a call: each load does
            transport.device_memory.bring_back()
        job = source.bring(writer, step=step)
        if job is not None and (job.error is not None or not (job.is_set or transport.to_device.can_wait_for(job))):
            if not waits:
                return None
            with transport.recorder.compute("wait", param=self.plan.name, on_host=True):
                job.wait()
        buffer = transport.up_ring.next_free(self._block)
        try:
            ticket = transport.to_device.submit(
                buffer.tensor, source.content(), step=step, param=self.plan.name, kind="load", after=job
            )
            if states is not None and self.plan.weight_in_file:
                states.host.copied_by(source, ticket, job)
            staged = Staged(source, writer, self.stored, job, buffer, ticket)
        except BaseException:
            transport.to_device.settle()  # an interrupt may have come after the submission, and the buffer stays free
            raise
        if states is not None:
            states.host.applied = ticket  # see [Note: reads of uploads]
        return staged

    def is_current(self, staged: Staged) -> bool:
        """Return whether a copy that was queued before brings the values that count now."""
        writer = None if self._states is None else self._states.host.upload_writer
        return staged.writer is writer and staged.stored == self.stored and staged.source is self._source()

    def fill(self, matrix: Tensor, staged: Staged) -> None:
        """Put the values into ``matrix``, the device's memory, from a copy that was queued before.

        Raises:
            RuntimeError: the copy failed, or a job that it waits for.
        """
        transport, buffer = self._transport, staged.buffer
        try:
            if not staged.ticket.done():
                with transport.recorder.stall(True, param=self.plan.name):
                    staged.ticket.wait_on_device()
        except CopyError:
            staged.drop()
            for job in (staged.writer, staged.after):
                if job is not None:
                    job.wait()  # re-raise the job's error if it failed: it is the root cause
            raise
        with transport.recorder.compute("load", param=self.plan.name):
            if self._states is None:
                matrix.copy_(buffer.tensor)
            else:
                device, exchange = self._states.device, transport.exchange
                if exchange.overlaps and exchange.moves(device):
                    exchange.finish()  # masters of slices that were selected last are on their way
                selected = device.state[0].to(self.plan.dtype)
                column_ops.unsplit_columns(matrix, self.plan.dim, device.selection, selected, buffer.tensor)
        # The device may not have read it yet: the next copy into the buffer waits for the stream that is current here.
        buffer.in_use = False

    # To the host.

    def store(self, matrix: Tensor) -> None:
        """Copy the values that only the device has to the host, and wait for it, for a parameter with host state."""
        if self._sides.written_by_others() or self._sides.host.free_upload() is None:
            # The masters do not know these values yet, or an update is on its way in every buffer.
            self.keep_whole(matrix.to("cpu", copy=True).view(self.plan.shape))
        else:
            self._into_slices(matrix)

    def put_into_slices(self) -> None:
        """Move values that are whole into an upload buffer, if one is free, where masters agree with them."""
        if self._states is not None and self._states.host.free_upload() is not None:
            assert self.whole is not None
            self._into_slices(self.whole.view(self.plan.matrix_shape))

    def _into_slices(self, values: Tensor) -> None:
        """Put the deferred slices of ``values`` [rows, columns], which masters agree with, into an upload buffer."""
        host, selection = self._sides.host, self._sides.device.selection
        host.wait()  # no job, and no earlier copy, uses the buffer then
        if host.applied is not None:
            host.applied.settle()
        upload = host.free_upload()
        assert upload is not None
        slices = values.index_select(self.plan.dim, selection.deferred.to(values.device))
        block = slices if self.plan.dim == 0 else slices.t()
        with upload.acquire(write=True, fresh=True) as memory:
            memory.copy_(self._device.to_host(block, "weight"))
        host.applied_upload, host.upload_writer = upload, None
        self.stored += 1
        self.whole, self.place = None, Place.SLICES

    def write_back(self, matrix: Tensor) -> None:
        """Queue the copy of what the device's own update has written, for a parameter without host state."""
        assert self._whole_matrix is not None
        step = self._transport.recorder.step
        self.written_back = self._transport.to_host.submit(
            self._whole_matrix.content(), matrix, step=step, param=self.plan.name, kind="write_back"
        )
        self.stored += 1
        self.move_to(Place.WHOLE)

    def keep_whole(self, values: Tensor) -> None:
        """Have ``values``, of the parameter's shape in host memory, be those that count."""
        self.whole = values
        self.move_to(Place.WHOLE)

    def overwrite(self, values: Tensor) -> None:
        """Overwrite the values, which the device does not have. Masters are compared with them later."""
        if self._states is None:
            self.read().copy_(values)
        else:
            # What is there now is not read: a file may have lost it.
            self.keep_whole(torch.empty(self.plan.shape, dtype=self.plan.dtype, device="cpu").copy_(values))
        self.stored += 1

    def read(self) -> Tensor:
        """The values in host memory, of the parameter's shape: a copy if they are in slices, else the memory itself.

        Raises:
            RuntimeError: work in flight failed, or the values are lost.
        """
        if self.place is Place.LOST:
            raise RuntimeError(
                f"the weight of {self.plan.name} was in a file that could not be read or written; load the last saved "
                "state of the model"
            ) from self._lost
        if self.place is Place.WHOLE:
            assert self.whole is not None
            if self.written_back is not None:
                self.written_back.wait()
            return self.whole
        host, device, _ = self._sides
        host.wait()
        self._transport.exchange.finish()
        assert host.applied_upload is not None
        whole = torch.empty(self.plan.shape, dtype=self.plan.dtype, device="cpu")
        read = self._transport.device_memory.read
        selected = self._device.to_host(read(device.state[0]).to(self.plan.dtype), "weight")
        with host.applied_upload.acquire() as deferred:
            parts = (device.selection.selected, selected), (device.selection.deferred, deferred)
            for slices, values in parts:
                indices = self._device.to_host(read(slices), "weight")
                matrix = whole.view(self.plan.matrix_shape)
                column_ops.reference_merge_columns(matrix, self.plan.dim, indices, values)
        return whole

    # Other places.

    def move_to(self, place: Place) -> None:
        """Note that the values are in ``place`` now. An upload buffer in a file drops its values, lost or not."""
        if self.place is Place.SLICES:
            host = self._sides.host
            upload, host.applied_upload = host.applied_upload, None
            if upload is not None and all(window.upload is not upload for window in host.flushed):
                upload.forget()
        self.place = place

    def discard(self) -> None:
        """Leave the values to the device for good, which has them."""
        self.move_to(Place.DEVICE)
        self.whole = None

    def lose(self, error: BaseException) -> None:
        """Have the values nowhere, because of ``error``: until they are overwritten, every read raises."""
        self.move_to(Place.LOST)
        self._lost = error

    def updates_dropped(self) -> None:
        """Forget updates on their way. One that is written over the weight becomes the weight."""
        if self.has_update_on_its_way:
            self._sides.host.note_applied(self._sides.host.flushed[0])  # no later one has its buffer

    def updates_failed(self, *, on_device: bool) -> None:
        """Take over what a failed job, or one whose update was not applied, has left in the upload buffer.

        Values that a file has lost are NaN from then on. ``on_device``: the device has the values, too.
        """
        if self.place is Place.SLICES:
            self._sides.host.clear_windows()  # waits until no job uses the buffer
            if self.plan.weight_in_file:
                self.detach_from_state(on_device=on_device)
        if self.place is Place.LOST:
            self.keep_whole(torch.full(self.plan.shape, torch.nan, dtype=self.plan.dtype, device="cpu"))
        self.stored += 1

    def detach_from_state(self, *, on_device: bool) -> None:
        """Have the values in a place of their own, before other state of the optimizer is loaded.

        Values that a file has lost are nowhere: until they are overwritten, every read raises.
        """
        if self.place is Place.SLICES:
            if on_device:
                self.move_to(Place.DEVICE)
                return
            try:
                whole = self.read()
            except RuntimeError as error:
                if not self.plan.weight_in_file:
                    raise
                self.lose(error)
                return
            self.keep_whole(whole)

    @property
    def read_error(self) -> BaseException | None:
        """Why a file has not brought the values that a load may have used; None if nothing failed."""
        reads = self._sides.host.reads if self.place is Place.SLICES else ()
        return next((error for job in reads if (error := job.error) is not None), None)
