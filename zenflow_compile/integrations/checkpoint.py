"""For ``torch.distributed.checkpoint``: asynchronous saves without a second copy of the optimizer's state."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils import _pytree as pytree

from zenflow_compile.optimizer import ZenFlow


class StateStager(DefaultStager):
    """``dcp.async_save(..., async_stager=StateStager(optimizer))``: stages everything but the optimizer's state.

    ``state_dict()`` of a ``ZenFlowAdamW`` has copies, which training does not write. PyTorch's stager copies them once
    more. This one copies the rest: weights, and whatever else is saved. Leave the saved state as it is until the save
    has ended.

    Args:
        optimizer: whose state is saved.
    """

    def __init__(self, optimizer: ZenFlow) -> None:
        super().__init__(StagingOptions(False, False, False, False))
        self._copies: dict[int, weakref.ref[Tensor]] = {}
        self._hook = optimizer.register_state_dict_post_hook(self._remember)

    def _remember(self, optimizer: Any, state_dict: Mapping[str, Any]) -> None:
        tensors = (value for entry in state_dict["state"].values() for value in entry.values())
        self._copies = {id(each): weakref.ref(each) for each in tensors if isinstance(each, Tensor)}

    def stage(self, state_dict: Any, **keywords: Any) -> Any:
        """What is to be saved; see ``torch.distributed.checkpoint.staging.AsyncStager``."""
        kept = pytree.tree_map_only(Tensor, self._keep, state_dict)
        return pytree.tree_map_only(_Kept, lambda each: each.tensor, super().stage(kept, **keywords))

    def _keep(self, tensor: Tensor) -> Tensor | _Kept:
        known = self._copies.get(id(tensor))
        return tensor if known is None or known() is not tensor else _Kept(tensor)

    def close(self) -> None:
        """Free what the stager keeps between saves."""
        self._hook.remove()
        super().close()


@dataclass(frozen=True, slots=True)
class _Kept:
    tensor: Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self
