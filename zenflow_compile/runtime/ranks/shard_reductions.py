"""Records of which parameters FSDP2 averages gradients, so that ranks can compare them.

FSDP2 adds up the gradients that each rank has, in order, and does not check that they are those of the same parameters.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakMethod

from torch import Tensor

from zenflow_compile.torch_internals import torch_private

_KEPT = 4096  # reductions by which one that differs between ranks is named
_NOTHING = (-1, "")


class ShardReductions:
    """The reductions of one rank since its last optimizer step.

    Args:
        params: of the optimizer; none of a model that is not sharded.
        members: the ranks of each process group that shards some of them.
        refuse: called as ``refuse(what, error)`` for a collective of FSDP2's in these groups that fails; it raises.
    """

    def __init__(self, params: Sequence[Tensor], members: Collection[tuple[int, ...]], refuse: WeakMethod[Any]) -> None:
        self._checksum = 0
        self._last = deque[tuple[int, str]](maxlen=_KEPT)
        self._groups = torch_private.ShardedGroups(params, members, refuse, WeakMethod(self._note))

    def _note(self, number: int, used: str) -> None:
        self._checksum = zlib.crc32(f"{number} {used} ".encode(), self._checksum)
        self._last.append((number, used))

    def take(self) -> tuple[bytes, str]:
        """Return a checksum of the reductions since the last call, and the last of them as JSON."""
        checksum, self._checksum = self._checksum, 0
        told = json.dumps(list(self._last))
        self._last.clear()
        return checksum.to_bytes(4, "little"), told

    def first_difference(self, first: str, other: str) -> tuple[str, bool]:
        """Return the name of a parameter that one of two ranks has reduced, and whether that is the first one.

        Args:
            first, other: what ``take`` has told on each of them.
        """
        pairs = itertools.zip_longest(json.loads(first), json.loads(other), fillvalue=_NOTHING)
        (number, used), (there, others) = next((pair for pair in pairs if pair[0] != pair[1]), (_NOTHING, _NOTHING))
        place, of_first = used.find("g"), True
        if number == there and used:
            place = next(place for place, (one, two) in enumerate(zip(used, others, strict=True)) if one != two)
            of_first = used[place] == "g"
        elif number < 0:
            number, place, of_first = there, others.find("g"), False
        return ("a parameter" if number < 0 else self._groups.name(number, place)), of_first

    def end(self) -> None:
        """Leave FSDP2's groups alone. Idempotent."""
        self._groups.end()
