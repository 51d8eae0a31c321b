"""Hooks through which FSDP2 and modules with shards call an engine: before shards are gathered, saved or loaded.

Hooks name their engine by number, so that models keep no engine alive, and may be pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor, nn

from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private


class Removable(Protocol):
    def remove(self) -> None: ...


class ServesShards(Protocol):
    """Is called before code that is not the engine's reads or writes shards."""

    def before_unshard(self, sharded: Sequence[Tensor]) -> None: ...
    def synchronize(self) -> None: ...
    def before_load(self) -> None: ...


def hook_shards(params: Sequence[Tensor], engine_id: int) -> list[Removable]:
    """Have FSDP2 call ``before_unshard`` before it gathers ``params``, and modules the others."""
    sharded = [param for param in params if torch_private.is_dtensor(param)]
    handles: list[Removable] = [*torch_private.listen_to_unshard(sharded, _BeforeUnshard(engine_id))]
    for module in torch_private.modules_with_shards(sharded):
        handles += [
            module.register_state_dict_pre_hook(partial(synchronize_before_state_dict, engine_id)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(partial(_before_load, engine_id)),  # type: ignore[no-untyped-call]
        ]
    return handles


@dataclass(frozen=True, slots=True)
class _BeforeUnshard:
    engine_id: int

    def __call__(self, sharded: Sequence[Tensor]) -> None:
        if (access := _find(self.engine_id)) is not None:
            access.before_unshard(sharded)


def synchronize_before_state_dict(engine_id: int, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if (access := _find(engine_id)) is not None:
        access.synchronize()


def _before_load(engine_id: int, module: nn.Module, *loading: Any) -> None:
    if (access := _find(engine_id)) is not None:
        access.before_load()


def _find(engine_id: int) -> ServesShards | None:
    engine = ops.find_engine(engine_id)
    return None if engine is None else cast("ServesShards", engine.access)
