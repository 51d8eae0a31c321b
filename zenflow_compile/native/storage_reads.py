"""Errors for code that reads a storage at the wrong time, and memory that PyTorch can resize."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache

import torch

from zenflow_compile.checks.printable import printable
from zenflow_compile.checks.user_frame import user_stacklevel
from zenflow_compile.native.build import BuildError, load_storage_reads
from zenflow_compile.torch_internals.torch_private import REFUSAL, Refusal, profiler_active, storage_identity


@cache  # a cached answer costs no Python call: each step asks for each parameter
def can_change_storages() -> bool:
    """Return whether the C++ source works here; the first call compiles it, or warns that it cannot."""
    return _library() is not None


class ReadGuard:
    """Makes every access to the memory of a storage raise ``RuntimeError``, also through views, for a time.

    Does nothing if the C++ source cannot be compiled here; the first call warns of it then. Does nothing either while a
    profiler runs: it asks for the addresses of parameters and of operators' inputs, and would lose events or raise.

    Args:
        text: of the error.
    """

    __slots__ = ("_storage", "_text")

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._storage: torch.UntypedStorage | None = None  # of the time when it was refused: ``param.data = ...``

    def refuse(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Make accesses raise, unless another refusal does so already; the memory stays as it is.

        Args:
            nbytes: size that the storage shows meanwhile.
        """
        shown = storage.__dict__
        if REFUSAL in shown or profiler_active() or (library := _library()) is None:
            return
        # First: an interrupt in between leaves a mark, which ``allow`` takes away.
        self._storage = storage
        # ``is_shared`` would end the process: its C++ code handles no errors.
        is_shared = _is_shared if storage.is_shared() else _is_not_shared
        shown.update({"is_shared": is_shared, REFUSAL: Refusal(storage.nbytes(), self._text)})
        library.zenflow_refuse_reads(storage_identity(storage), nbytes, self._text)

    def allow(self) -> None:
        """Undo ``refuse``. Idempotent."""
        if (storage := self._storage) is not None:
            # Not a refusal that came later: the memory may have been given back since.
            if (refusal := storage.__dict__.get(REFUSAL)) is not None and refusal.text is self._text:
                allow_reads(storage)
            self._storage = None


def refuse_reads(storage: torch.UntypedStorage, nbytes: int, text: str) -> None:
    """Make every access to the memory of a storage raise until ``allow_reads``. See ``ReadGuard``."""
    ReadGuard(text).refuse(storage, nbytes)


def allow_reads(storage: torch.UntypedStorage) -> None:
    """Undo all refusals: the storage has the size and the memory that it had before. Idempotent."""
    shown = storage.__dict__
    if (refusal := shown.get(REFUSAL)) is not None and (library := _library()) is not None:
        library.zenflow_allow_reads(storage_identity(storage), refusal.nbytes)
        del shown[REFUSAL], shown["is_shared"]


def own_memory(storage: torch.UntypedStorage) -> None:
    """Move a storage to memory that PyTorch can resize: not that of a file, or of another library.

    All tensors of the storage move with it. Needs memory for both at a time. Ask ``can_change_storages`` first.
    """
    library = _library()
    assert library is not None
    copy = storage.clone()  # type: ignore[no-untyped-call]
    library.zenflow_swap_memory(storage_identity(storage), storage_identity(copy))


def _is_shared() -> bool:
    return True


def _is_not_shared() -> bool:
    return False


@cache  # compile, check and warn once per process
def _library() -> ctypes.PyDLL | None:
    try:
        library = load_storage_reads()
        library.zenflow_refuse_reads.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p]
        library.zenflow_refuse_reads.restype = None
        library.zenflow_allow_reads.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        library.zenflow_allow_reads.restype = None
        library.zenflow_swap_memory.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.zenflow_swap_memory.restype = None
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
    library.zenflow_refuse_reads(storage_identity(storage), 8, b"refused")
    try:
        storage.data_ptr()
    except RuntimeError as error:
        refused = str(error).startswith("refused")
    else:
        refused = False
    shown = storage.nbytes()
    library.zenflow_allow_reads(storage_identity(storage), 0)
    if not refused or shown != 8 or storage.nbytes() or storage.data_ptr():
        raise BuildError("the C++ headers of PyTorch do not belong to the PyTorch that runs")
