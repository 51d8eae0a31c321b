"""Sharded parameters: the part that a rank has, as a parameter of its own, and what is refused, with the alternative.

FSDP2 replaces parameters by ``DTensor`` s and brings their gradients as ``DTensor`` s, after its reduce-scatter. The
engine serves the parts: to it each is an ordinary parameter, whose ``.grad`` is the part of the gradient.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from zenflow_compile.planning.planners import ShardedBy
from zenflow_compile.torch_internals import torch_private


class LocalShard(Parameter):
    """The part of ``sharded``, a ``DTensor`` of the model, in the same memory."""

    sharded: Parameter
    by: ShardedBy

    @staticmethod
    def of(param: Parameter, by: ShardedBy) -> LocalShard:
        shard: LocalShard = Tensor._make_subclass(LocalShard, torch_private.local_tensor(param), param.requires_grad)
        shard.sharded, shard.by = param, by
        return shard

    @property
    def grad(self) -> Tensor | None:
        """The part of the gradient in ``.grad`` of the model's parameter; TypeError if it is sharded otherwise."""
        grad = self.sharded.grad
        if grad is None:
            return None
        if not torch_private.is_dtensor(grad) or _placements(grad) != _placements(self.sharded):
            raise TypeError(
                f"the gradient of a sharded parameter is a {type(grad).__name__} that is not sharded as the parameter "
                "is; assign a DTensor with the parameter's mesh and placements to .grad, or None"
            )
        return torch_private.local_tensor(grad)

    @grad.setter
    def grad(self, part: Tensor | None) -> None:
        self.sharded.grad = None if part is None else torch_private.sharded_as(self.sharded, part)

    @property
    def _version(self) -> int:  # type: ignore[override]
        """Moves with writes to the part, and with writes to the ``DTensor``, which has another version counter."""
        own: int = _own_version(self)
        return own + self.sharded._version

    def follow(self) -> None:
        """Take over the memory of the model's parameter, if that was replaced."""
        local = torch_private.local_tensor(self.sharded)
        if local.dtype != self.dtype or not torch_private.same_memory(local, self):
            self.data = local.detach()


_own_version: Any = Tensor._version.__get__  # type: ignore[attr-defined]


def _placements(tensor: Any) -> Any:
    return tensor.placements


def given(param: Parameter) -> Parameter:
    """The parameter that the optimizer was given, of which ``param`` may be a part."""
    return param.sharded if isinstance(param, LocalShard) else param


def sharded_by(param: Tensor) -> ShardedBy | None:
    """How the model shards ``param``; None where it does not."""
    return param.by if isinstance(param, LocalShard) else None


ALTERNATIVE = (
    "leave the model whole on each rank and pass process_group=torch.distributed.group.WORLD, which divides the "
    "optimizer's state and updates among ranks, or shard it by fully_shard (FSDP2) before the optimizer is created"
)


