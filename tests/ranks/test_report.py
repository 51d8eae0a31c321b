"""The report of all ranks: what it says, and which rank prints it."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zenflow_compile as zf
from tests.ranks.models import WINDOWED, backward, on_ranks, optimizer_over, uneven
from tests.ranks.sharded import sharded
from tests.support.rank_processes import RankProcesses, messages

pytestmark = pytest.mark.timeout(120)
STEPS = 6
LATE_US = 200_000


def profiled(
    rank: int, *, over_shards: bool = False, late: float = 0.0, trace: str | None = None
) -> tuple[str, dict[str, Any]]:
    """What a rank prints, and the numbers of its own. The second one is ``late`` seconds late in each step."""
    model = sharded() if over_shards else uneven()
    options = WINDOWED["re-selecting"]
    optimizer = optimizer_over(model, options, "") if over_shards else on_ranks(model, **options)
    out = io.StringIO()
    with zf.profile(optimizer) as profile:
        for step in range(STEPS):
            time.sleep(late * rank)
            backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
    profile.report_ranks(Console(file=out, width=120, color_system=None), trace=trace)
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
        assert summary["rank_wait_ms_per_step"] > 0
        parts = ("forward", "backward", "update", "merge", "select", "stall", "rank_wait", "other")
        of_step = [summary[f"{part}_ms_per_step"] or 0.0 for part in parts]
        assert sum(of_step) == pytest.approx(summary["step_ms"])
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


@pytest.mark.parametrize("over_shards", [False, True], ids=["process_group", "shards"])
def test_late_rank_is_named(two_ranks: RankProcesses, over_shards: bool) -> None:
    (text, first), (_, second) = two_ranks.call(profiled, over_shards=over_shards, late=LATE_US / 1e6)
    assert "Rank 1 is the slowest: the others wait for it." in text
    assert first["in_collectives_ms_per_step"] > 100 + second["in_collectives_ms_per_step"]
    picture = text[text.index("Ranks, per step") :]
    rows = [line for line in picture.splitlines() if line.startswith(("rank 0", "rank 1"))]
    assert rows[0].count("?") > rows[1].count("?")
    assert "? waiting for ranks" in picture


def test_trace_has_all_ranks_on_one_clock(two_ranks: RankProcesses, tmp_path: Path) -> None:
    path = tmp_path / "ranks.trace.json"
    two_ranks.call(profiled, over_shards=True, late=LATE_US / 1e6, trace=str(path))
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1"}
    waits = [event for event in events if event["name"] == "rank_wait"]
    of_each = [[event for event in waits if event["pid"] == pid] for pid in names]
    assert len(of_each[0]) > STEPS
    # A collective ends on no rank before it has begun on all; a wait for one is noted behind its beginning.
    for here, there in zip(*of_each, strict=True):
        assert here["ts"] + here["dur"] > there["ts"] - LATE_US / 4
        assert there["ts"] + there["dur"] > here["ts"] - LATE_US / 4


def sets_its_own_collectives(rank: int, order: str) -> None:
    model = sharded()
    optimizer = optimizer_over(model, WINDOWED["re-selecting"], "")
    outer, inner = zf.profile(optimizer), zf.profile(optimizer)
    if order == "nested":
        with outer, inner:
            backward(model, 0, rank)
    elif order == "crossed":
        outer.__enter__()
        with inner:
            outer.__exit__(None, None, None)
            backward(model, 0, rank)
            optimizer.step()
        kinds = {event.kind for recording in inner.recordings() for event in recording.events}
        assert {"all_gather", "reduce_scatter"} <= kinds
    else:
        with outer:
            backward(model, 0, rank)
            optimizer.close()
    model.set_allocate_memory_from_process_group_for_comm(True)  # refuses others than PyTorch's own
    optimizer.close()


@pytest.mark.parametrize("order", ["nested", "crossed", "closed"])
def test_profile_leaves_collectives_as_they_were(two_ranks: RankProcesses, order: str) -> None:
    two_ranks.call(sets_its_own_collectives, order)


def hybrid(rank: int) -> str:
    """The report of two replicas, whose all-reduce FSDP2 calls by itself."""
    model = sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    optimizer = optimizer_over(model, WINDOWED["re-selecting"], "")
    out = io.StringIO()
    with zf.profile(optimizer) as profile:
        backward(model, 0, rank)
        optimizer.step()
    profile.report_ranks(Console(file=out, width=120, color_system=None))
    optimizer.close()
    return out.getvalue()


def test_no_replica_is_called_slow(two_ranks: RankProcesses) -> None:
    assert "Which rank is the slowest is not known" in two_ranks.call(hybrid)[0]


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
