"""Code that reads every shard directly after every step sees AdamW's weights, or gets an error."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.ranks.models import ADAM, ALL_POLICIES, batch, uneven
from tests.ranks.sharded import sharded
from tests.support.rank_processes import RankProcesses
from tests.support.training import IN_FLIGHT
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(300)

CLOSE = 1e-4  # of weights of about 1: fp32 rounds differently in the two optimizers


def reads(rank: int, policy: str, steps: int) -> tuple[int, float]:
    """Return how many reads raised, and the largest difference that one of the others found."""
    options: dict[str, Any] = ALL_POLICIES[policy]
    raised, largest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        if "nvme_path" in options:
            options = {**options, "nvme_path": folder}
        model, expected = sharded(uneven), sharded(uneven)
        optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **options)
        adamw = torch.optim.AdamW(expected.parameters(), **ADAM)
        for step in range(steps):
            for each, stepping in ((model, optimizer), (expected, adamw)):
                x, y = batch(step, rank, 2)
                F.cross_entropy(each(x), y).backward()
                stepping.step()
                stepping.zero_grad()
            for param, other in zip(model.parameters(), expected.parameters(), strict=True):
                try:
                    found = param.to_local().clone()  # type: ignore[attr-defined]
                except RuntimeError as error:
                    if not re.match(IN_FLIGHT, str(error)):
                        raise
                    raised += 1
                    continue
                if found.numel():
                    largest = max(largest, (found - other.to_local()).abs().max().item())  # type: ignore[attr-defined]
        optimizer.close()
    return raised, largest


@pytest.mark.matrix(4)
@pytest.mark.filterwarnings("ignore:policy=:UserWarning")
@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
@pytest.mark.parametrize("steps", [50, pytest.param(200, marks=pytest.mark.long)])
def test_no_read_of_shards_is_stale(policy: str, ranks: str, steps: int, request: pytest.FixtureRequest) -> None:
    processes: RankProcesses = request.getfixturevalue(ranks)
    for raised, largest in processes.call(reads, policy, steps, timeout=240):
        assert largest < CLOSE
        assert bool(raised) == (policy == "zenflow")
