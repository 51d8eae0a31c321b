"""What the package asks of a device. No other file names a kind of accelerator.

An implementation is a :class:`Device`, for a device type that PyTorch has. ``cuda.py`` has one, ``devices.py`` the CPU;
``devices.register_device`` adds another. Decisions follow capabilities: ``device.streams is None``, never a type.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from zenflow_compile.timeline import DeviceEvent


class Stream(Protocol):
    """A queue of the device: ``torch.cuda.Stream``, or an object with its methods."""

    def wait_stream(self, stream: Any) -> None:
        """Queue a wait for the work that ``stream`` has now."""

    def wait_event(self, event: Any) -> None:
        """Queue a wait for the work before the last ``record`` of ``event``; a later one does not change the wait."""

    def synchronize(self) -> None:
        """Block the calling thread, without the GIL, until the queue is empty; raises if the device has failed."""


class Streams(ABC):
    """Streams and events of a device whose operators run after the call that queues them.

    Calls that may block (on a full queue, too) must release the GIL. Those of ``torch.Stream`` and ``torch.Event`` do
    not, those of ``torch.cuda`` do.

    Attributes:
        has_values: whether a stream itself can write numbers to host memory, and wait for them.
    """

    has_values: bool

    @abstractmethod
    def current(self) -> Stream:
        """The stream on which the calling thread queues operators."""

    @abstractmethod
    def acquire(self, *, urgent: bool) -> Stream:
        """Take a stream that no other code uses. An urgent one shares no queue of the hardware with the others."""

    @abstractmethod
    def release(self, stream: Stream, *, urgent: bool) -> None:
        """Give an acquired stream back; the next ``acquire`` may return it."""

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Make ``stream``, and its device, the current one of the calling thread inside the block."""

    @abstractmethod
    def event(self, *, timed: bool = False, blocking: bool = False) -> DeviceEvent:
        """Make an event.

        Args:
            timed: ``elapsed_time`` can be asked.
            blocking: ``synchronize`` sleeps instead of keeping a core busy, for waits that may be long.
        """

    @abstractmethod
    def record_use(self, tensor: Tensor) -> None:
        """Have the allocator keep the memory of ``tensor``, when it is freed, until the current stream has read it."""

    @abstractmethod
    def write_value(self, stream: Stream, address: int, value: int) -> None:
        """Make ``stream`` write the 32-bit ``value`` to host memory at ``address`` after all earlier work in it.

        Raises ``RuntimeError`` if the driver refuses, as ``write_by_host`` and ``wait_value`` do.
        """

    @abstractmethod
    def write_by_host(self, stream: Stream, address: int, value: int) -> None:
        """Like ``write_value``, by a thread of the driver, which needs no GIL. Works without ``has_values``."""

    @abstractmethod
    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        """Make ``stream`` wait until the 32-bit number at ``address`` reaches ``value``, modulo 2**32."""

    @abstractmethod
    def reference(self) -> tuple[DeviceEvent, int]:
        """A timed event that has happened, and the host time (``time.perf_counter_ns``) at which it did.

        Does not wait for work in other streams.
        """

    def now(self) -> DeviceEvent:
        """This moment of the current stream: a recorded event with timing."""
        event = self.event(timed=True)
        # The stream is named: an event would be recorded on a stream of the thread's current device, which may differ.
        event.record(self.current())
        return event


class Device(ABC):
    """One device: its memory, its streams, and what its driver can do.

    Attributes:
        torch_device: with an index, unless it is the CPU.
        streams: None where operators are complete when they return.
        has_triton: Triton compiles kernels for it.
        blocking: how often the host had to wait for the device so far, by reason. A blocking copy waits until the
            device has done all earlier work.
    """

    streams: Streams | None
    has_triton: bool

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.blocking: Counter[str] = Counter()

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Number of devices of this type in this machine."""

    @classmethod
    def pci_addresses(cls) -> list[str]:
        """Where the devices of this type are plugged in, by index, such as "0000:c1:00.0"; none that are not."""
        return []

    @property
    @abstractmethod
    def name(self) -> str:
        """What the vendor calls it."""

    @classmethod
    @abstractmethod
    def versions(cls) -> dict[str, str]:
        """Versions of the software that drives it, by name."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Memory that no process has allocated and this one may; None where the device shares the host's memory."""

    @abstractmethod
    def unused_bytes(self) -> int:
        """Memory that PyTorch's allocator has reserved and no tensor uses."""

    @abstractmethod
    def allocated_bytes(self) -> int | None:
        """Memory that tensors have now, as the host sees it, without a wait; None where it is not counted."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Most memory that tensors had at a time since the last ``reset_peak``; None where it is not counted."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Make the memory that tensors have now the peak."""

    def memory_of_weights(self) -> AbstractContextManager[object]:
        """The context in which memory of weights is allocated that come and go.

        An allocator that gives pieces of larger blocks away would fill the place of a weight with activations, which
        stay until the backward.
        """
        return nullcontext()

    @property
    @abstractmethod
    def compute_threads(self) -> int | None:
        """Threads of this machine's cores that compute the model; None where the device does."""

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a small tensor of zeros in host memory that the device copies to and from asynchronously.

        The device knows the memory by its host address, so that its streams can also write values there. Where the
        driver refuses to page-lock memory, copies wait for the device, and it cannot write values.
        """
        # The host is named: ``torch.set_default_device`` is in effect here, too.
        with suppress(RuntimeError):
            return torch.zeros(tuple(shape), dtype=dtype, device="cpu", pin_memory=self.streams is not None)
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")

    @abstractmethod
    def register(self, address: int, size_bytes: int) -> None:
        """Page-lock host memory, so that the device copies to and from it asynchronously. Releases the GIL.

        Raises:
            RuntimeError: the driver's reason for refusing.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo ``register``. Ignores errors: then the memory was not registered."""

    @abstractmethod
    def pinned_buffer(self, size_bytes: int) -> Any:
        """Allocate page-locked host memory where ``register`` is refused, as in some containers.

        Returns:
            An object with the buffer protocol over ``size_bytes`` zeros. The last reference to it frees the memory.

        Raises:
            RuntimeError: the driver's reason for refusing.
        """

    @cached_property
    def refusal(self) -> str | None:
        """Why the driver does not register host memory, asked with one page; None if it does."""
        page = mmap.mmap(-1, mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        try:
            self.register(address, mmap.PAGESIZE)
        except RuntimeError as error:
            return str(error)
        self.unregister(address)
        return None

    @abstractmethod
    def use(self) -> AbstractContextManager[object]:
        """Make it the calling thread's current device inside the block."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until all queued work is done."""

    def to_host(self, tensor: Tensor, why: str) -> Tensor:
        """Copy a tensor of this device to the host, and wait for it. On the CPU it is the tensor itself."""
        if self.streams is None:
            return tensor
        self.blocking[why] += 1
        return tensor.cpu()

    def wait_for(self, event: DeviceEvent, why: str) -> None:
        """Block the calling thread, without the GIL, until ``event`` has happened; raises if the device has failed."""
        if not event.query():
            self.blocking[why] += 1
            event.synchronize()

    def from_host(self, tensor: Tensor, why: str) -> Tensor:
        """Copy a tensor of the host to this device, and wait for it. On the CPU it is the tensor itself."""
        if self.streams is None:
            return tensor
        self.blocking[why] += 1
        return tensor.to(self.torch_device)
