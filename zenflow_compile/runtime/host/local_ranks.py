"""The processes that a launcher has started on this machine, which share its cores, memory and disks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from zenflow_compile.runtime.host.cores import Core

_T = TypeVar("_T")


class LocalRanks(NamedTuple):
    """``rank``: of this process among ``size`` processes on this machine, from 0."""

    rank: int
    size: int

    def part(self, items: Sequence[_T]) -> Sequence[_T]:
        """This process's part of consecutive ``items``; one of them at least, shared if there are too few."""
        first = len(items) * self.rank // self.size
        stop = len(items) * (self.rank + 1) // self.size
        return items[first : max(stop, first + 1)]

    def cores(self, cores: Sequence[Core]) -> Sequence[Core]:
        """This process's part of the physical cores of a machine, of as few NUMA nodes as possible.

        Consecutive ranks share a node: launchers give them consecutive devices, which mostly share one, too.
        """
        return self.part(sorted(cores, key=lambda core: (core.node, core.logical)))

    def directory(self, path: str | os.PathLike[str]) -> Path:
        """The directory of this process below ``path``, which all of them were given."""
        return Path(path) if self.size == 1 else Path(path) / f"rank{self.rank}"


def local_ranks() -> LocalRanks:
    """What launchers such as torchrun say in ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``; a process alone without them."""
    try:
        rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return LocalRanks(0, 1)
    return LocalRanks(rank, size) if 0 <= rank < size else LocalRanks(0, 1)
