"""Selection inside groups, compared with plain Python, and with ranks that each select in some of the groups."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan, Placement, group_count
from zenflow_compile.runtime.device_updates.selection import (
    Selection,
    best_slices,
    better_slices,
    count_swaps,
    swaps_per_group,
)
from zenflow_compile.runtime.parameters.device_state import DeviceState

CPU = torch.device("cpu")
MARGIN = 0.25

# (slices, selected, groups): divisible by the groups, not divisible, k below and above half, one group, many groups.
SIZES = [(64, 16, 4), (67, 20, 4), (160, 64, 16), (175, 69, 16), (175, 130, 16), (33, 5, 1), (40, 17, 16), (9, 4, 2)]
SCORES = ["distinct", "ties", "zeros", "infinite"]


def scores(kind: str, slices: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(slices, generator=generator)
    if kind == "ties":
        return (score * 4).floor() / 2 + 0.5
    if kind == "zeros":
        return torch.where(score < 0.8, 0.0, score)
    if kind == "infinite":
        return torch.where(score < 0.1, torch.inf, score)
    return score


def members(slices: int, groups: int) -> list[list[int]]:
    return [[i for i in range(slices) if i % groups == group] for group in range(groups)]


def best_of(score: Sequence[float], k: int, groups: int) -> list[int]:
    """Select in each group as many slices as it has among the first k, by score; the lower index wins ties."""
    chosen: list[int] = []
    for group in members(len(score), groups):
        ranked = sorted(group, key=lambda i: (-score[i], i))
        chosen += ranked[: sum(i < k for i in group)]
    return sorted(chosen)


def swapped(
    score: Sequence[float], selected: set[int], groups: int, at_most: Sequence[int] | None
) -> tuple[set[int], int]:
    """Swap in each group the best outside for the worst inside, while better by a quarter and paid for."""
    after, swaps = set(selected), 0
    for number, group in enumerate(members(len(score), groups)):
        inside = sorted((i for i in group if i in selected), key=lambda i: (score[i], i))
        outside = sorted((i for i in group if i not in selected), key=lambda i: (-score[i], i))
        for done, (leaves, enters) in enumerate(zip(inside, outside, strict=False)):
            if (at_most is not None and done >= at_most[number]) or not score[enters] > 1.25 * score[leaves]:
                break
            after = after - {leaves} | {enters}
            swaps += 1
    return after, swaps


def some_selection(slices: int, k: int, groups: int, seed: int) -> set[int]:
    """Return a selection other than the best, with the same number of slices of each group."""
    chosen = random.Random(seed)
    return {i for group in members(slices, groups) for i in chosen.sample(group, sum(i < k for i in group))}


def mask_of(selected: set[int], slices: int) -> Tensor:
    return torch.tensor([i in selected for i in range(slices)])


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(("slices", "k", "groups"), SIZES)
def test_best_slices_of_each_group(slices: int, k: int, groups: int, kind: str) -> None:
    for seed in range(5):
        score = scores(kind, slices, seed)
        found = best_slices(score, k, groups)
        assert found.dtype == torch.int32
        assert found.tolist() == best_of(score.tolist(), k, groups)


@pytest.mark.parametrize(("slices", "k", "groups"), SIZES)
def test_first_selection_is_balanced_over_groups(slices: int, k: int, groups: int) -> None:
    """Before there are scores the first k slices are selected: as many of each group as later."""
    plan = ParamPlan(
        index=0, name="w", shape=(slices, 1), dtype=torch.float32, placement=Placement.SPLIT_COLUMNS,
        dim=0, slices=slices, length=1, k=k,
    )  # fmt: skip
    device = DeviceState.allocate(plan, CPU)
    assert device.best_slices().tolist() == device.selection.selected.tolist()  # of equal scores the lower slices
    expected = Counter(i % groups for i in device.selection.selected.tolist())
    for seed in range(3):
        best = best_slices(scores("distinct", slices, seed), k, groups)
        assert Counter(i % groups for i in best.tolist()) == expected


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(("slices", "k", "groups"), SIZES)
def test_best_swaps_of_each_group(slices: int, k: int, groups: int, kind: str) -> None:
    moved = 0
    for seed in range(5):
        score, selected = scores(kind, slices, seed), some_selection(slices, k, groups, seed)
        mask = mask_of(selected, slices)
        for swaps in (0, 1, groups - 1, groups + 1, 3 * groups, k):
            at_most = swaps_per_group(swaps, groups, seed, CPU)
            expected, done = swapped(score.tolist(), selected, groups, at_most.tolist())
            assert better_slices(score, mask, k, MARGIN, at_most).tolist() == sorted(expected)
            assert done <= swaps
            moved += done
        count = count_swaps(score, mask, groups, MARGIN)
        assert count.item() == swapped(score.tolist(), selected, groups, None)[1]
    assert moved > 5


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["distinct", "ties", "zeros"])
@pytest.mark.parametrize(("slices", "k"), [(640, 64), (667, 66), (1000, 100), (175, 80), (641, 577)])
def test_ranks_select_as_one_device(slices: int, k: int, kind: str, ranks: int) -> None:
    """Rank r owns the groups g with g % ranks == r: the slices i with i % ranks == r, in ascending order."""
    groups = group_count(slices, k)
    assert groups >= ranks
    for seed in range(3):
        score, selected = scores(kind, slices, seed), some_selection(slices, k, groups, seed)
        mask, at_most = mask_of(selected, slices), swaps_per_group(k // 3, groups, 16 + seed, CPU)
        best, better, counted = set[int](), set[int](), 0.0
        for rank in range(ranks):
            own = slice(rank, None, ranks)
            share = len(range(rank, k, ranks))
            assert int(mask[own].sum()) == share
            best |= {rank + ranks * i for i in best_slices(score[own], share, groups // ranks).tolist()}
            chosen = better_slices(score[own], mask[own], share, MARGIN, at_most[own])
            better |= {rank + ranks * i for i in chosen.tolist()}
            counted += count_swaps(score[own], mask[own], groups // ranks, MARGIN).item()
        assert best == set(best_slices(score, k, groups).tolist())
        assert better == set(better_slices(score, mask, k, MARGIN, at_most).tolist()) != selected
        count = count_swaps(score, mask, groups, MARGIN)
        assert counted == count.item()


@pytest.mark.parametrize("kind", ["some", "all"])
@pytest.mark.parametrize(("slices", "k", "groups"), SIZES)
def test_nan_scores_give_a_valid_selection(slices: int, k: int, groups: int, kind: str) -> None:
    for seed in range(5):
        score = scores("distinct", slices, seed)
        score[score < (0.2 if kind == "some" else 2.0)] = torch.nan
        mask = mask_of(some_selection(slices, k, groups, seed), slices)
        at_most = swaps_per_group(k, groups, seed, CPU)
        expected = Counter(i % groups for i in range(k))
        for found in (best_slices(score, k, groups), better_slices(score, mask, k, MARGIN, at_most)):
            assert len(set(found.tolist())) == k
            assert Counter(i % groups for i in found.tolist()) == expected


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16])
def test_swap_budget_is_divided_evenly(groups: int) -> None:
    """At re-selections any number of steps apart: a group that never got the remainder would never move."""
    for swaps in (1, 3, groups, 2 * groups + 1):
        for apart in (16, 17, 18, 20, 24, 32, 48, 64, 128, 256):
            total = torch.zeros(groups)
            for number in range(200):
                shares = swaps_per_group(swaps, groups, 3 + apart * number, CPU)
                assert shares.sum() == swaps
                assert shares.max() - shares.min() <= 1
                total += shares
            mean = 200 * swaps / groups
            assert 0.4 * mean <= total.min() <= total.max() <= 1.7 * mean, (swaps, apart, total)


def test_mask_is_independent_of_row_order() -> None:
    one = Selection.of(torch.tensor([4, 1]), 6, CPU)
    other = Selection.of(torch.tensor([1, 4]), 6, CPU, deferred=torch.tensor([5, 0, 3, 2]))
    assert one.mask.tolist() == other.mask.tolist() == [False, True, False, False, True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(("slices", "k", "groups"), SIZES)
def test_cuda_selection_does_not_synchronize(slices: int, k: int, groups: int, kind: str) -> None:
    score, selected = scores(kind, slices, 0), some_selection(slices, k, groups, 0)
    mask = mask_of(selected, slices)
    on_device = score.cuda(), mask.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        best = best_slices(on_device[0], k, groups)
        better = better_slices(*on_device, k, MARGIN, swaps_per_group(k, groups, 5, on_device[0].device))
        count = count_swaps(*on_device, groups, MARGIN)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    at_most = swaps_per_group(k, groups, 5, CPU)
    assert best.tolist() == best_of(score.tolist(), k, groups)
    expected, _ = swapped(score.tolist(), selected, groups, at_most.tolist())
    assert better.tolist() == sorted(expected)
    assert count.item() == swapped(score.tolist(), selected, groups, None)[1]
