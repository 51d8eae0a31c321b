"""A guard makes PyTorch refuse accesses to a storage for a time, and changes nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from zenflow_compile.native import storage_reads
from zenflow_compile.native.storage_reads import ReadGuard, allow_reads, refuse_reads

pytestmark = pytest.mark.timeout(120)


def refused(tensor: Tensor) -> ReadGuard:
    guard = ReadGuard("not now")
    storage = tensor.untyped_storage()
    guard.refuse(storage, storage.nbytes())
    return guard


def test_guard_leaves_values_size_and_address() -> None:
    tensor = torch.arange(6.0)
    storage, address = tensor.untyped_storage(), tensor.data_ptr()
    guard = refused(tensor)
    with pytest.raises(RuntimeError, match=r"^not now"):
        tensor.sum()
    assert storage.nbytes() == 24
    for _ in range(2):
        guard.allow()
        assert torch.equal(tensor, torch.arange(6.0))
        assert (storage.nbytes(), tensor.data_ptr(), storage.__dict__) == (24, address, {})
    storage.resize_(32)


def test_second_guard_leaves_the_first() -> None:
    tensor = torch.ones(4)
    first, second = refused(tensor), ReadGuard("nor then")
    second.refuse(tensor.untyped_storage(), 16)
    second.allow()
    with pytest.raises(RuntimeError, match=r"^not now"):
        tensor.sum()
    first.allow()
    tensor.sum()


def test_older_guard_leaves_a_later_refusal() -> None:
    """The memory is given back while the guard is on."""
    tensor = torch.ones(4)
    storage = tensor.untyped_storage()
    guard = refused(tensor)
    allow_reads(storage)
    storage.resize_(0)
    refuse_reads(storage, 16, b"given back")
    guard.allow()
    with pytest.raises(RuntimeError, match=r"^given back"):
        tensor.sum()
    allow_reads(storage)
    assert storage.nbytes() == 0


class Interrupted:
    """The library, with an interrupt before a call of one function."""

    def __init__(self, library: Any, name: str) -> None:
        self._library, self._name = library, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise KeyboardInterrupt
        return getattr(self._library, name)


@pytest.mark.parametrize("name", ["zenflow_refuse_reads", "zenflow_allow_reads"])
def test_interrupted_guard_can_be_ended(name: str) -> None:
    tensor, guard = torch.ones(4), ReadGuard("not now")
    library = Interrupted(storage_reads.storage_reads(), name)
    with mock.patch.object(storage_reads, "storage_reads", return_value=library):
        with suppress(KeyboardInterrupt):
            guard.refuse(tensor.untyped_storage(), 16)
        with suppress(KeyboardInterrupt):
            guard.allow()
    guard.allow()
    assert tensor.sum() == 4
    assert tensor.untyped_storage().__dict__ == {}


def test_refused_storage_is_freed_with_its_tensor() -> None:
    tensor = torch.ones(4)
    refuse_reads(tensor.untyped_storage(), 16, b"not now")
    weak = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    del tensor
    assert weak.expired()  # type: ignore[no-untyped-call]


def test_guard_does_nothing_under_the_profiler() -> None:
    tensor = torch.ones(4)
    with torch.profiler.profile():
        refused(tensor)
    assert tensor.sum() == 4
