"""One weight in host memory, which the device has only while something reads it.

The storage of such a weight is empty in between. It is resized in place: autograd may have saved the parameter, or
views of it, and finds them loaded in the backward. ``HostValues`` has the values meanwhile.

[Note: a forward and its backward] Nothing writes these values between the two: updates are applied before a forward,
and slices are updated in ``step()``. An update in a second forward moves the version, so that the backward of the first
one raises. A backward after the ``step()`` that follows its forward raises in its load.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.native.storage_reads import allow_reads, refuse_reads
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.device import Stream
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter
from zenflow_compile.runtime.parameters.host_values import HostValues, Place, Staged
from zenflow_compile.runtime.parameters.moved_weights import have_own_memory, leave_on_host, not_emptied
from zenflow_compile.runtime.parameters.unseen_writes import sample_of
from zenflow_compile.torch_internals.torch_private import REFUSAL, storage_identity

_REFUSED = (
    "{} is in host memory, and code outside of the compiled graphs reads or writes it: do that inside of `with "
    "optimizer.loaded_weights():`, or after optimizer.synchronize()"
)


class HostWeight:
    """Loads one weight into the device's memory, and unloads it.

    Args:
        note: called with each change of the bytes on the device.

    Attributes:
        served: a compiled graph loads it for its uses.
        loaded: the device has the values.
        readers: graphs that have loaded it, and not unloaded: several run at a time in threads, or inside each other.
        held: code without an unload of its own reads the weight: it stays loaded until the next optimizer step.
    """

    def __init__(
        self, param: Parameter, counter: VersionCounter, values: HostValues, note: Callable[[int], None]
    ) -> None:
        self.plan = plan = values.plan
        self.param = param
        self.nbytes, self._shape = plan.weight_bytes, plan.matrix_shape  # computed once: each load asks several times
        self.values = values
        self.served = False
        self.loaded = True
        self.readers = 0
        self.held = False
        self._counter = counter
        self._device = device_of(param.device)
        self._note = note
        have_own_memory(param)
        self._owns_memory = True
        self._layout = param.dtype, param.shape, param.device
        self._storage = storage_identity(param.untyped_storage())
        self._stream: Stream | None = None  # in which the memory was allocated; None: other code did that
        self._refusal = _REFUSED.format(plan.name).encode()  # of reads while the memory is empty
        self._bumps = 0  # external ones, at the last load
        self._sample: Tensor | None = None  # of a held weight

    @property
    def replaced(self) -> bool:
        """Return whether the parameter has other memory than at the last look (``param.data = ...``)."""
        return storage_identity(self.param.untyped_storage()) != self._storage

    def is_on_device(self) -> bool:
        """Return whether the device has the values, also in memory that other code gave the parameter."""
        if self.replaced:
            self._accept_memory()
        return self.loaded

    # To the device.

    def load(self, staged: Staged | None = None) -> None:
        """Fill the device's memory. The version of the parameter does not move: its values are what they were.

        Args:
            staged: from ``HostValues.stage``; None: the copy is made now.

        Raises:
            RuntimeError: the job that writes the values failed, or the values are overwritten already: ``backward()``
                ran after the optimizer step that followed its forward.
        """
        values = self.values
        replaced, updated = self.replaced, values.has_update_on_its_way
        if staged is not None and (replaced or updated):
            staged.drop()
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
            if staged is None and (staged := values.stage(waits=True)) is not None:
                staged.buffer.in_use = True
            matrix = self._matrix
            if staged is not None:
                values.fill(matrix, staged)
            else:
                matrix.copy_(values.read().view(matrix.shape))
        except BaseException:  # no memory, for example
            if staged is not None:
                staged.drop()
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
            if self.values.place is not Place.LOST:
                if not self.values.unreadable:
                    raise
                self.values.lose(error)
            self._allocate()
            self._matrix.fill_(torch.nan)
            self._is_loaded()

    def check_not_lost(self) -> None:
        """Accept what other code has written over lost values.

        Raises:
            RuntimeError: they are lost, and no code has.
        """
        if self.values.place is Place.LOST:
            if self.loaded and self._was_written:
                self.values.move_to(Place.DEVICE)
            else:
                self.values.read()

    @property
    def _matrix(self) -> Tensor:
        """The parameter's memory as [rows, columns]."""
        return self.param.data.view(self._shape)  # ``.data`` has a version counter of its own

    def hold(self) -> None:
        """Stay loaded until the next optimizer step, for code that may write the weight."""
        self.held = True
        self.written()

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
        """Return whether other code has written the device's memory since the last load."""
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
        self.values.move_to(Place.DEVICE)
        self.values.stored += 1
        self._is_loaded()

    # To the host.

    def unload(self) -> None:
        """Give the device's memory back. Values that other code has written are kept.

        A weight that other code has moved or cast stays: it can be read, and training refuses it.

        Raises:
            RuntimeError: other code gave the parameter memory that cannot be emptied.
        """
        values = self.values
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
        if values.place is not Place.DEVICE and self._was_written:
            values.move_to(Place.DEVICE)
        if values.place is not values.steady_place and values.place is not Place.LOST:
            # This waits for a copy to the host: not in a steady step.
            allow_reads(self.param.untyped_storage())
            if values.steady_place is Place.WHOLE:
                self.write_back()
            else:
                values.store(self._matrix)
        if values.written_back is not None and not values.written_back.done():
            # The copy reads the memory that is freed below. The next load, which reads what it writes, follows this
            # stream.
            values.written_back.wait_on_device()
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

    def write_back(self) -> None:
        """Queue the copy of what the device's own update has written to the host, of a parameter without host state."""
        self.values.write_back(self._matrix)
        self._bumps = self._counter.external_bumps(self.param)

    def leave_on_host(self) -> None:
        """Leave the values in host memory of their own, at the end."""
        leave_on_host(self.param, self.values.read().clone())
        self.values.discard()

    # What the optimizer reads and writes.

    def put_into_slices(self) -> bool:
        """Have the upload buffer and masters hold the values. False: only the device has them, or no buffer is free."""
        if self.values.place is Place.WHOLE and not self.is_on_device():
            self.values.put_into_slices()
        return self.values.place is Place.SLICES

    def begin_write(self) -> None:
        """Have the values on the device alone, which the optimizer is going to write there."""
        if not self.is_on_device():
            self.load()
        self.values.move_to(Place.DEVICE)

    def write(self, values: Tensor) -> None:
        """Overwrite the values, of the parameter's shape, below autograd; its masters are compared with them later."""
        if self.loaded:
            self.param.data.copy_(values)
            self.values.move_to(Place.DEVICE)
            self.written()
        else:
            self.values.overwrite(values)

    def reads_failed(self) -> None:
        """Note that the device may have used what was in memory instead of what a file should have brought there."""
        if (error := self.values.read_error) is not None:
            self.values.lose(error)
            if self.loaded:
                self.unload()
