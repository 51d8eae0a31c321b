"""Errors in place of crashes and stale values for code that reads a storage at the wrong time."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache

import torch

from zenflow_compile.checks.printable import printable
from zenflow_compile.checks.user_frame import user_stacklevel
from zenflow_compile.native.build import BuildError, load_storage_reads
from zenflow_compile.torch_internals.torch_private import (
    Refusal,
    mark_refused,
    profiler_active,
    refusal_of,
    storage_identity,
    unmark_refused,
)


def can_refuse_reads() -> bool:
    """Return whether the C++ source works here; the first call compiles it, or warns that it cannot."""
    return _library() is not None


def refuse_reads(storage: torch.UntypedStorage, nbytes: int, text: bytes) -> None:
    """Make every access to the memory of a storage raise ``RuntimeError``, also through views.

    Does nothing if the C++ source cannot be compiled here; the first call warns of it then. Does nothing either while a
    profiler runs: it asks for the addresses of parameters and of operators' inputs, and would lose events or raise.

    Args:
        nbytes: size that the storage shows meanwhile.
        text: of the error, encoded.
    """
    if not profiler_active() and (library := _library()) is not None:
        _refuse(library, storage, nbytes, text)


def allow_reads(storage: torch.UntypedStorage) -> None:
    """Undo ``refuse_reads``: the storage has the size and the memory that it had before. Idempotent."""
    if refusal_of(storage) is not None and (library := _library()) is not None:
        _allow(library, storage)


class ReadGuard:
    """Refuses accesses to a tensor's memory, which stays as it is, for a time.

    Args:
        text: of the error.
    """

    __slots__ = ("_storage", "_text")

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._storage: torch.UntypedStorage | None = None  # of the time when it was refused: ``param.data = ...``

    def refuse(self, tensor: torch.Tensor) -> None:
        """Make every access raise, unless another refusal does so already."""
        storage = tensor.untyped_storage()
        if refusal_of(storage) is None:
            self._storage = storage
            refuse_reads(storage, storage.nbytes(), self._text)

    def allow(self) -> None:
        """Undo ``refuse``. Idempotent."""
        if (storage := self._storage) is not None:
            self._storage = None
            # Not a refusal that came later: the memory may have been given back since.
            if (refusal := refusal_of(storage)) is not None and refusal.text is self._text:
                allow_reads(storage)


def _refuse(library: ctypes.PyDLL, storage: torch.UntypedStorage, nbytes: int, text: bytes) -> None:
    # First: an interrupt in between leaves a mark, which ``allow_reads`` takes away.
    mark_refused(storage, Refusal(storage.nbytes(), text))
    library.zenflow_refuse_reads(storage_identity(storage), nbytes, text)


def _allow(library: ctypes.PyDLL, storage: torch.UntypedStorage) -> None:
    if (refusal := refusal_of(storage)) is not None:
        library.zenflow_allow_reads(storage_identity(storage), refusal.nbytes)
        unmark_refused(storage)


@cache  # compile, check and warn once per process
def _library() -> ctypes.PyDLL | None:
    try:
        library = load_storage_reads()
        library.zenflow_refuse_reads.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p]
        library.zenflow_refuse_reads.restype = None
        library.zenflow_allow_reads.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        library.zenflow_allow_reads.restype = None
        _check(library)
    except BuildError as error:
        warnings.warn(
            "direct reads of weights are not guarded: without the guard, weights in host memory crash code that reads "
            "them, and updates are applied inside of step(), without overlap, so that no code reads old values: "
            f"{printable(str(error))}",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )
        return None
    return library


def _check(library: ctypes.PyDLL) -> None:
    """Guards against headers of another PyTorch than the one that runs: a storage has other fields then."""
    storage = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    _refuse(library, storage, 8, b"refused")
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
