"""Host memory of one engine: whether there is enough, and one mapping of exactly the size needed.

PyTorch's pinned allocator rounds each request up to a power of two, so memory is mapped here and registered.

[Note: lifetime] Tensors keep the mapping alive, and the last of them frees it. It is never closed by hand:
``torch.frombuffer`` holds a reference to the mapping but no buffer export, so ``mmap.close()`` would succeed under
living tensors, and their next access would crash.

[Note: fork] Forked children do not inherit the mapping (MADV_DONTFORK): DataLoader workers would otherwise copy its
page tables at start, and every page that the parent writes later. A child that touches a tensor of an arena crashes;
the optimizer belongs to the process that made it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from zenflow_compile.planning.shared_buffers import ALIGNMENT_BYTES
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.host.cgroups import CGROUPS, MEMBERSHIP, groups_of

_TOUCH_BYTES = 64 << 20
"""Bytes per operator in ``touch_pages``: few enough pages that PyTorch does not spread them over threads."""

_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def require_host_memory(needed_bytes: int, remedies: str, processes: int = 1) -> None:
    """Refuse a plan that does not fit, before anything is allocated.

    Linux maps more memory than there is, and kills a process that later touches too much of it. ``processes`` on this
    machine are about to allocate as much; ``remedies`` need less.

    Raises:
        ValueError: more is needed than is available to this process; says how much, and which settings help.
    """
    available_bytes, limited_by = available_host_memory()
    if needed_bytes * processes > available_bytes:
        each = "" if processes == 1 else f" in each of {processes} ranks on this machine"
        raise ValueError(
            f"optimizer state and gradient windows need {_size(needed_bytes)} of host memory{each}, but only "
            f"{_size(available_bytes)} are available ({limited_by}); free some, or choose {remedies}"
        )


def available_host_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> tuple[int, str]:
    """Bytes that this process can still use without swapping, and the limit that applies.

    A container's limit is that of its tightest control group, version 1 or 2, where readable. Cached file pages that
    the kernel would give back count as available.
    """
    machine = psutil.virtual_memory()
    bounds = [(int(machine.available), f"the machine has {_size(machine.total)}")]
    for group, version in groups_of("memory", cgroups, membership):
        if (bound := _cgroup_bound(group, *_MEMORY_FILES[version])) is not None:
            bounds.append(bound)
    return min(bounds)


def _cgroup_bound(group: Path, limit_file: str, usage_file: str, cache_key: str) -> tuple[int, str] | None:
    """Free bytes of a control group; None if it has no limit, or is not visible to this process."""
    try:
        limit = int((group / limit_file).read_text())  # "max", which int() refuses, without a limit
        usage = int((group / usage_file).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left = limit - usage + int(statistics.get(cache_key, 0))
    except (OSError, ValueError):
        return None
    return max(0, left), f"the control group {group} is limited to {_size(limit)}"


def carved_bytes(pieces: Iterable[tuple[Sequence[int], torch.dtype]]) -> int:
    """Bytes that an arena needs to hold a tensor for each (shape, dtype), alignment included."""
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in pieces)


class HostArena:
    """Anonymous host memory, zero to begin with, from which tensors are taken and never given back.

    The kernel allocates pages when they are first touched, near the core that touches them: let the worker that will
    serve a tensor touch it (``touch_pages``). ``pin`` touches all other pages.

    Args:
        total_bytes: bytes of all tensors, as ``carved_bytes`` counts them; rounded up to whole pages.
        device: that copies from and to this memory asynchronously; None: no device does. If its driver does not
            register memory, it is asked for memory of its own, which is page-locked from the start.

    Raises:
        ValueError: ``total_bytes`` is negative.
        MemoryError: the operating system does not map that much.
    """

    def __init__(self, total_bytes: int, device: Device | None = None) -> None:
        if total_bytes < 0:
            raise ValueError(f"total_bytes={total_bytes} must be >= 0")
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._from_driver: Any = None
        if device is not None and total_bytes and device.refusal is not None:
            with suppress(RuntimeError):  # ``pin`` says why, and what it costs
                self._from_driver = device.pinned_buffer(total_bytes)
        self._mapping: _Mapping | None = _map(total_bytes if self._from_driver is None else 0)

    @property
    def pinned(self) -> bool:
        """Whether a device can copy from and to this memory asynchronously."""
        mapping = self._mapping
        return mapping is not None and (mapping.registered_with is not None or self._from_driver is not None)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take a contiguous tensor of zeros, aligned to 64 bytes, with its own storage over the next bytes.

        Raises:
            RuntimeError: the arena is closed, or has too few bytes left: an error of the caller, which decides sizes
                before it makes an arena.
        """
        mapping = self._open_mapping()
        needed = _aligned(prod(shape) * dtype.itemsize)
        if needed > self.total_bytes - self.used_bytes:
            raise RuntimeError(
                f"arena exhausted: {tuple(shape)} of {dtype} needs {needed} bytes, and of {self.total_bytes} "
                f"only {self.total_bytes - self.used_bytes} are left; the plan counted this arena too small"
            )
        if needed == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        memory = mapping if self._from_driver is None else self._from_driver
        flat = torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=self.used_bytes)
        self.used_bytes += needed
        return flat.view(tuple(shape))

    def pin(self, device: Device, remedies: str | None = None) -> bool:
        """Register the whole arena with ``device``; return whether it is pinned now. Idempotent.

        It is one registration, because a copy may not span two. If the driver refuses, a warning says what that costs,
        and everything works on unpinned memory.

        Args:
            remedies: settings that need less host memory, for the warning; None: no warning.
        """
        mapping = self._open_mapping()
        if not self.pinned and len(mapping):
            try:
                device.register(mapping.address, len(mapping))
            except RuntimeError as error:
                if remedies is not None:
                    warnings.warn(
                        f"the driver refused to pin {_size(len(mapping))} of host memory ({error}). Training is as "
                        "correct, but copies between host and device go through the driver's small buffers now: "
                        "slower, and the training thread waits for them. Raise the limit on locked memory (ulimit -l), "
                        f"free host memory, or make do with less: {remedies}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            else:
                mapping.registered_with = device
        return self.pinned

    def close(self) -> None:
        """Unregister the memory, which is unmapped with its last tensor. Idempotent.

        No copy from or to this memory may be in flight.
        """
        mapping, self._mapping, self._from_driver = self._mapping, None, None
        if mapping is not None:
            mapping.unregister()

    def _open_mapping(self) -> _Mapping:
        if self._mapping is None:
            raise RuntimeError("this arena is closed")
        return self._mapping


def touch_pages(tensor: Tensor) -> None:
    """Make the pages of a contiguous CPU tensor resident, near the calling thread's core. Releases the GIL.

    Keeps the contents, but no other thread may write there meanwhile.
    """
    content = tensor.view(-1).view(torch.uint8)
    for first in range(0, content.numel(), _TOUCH_BYTES):
        chunk = content[first : first + _TOUCH_BYTES]
        # Reads a byte and writes it back: a write by another thread in between would be lost.
        chunk[:: mmap.PAGESIZE].bitwise_or_(0)
        chunk[-1:].bitwise_or_(0)  # the last page, when the tensor does not begin at the start of one


class _Mapping(mmap.mmap):
    """A private anonymous mapping, with the device that it is registered with and the process that owns it."""

    address = 0
    registered_with: Device | None = None
    owner = 0

    def unregister(self) -> None:
        device, self.registered_with = self.registered_with, None
        if device is not None:
            device.unregister(self.address)

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            # In a forked child there is a hole at this address, which other memory may have filled since. Unmapping
            # would free that memory, so the object is leaked.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        with suppress(Exception):  # at interpreter exit the driver may be gone, and its registrations with it
            self.unregister()


def _map(total_bytes: int) -> _Mapping:
    length = max(1, -(-total_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    try:
        # Private: shared anonymous memory would get no huge pages.
        mapping = _Mapping(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"the operating system did not map {_size(length)} of host memory: {error}; free memory, or raise the "
            "limit on address space (ulimit -v) or on mappings (vm.max_map_count)"
        ) from error
    mapping.owner = os.getpid()
    mapping.address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # neither exists on every platform and kernel
        if hasattr(mmap, advice):
            with suppress(OSError):
                mapping.madvise(getattr(mmap, advice))
    return mapping


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _size(count: int) -> str:
    """A number of bytes in the largest unit of which it has one."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit = next((unit for unit, size in units.items() if abs(count) >= size), None)
    return f"{count} bytes" if unit is None else f"{count / units[unit]:.1f} {unit}"
