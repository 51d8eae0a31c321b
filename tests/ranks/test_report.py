"""The report of all ranks: what it says, and which rank prints it."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import nn

import zenflow_compile as zf
from tests.ranks.models import WINDOWED, backward, on_ranks, optimizer_over, uneven
from tests.ranks.sharded import sharded
from tests.support.rank_processes import RankProcesses, messages
from zenflow_compile.profiling.diagnose import diagnose
from zenflow_compile.profiling.report import slowest
from zenflow_compile.profiling.summary import Summary

pytestmark = pytest.mark.timeout(120)
STEPS = 6


def profiled(rank: int, *, over_shards: bool = False) -> tuple[str, dict[str, Any]]:
    """What a rank prints, and the numbers of its own."""
    model = sharded() if over_shards else uneven()
    options = WINDOWED["re-selecting"]
    optimizer = optimizer_over(model, options, "") if over_shards else on_ranks(model, **options)
    out = io.StringIO()
    with zf.profile(optimizer) as profile:
        for step in range(STEPS):
            backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
    profile.report_ranks(Console(file=out, width=120, color_system=None))
    summary = dict(profile.summary())
    optimizer.close()
    return out.getvalue(), summary


def test_first_rank_prints_all(two_ranks: RankProcesses) -> None:
    (text, first), (nothing, second) = two_ranks.call(profiled)
    assert nothing == ""
    assert "step time" in text
    rows = text[text.index("Ranks, per step") :].splitlines()
    assert [line.split()[0] for line in rows[2:4]] == ["0", "1"]
    for summary in (first, second):
        assert summary["sent_bytes_per_step"] > sum(param.nbytes for param in uneven().parameters())
        assert 0 < summary["rank_wait_ms_per_step"] <= summary["stall_ms_per_step"]
    for line, summary in zip(rows[2:4], (first, second), strict=True):
        assert line.split()[-1] == f"{summary['sent_bytes_per_step'] / 1e6:.2f}"
    assert "other ranks" in text[: text.index("Ranks, per step")]


def test_first_rank_prints_all_of_shards(two_ranks: RankProcesses) -> None:
    (text, first), (nothing, second) = two_ranks.call(profiled, over_shards=True)
    assert nothing == ""
    rows = text[text.index("Ranks, per step") :].splitlines()
    for line, summary in zip(rows[2:4], (first, second), strict=True):
        assert summary["sent_bytes_per_step"] > 0
        assert line.split()[-1] == f"{summary['sent_bytes_per_step'] / 1e6:.2f}"


def reports_alone(rank: int) -> None:
    model = uneven()
    optimizer = on_ranks(model)
    with zf.profile(optimizer) as profile:
        for step in range(2):
            backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        profile.report_ranks()
    backward(model, 2, rank)


def test_report_by_one_rank_alone_is_refused(two_ranks: RankProcesses) -> None:
    for text in messages(two_ranks.outcomes(reports_alone)):
        assert "reports on all ranks" in text
        assert "ends a backward" in text


def test_report_of_ranks_needs_ranks() -> None:
    optimizer = zf.ZenFlowAdamW(nn.Linear(4, 4).parameters(), process_group=False)
    with zf.profile(optimizer) as profile:
        torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"with a process_group or a sharded model, and this profile has 0"):
        profile.report_ranks()
    optimizer.close()


def summary(step_ms: float | None, waits: float) -> Summary:
    numbers = {
        "step_ms": step_ms,
        "step_ms_median": step_ms,
        "rank_wait_ms_per_step": waits,
        "stall_ms_per_step": waits,
        "stall_share": 0.5,
    }
    return cast(Summary, {"host_update_ms_per_step": 1.0, "d2h_bytes_per_step": 1.0, "blocking": False, **numbers})


def test_slowest_rank_is_the_one_that_waits_least() -> None:
    assert "Rank 1 is the slowest: 9.00 ms" in slowest([summary(10, 6), summary(10, 1), summary(10, 5)])
    assert slowest([summary(10, 1), summary(10, 1.1)]).startswith("The ranks are even: 8.95 ms")
    assert slowest([summary(None, 0)]).startswith("Nothing was measured")


def test_diagnosis_names_waits_for_ranks() -> None:
    assert (
        "The ranks wait for each other and for their collectives, 5.00 ms of 5.00 ms"
        in diagnose(summary(10, 5)).sentence
    )
