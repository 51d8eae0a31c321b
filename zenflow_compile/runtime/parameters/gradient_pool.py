"""The gradient buffers that parameters share, in host memory: see ``planning/shared_buffers.py``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan, pool_packing, pools_of
from zenflow_compile.planning.shared_buffers import overlaps
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes
from zenflow_compile.runtime.parameters.host_state import HostState


class PooledBuffer(NamedTuple):
    """A gradient buffer of a parameter.

    Attributes:
        param: index of the parameter.
        number: of the buffer, by which the parameter knows it.
    """

    param: int
    number: int


def pooled_buffers(params: Sequence[ParamPlan]) -> list[PooledBuffer]:
    """The buffers of parameters of one pool, in the order of its packing."""
    return [PooledBuffer(param.index, number) for param in params for number in range(param.gradient_buffers)]


def pools_arena_bytes(params: Sequence[ParamPlan]) -> int:
    """Bytes that ``allocate_pools`` takes."""
    return carved_bytes([((pool_packing(pool).nbytes,), torch.uint8) for pool in pools_of(params)])


def allocate_pools(params: Sequence[ParamPlan], arena: HostArena) -> dict[int, list[Tensor]]:
    """Carve the pools of ``params`` out of ``arena``. Returns the gradient buffers, by index of the parameter."""
    found: dict[int, list[Tensor]] = {}
    for pool in pools_of(params):
        packing = pool_packing(pool)
        memory = arena.take((packing.nbytes,), torch.uint8)
        offsets = iter(packing.offsets)
        for param in pool:
            found[param.index] = [_view(memory, next(offsets), param) for _ in range(param.gradient_buffers)]
    return found


def _view(memory: Tensor, offset: int, param: ParamPlan) -> Tensor:
    nbytes = prod(param.buffer_shape) * param.buffer_dtype.itemsize
    return memory[offset : offset + nbytes].view(param.buffer_dtype).view(param.buffer_shape)


def connect(hosts: Mapping[int, HostState]) -> None:
    """Tell each of ``hosts``, by index of its parameter, which buffers of others have memory of its own buffers."""
    for pool in pools_of(host.plan for host in hosts.values()):
        buffers = pooled_buffers(pool)
        # No references: the arena's memory is given back with its last tensor, and not when cycles are collected.
        known = {param.index: weakref.ref(hosts[param.index]) for param in pool}
        together = overlaps([each for param in pool for each in param.lifetimes], pool_packing(pool))
        for (index, number), others in zip(buffers, together, strict=True):
            hosts[index].sharers[number] = [(known[buffers[other].param], buffers[other].number) for other in others]
