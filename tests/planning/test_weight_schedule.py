"""Weights are loaded as rarely as a byte budget allows."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest

from zenflow_compile.planning.weight_memory import Turn, peak_bytes, schedule_weights, weight_budget


def replay(uses: list[frozenset[int]], turns: list[Turn]) -> int:
    """Check that each use finds its weights, and return the number of loads."""
    present: set[int] = set()
    for needed, turn in zip(uses, turns, strict=True):
        assert present.issuperset(turn.evicted)
        present -= set(turn.evicted)
        assert present.isdisjoint(turn.loaded)
        present |= set(turn.loaded)
        assert present >= needed
        present -= set(turn.ended)
    assert not present
    return sum(len(turn.loaded) for turn in turns)


def fewest_loads(uses: list[frozenset[int]], room: int) -> int:
    """Of all ways to serve uses with ``room`` weights of equal size."""

    @cache
    def fewest(position: int, present: frozenset[int]) -> int:
        if position == len(uses):
            return 0
        needed = uses[position]
        others = sorted(present - needed)
        loads = len(needed - present)
        left = max(0, room - len(needed))
        kept = (each for count in range(min(left, len(others)) + 1) for each in combinations(others, count))
        return loads + min(fewest(position + 1, needed | frozenset(each)) for each in kept)

    return fewest(0, frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_needs_fewer_loads(seed: int) -> None:
    choose = random.Random(seed)
    weights = choose.randint(2, 5)
    uses = [frozenset(choose.sample(range(weights), choose.randint(1, 2))) for _ in range(choose.randint(1, 9))]
    sizes = dict.fromkeys(range(weights), 8)
    for room in range(1, weights + 1):
        turns = schedule_weights(uses, sizes, 8 * room)
        assert replay(uses, turns) == fewest_loads(uses, room)
        assert peak_bytes(turns, sizes) <= 8 * max(room, *map(len, uses))


@pytest.mark.parametrize("seed", range(20))
def test_peak_is_bounded_for_other_sizes(seed: int) -> None:
    choose = random.Random(seed)
    sizes = {p: choose.randint(1, 50) for p in range(8)}
    uses = [frozenset(choose.sample(range(8), choose.randint(1, 3))) for _ in range(30)]
    largest = max(sum(sizes[p] for p in each) for each in uses)
    for budget in (0, largest, 2 * largest, sum(sizes.values())):
        turns = schedule_weights(uses, sizes, budget)
        replay(uses, turns)
        assert peak_bytes(turns, sizes) <= max(budget, largest)
    assert replay(uses, schedule_weights(uses, sizes, sum(sizes.values()))) == len(frozenset().union(*uses))


def test_a_share_is_what_leaves_the_device() -> None:
    sizes = {"a": 100, "b": 300, "c": 600}
    assert weight_budget(0.25, sizes) == 750
    assert weight_budget(1.0, sizes) == 600, "the largest weight is loaded as a whole"
    assert weight_budget(600, sizes) == 600


def test_budget_below_the_largest_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"offload_weights=599 bytes must be at least 600, the size of c"):
        weight_budget(599, {"a": 100, "c": 600})
