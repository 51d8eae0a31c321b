"""Refuses parameters that a distributed strategy shards or replaces, with the reason and the alternative."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from zenflow_compile.torch_internals import torch_private

ALTERNATIVE = (
    "leave the model whole on each rank and pass process_group=torch.distributed.group.WORLD, which divides the "
    "optimizer's state and updates among ranks: this version does not serve sharded parameters"
)


def refuse_sharded(params: Iterable[Tensor]) -> None:
    """Refuse sharded parameters.

    Raises:
        TypeError: a parameter is a shard, or a wrapper around other tensors.
    """
    for param in params:
        if torch_private.is_wrapper_subclass(param):
            raise TypeError(
                f"a parameter is a {type(param).__name__}: other tensors hold its memory, as under fully_shard (FSDP2) "
                f"or tensor parallelism; {ALTERNATIVE}. Leave out quantized weights and other tensor subclasses"
            )
        if torch_private.is_flattened_by_fsdp(param):
            raise TypeError(
                "a parameter belongs to FullyShardedDataParallel, whose 1-D shards have no columns to select and "
                f"would all stay on the device; {ALTERNATIVE}"
            )


def refuse_replaced_by_shards(params: Sequence[Tensor]) -> None:
    """Refuse parameters that a strategy took out of the model after the optimizer was created: they would never train.

    Searches all modules of the process, because an optimizer does not know its model. Does nothing without a process
    group.

    Args:
        params: parameters without a gradient at the first step.

    Raises:
        RuntimeError: one of ``params`` is in no module, and a module has a sharded parameter.
    """
    if not params or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    missing, shard = {id(param) for param in params}, ""
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):  # isinstance() would run the code of lazy proxies
            continue
        # A copy, because another thread may be building this module.
        for name, param in dict(module.__dict__.get("_parameters") or {}).items():
            missing.discard(id(param))
            if param is None:
                continue
            if torch_private.is_wrapper_subclass(param) or torch_private.is_flattened_by_fsdp(param):
                shard = f"{name} of a {type(module).__name__} is a {type(param).__name__}"
    if missing and shard:
        raise RuntimeError(
            f"{len(missing)} of the optimizer's parameters are in no module any more, and {shard}: fully_shard "
            "(FSDP2), tensor parallelism or FullyShardedDataParallel replaced them after the optimizer was created; "
            f"{ALTERNATIVE}"
        )