class Sharding(NamedTuple):
    """The mesh of a sharded model, and the dimension over which it is sharded and not replicated."""

    mesh: DeviceMesh
    dim: int

    @property
    def group(self) -> torch.distributed.ProcessGroup:
        """The ranks that have different parts."""
        return self.mesh.get_group(self.dim)

    @property
    def ranks(self) -> list[int]:
        """All ranks of the mesh: those of the replicas, too."""
        ranks: list[int] = self.mesh.mesh.flatten().tolist()
        return ranks

    @property
    def members(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks of ``group``, and all ranks: the same ones in meshes that differ by dimensions of one rank."""
        return tuple(torch.distributed.get_process_group_ranks(self.group)), tuple(self.ranks)


def sharding_of(params: Iterable[Tensor]) -> Sharding | None:
    """The mesh over which ``params`` are sharded; None if none of them is.

    Raises TypeError if they are sharded over several, or as ``refuse_sharded`` does.
    """
    sharded = [param for param in params if torch_private.is_dtensor(param)]
    found = {_sharding(param): None for param in sharded}
    if sharded and not {id(param) for param in sharded} <= set(map(id, torch_private.fully_sharded_params())):
        raise TypeError(
            "a parameter is a DTensor, and no module that fully_shard (FSDP2) has sharded has it, as under tensor "
            f"parallelism alone, or after the model was changed: its gradients would not be averaged; {ALTERNATIVE}"
        )
    meshes = {each.members: each for each in found}
    if len(meshes) > 1:
        shown = ", ".join(str(each.mesh) for each in meshes.values())
        raise TypeError(
            f"parameters are sharded over {len(meshes)} meshes ({shown}); use one optimizer for the parameters of each "
            "mesh"
        )
    return next(iter(meshes.values()), None)


def local_part(param: Parameter) -> Parameter:
    """What this rank has of ``param``: a :class:`LocalShard`, or the parameter itself if it is not sharded."""
    if not torch_private.is_dtensor(param):
        return param
    mesh, dim = _sharding(param)
    placement: Any = param.placements[dim]  # type: ignore[attr-defined]
    return LocalShard.of(param, ShardedBy(placement.dim % param.dim(), mesh.get_local_rank(dim), mesh.size(dim)))


def _sharding(param: Any) -> Sharding:
    refuse_sharded([param])
    return Sharding(param.device_mesh, _shard_dims(param)[0])


def _shard_dims(param: Any) -> list[int]:
    """The dimensions of its mesh over which a DTensor is not replicated."""
    return [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate()]


def _is_served(param: Any) -> bool:
    """Whether ``param`` is a DTensor in chunks over one dimension of its mesh.

    It is replicated over the others, or they have one rank: tensor parallelism shards over a dimension behind that of
    ``fully_shard``.
    """
    if not torch_private.is_dtensor(param):
        return False
    dims = _shard_dims(param)
    in_chunks = all(type(param.placements[dim]).__name__ == "Shard" for dim in dims)
    return bool(dims) and in_chunks and all(param.device_mesh.size(dim) == 1 for dim in dims[1:])


def leaves_a_rank_empty(slices: int, ranks: int) -> bool:
    """Whether a rank has none of so many ``slices`` when they are sharded over ``ranks``."""
    return slices <= (ranks - 1) * -(-slices // ranks)  # the last rank has what chunks of this many leave


def refuse_sharded(params: Iterable[Tensor]) -> None:
    """Raise TypeError if a parameter is sharded in another way than by ``fully_shard``, or wraps other tensors."""
    for param in params:
        if torch_private.is_dtensor(param):
            if not _is_served(param):
                raise TypeError(
                    f"a parameter is a DTensor with placements {param.placements}, as under tensor parallelism; "  # type: ignore[attr-defined]
                    f"parameters in chunks over one dimension of their mesh are served: {ALTERNATIVE}"
                )
        elif torch_private.is_wrapper_subclass(param):
            raise TypeError(
                f"a parameter is a {type(param).__name__}, a wrapper around other tensors that hold its memory; "
                f"{ALTERNATIVE}. Leave out quantized weights and other tensor subclasses"
            )
        if torch_private.is_flattened_by_fsdp(param):
            raise TypeError(
                "a parameter belongs to FullyShardedDataParallel, whose 1-D shards have no columns to select and "
                f"would all stay on the device; {ALTERNATIVE}"
            )


def refuse_exchanged(params: Iterable[Tensor]) -> None:
    """Raise TypeError if a strategy has put one of ``params`` into an optimizer, in the place of a whole parameter."""
    if any(torch_private.is_wrapper_subclass(param) for param in params):
        raise TypeError(
            "the parameters in param_groups were replaced by shards after the optimizer was created, as Accelerate "
            "does for FSDP2; call zenflow_compile.integrations.accelerate.shard_model(accelerator, model) before the "
            f"optimizer is created, or {ALTERNATIVE}"
        )


def refuse_replaced_by_shards(params: Sequence[Tensor]) -> None:
    """Raise RuntimeError if a parameter is in no module, and a module has a sharded one: it would never train.

    Searches all modules of the process, because an optimizer does not know its model. Does nothing without a process
    group.

    Args:
        params: parameters without a gradient at the first step.
    """
    if not params or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    # Modules hold what FSDP2 has gathered, until it takes it back.
    missing, shard = {id(param) for param in params} - set(map(id, torch_private.fully_sharded_params())), ""
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
