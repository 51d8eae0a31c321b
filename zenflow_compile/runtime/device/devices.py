"""The devices of this process: which types are served, the one object per device, and the CPU as the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zenflow_compile.runtime.device.cuda import CudaDevice
from zenflow_compile.runtime.device.device import Device


class CpuDevice(Device):
    """Operators are complete when they return, and threads make copies asynchronous."""

    streams = None
    has_triton = False

    @classmethod
    def count(cls) -> int:
        return 1

    @property
    def name(self) -> str:
        return "cpu"

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {}

    def free_bytes(self) -> int | None:
        return None

    def unused_bytes(self) -> int:
        return 0

    def allocated_bytes(self) -> int | None:
        return None

    def peak_bytes(self) -> int | None:
        return None

    def reset_peak(self) -> None:
        """Nothing is counted."""

    @property
    def compute_threads(self) -> int:
        return torch.get_num_threads()

    def register(self, address: int, size_bytes: int) -> None:
        """Nothing to do: threads copy, and need no page locks."""

    def unregister(self, address: int) -> None:
        """Nothing to do."""

    def pinned_buffer(self, size_bytes: int) -> Any:
        return bytearray(size_bytes)

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing to wait for."""


_IMPLEMENTATIONS: dict[str, type[Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}
_DEVICES: dict[torch.device, Device] = {}


def register_device(device_type: str, implementation: type[Device]) -> None:
    """Serve devices whose ``torch.device.type`` is ``device_type``. Engines that are built keep theirs."""
    _IMPLEMENTATIONS[device_type] = implementation
    for device in [each for each in _DEVICES if each.type == device_type]:
        del _DEVICES[device]


def device_types() -> list[str]:
    """The served device types; the CPU is the first."""
    return list(_IMPLEMENTATIONS)


def implementation_of(device_type: str) -> type[Device]:
    """The implementation for a device type.

    Raises:
        ValueError: there is none; says what one needs.
    """
    if (found := _IMPLEMENTATIONS.get(device_type)) is None:
        raise ValueError(
            f"device type {device_type!r} must be one of {', '.join(_IMPLEMENTATIONS)}. To serve another type, "
            "subclass Device in zenflow_compile/runtime/device/device.py (memory queries, page-locked host memory and, "
            "if its operators run asynchronously, streams, events and stream values), and pass the class to "
            "register_device()"
        )
    return found


def device_of(device: torch.device) -> Device:
    """The one object that stands for ``device`` in this process; without an index, for the current device of its type.

    Raises:
        ValueError: its type is not served; says what an implementation needs.
    """
    if (found := _DEVICES.get(device)) is None:
        made = implementation_of(device.type)(device)
        # By the index that the implementation found: another device may be the current one in the next call.
        found = _DEVICES.setdefault(made.torch_device, made)
    return found
