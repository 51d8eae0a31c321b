"""The part that this rank has of a sharded parameter, as a parameter of its own.

FSDP2 replaces parameters by ``DTensor`` s and brings their gradients as ``DTensor`` s, after its reduce-scatter. The
engine serves the parts: to it each is an ordinary parameter, whose ``.grad`` is the part of the gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.partition import ShardedBy
from zenflow_compile.torch_internals import torch_private


class LocalShard(Parameter):
    """The part of a sharded parameter, in the same memory.

    Attributes:
        sharded: the parameter of the model, a ``DTensor``.
        by: how it is sharded.
    """

    sharded: Parameter
    by: ShardedBy

    @staticmethod
    def of(param: Parameter, by: ShardedBy) -> LocalShard:
        """The part that this rank has of ``param``."""
        shard: LocalShard = Tensor._make_subclass(LocalShard, torch_private.local_tensor(param), param.requires_grad)
        shard.sharded, shard.by = param, by
        return shard

    @property
    def grad(self) -> Tensor | None:
        """The part of the gradient in ``.grad`` of the model's parameter.

        Raises:
            TypeError: there is a tensor that is not sharded as the parameter is.
        """
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
