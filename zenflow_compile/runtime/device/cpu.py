"""The CPU as the device: operators are complete when they return, and threads make copies asynchronous."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zenflow_compile.runtime.device.device import Device


class CpuDevice(Device):
    """See :class:`Device`."""

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
