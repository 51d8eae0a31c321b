"""CUDA: the only file that uses ``torch.cuda``."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import time
import weakref
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from zenflow_compile.runtime.device import cuda_driver
from zenflow_compile.runtime.device.device import Device, Stream, Streams
from zenflow_compile.timeline import DeviceEvent

_URGENT, _NORMAL = -1, 0  # stream priorities; lower numbers go first


class CudaStreams(Streams):
    """``torch.cuda``'s own classes: the generic ones of PyTorch hold the GIL while they block."""

    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device
        self._free: dict[bool, list[Stream]] = {True: [], False: []}  # acquired before, and given back
        self._reference_stream: Any = None
        self._lock = threading.Lock()

    @property
    def has_values(self) -> bool:  # type: ignore[override]
        return cuda_driver.has_bindings()

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def acquire(self, *, urgent: bool) -> Stream:
        with self._on_device():
            torch.cuda.current_stream().query()  # makes the device's context in this thread, which driver calls need
        with self._lock:
            if self._free[urgent]:
                return self._free[urgent].pop()
        return self._make(_URGENT if urgent else _NORMAL)

    def release(self, stream: Stream, *, urgent: bool) -> None:
        with self._lock:
            self._free[urgent].append(stream)

    def _make(self, priority: int) -> Stream:
        # PyTorch has 32 streams per priority and hands them out in turns: other code may get the same one, and would
        # wait behind gradients. The driver makes one that no other code has.
        if cuda_driver.has_bindings():
            with self._on_device(), suppress(RuntimeError):
                handle = cuda_driver.create_stream(priority)
                return torch.cuda.ExternalStream(handle, self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)  # type: ignore[arg-type]

    def event(self, *, timed: bool = False, blocking: bool = False) -> DeviceEvent:
        event: DeviceEvent = torch.cuda.Event(enable_timing=timed, blocking=blocking)  # type: ignore[no-untyped-call]
        return event

    def record_use(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        # With the device's context current: the driver's manual does not say what happens in another device's context.
        with self._on_device():
            cuda_driver.write_value(stream.cuda_stream, address, value)  # type: ignore[attr-defined]

    def write_by_host(self, stream: Stream, address: int, value: int) -> None:
        with self._on_device():
            cuda_driver.write_by_host(stream.cuda_stream, address, value)  # type: ignore[attr-defined]

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        with self._on_device():
            cuda_driver.wait_value(stream.cuda_stream, address, value)  # type: ignore[attr-defined]

    def reference(self) -> tuple[DeviceEvent, int]:
        with self._on_device():
            # A stream of its own: on a busy one the event would come after all queued work, and its wait would stall
            # the run. One for all times: a new one for each would soon be a stream that other code uses.
            if self._reference_stream is None:
                self._reference_stream = self._make(_URGENT)
            event = self.event(timed=True)
            event.record(self._reference_stream)
            event.synchronize()
        return event, time.perf_counter_ns()

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device)


class CudaDevice(Device):
    """See :class:`Device`. ``torch.cuda.cudart()`` and the queries were seen in torch 2.11 and 2.13."""

    def __init__(self, torch_device: torch.device) -> None:
        index: int | None = torch_device.index  # PyTorch declares it an int; it is None in ``torch.device("cuda")``
        if index is None:
            torch_device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(torch_device)
        self.streams: CudaStreams = CudaStreams(torch_device)
        self._weights: torch.cuda.MemPool | None = None
        self.has_triton = importlib.util.find_spec("triton") is not None  # its wheels are for Linux only

    @classmethod
    def count(cls) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @classmethod
    def pci_addresses(cls) -> list[str]:
        # Properties make no context on a device.
        found: list[Any] = [torch.cuda.get_device_properties(index) for index in range(cls.count())]
        return [f"{each.pci_domain_id:04x}:{each.pci_bus_id:02x}:{each.pci_device_id:02x}.0" for each in found]

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"cuda": torch.version.cuda or "none"}

    def free_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.torch_device))
        return max(0, min(free, allowed - torch.cuda.memory_reserved(self.torch_device)))

    def memory_of_weights(self) -> AbstractContextManager[object]:
        # The pool outlives its tensors: equal weights take each other's place.
        if self._weights is None:
            self._weights = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._weights, self.torch_device)

    def unused_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)

    def allocated_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self.torch_device)

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    @property
    def compute_threads(self) -> int | None:
        return None

    def register(self, address: int, size_bytes: int) -> None:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # On this device: the call would make a context, of hundreds of MB, on another one that is the current device.
        with self.use():
            error = cudart.cudaHostRegister(address, size_bytes, 1)  # 1: cudaHostRegisterPortable, for every device
        if int(error) != 0:
            # Hazard: CUDA reports the error again at the check after the next kernel launch. Clear it here.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.torch_device)
            raise RuntimeError(f"cudaHostRegister: {cudart.cudaGetErrorString(error)}")

    def unregister(self, address: int) -> None:
        with self.use():  # as in ``register``
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def pinned_buffer(self, size_bytes: int) -> Any:
        if not cuda_driver.has_bindings():
            raise RuntimeError("cuda-bindings, which call cuMemHostAlloc, are not installed")
        with self.use():
            torch.cuda.current_stream().query()  # the driver needs a context, which the first use of a device makes
            address = cuda_driver.host_alloc(size_bytes)
        buffer = (ctypes.c_char * size_bytes).from_address(address)
        # Not at exit: a copy or a thread that is left then may still use the memory, which the process takes along.
        weakref.finalize(buffer, cuda_driver.host_free, address).atexit = False
        ctypes.memset(address, 0, size_bytes)
        return buffer

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
