"""Two ranks on a GPU each, through NCCL: the comparisons of tests/ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks.models import ALL_POLICIES, WINDOWED, difference, train
from tests.support.rank_processes import RankProcesses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(2)
    yield processes
    processes.close()


def on_gpu(rank: int, options: dict[str, Any], keywords: dict[str, Any]) -> list[Tensor]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return train(options, rank, 2, device=str(device), **keywords)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_exact_policies_equal_adamw(ranks: RankProcesses, policy: str, compiled: bool, clip: float | None) -> None:
    first, second = ranks.call(on_gpu, ALL_POLICIES[policy], {"compiled": compiled, "clip": clip})
    assert difference(first, second) == 0
    assert difference(first, train(None, clip=clip)) < 1e-5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", WINDOWED)
def test_two_ranks_equal_one(ranks: RankProcesses, name: str, compiled: bool) -> None:
    keywords = {"steps": 24, "compiled": compiled, "clip": 0.1}
    first, second = ranks.call(on_gpu, WINDOWED[name], keywords)
    assert difference(first, second) == 0
    # A rounding may fall on the other side in int8.
    assert difference(first, train(WINDOWED[name], **keywords)) < (2e-3 if name == "int8" else 1e-4)
