"""Moves everything that an engine has on its device to host memory, and back before its next use.

[Note: memory given back] Storages are emptied and filled in place, so that tensors and their views stay what they are.
In between, code that asks for their address gets an error: a use without ``bring_back`` is never silent. What is only
read can be read from the host's copy (``read``).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_compile.native.storage_reads import allow_reads, refuse_reads
from zenflow_compile.runtime.device.copy_lanes import CopyLane
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.host.arena import HostArena, available_host_memory, carved_bytes
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.torch_internals.torch_private import storage_identity

_REFUSED = "memory of the optimizer was used while offload_all() had it in host memory; please report this"
_IN_RECORDINGS = "everything on the device"


@dataclass(frozen=True, slots=True)
class _Block:
    """A storage whose memory is given back.

    ``values``: uint8[size_bytes] in host memory; None if they do not count.
    """

    storage: torch.UntypedStorage
    size_bytes: int
    values: Tensor | None

    def empty(self) -> None:
        """Give the device's memory back. Idempotent."""
        allow_reads(self.storage)
        self.storage.resize_(0)
        refuse_reads(self.storage, self.size_bytes, _REFUSED.encode())

    def allocate(self) -> None:
        """Have memory again, with arbitrary values. Idempotent."""
        allow_reads(self.storage)
        self.storage.resize_(self.size_bytes)

    def on_device(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class DeviceMemory:
    """The device memory of one engine, which the device has or which is given back.

    Host memory for the values is made when it is needed first, and kept for the next time. An accelerator has it
    page-locked, if the driver allows that.

    Attributes:
        given_back: blocks whose memory the device does not have, by identity of the storage; empty if it has all.
    """

    def __init__(self, device: Device, to_host: CopyLane, to_device: CopyLane, recorder: Recorder) -> None:
        self._device = device
        self._to_host = to_host
        self._to_device = to_device
        self._recorder = recorder
        self._lock = threading.RLock()  # backwards in several threads may bring their first gradients at a time
        self.given_back: dict[int, _Block] = {}
        self._arena: HostArena | None = None
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def host_bytes(self) -> int:
        return self._room.nbytes

    def settle(self) -> None:
        """Block until no work of the engine's uses the device's memory."""
        self._to_host.settle()  # where it is a thread, a gradient may be on its way out of the ring
        self._device.synchronize()  # all streams, those of lanes and ranks among them

    def offload(self, found: MemoryList) -> None:
        """Copy values to the host, and give the device's memory back. Call ``settle`` before.

        Raises:
            MemoryError: the host has no room for the values.
            RuntimeError: a copy failed. Nothing has been given back then.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            blocks, step = self._blocks_of(found), self._recorder.step
            copies = [
                self._to_host.submit(values, block.on_device(), step=step, param=_IN_RECORDINGS, kind="state")
                for block in blocks
                if (values := block.values) is not None
            ]
            for copy in copies:
                copy.wait()  # it reads the memory that is given back below
            # First: all values are on the host, so after an interrupt below ``bring_back`` fills what is empty.
            self.given_back = {storage_identity(block.storage): block for block in blocks}
            for block in blocks:
                block.empty()

    def bring_back(self) -> None:
        """Have all memory on the device again, before it is used. Cheap when it is there.

        Work of the calling thread's stream finds the values. Call it behind ``StreamOrder.follow``.

        Raises:
            torch.OutOfMemoryError: the device has no room for all of it. The values are still on the host.
            RuntimeError: a copy failed; the values are still on the host.
        """
        if not self.given_back:
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            blocks, step = self.given_back.values(), self._recorder.step
            try:
                for block in blocks:
                    block.allocate()
                copies = [
                    self._to_device.submit(block.on_device(), values, step=step, param=_IN_RECORDINGS, kind="state")
                    for block in blocks
                    if (values := block.values) is not None
                ]
                for copy in copies:
                    copy.wait_on_device()
            except BaseException as error:
                # Before the memory is freed: copies into it may be under way.
                self._to_device.settle()
                for block in blocks:
                    block.empty()
                if isinstance(error, torch.OutOfMemoryError):
                    needed = _megabytes(sum(block.size_bytes for block in blocks))
                    raise torch.OutOfMemoryError(
                        f"the device has no room for the {needed} of the optimizer that offload_all() has moved to the "
                        "host, where they still are; free device memory (put an inference engine to sleep, empty the "
                        "cache of its allocator), and repeat this call"
                    ) from error
                raise
            self.given_back = {}  # last: until here an interrupt leaves the values on the host to count

    def read(self, tensor: Tensor) -> Tensor:
        """``tensor``, or its values in host memory if its memory is given back. Not to be written.

        Its values must count: see :class:`MemoryList`.
        """
        if not self.given_back or (block := self.given_back.get(storage_identity(tensor.untyped_storage()))) is None:
            return tensor
        assert block.values is not None
        values = block.values.view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset() + tensor.storage_offset())

    def free(self) -> None:
        """Free the host memory, when no copy is in flight. Idempotent."""
        self._room = self._room[:0]
        if self._arena is not None:
            self._arena.close()

    def _blocks_of(self, found: MemoryList) -> list[_Block]:
        """The storages with places for their values."""
        storages = list(found.storages())
        places = [((storage.nbytes(),), torch.uint8) for storage, has_values in storages if has_values]
        needed = carved_bytes(places)
        if needed > self._room.nbytes:
            self._make_room(needed)
        blocks, first = [], 0
        for storage, has_values in storages:
            values, size = None, storage.nbytes()
            if has_values:
                values = self._room[first : first + size]
                first += carved_bytes([((size,), torch.uint8)])
            blocks.append(_Block(storage, size, values))
        return blocks

    def _make_room(self, needed_bytes: int) -> None:
        available_bytes, limited_by = available_host_memory()
        self.free()
        if needed_bytes > available_bytes:
            raise MemoryError(
                f"offload_all() needs {_megabytes(needed_bytes)} of host memory, and only "
                f"{_megabytes(available_bytes)} are available ({limited_by}); free some. Nothing has been moved"
            )
        asynchronous = self._device.streams is not None
        self._arena = HostArena(needed_bytes, self._device if asynchronous else None)
        if asynchronous:
            self._arena.pin(self._device)
        self._room = self._arena.take((needed_bytes,), torch.uint8)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
