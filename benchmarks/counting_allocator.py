"""Lets the CPU stand for a device with little memory: its tensors are counted, and memory of the host is not.

PyTorch's CPU allocator is wrapped by one that counts. State and weights in host memory are mapped pages of the
package, which no allocator knows. So the count is what a device with memory of its own would have to hold.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from zenflow_compile.runtime.device.devices import CpuDevice, register_device
from zenflow_compile.torch_internals.torch_private import cpp_compiler, extension_flags

_SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILE_SECONDS = 120.0


class CountingError(RuntimeError):
    """The counting allocator cannot be compiled or loaded here; the message has the reason."""


class CountedCpu(CpuDevice):
    """The CPU as a device whose memory is what the allocator counts.

    Attributes:
        limit_bytes: of that memory; None: as much as there is.
    """

    limit_bytes: int | None = None

    def free_bytes(self) -> int | None:
        # Negative before weights beyond the limit have left for host memory.
        return None if self.limit_bytes is None else self.limit_bytes - _library().counting_now()

    def allocated_bytes(self) -> int | None:
        return int(_library().counting_now())

    def peak_bytes(self) -> int | None:
        return int(_library().counting_peak())

    def reset_peak(self) -> None:
        _library().counting_reset_peak()


@contextmanager
def counted_cpu(limit_bytes: int | None) -> Iterator[None]:
    """Count tensors on the CPU that are made inside of the block, and let the package ask for the count.

    Models and optimizers of the block belong to it: they are closed when it ends.

    Raises:
        CountingError: there is no C++ compiler, or it fails.
    """
    library = _library()
    register_device("cpu", type("LimitedCpu", (CountedCpu,), {"limit_bytes": limit_bytes}))
    library.counting_start()
    try:
        yield
    finally:
        library.counting_stop()
        register_device("cpu", CpuDevice)


@cache  # compile and load once per process: storages keep a pointer to the allocator
def _library() -> ctypes.CDLL:
    if (compiler := cpp_compiler()) is None:
        raise CountingError("counting memory on the CPU needs a C++ compiler: install g++, set CXX, or train on CUDA")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "counting_allocator.so"
        try:
            done = subprocess.run(
                [*compiler, str(_SOURCE), *extension_flags(), "-o", str(made)],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=_COMPILE_SECONDS,
            )
            if done.returncode:
                raise CountingError(f"{' '.join(compiler)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
            library = ctypes.CDLL(str(made))  # stays mapped when the file is removed
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CountingError(f"{_SOURCE.name} cannot be compiled or loaded: {error}") from None
    for name in ("counting_now", "counting_peak"):
        getattr(library, name).restype = ctypes.c_int64
    return library
