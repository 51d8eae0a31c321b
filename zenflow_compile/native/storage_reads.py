"""Errors in place of crashes for code that reads a storage without memory."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache

import torch

from zenflow_compile.checks.printable import printable
from zenflow_compile.checks.user_frame import user_stacklevel
from zenflow_compile.native.build import BuildError, load_storage_reads
from zenflow_compile.torch_internals.torch_private import (
    mark_refused,
    profiler_active,
    reads_are_refused,
    storage_identity,
    unmark_refused,
)


def refuse_reads(storage: torch.UntypedStorage, nbytes: int, text: str) -> None:
    """Make every read and write of an empty storage raise ``RuntimeError``, also through views.

    Does nothing if the C++ source cannot be compiled here; the first call warns of it then. Does nothing either while a
    profiler runs: it asks for the addresses of parameters and of operators' inputs, and would lose events or raise.

    Args:
        nbytes: size that the storage shows meanwhile.
        text: of the error.
    """
    if not profiler_active() and (library := _library()) is not None:
        _refuse(library, storage, nbytes, text)


def allow_reads(storage: torch.UntypedStorage) -> None:
    """Undo ``refuse_reads``: the storage is empty, with 0 bytes. Idempotent."""
    if reads_are_refused(storage) and (library := _library()) is not None:
        _allow(library, storage)


def _refuse(library: ctypes.PyDLL, storage: torch.UntypedStorage, nbytes: int, text: str) -> None:
    library.zenflow_refuse_reads(storage_identity(storage), nbytes, text.encode())
    mark_refused(storage)


def _allow(library: ctypes.PyDLL, storage: torch.UntypedStorage) -> None:
    unmark_refused(storage)
    library.zenflow_allow_reads(storage_identity(storage))


@cache  # compile, check and warn once per process
def _library() -> ctypes.PyDLL | None:
    try:
        library = load_storage_reads()
        library.zenflow_refuse_reads.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p]
        library.zenflow_refuse_reads.restype = None
        library.zenflow_allow_reads.argtypes = [ctypes.c_void_p]
        library.zenflow_allow_reads.restype = None
        _check(library)
    except BuildError as error:
        warnings.warn(
            f"direct reads of weights in host memory crash instead of raising: {printable(str(error))}",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )
        return None
    return library


def _check(library: ctypes.PyDLL) -> None:
    """Guards against headers of another PyTorch than the one that runs: a storage has other fields then."""
    storage = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    _refuse(library, storage, 8, "refused")
    try:
        storage.data_ptr()
    except RuntimeError as error:
        refused = str(error).startswith("refused")
    else:
        refused = False
    shown = storage.nbytes()
    _allow(library, storage)
    if not refused or shown != 8 or storage.nbytes() or storage.data_ptr():
        raise BuildError("the C++ headers of PyTorch do not belong to the PyTorch that runs")
