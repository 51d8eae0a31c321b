"""The simulated accelerator as a :class:`Device` of the package: what ``cuda.py`` is for CUDA."""

from __future__ import annotations

import ctypes
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tests.simulated import device_module, streams
from tests.simulated import library as simulated
from tests.simulated.simulator import load_simulator
from zenflow_compile.native import library as native
from zenflow_compile.runtime.device.device import Device, Streams
from zenflow_compile.runtime.device.devices import register_device


class SimulatedStreams(Streams):
    """See :class:`Streams`."""

    has_values = True

    def __init__(self) -> None:
        self._simulator = load_simulator()
        self._free: list[Any] = []

    def current(self) -> Any:
        return streams.current_stream()

    def acquire(self, *, urgent: bool) -> Any:
        return self._free.pop() if self._free else streams.Stream()

    def release(self, stream: Any, *, urgent: bool) -> None:
        self._free.append(stream)

    def use(self, stream: Any) -> AbstractContextManager[object]:
        used: AbstractContextManager[object] = stream
        return used

    def event(self, *, timed: bool = False, blocking: bool = False) -> streams.Event:
        return streams.Event(enable_timing=timed)

    def record_use(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.current())

    def write_value(self, stream: Any, address: int, value: int) -> None:
        self._simulator.write_value(stream, address, value)

    def write_by_host(self, stream: Any, address: int, value: int) -> None:
        launch = simulated.library().address("launch_host_function")
        assert not native.library().zenflow_write_behind(launch, stream.handle, address, value)

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        self._simulator.wait_value(stream, address, value)

    def reference(self) -> tuple[streams.Event, int]:
        event = self.event(timed=True)
        event.record(streams.Stream())
        event.synchronize()
        return event, time.perf_counter_ns()


class SimulatedDevice(Device):
    """See :class:`Device`."""

    has_triton = False

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self.streams: SimulatedStreams = SimulatedStreams()
        self._simulator = load_simulator()

    @classmethod
    def count(cls) -> int:
        return 1

    @property
    def name(self) -> str:
        return "simulated"

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {}

    def free_bytes(self) -> int:
        return self._simulator.free_bytes()

    def unused_bytes(self) -> int:
        return 0

    def allocated_bytes(self) -> int:
        return device_module.memory_allocated()

    def peak_bytes(self) -> int:
        return device_module.max_memory_allocated()

    def reset_peak(self) -> None:
        device_module.reset_peak_memory_stats()

    @property
    def compute_threads(self) -> None:
        return None

    @property
    def refusal(self) -> str | None:  # type: ignore[override]  # asked every time: a test changes the answer
        reason: str | None = Device.refusal.func(self)
        return reason

    def register(self, address: int, size_bytes: int) -> None:
        self._simulator.register(address, size_bytes)

    def unregister(self, address: int) -> None:
        self._simulator.unregister(address)

    def pinned_buffer(self, size_bytes: int) -> Any:
        memory = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        buffer: Any = (ctypes.c_char * size_bytes).from_address(memory.data_ptr())
        buffer.keep = memory
        return buffer

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        device_module.synchronize()


def serve() -> None:
    """Let the package serve the simulated device in this process."""
    load_simulator()
    register_device(device_module.NAME, SimulatedDevice)
