"""Memory of weights, which is emptied and filled in place.

PyTorch cannot resize the memory of weights that come from a file, from numpy or from another library. They get memory
of their own before it is emptied for the first time.
"""

from __future__ import annotations

from torch import Tensor

from zenflow_compile.native.storage_reads import can_change_storages, own_memory

SHARED = "it shares memory with other tensors"


def not_emptied(param: Tensor) -> str | None:
    """Why the memory of ``param`` cannot be emptied; None if it can, after ``have_own_memory``."""
    storage = param.untyped_storage()
    if not param.is_contiguous():
        return "its memory is not contiguous"
    if param.storage_offset() or storage.nbytes() != param.nbytes:
        return SHARED
    if param.is_cpu and storage.is_shared():
        return "other processes may share its memory"
    if not storage.resizable() and not (param.is_cpu and can_change_storages()):
        return "PyTorch cannot resize its memory, which another library has allocated"
    return None


def have_own_memory(param: Tensor) -> None:
    """Move ``param``, and all tensors that share its storage, to memory that can be emptied. Idempotent.

    Needs memory for two such weights at a time.
    """
    storage = param.untyped_storage()
    if not storage.resizable():
        own_memory(storage)
