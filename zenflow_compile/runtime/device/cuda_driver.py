"""Calls of the CUDA driver that PyTorch does not offer, through ``cuda-bindings``, which its CUDA builds install.

Where the bindings are missing, :func:`has_bindings` is False, and only :func:`write_by_host` may be called. Calls that
the driver refuses raise ``RuntimeError``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from zenflow_compile.native.library import library


@cache
def has_bindings() -> bool:
    """Whether the driver can be called."""
    try:
        # Not find_spec("cuda.bindings"): it raises where an unrelated module is called ``cuda``.
        from cuda.bindings import driver  # noqa: F401
    except ImportError:
        return False
    return True


def write_value(stream: int, address: int, value: int) -> None:
    """``cuStreamWriteValue32``: the stream writes ``value`` to ``address`` after all earlier work in it."""
    default = _driver().CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
    _call("cuStreamWriteValue32", stream, address, value, default)


def write_by_host(stream: int, address: int, value: int) -> None:
    """``cuLaunchHostFunc`` of a native function that writes ``value`` to ``address``, after all earlier work."""
    error = library().zenflow_write_behind(_launch_host_func(), stream, address, value)
    if error:
        raise RuntimeError(f"cuLaunchHostFunc: error {error}")


@cache
def _launch_host_func() -> ctypes.c_void_p:
    # The library of the driver, which PyTorch has loaded.
    return ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc, ctypes.c_void_p)


def wait_value(stream: int, address: int, value: int) -> None:
    """``cuStreamWaitValue32``: the stream waits until the number at ``address`` reaches ``value``, modulo 2**32."""
    beyond = _driver().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    _call("cuStreamWaitValue32", stream, address, value, beyond)


def create_stream(priority: int) -> int:
    """``cuStreamCreateWithPriority`` in the current context, without implicit waits for the default stream.

    Returns the handle. The stream lives as long as the process.
    """
    not_blocking = _driver().CUstream_flags.CU_STREAM_NON_BLOCKING
    return int(_call("cuStreamCreateWithPriority", not_blocking, priority)[1])


def host_alloc(size_bytes: int) -> int:
    """``cuMemHostAlloc``: the address of page-locked host memory of exactly this size, for every device."""
    return int(_call("cuMemHostAlloc", size_bytes, _driver().CU_MEMHOSTALLOC_PORTABLE)[1])


def host_free(address: int) -> None:
    """``cuMemFreeHost``. Ignores errors: at interpreter exit the driver may be gone."""
    _driver().cuMemFreeHost(address)


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _call(name: str, *arguments: Any) -> Any:
    result = getattr(_driver(), name)(*arguments)
    error = result[0] if isinstance(result, tuple) else result
    if int(error) != 0:
        raise RuntimeError(f"{name}: {error}")
    return result
