"""Which weights are kept under ``offload_weights``, and the ring for the others."""

from __future__ import annotations

import itertools

import pytest

from zenflow_compile.planning.weight_memory import (
    divide_budget,
    offloadable_weights,
    reloaded_weights,
)

KIB = 1 << 10
# An embedding, three blocks of two matrices and a norm, a norm, and a head; bf16.
BLOCK = [(256, 256), (512, 256), (256,)]
SHAPES = [(1000, 256), *BLOCK * 3, (256,), (1000, 256)]
BYTES = [2 * (shape[0] * shape[1] if len(shape) > 1 else shape[0]) for shape in SHAPES]
SMALL, LARGE, ENDS = 128 * KIB, 256 * KIB, 512_000
TOTAL = 3 * (SMALL + LARGE) + 2 * ENDS


def kept(budget: int) -> tuple[set[int], int]:
    sizes = offloadable_weights(SHAPES, BYTES)
    offloaded, ring = divide_budget(budget, SHAPES, sizes)
    return set(sizes) - offloaded, ring


def test_small_and_1d_weights_are_always_kept() -> None:
    sizes = offloadable_weights([*SHAPES, (127, 256), (128, 256), (100_000,)], [*BYTES, 65_024, 65_536, 200_000])
    assert set(sizes) == {0, 1, 2, 4, 5, 7, 8, 11, 13}
    assert sum(sizes.values()) == TOTAL + 65_536


def test_ring_holds_two_of_the_largest_blocks() -> None:
    """The embedding is the largest block here."""
    assert kept(TOTAL - 1)[1] == 2 * ENDS
    assert kept(2 * ENDS) == (set(), 2 * ENDS)
    assert kept(2 * ENDS - 1) == (set(), 2 * ENDS - 1)


@pytest.mark.parametrize(
    ("beyond", "expected"),
    [
        (SMALL - 1, set()),
        (SMALL, {1}),
        (LARGE, {1, 4}),  # the second matrix does not fit behind the first
        (SMALL + LARGE, {1, 2}),  # the first block
        (SMALL + LARGE + SMALL, {1, 2, 4}),  # no space for the embedding, but for a further weight
        (SMALL + LARGE + ENDS, {0, 1, 2}),
    ],
)
def test_kept_weights_follow_their_order(beyond: int, expected: set[int]) -> None:
    assert kept(2 * ENDS + beyond)[0] == expected


def test_weights_that_fit_are_all_kept() -> None:
    assert kept(TOTAL) == ({0, 1, 2, 4, 5, 7, 8, 11}, 0)


def test_memory_grows_with_the_budget_and_fits_it() -> None:
    sizes = offloadable_weights(SHAPES, BYTES)
    needed = []
    for budget in range(2 * ENDS, TOTAL + 50_000, 7919):
        stays, ring = kept(budget)
        needed.append(ring + sum(sizes[index] for index in stays))
        assert needed[-1] <= budget
    assert all(before <= after for before, after in itertools.pairwise(needed))


def test_block_that_exceeds_the_ring_is_reloaded() -> None:
    sizes = offloadable_weights(SHAPES, BYTES)
    offloaded = frozenset(sizes) - {0, 1, 11}
    assert reloaded_weights(SHAPES, sizes, offloaded, SMALL + LARGE) == frozenset()
    assert reloaded_weights(SHAPES, sizes, offloaded, SMALL + LARGE - 1) == {4, 5, 7, 8}
    assert reloaded_weights([(10, 10), (20, 20)], {0: 200, 1: 800}, frozenset({0, 1}), 800) == frozenset()
