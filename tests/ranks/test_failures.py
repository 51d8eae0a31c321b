"""A rank that fails, ends or hangs makes the others raise, and they say why."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from tests.ranks.models import ADAM, ALL_POLICIES, WINDOWED, backward, batch, on_ranks, uneven
from tests.ranks.sharded import sharded
from tests.support.calls import at_calls
from tests.support.rank_processes import RankProcesses, messages
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.parameters.gradient_parts import GradientParts
from zenflow_compile.runtime.parameters.incoming_gradient import IncomingGradient
from zenflow_compile.runtime.ranks.rank_group import Call, Levels, RankGroup
from zenflow_compile.runtime.step.upload_scheduler import UploadScheduler

pytestmark = pytest.mark.timeout(120)
SECONDS = 4.0
LONG_SECONDS = 300.0  # no rank waits so long


def train_and(rank: int, failure: str) -> None:
    """Train; rank 1 fails in the second step."""
    group = dist.new_group(timeout=timedelta(seconds=SECONDS if failure == "hang" else LONG_SECONDS))
    raised = dist.distributed_c10d._get_default_store()
    model = uneven()
    optimizer = on_ranks(model, group=group)
    with ExitStack() as failures:
        for step in range(3):
            if step == 1 and rank == 1:
                if failure == "raise":
                    failures.enter_context(at_calls(_fail, GradientParts.copy_to_host))
                elif failure == "in step":
                    failures.enter_context(at_calls(_fail, IncomingGradient.commit))
                elif failure == "exit":
                    os._exit(3)
                elif failure == "hang":
                    raised.wait(["missed"], timedelta(seconds=LONG_SECONDS))
                    raise RuntimeError("this rank was late")
            try:
                backward(model, step, rank)
                if not (failure == "skip the step" and step == rank == 1):
                    optimizer.step()
            except RuntimeError:
                raised.set("missed", "")
                raise
            optimizer.zero_grad()


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("the lane is on fire")


@pytest.mark.parametrize("failure", ["raise", "in step"])
def test_error_of_one_rank_is_raised_by_all(two_ranks: RankProcesses, failure: str) -> None:
    other, own = messages(two_ranks.outcomes(train_and, failure, timeout=60))
    assert own == "the lane is on fire"
    assert "rank 1 failed" in other
    assert "the lane is on fire" in other


def test_rank_that_ends_is_missed(two_ranks: RankProcesses) -> None:
    other, _ = messages(two_ranks.outcomes(train_and, "exit", timeout=60))
    assert "step 1: rank 1 is gone" in other
    assert "all ranks were last together where each calls step() in step 0" in other


@pytest.mark.tier2
def test_rank_that_hangs_is_missed(two_ranks: RankProcesses) -> None:
    other, late = messages(two_ranks.outcomes(train_and, "hang", timeout=60))
    assert "late" in late
    assert f"step 1: rank 1 is gone, or not there within {SECONDS:g} s" in other


def killed(rank: int) -> None:
    """Rank 2 of four is killed in its third step."""
    model = uneven()
    optimizer = on_ranks(model, **ALL_POLICIES["zero_offload"])
    for step in range(4):
        if step == 2 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.tier2
def test_killed_rank_is_named_by_all_others(four_ranks: RankProcesses) -> None:
    outcomes = four_ranks.outcomes(killed, timeout=60)
    for text in messages([outcome for rank, outcome in enumerate(outcomes) if rank != 2]):
        assert "step 2: rank 2 is gone" in text
        assert "where each calls step() in step 1" in text


def killed_of_shards(rank: int, step_of_death: int, point: str) -> None:
    """Rank 2 of four is killed in a forward or a backward of a sharded model."""
    model = sharded(mesh=DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=SECONDS)), "cpu"))
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, **ALL_POLICIES["zenflow"])
    for step in range(step_of_death + 2):
        x, y = batch(step, rank, 4)
        logits = model(x)
        if step == step_of_death and rank == 2:
            if point == "backward":
                logits.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("point", ["forward", "backward"])
@pytest.mark.parametrize("step", [0, 2])
def test_killed_rank_of_shards_is_named(four_ranks: RankProcesses, step: int, point: str) -> None:
    outcomes = four_ranks.outcomes(killed_of_shards, step, point, timeout=60)
    for text in messages([outcome for rank, outcome in enumerate(outcomes) if rank != 2]):
        assert f"step {step}: rank 2 is gone: its process has ended" in text
        assert "under FSDP2: " in text


def fails_in_flush(rank: int) -> None:
    """Rank 1 fails when its last windows are applied, behind the message that all ranks close."""
    model = sharded()
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, **WINDOWED["re-selecting"])
    for step in range(2):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 1:
        pytest.MonkeyPatch().setattr(UploadScheduler, "finish", _fail)  # of a process that ends with its error
    optimizer.close()


def test_rank_that_fails_in_close_is_told_of(two_ranks: RankProcesses) -> None:
    other, own = messages(two_ranks.outcomes(fails_in_flush, timeout=60))
    assert own == "the lane is on fire"
    assert "rank 1 failed" in other


def test_skipped_step_raises_on_all(two_ranks: RankProcesses) -> None:
    for text in messages(two_ranks.outcomes(train_and, "skip the step", timeout=60)):
        assert "calls step()" in text
        assert "ends a backward" in text


def failed_backward(rank: int, by_model: bool) -> None:
    """The backward of rank 1 fails behind the first gradients, and the loop goes on."""
    model = uneven()
    optimizer = on_ranks(model, **ALL_POLICIES["zero_offload"])
    for step in range(3):
        x, y = batch(step, rank, 2)
        hidden = model.embedding(x)  # type: ignore[operator]
        if step == 1 and rank == 1:
            hidden.register_hook(_fail)
        logits = model.middle(torch.tanh(model.up(model.norm(hidden))))  # type: ignore[operator]
        try:
            F.cross_entropy(model.down(torch.tanh(logits)), y).backward()  # type: ignore[operator]
        except RuntimeError as error:
            if "on fire" not in str(error):
                raise
            (model if by_model else optimizer).zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("by_model", [False, True])
def test_failed_backward_of_one_rank_stops_all(two_ranks: RankProcesses, by_model: bool) -> None:
    for text in messages(two_ranks.outcomes(failed_backward, by_model, timeout=60)):
        assert "backward failed" in text


def closed(rank: int) -> None:
    group = RankGroup(dist.group.WORLD, torch.device("cpu"), Levels([[0, 1]], [0, 1]))
    group.exchange(Call.CLOSE)  # else one rank may close while the other one connects to it
    group.close()
    group.close()


def test_group_closes_twice(two_ranks: RankProcesses) -> None:
    two_ranks.call(closed)


def reorders(rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    optimizer = on_ranks(model, **options)
    for step in range(2):
        if step == 1:
            model.to(memory_format=torch.channels_last)
        model(torch.randn(2, 4, 8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


@pytest.mark.parametrize("policy", ["deep_optimizer_states", "zero_offload"])
def test_reordered_weights_are_refused(two_ranks: RankProcesses, policy: str) -> None:
    for text in messages(two_ranks.outcomes(reorders, ALL_POLICIES[policy])):
        assert "was reordered after the optimizer's first use" in text
        assert "create it anew over model.parameters()" in text
