"""The memory that operators allocate and free again."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NewMemory(TorchDispatchMode):
    """Adds up the bytes of tensors that are made inside of the block, while they live.

    Attributes:
        most_bytes: at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._bytes: dict[int, int] = {}
        self._old: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {key for key in map(_storage, _tensors((args, kwargs))) if key not in self._bytes}
        self._old |= before
        found = func(*args, **(kwargs or {}))
        for tensor in _tensors(found):
            storage, key = tensor.untyped_storage(), _storage(tensor)
            if key not in self._old and key not in self._bytes:
                self._bytes[key] = storage.nbytes()
                weakref.finalize(storage, self._bytes.pop, key, None)
        self.most_bytes = max(self.most_bytes, sum(self._bytes.values()))
        return found


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
