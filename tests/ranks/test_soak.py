"""Four ranks with random delays: the weights of all of them are equal after every step."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.ranks.models import ADAM, WINDOWED, batch, uneven
from tests.support.rank_processes import RankProcesses
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.device.thread_lane import ThreadLane
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.ranks.rank_group import RankGroup

DELAYED: dict[type, tuple[str, ...]] = {
    RankGroup: ("reduce_scatter", "all_gather", "all_reduce", "exchange"),
    ThreadLane: ("submit",),
    Workers: ("submit",),
}


@pytest.fixture
def four_ranks() -> Iterator[RankProcesses]:
    ranks = RankProcesses(4)
    yield ranks
    ranks.close()


def delayed(function: Callable[..., Any], chance: random.Random, longest_ms: float) -> Callable[..., Any]:
    """``function`` behind a delay, one time in four."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        if chance.random() < 0.25:
            time.sleep(chance.random() * longest_ms / 1000)
        return function(*arguments, **keywords)

    return run


def train_with_delays(rank: int, options: dict[str, Any], steps: int) -> list[str]:
    """A digest of the weights after each step."""
    chance = random.Random(rank)
    model = uneven()
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **options, workers=1, process_group=dist.group.WORLD)
    digests = []
    with pytest.MonkeyPatch.context() as patch:
        for kind, names in DELAYED.items():
            for name in names:
                patch.setattr(kind, name, delayed(getattr(kind, name), chance, 3.0))
        for step in range(steps):
            x, y = batch(step, rank, 4)
            if step % 7 == rank:  # this rank has no gradient of some parameters
                loss = F.cross_entropy(model.embedding(x) @ model.down.weight[:, :32].t(), y)  # type: ignore[operator,union-attr,index]
            else:
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            together = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
            digests.append(hashlib.sha256(together).hexdigest())
    optimizer.close()
    return digests


def assert_equal_after_each_step(ranks: RankProcesses, options: dict[str, Any], steps: int) -> None:
    first, *others = ranks.call(train_with_delays, options, steps, timeout=1500)
    assert len(set(first)) == steps, "a step has changed nothing"
    for other in others:
        assert other == first


@pytest.mark.timeout(180)
def test_four_ranks_with_delays_stay_equal(four_ranks: RankProcesses) -> None:
    assert_equal_after_each_step(four_ranks, WINDOWED["re-selecting"], 20)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["re-selecting", "adaptive", "late"])
def test_soak_of_four_ranks(four_ranks: RankProcesses, name: str) -> None:
    assert_equal_after_each_step(four_ranks, WINDOWED[name], 500)
