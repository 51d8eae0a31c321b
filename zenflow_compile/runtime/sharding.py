"""Sharded parameters: the part that a rank has, as a parameter of its own, and what is refused, with the alternative.

FSDP2 replaces parameters by ``DTensor`` s and brings their gradients as ``DTensor`` s, after its reduce-scatter. The
engine serves the parts: to it each is an ordinary parameter, whose ``.grad`` is the part of the gradient.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from zenflow_compile.planning.planners import ShardedBy
from zenflow_compile.torch_internals import torch_private


class LocalShard(Parameter):
    """The part of ``sharded``, a ``DTensor`` of the model, in the same memory.

    Attributes:
        by: how FSDP2 shards it.
        pieces: how tensor and expert parallelism have divided it before, in this order; each piece is then sharded by
            itself, and trained as a parameter.
        mesh_dims: the dimensions of its mesh that belong to ``by``, and to ``pieces``.
        planned_shape: what planning sees: the shape of the largest piece.
    """

    sharded: Parameter
    by: ShardedBy
    pieces: tuple[ShardedBy, ...]
    mesh_dims: tuple[int, ...]
    planned_shape: tuple[int, ...]

    @staticmethod
    def of(param: Parameter, sharding: Sharding, everyone: Sequence[int]) -> LocalShard:
        shard: LocalShard = Tensor._make_subclass(LocalShard, torch_private.local_tensor(param), param.requires_grad)
        pieces = tuple(sharding.along(param, dim) for dim in sharding.dims[1:])
        largest, own, uneven = list(param.shape), list(param.shape), False
        for piece in pieces:
            uneven |= own[piece.dim] % piece.ranks != 0  # on all ranks: pieces are equal until one division is uneven
            largest[piece.dim] = len(piece.part(largest[piece.dim], 0))
            own[piece.dim] = len(piece.part(own[piece.dim]))
        shard.by = replace(
            sharding.along(param, sharding.dims[0]),
            members=sharding.members,
            pieces=math.prod(piece.ranks for piece in pieces),
            uneven=tuple(own) if uneven else None,
            repeated=sharding.repeats(everyone),
        )
        shard.sharded, shard.pieces = param, pieces
        shard.mesh_dims, shard.planned_shape = sharding.dims, tuple(largest)
        return shard

    def entry(self, local: Tensor, shape: tuple[int, ...], dims: Sequence[int | None]) -> Tensor:
        """A ``DTensor`` of ``shape`` over this rank's part of a tensor that is sharded like the parameter.

        Args:
            dims: the dimension of ``shape`` that each of ``mesh_dims`` shards; None: ranks have the same values.
        """
        of_mesh: list[int | None] = [None] * self.sharded.device_mesh.ndim  # type: ignore[attr-defined]
        for place, dim in zip(self.mesh_dims, dims, strict=True):
            of_mesh[place] = dim
        return torch_private.sharded_along(self.sharded, local, shape, of_mesh, self.mesh_dims[0])

    def piece_of(self, whole: Tensor) -> Tensor:
        """View this rank's piece in a tensor of the shape of the model's parameter."""
        for piece in self.pieces:
            whole = piece.view(whole)
        return whole

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


def planned_shape(param: Parameter) -> tuple[int, ...]:
    """The shape that planning sees of ``param``: the same one on all ranks."""
    return param.planned_shape if isinstance(param, LocalShard) else tuple(param.shape)


def sharded_by(param: Tensor) -> ShardedBy | None:
    """How the model shards ``param``; None where it does not."""
    return param.by if isinstance(param, LocalShard) else None


ALTERNATIVE = (
    "leave the model whole on each rank and pass process_group=torch.distributed.group.WORLD, which divides the "
    "optimizer's state and updates among ranks, or shard it by fully_shard (FSDP2) before the optimizer is created"
)


class Sharding(NamedTuple):
    """How a parameter is sharded: over ``dims`` of a mesh. It is replicated over the others.

    The first of ``dims`` is that of FSDP2, which puts its own in front of those of tensor and expert parallelism.
    """

    mesh: DeviceMesh
    dims: tuple[int, ...]

    @property
    def group(self) -> torch.distributed.ProcessGroup:
        """The ranks among which FSDP2 has sharded it."""
        return self.mesh.get_group(self.dims[0])

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of ``group``."""
        return torch_private.ranks_of(self.group)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh: those of the replicas, too."""
        return tuple(sorted(self.mesh.mesh.flatten().tolist()))

    def along(self, param: Parameter, dim: int) -> ShardedBy:
        placement: Any = param.placements[dim]  # type: ignore[attr-defined]
        return ShardedBy(placement.dim % param.dim(), self.mesh.get_local_rank(dim), self.mesh.size(dim))

    def repeats(self, everyone: Sequence[int]) -> bool:
        """Whether a rank in front of this one, among all ranks of the optimizer, has the same part."""
        replicated = [dim for dim in range(self.mesh.ndim) if dim not in self.dims]
        return everyone[0] not in self.ranks or any(self.mesh.get_local_rank(dim) for dim in replicated)


class ShardedModel(NamedTuple):
    """Over which ranks the parameters of an optimizer are sharded.

    Attributes:
        groups: FSDP2's, that have this rank and shard parameters of it, in the order of the first of these.
        everyone: all ranks that have a part of the model, or a copy.
    """

    groups: tuple[torch.distributed.ProcessGroup, ...]
    everyone: tuple[int, ...]


def sharding_of(params: Iterable[Tensor]) -> ShardedModel | None:
    """Over which ranks ``params`` are sharded; None if none of them is.

    Raises TypeError if no mesh has all ranks, or as ``refuse_sharded`` does.
    """
    sharded = [param for param in params if torch_private.is_dtensor(param)]
    found = {_sharding(param): None for param in sharded}
    if sharded and not {id(param) for param in sharded} <= set(map(id, torch_private.fully_sharded_params())):
        raise TypeError(
            "a parameter is a DTensor, and no module that fully_shard (FSDP2) has sharded has it, as under tensor "
            f"parallelism alone, or after the model was changed: its gradients would not be averaged; {ALTERNATIVE}"
        )
    if not found:
        return None
    largest = max(found, key=lambda each: len(each.ranks))  # the first of several
    everyone = set(largest.ranks)
    if apart := [each for each in found if not everyone.issuperset(each.ranks)]:
        raise TypeError(
            f"parameters are sharded over meshes of other ranks, {largest.mesh} and {apart[0].mesh}, none of which has "
            "all of them; use one optimizer for the parameters of each mesh"
        )
    return ShardedModel(tuple({each.members: each.group for each in found}.values()), largest.ranks)


def local_parts(params: Sequence[Parameter]) -> list[Parameter]:
    """What this rank has of all ``params`` of an optimizer: of a sharded one a :class:`LocalShard`."""
    model = sharding_of(params)
    return [
        LocalShard.of(param, _sharding(param), model.everyone) if model and torch_private.is_dtensor(param) else param
        for param in params
    ]


def _sharding(param: Any) -> Sharding:
    refuse_sharded([param])
    return Sharding(param.device_mesh, _shard_dims(param))


def _shard_dims(param: Any) -> tuple[int, ...]:
    """The dimensions of its mesh over which a DTensor is not replicated."""
    return tuple(dim for dim, placement in enumerate(param.placements) if not placement.is_replicate())


def _refuse_placements(param: Any) -> None:
    """Raise TypeError if a DTensor is not in chunks over some dimensions of its mesh, and replicated over others."""
    dims = _shard_dims(param)
    if not (dims and all(torch_private.is_shard(param.placements[dim]) for dim in dims)):
        raise TypeError(
            f"a parameter is a DTensor with placements {param.placements}; parameters in chunks over dimensions of "
            f"their mesh are served: {ALTERNATIVE}"
        )


def leaves_a_rank_empty(slices: int, ranks: int) -> bool:
    """Whether a rank has none of so many ``slices`` when they are sharded over ``ranks``."""
    return slices <= (ranks - 1) * -(-slices // ranks)  # the last rank has what chunks of this many leave


def refuse_sharded(params: Iterable[Tensor]) -> None:
    """Raise TypeError if a parameter is sharded in another way than by ``fully_shard``, or wraps other tensors."""
    for param in params:
        if torch_private.is_dtensor(param):
            _refuse_placements(param)
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


def repeated_parts(params: Sequence[Tensor], everyone: int) -> list[tuple[int, int, Tensor]]:
    """The parts that ranks of other meshes are taken to have, too: index of the parameter, place in the mesh, part.

    Args:
        everyone: number of all ranks of the optimizer.
    """
    found = []
    for index, param in enumerate(params):
        if torch_private.is_dtensor(param) and len(ranks := _sharding(param).ranks) < everyone:
            found.append((index, ranks.index(torch.distributed.get_rank()), torch_private.local_tensor(param)))
    return found


def refuse_other_sharding(params: Sequence[Tensor], added: Sequence[Tensor]) -> None:
    """Raise ValueError if parameters that an optimizer of ``params`` gets are sharded over other ranks than these."""
    if (now := sharding_of([*params, *added])) is not None and now != sharding_of(params):
        raise ValueError(
            "a param group that is added has parameters that are sharded over other ranks than those that the "
            "optimizer has; give them to the optimizer when it is created, or to one of their own"
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
