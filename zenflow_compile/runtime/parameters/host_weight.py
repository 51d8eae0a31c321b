"""One weight in host memory, which the device has only while something reads it.

The storage of such a weight is empty in between. It is resized in place: autograd may have saved the parameter, or
views of it, and finds them loaded in the backward.

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

[Note: a forward and its backward] Nothing writes these values between the two: updates are applied before a forward,
and slices are updated in ``step()``. An update in a second forward moves the version, so that the backward of the first
one raises. A backward after the ``step()`` that follows its forward raises in its load.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.native.storage_reads import allow_reads, refuse_reads
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.copy_lanes import CopyError, Ticket
from zenflow_compile.runtime.device.device import Stream
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.staging_ring import Block, StagingBuffer
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter
from zenflow_compile.runtime.host.state_store import UploadBuffer
from zenflow_compile.runtime.host.workers import Job
from zenflow_compile.runtime.nvme.cache import Cached
from zenflow_compile.runtime.nvme.chunk import Chunk
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.parameters.moved_weights import have_own_memory, leave_on_host, not_emptied
from zenflow_compile.runtime.parameters.transport import Transport
from zenflow_compile.runtime.parameters.unseen_writes import sample_of
from zenflow_compile.torch_internals.torch_private import REFUSAL, storage_identity

_REFUSED = (
    "{} is in host memory, and code outside of the compiled graphs reads or writes it: do that inside of `with "
    "optimizer.loaded_weights():`, or after optimizer.synchronize()"
)


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

    source: Tensor | UploadBuffer
    writer: Job | None
    stored: int
    after: Job | None
    buffer: StagingBuffer
    ticket: Ticket


class HostWeight:
    """One weight.

    Args:
        whole: memory of the parameter's shape and dtype, which lanes can copy, for a parameter without host state.
        note: called with each change of the bytes on the device.

    Attributes:
        served: a compiled graph loads it for its uses.
        loaded: the device has the values.
        readers: graphs that have loaded it, and not unloaded: several run at a time in threads, or inside each other.
        held: code without an unload of its own reads the weight: it stays loaded until the next optimizer step.
    """

    def __init__(
        self,
        plan: ParamPlan,
        param: Parameter,
        counter: VersionCounter,
        transport: Transport,
        whole: Tensor | None,
        note: Callable[[int], None],
    ) -> None:
        self.plan = plan
        self.param = param
        self.served = False
        self.place = Place.DEVICE
        self.nbytes = plan.weight_bytes  # computed once: each load asks several times
        self.loaded = True
        self.readers = 0
        self.held = False
        self._counter = counter
        self._transport = transport
        self._device = device_of(param.device)
        self._states: SliceStates | None = None
        self._block: Block = (plan.shape[0], plan.numel // plan.shape[0]), plan.dtype
        self._whole = whole
        self._whole_matrix = None if whole is None else whole.view(self._block[0])
        self._stored = 0  # writes to the values by other than jobs
        self._written_back: Ticket | None = None  # the last copy into ``_whole``
        self._lost: BaseException | None = None  # why the values are, where ``place`` says so
        self._note = note
        have_own_memory(param)
        self._owns_memory = True
        self._layout = param.dtype, param.shape, param.device
        self._storage = storage_identity(param.untyped_storage())
        self._stream: Stream | None = None  # in which the memory was allocated; None: other code did that
        self._refusal = _REFUSED.format(plan.name).encode()  # of reads while the memory is empty
        self._bumps = 0  # external ones, at the last load
        self._sample: Tensor | None = None  # of a held weight

    def attach(self, states: SliceStates) -> None:
        """Have the weight in the upload buffers of a parameter with host state."""
        self._states = states
        self._block = (self.plan.deferred, self.plan.length), self.plan.dtype

    @property
    def _sides(self) -> SliceStates:
        assert self._states is not None
        return self._states

    @property
    def staged_bytes(self) -> int:
        """Bytes of one load in the upload ring."""
        (rows, length), dtype = self._block
        return rows * length * dtype.itemsize

    @property
    def offloaded(self) -> bool:
        """Whether the values in host memory count; the device may have a copy."""
        return self.place is not Place.DEVICE

    @property
    def replaced(self) -> bool:
        """Whether the parameter has other memory than at the last look (``param.data = ...``)."""
        return storage_identity(self.param.untyped_storage()) != self._storage

    def is_on_device(self) -> bool:
        """Whether the device has the values, also in memory that other code gave the parameter."""
        if self.replaced:
            self._accept_memory()
        return self.loaded

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
        transport, states = self._transport, self._states
        writer = None if states is None else states.host.upload_writer
        transport.device_memory.bring_back()
        job = None if isinstance(source, Tensor) else source.bring(writer, step=transport.recorder.step)
        if job is not None and (job.error is not None or not (job.is_set or transport.to_device.can_wait_for(job))):
            if not waits:
                return None
            with transport.recorder.compute("wait", param=self.plan.name, on_host=True):
                job.wait()
        buffer = transport.up_ring.next_free(self._block)
        try:
            values = source if isinstance(source, Tensor) else source.content()
            ticket = transport.to_device.submit(
                buffer.tensor, values, step=transport.recorder.step, param=self.plan.name, kind="load", after=job,
            )  # fmt: skip
            if states is not None and not isinstance(source, Tensor):
                states.host.copied_by(source, ticket, job)
            staged = Staged(source, writer, self._stored, job, buffer, ticket)
        except BaseException:
            transport.to_device.settle()  # an interrupt may have come after the submission, and the buffer stays free
            raise
        if states is not None:
            states.host.applied = ticket  # see [Note: reads of uploads]
        return staged

    def is_current(self, staged: Staged) -> bool:
        """Whether a copy that was queued before brings the values that count now."""
        writer = None if self._states is None else self._states.host.upload_writer
        return staged.writer is writer and staged.stored == self._stored and staged.source is self._source()

    @property
    def chunk(self) -> Chunk | None:
        """What the next load reads, if that is in a file."""
        source = self._source()
        return source.chunk if isinstance(source, Cached) else None

    def _source(self) -> Tensor | UploadBuffer | None:
        """What a lane copies; None where the values are in memory that it cannot copy, or on the device."""
        if self._states is None:
            return self._whole_matrix if self.place is Place.WHOLE else None
        return self._states.host.applied_upload if self.place is Place.SLICES else None

    def load(self, staged: Staged | None = None) -> None:
        """Fill the device's memory. The version of the parameter does not move: its values are what they were.

        Args:
            staged: from ``stage``; None: the copy is made now.

        Raises:
            RuntimeError: the job that writes the values failed, or the values are overwritten already: ``backward()``
                ran after the optimizer step that followed its forward.
        """
        replaced, updated = self.replaced, self.has_update_on_its_way
        if staged is not None and (replaced or updated):
            self.drop(staged)
        if replaced:
            self._accept_memory()
            return
        if updated:
            raise RuntimeError(
                f"{self.plan.name} is in host memory, and an optimizer step has updated it there since the forward "
                "that this backward belongs to; call backward() before step(), or pass offload_weights=False"
            )
        before = self.loaded
        try:
            self._allocate()
            if staged is None and (staged := self.stage(waits=True)) is not None:
                staged.buffer.in_use = True
            if staged is not None:
                self._fill(staged)
            else:
                self._matrix.copy_(self.values().view(self._matrix.shape))
        except BaseException:  # no memory, for example
            if staged is not None:
                self.drop(staged)
            if not before:
                self._free()
            raise
        self._is_loaded()

    def _allocate(self) -> None:
        """Give the parameter memory again. The copies of lanes never write it: they end in the ring."""
        if not self.loaded:
            storage = self.param.untyped_storage()
            allow_reads(storage)
            with self._device.memory_of_weights():
                storage.resize_(self.nbytes)
            streams = self._device.streams
            self._stream = None if streams is None else streams.current()

    def _fill(self, staged: Staged) -> None:
        transport, buffer = self._transport, staged.buffer
        try:
            if not staged.ticket.done():
                with transport.recorder.stall(True, param=self.plan.name):
                    staged.ticket.wait_on_device()
        except CopyError:
            self.drop(staged)
            for job in (staged.writer, staged.after):
                if job is not None:
                    job.wait()  # re-raise the job's error if it failed: it is the root cause
            raise
        with transport.recorder.compute("load", param=self.plan.name):
            if self._states is None:
                self._matrix.copy_(buffer.tensor)
            else:
                device, exchange = self._states.device, transport.exchange
                if exchange.overlaps and exchange.moves(device):
                    exchange.finish()  # masters of slices that were selected last are on their way
                selected = device.master.to(self.plan.dtype)
                column_ops.unsplit_columns(self._matrix, self.plan.dim, device.selection, selected, buffer.tensor)
        # The device may not have read it yet: the next copy into the buffer waits for the stream that is current here.
        buffer.in_use = False

    def load_to_write(self) -> None:
        """Load the weight for code that is going to overwrite it. Lost values are NaN, and raise where they are read.

        Raises:
            RuntimeError: as ``load``, but not for lost values.
        """
        try:
            self.load()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.place is not Place.LOST:
                if not self._is_lost:
                    raise
                self._lose(error)
            self._allocate()
            self._matrix.fill_(torch.nan)
            self._is_loaded()

    @property
    def _is_lost(self) -> bool:
        """Whether the upload buffer does not have the values any more, or never got them."""
        if self._states is None:
            return False
        host = self._states.host
        unreadable = host.applied_upload is not None and host.applied_upload.error is not None
        return unreadable or host.applied_failure is not None or self.has_update_on_its_way

    def check_not_lost(self) -> None:
        """Accept what other code has written over lost values.

        Raises:
            RuntimeError: they are lost, and no code has.
        """
        if self.place is Place.LOST:
            if self.loaded and self._was_written:
                self._move_to(Place.DEVICE)
            else:
                self.values()

    def drop(self, staged: Staged) -> None:
        """Give the buffer of a copy back that no load takes."""
        with suppress(Exception):  # a failure of the copy belongs to the load that would have taken it
            staged.ticket.settle()
        staged.buffer.in_use = False

    @property
    def has_update_on_its_way(self) -> bool:
        """Whether a job overwrites the values with an update that has not been applied."""
        if self._states is None or self.place is not Place.SLICES:
            return False
        host = self._states.host
        return any(window.upload is host.applied_upload for window in host.flushed)

    @property
    def _matrix(self) -> Tensor:
        """The parameter's memory as [rows, columns]."""
        return self.param.data.view(self.plan.shape[0], -1)  # ``.data`` has a version counter of its own

    def hold(self) -> None:
        """Stay loaded until the next optimizer step, for code that may write the weight."""
        self.held = True
        self._sample = sample_of(self.param).clone()

    def written(self) -> None:
        """Note that the optimizer has written the device's memory, where code may write it, too."""
        if self.held:
            self._sample = sample_of(self.param).clone()

    def check_held(self) -> None:
        """Check that no code has written a held weight in a way that moves no version: an unload would drop that.

        Raises:
            RuntimeError: a sample of the weight shows such a write; see ``unseen_writes``.
        """
        if self._sample is None or not self.loaded or self._was_written or self.replaced:
            return
        if not torch.equal(sample_of(self.param), self._sample):
            errors.refuse_unseen_write(self.plan.name)

    @property
    def _was_written(self) -> bool:
        """Whether other code has written the device's memory since the last load."""
        # ``external_bumps``, without a call: each unload asks. ``_is_loaded`` does so, too.
        return self.param._version - self._counter.own_bumps != self._bumps

    def _is_loaded(self) -> None:
        self._bumps = self.param._version - self._counter.own_bumps
        if self.held:
            self.written()
        if not self.loaded:
            self.loaded = True
            self._note(self.nbytes)

    def _accept_memory(self) -> None:
        """Take over memory that other code gave the parameter."""
        self._owns_memory = False
        self._storage, self._stream = storage_identity(self.param.untyped_storage()), None
        self._move_to(Place.DEVICE)
        self._stored += 1
        self._is_loaded()

    # To the host.

    def unload(self) -> None:
        """Give the device's memory back. Values that other code has written are kept.

        A weight that other code has moved or cast stays: it can be read, and training refuses it.

        Raises:
            RuntimeError: other code gave the parameter memory that cannot be emptied.
        """
        if self.replaced:
            self._accept_memory()
        if (self.param.dtype, self.param.shape, self.param.device) != self._layout:
            return
        if not self._owns_memory:
            if (reason := not_emptied(self.param)) is not None:
                raise RuntimeError(
                    f"{self.plan.name} was given memory that offload_weights cannot empty: {reason}; give it a copy "
                    "with param.data = values.clone(), or train with offload_weights=False"
                )
            have_own_memory(self.param)
            self._owns_memory = True
        if self.place is not Place.DEVICE and self._was_written:
            self._move_to(Place.DEVICE)
        if self.place is Place.DEVICE or (self.place is Place.WHOLE and self._states is not None):
            self._store()
        if self._written_back is not None and not self._written_back.done():
            # The copy reads the memory that is freed below. The next load, which reads what it writes, follows this
            # stream.
            self._written_back.wait_on_device()
        # First: after an interrupt below, a load fills the memory again.
        self.loaded, self.held, self._sample = False, False, None
        self._free()
        self._note(-self.nbytes)

    def _free(self) -> None:
        """Empty the parameter's memory. Direct reads raise from here on."""
        storage = self.param.untyped_storage()
        if REFUSAL in storage.__dict__:
            allow_reads(storage)
        # Hazard: the allocator gives the memory to the next tensor of the stream that it was allocated in, which may
        # run ahead of the one that has read the weight.
        if (streams := self._device.streams) is not None:
            if self._stream is None:
                streams.record_use(self.param.data)
            elif (current := streams.current()) != self._stream:
                self._stream.wait_stream(current)
        storage.resize_(0)
        refuse_reads(storage, self.nbytes, self._refusal)

    def _store(self) -> None:
        """Copy the device's values to the host, and wait for it: not in a steady step."""
        allow_reads(self.param.untyped_storage())
        if self._states is None:
            self.write_back()
        elif self._states.written_by_others() or self._states.host.free_upload() is None:
            # The masters do not know these values yet, or an update is on its way in every buffer.
            self._whole = self.param.detach().to("cpu", copy=True)
            self._move_to(Place.WHOLE)
        else:
            self._into_slices(self._matrix)

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
        self._stored += 1
        self._whole, self.place = None, Place.SLICES

    def write_back(self) -> None:
        """Queue the copy of what the device's own update has written to the host, of a parameter without host state."""
        assert self._whole_matrix is not None
        source = self._matrix
        self._written_back = self._transport.to_host.submit(
            self._whole_matrix, source, step=self._transport.recorder.step, param=self.plan.name,
            kind="write_back",
        )  # fmt: skip
        self._stored += 1
        self._move_to(Place.WHOLE)
        self._bumps = self._counter.external_bumps(self.param)

    # The end.

    def stay(self) -> None:
        """Leave the values on the device for good, where they are loaded."""
        self._move_to(Place.DEVICE)
        self._whole = None

    def leave_on_host(self) -> None:
        """Leave the values in host memory of their own."""
        leave_on_host(self.param, self.values().clone())
        self.stay()

    # What the optimizer reads and writes.

    def put_into_slices(self) -> bool:
        """Have the upload buffer and masters hold the values. False: only the device has them, or no buffer is free."""
        at_rest = self.place is Place.WHOLE and not self.is_on_device()
        if at_rest and self._states is not None and self._states.host.free_upload() is not None:
            assert self._whole is not None
            self._into_slices(self._whole.view(self.plan.shape[0], -1))
        return self.place is Place.SLICES

    def values(self) -> Tensor:
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
            assert self._whole is not None
            if self._written_back is not None:
                self._written_back.wait()
            return self._whole
        host, device, _ = self._sides
        host.wait()
        self._transport.exchange.finish()
        assert host.applied_upload is not None
        whole = torch.empty(self.plan.shape, dtype=self.plan.dtype, device="cpu")
        read = self._transport.device_memory.read
        selected = self._device.to_host(read(device.master).to(self.plan.dtype), "weight")
        with host.applied_upload.acquire() as deferred:
            parts = (device.selection.selected, selected), (device.selection.deferred, deferred)
            for slices, values in parts:
                indices = self._device.to_host(read(slices), "weight")
                column_ops.reference_merge_columns(whole.view(whole.shape[0], -1), self.plan.dim, indices, values)
        return whole

    def begin_write(self) -> None:
        """Have the values on the device alone, which the optimizer is going to write there."""
        if not self.is_on_device():
            self.load()
        self._move_to(Place.DEVICE)

    def updates_dropped(self) -> None:
        """Updates on their way are dropped. One that is written over the weight becomes the weight."""
        if self.has_update_on_its_way:
            self._sides.host.note_applied(self._sides.host.flushed[0])  # no later one has its buffer

    def updates_failed(self) -> None:
        """A job has failed, or its update was never applied: have what is in the upload buffer, as far as it got.

        Values that a file has lost are NaN from then on.
        """
        if self.place is Place.SLICES:
            self._sides.host.clear_windows()  # waits until no job uses the buffer
            if self.plan.weight_in_file:
                self.detach_from_state()
        if self.place is Place.LOST:
            self._whole = torch.full(self.plan.shape, torch.nan, dtype=self.plan.dtype, device="cpu")
            self._move_to(Place.WHOLE)
        self._stored += 1

    def reads_failed(self) -> None:
        """The device may have used what was in memory instead of what a file should have brought there."""
        if self.place is Place.SLICES:
            errors_of_reads = (job.error for job in self._sides.host.reads)
            if (error := next(filter(None, errors_of_reads), None)) is not None:
                self._lose(error)

    def _lose(self, error: BaseException) -> None:
        self._move_to(Place.LOST)
        self._lost = error
        if self.loaded:
            self.unload()

    def detach_from_state(self) -> None:
        """Have the values in a place of their own, before other state of the optimizer is loaded.

        Values that a file has lost are nowhere: until they are overwritten, every read raises.
        """
        if self.place is Place.SLICES:
            if self.loaded:
                self._move_to(Place.DEVICE)
            else:
                try:
                    self._whole = self.values()
                except RuntimeError as error:
                    if not self.plan.weight_in_file:
                        raise
                    self._lose(error)
                    return
                self._move_to(Place.WHOLE)

    def _move_to(self, place: Place) -> None:
        """The values are in another place. An upload buffer in a file drops what it has, and whether that is lost."""
        if self.place is Place.SLICES:
            host = self._sides.host
            upload, host.applied_upload = host.applied_upload, None
            if upload is not None and all(window.upload is not upload for window in host.flushed):
                upload.forget()
        self.place = place

    def write(self, values: Tensor) -> None:
        """Overwrite the values, of the parameter's shape, below autograd; its masters are compared with them later."""
        if self.loaded:
            self.param.data.copy_(values)
            self._move_to(Place.DEVICE)
            self.written()
        elif self._states is None:
            self.values().copy_(values)
            self._stored += 1
        else:
            # What is there now is not read: a file may have lost it.
            self._whole = torch.empty(self.plan.shape, dtype=self.plan.dtype, device="cpu").copy_(values)
            self._move_to(Place.WHOLE)
            self._stored += 1
