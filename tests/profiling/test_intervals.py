import random

import pytest

from zenflow_compile.profiling.recording import exclusive, intersect, length_ns, subtract, union


def test_union_merges_and_drops_empty_spans():
    assert union([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == [(0, 3), (5, 9)]


def test_intersect():
    assert intersect([(0, 3), (5, 9)], [(2, 6), (8, 20)]) == [(2, 3), (5, 6), (8, 9)]
    assert intersect([(0, 3)], []) == []


def test_subtract():
    assert subtract([(0, 10)], [(2, 3), (9, 12)]) == [(0, 2), (3, 9)]
    assert subtract([(0, 10)], []) == [(0, 10)]
    assert subtract([], [(0, 1)]) == []


def test_exclusive_gives_time_to_the_first_span():
    assert exclusive([("inner", [(2, 4)]), ("outer", [(0, 10)])]) == {"inner": [(2, 4)], "outer": [(0, 2), (4, 10)]}


@pytest.mark.parametrize("seed", range(5))
def test_intervals_agree_with_sets_of_integers(seed):
    draw = random.Random(seed)

    def pairs():
        starts = [draw.randrange(60) for _ in range(8)]
        return [(start, start + draw.randrange(8)) for start in starts]

    def moments(intervals):
        return {moment for start, end in intervals for moment in range(start, end)}

    left, right = pairs(), pairs()
    a, b = union(left), union(right)
    assert moments(a) == moments(left)
    assert length_ns(a) == len(moments(left))
    assert moments(intersect(a, b)) == moments(left) & moments(right)
    assert moments(subtract(a, b)) == moments(left) - moments(right)
