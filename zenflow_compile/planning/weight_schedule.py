"""When offloaded weights are loaded and unloaded, for a sequence of uses that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """What happens around one use.

    Attributes:
        evicted: weights that are unloaded in front of it, to make room.
        loaded: weights that are loaded in front of it, behind these.
        ended: weights that are unloaded behind it, because no later use reads them.
    """

    evicted: tuple[int, ...]
    loaded: tuple[int, ...]
    ended: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphLoads:
    """The loads of one graph.

    Attributes:
        order: parameters, one for each load.
        peak_bytes: of loaded weights, at most.
        reads_updates: the graph fetches parameters, so due updates are applied before they are loaded.
    """

    order: tuple[int, ...]
    peak_bytes: int
    reads_updates: bool


def schedule_weights(uses: Sequence[frozenset[int]], sizes: Mapping[int, int], budget_bytes: int) -> list[Turn]:
    """Load each weight as late, and unload it as rarely, as a byte budget allows.

    Where there is no room, the weight that is used furthest away is unloaded: with equal sizes no other choice needs
    fewer loads (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966). A use of weights
    that are larger than the budget together has them together all the same.

    Args:
        uses: the weights that each use reads, in order.
        sizes: bytes of each weight.
    """
    following: list[dict[int, int]] = [{} for _ in uses]  # the next use of each weight behind a use
    next_use: dict[int, int] = {}
    for position in reversed(range(len(uses))):
        following[position] = {p: next_use[p] for p in next_use}
        next_use.update(dict.fromkeys(uses[position], position))
    turns: list[Turn] = []
    present: dict[int, int] = {}  # weights on the device, with their next use
    for position, needed in enumerate(uses):
        loaded = tuple(sorted(needed - present.keys()))
        room = budget_bytes - sum(sizes[p] for p in (*present, *loaded))
        evicted = []
        for p in sorted(present.keys() - needed, key=lambda p: (-present[p], p)):
            if room >= 0:
                break
            room += sizes[p]
            evicted.append(p)
            del present[p]
        later = following[position]
        present.update({p: later[p] for p in needed if p in later})
        ended = tuple(sorted(p for p in needed if p not in later))
        for p in ended:
            present.pop(p, None)
        turns.append(Turn(tuple(evicted), loaded, ended))
    return turns


def peak_bytes(turns: Sequence[Turn], sizes: Mapping[int, int]) -> int:
    """Most bytes of weights on the device at a time."""
    now = peak = 0
    for turn in turns:
        now += sum(sizes[p] for p in turn.loaded) - sum(sizes[p] for p in turn.evicted)
        peak = max(peak, now)
        now -= sum(sizes[p] for p in turn.ended)
    return peak
