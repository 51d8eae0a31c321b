"""A list of the memory that an engine has on its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from zenflow_compile.runtime.device.number import Number
from zenflow_compile.torch_internals.torch_private import storage_identity


class MemoryList:
    """Storages of tensors, each listed one time: those with content, and those that are written before they are read.

    The parts of an engine add their tensors. A tensor that is left out stays on the device, so that a new part with
    device memory needs a ``list_memory``: ``tests/simulated/test_given_back.py`` compares with what there was before.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._with_content: set[int] = set()

    def content(self, *tensors: Tensor | None) -> None:
        """Add tensors whose values count; None is skipped."""
        self._with_content.update(self._add(tensors))

    def scratch(self, *tensors: Tensor | None) -> None:
        """Add tensors whose values do not count now; None is skipped."""
        self._add(tensors)

    def numbers(self, numbers: Iterable[Number]) -> None:
        """Add the device's side of numbers that it has computed."""
        self.content(*(number.on_device for number in numbers))

    def storages(self) -> Iterator[tuple[torch.UntypedStorage, bool]]:
        """Each storage that has memory, and whether its values count."""
        for identity, storage in self._storages.items():
            if storage.nbytes():
                yield storage, identity in self._with_content

    def _add(self, tensors: Iterable[Tensor | None]) -> Iterable[int]:
        storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
        added = {storage_identity(storage): storage for storage in storages}
        self._storages.update(added)
        return added
