"""Errors for code that reads a storage at the wrong time, and memory that PyTorch can resize."""

from __future__ import annotations

import ctypes
from functools import cache, partial

import torch

from zenflow_compile.native.build import BuildError, load_storage_reads
from zenflow_compile.torch_internals.torch_private import REFUSAL, Refusal, profiler_active, storage_identity


class ReadGuard:
    """Makes every access to the memory of a storage raise ``RuntimeError(text)``, also through views, for a time.

    Does nothing while a profiler runs: it asks for the addresses of parameters and of operators' inputs, and would lose
    events or raise.
    """

    __slots__ = ("_storage", "_text")

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._storage: torch.UntypedStorage | None = None  # of the time when it was refused: ``param.data = ...``

    def refuse(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Make accesses raise, unless another refusal does; meanwhile the storage shows a size of ``nbytes``."""
        self._storage = storage  # first: an interrupt leaves what ``allow`` takes away
        refuse_reads(storage, nbytes, self._text)

    def allow(self) -> None:
        """Undo ``refuse``. Idempotent."""
        if (storage := self._storage) is not None:
            # Not a refusal that came later: the memory may have been given back since.
            if (refusal := storage.__dict__.get(REFUSAL)) is not None and refusal.text is self._text:
                allow_reads(storage)
            self._storage = None


def refuse_reads(storage: torch.UntypedStorage, nbytes: int, text: bytes) -> None:
    """Make every access to the memory of a storage raise until ``allow_reads``. See ``ReadGuard``."""
    shown = storage.__dict__
    if REFUSAL in shown or profiler_active():
        return
    # ``is_shared`` would end the process: its C++ code handles no errors. An interrupt may leave the mark without the
    # refusal; ``allow_reads`` removes both.
    shown.update({"is_shared": partial(bool, storage.is_shared()), REFUSAL: Refusal(storage.nbytes(), text)})
    storage_reads().zenflow_refuse_reads(storage_identity(storage), nbytes, text)


def allow_reads(storage: torch.UntypedStorage) -> None:
    """Undo all refusals: the storage has the size and the memory that it had before. Idempotent."""
    shown = storage.__dict__
    if (refusal := shown.get(REFUSAL)) is not None:
        storage_reads().zenflow_allow_reads(storage_identity(storage), refusal.nbytes)
        del shown[REFUSAL], shown["is_shared"]


def own_memory(storage: torch.UntypedStorage) -> None:
    """Move a storage to memory that PyTorch can resize: not that of a file, or of another library.

    All tensors of the storage move with it. Needs memory for both at a time.
    """
    copy = storage.clone()  # type: ignore[no-untyped-call]
    storage_reads().zenflow_swap_memory(storage_identity(storage), storage_identity(copy))


@cache
def storage_reads() -> ctypes.PyDLL:
    """The library of storage_reads.cpp; the first call compiles it, and checks it.

    Raises:
        BuildError: see ``load_storage_reads``; or PyTorch's headers belong to another version.
    """
    library = load_storage_reads()
    library.zenflow_refuse_reads.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p]
    library.zenflow_allow_reads.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.zenflow_swap_memory.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    for function in (library.zenflow_refuse_reads, library.zenflow_allow_reads, library.zenflow_swap_memory):
        function.restype = None
    _check(library)
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
