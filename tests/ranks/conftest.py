"""The processes that the tests of several ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankProcesses]:
    """One process with a group of its own."""
    ranks = RankProcesses(1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankProcesses]:
    """Two processes in a gloo group, for all tests of this process."""
    ranks = RankProcesses(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankProcesses]:
    """Three processes: no power of two."""
    ranks = RankProcesses(3)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def six_ranks() -> Iterator[RankProcesses]:
    """Six processes: two machines of three ranks, or three of two."""
    ranks = RankProcesses(6)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[RankProcesses]:
    """Eight processes: a machine with as many devices, or several of them."""
    ranks = RankProcesses(8)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankProcesses]:
    """Four processes: two replicas of two shards."""
    ranks = RankProcesses(4)
    yield ranks
    ranks.close()
