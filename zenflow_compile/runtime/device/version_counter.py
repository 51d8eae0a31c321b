"""Autograd's version counters, and how often the engine itself moved them.

Parameters that are views of one tensor, such as the chunks of a fused weight, have one version counter: a write to one
of them moves the version of all. Own writes are therefore counted per counter, and not remembered per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.torch_internals import torch_private


class WriteMark(NamedTuple):
    """A parameter after the last write that the engine knows of.

    Attributes:
        bumps: ``VersionCounter.external_bumps`` of it.
        memory: its memory: ``param.data = ...`` replaces it and does not move the version.
    """

    bumps: int
    memory: torch_private.MemoryMark


class VersionCounter:
    """The version counter of one parameter, or of all parameters of the engine that share it.

    Attributes:
        own_bumps: how often the engine moved the version.
        sharers: indices in the plan of the parameters that have this counter.
        exposed: tensors that are not parameters of the engine may have this counter, too: a frozen chunk, or one that
            another optimizer updates.
    """

    __slots__ = ("exposed", "own_bumps", "sharers")

    def __init__(self) -> None:
        self.own_bumps = 0
        self.sharers: list[int] = []
        self.exposed = False

    def add(self, index: int, param: Tensor) -> None:
        """Parameter ``index`` of the plan has this counter."""
        self.sharers.append(index)
        self.exposed |= param.untyped_storage().nbytes() > param.nbytes

    @property
    def shared(self) -> bool:
        """Whether several parameters of the engine have this counter."""
        return len(self.sharers) > 1

    def external_bumps(self, param: Tensor) -> int:
        """The version of ``param``, which has this counter, without the engine's own bumps.

        The value changes only when someone else writes ``param``, or another parameter that shares the counter.
        """
        return param._version - self.own_bumps

    def mark(self, param: Tensor) -> WriteMark:
        """Remember ``param``, which has this counter, as it is now."""
        return WriteMark(self.external_bumps(param), torch_private.MemoryMark(param))

    def written_since(self, param: Tensor, mark: WriteMark | None) -> bool:
        """Whether someone else may have written ``param``, or replaced its memory, since ``mark``; None: unknown."""
        return mark is None or mark.bumps != self.external_bumps(param) or not mark.memory.matches(param)


def bump_versions(params: Sequence[Tensor], counters: Sequence[VersionCounter]) -> None:
    """Move the version of each of ``params`` by one, as an own write.

    The kernels write below autograd. Without this a graph that saved the old weights would use the new ones silently.

    Args:
        counters: of ``params``, in their order.
    """
    torch.autograd.graph.increment_version(params)
    # Counted last: if an interrupt comes before, the bumps look like an external write, and weights are compared. In
    # the other order the next external write would stay unnoticed.
    for counter in counters:
        counter.own_bumps += 1


def counters_of(params: Sequence[Tensor], known: Sequence[VersionCounter] = ()) -> list[VersionCounter]:
    """The counters of ``params``, in their order; parameters that share a version counter get the same object.

    Common storage does not tell: ``module.to(dtype)`` gives every parameter a storage of its own, and parameters that
    shared a version counter before still do.

    Args:
        known: counters of the first of ``params``, which keep them.
    """
    labels = torch_private.version_counter_labels(params)
    counters = dict(zip(labels, known, strict=False))
    return [counters.setdefault(label, VersionCounter()) for label in labels]
