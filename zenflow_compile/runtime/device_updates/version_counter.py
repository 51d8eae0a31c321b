"""Detects external writes to parameters: compares autograd's version counters with the engine's own writes.

Parameters that are views of one tensor, such as the chunks of a fused weight, share one version counter: a write to one
of them moves the version of all. So the engine's writes are counted per counter, not per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.torch_internals import torch_private


class WriteMark(NamedTuple):
    """The version (``external_bumps``) and the memory of a parameter after the last known write.

    ``param.data = ...`` replaces the memory without moving the version.
    """

    bumps: int
    memory: torch_private.MemoryMark


class VersionCounter:
    """The version counter of one parameter, or of all parameters of the engine that share it.

    Attributes:
        own_bumps: number of times that the engine moved the version.
        sharers: indices in the plan of the parameters that have this counter; ``shared`` if these are several.
        exposed: tensors that are not parameters of the engine may share this counter, such as a frozen chunk, or one
            that another optimizer updates.
    """

    __slots__ = ("exposed", "own_bumps", "shared", "sharers")

    def __init__(self) -> None:
        self.own_bumps = 0
        self.sharers: list[int] = []
        self.shared = False
        self.exposed = False

    def add(self, index: int, param: Tensor) -> None:
        self.sharers.append(index)
        self.shared = len(self.sharers) > 1
        self.exposed |= param.untyped_storage().nbytes() > param.nbytes

    def external_bumps(self, param: Tensor) -> int:
        """The version of ``param``, which has this counter, minus the engine's own bumps.

        It changes only with an external write to ``param``, or to another tensor that shares the counter.
        """
        return param._version - self.own_bumps

    def mark(self, param: Tensor) -> WriteMark:
        return WriteMark(self.external_bumps(param), torch_private.MemoryMark(param))

    def written_since(self, param: Tensor, mark: WriteMark | None) -> bool:
        """Whether there may have been an external write to ``param`` since ``mark``; True if that is None."""
        return mark is None or mark.bumps != self.external_bumps(param) or not mark.memory.matches(param)


def bump_versions(params: Sequence[Tensor], counters: Sequence[VersionCounter]) -> None:
    """Move the version of each of ``params`` by one, and count it in its counter as a write of the engine.

    The kernels write below autograd. Without the bump, a graph that saved the old weights would silently use the new
    ones.
    """
    torch.autograd.graph.increment_version(params)
    # Counted last: after an interrupt in between, the bumps look like an external write, and the weights are compared.
    # In the other order the next external write would go unnoticed.
    for counter in counters:
        counter.own_bumps += 1


def counters_of(params: Sequence[Tensor], known: Sequence[VersionCounter] = ()) -> list[VersionCounter]:
    """Return the counters of ``params``, in their order; parameters that share a version counter get the same object.

    The first of ``params`` have the counters ``known``. Shared storage is no sign of a shared counter:
    ``module.to(dtype)`` gives every parameter new storage, but those that shared a version counter before still do.
    """
    labels = torch_private.version_counter_labels(params)
    counters = dict(zip(labels, known, strict=False))
    return [counters.setdefault(label, VersionCounter()) for label in labels]
