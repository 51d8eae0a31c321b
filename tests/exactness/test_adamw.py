"""Invariants 1 and 2: exact policies equal ``torch.optim.AdamW`` on the same forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.trajectories import Trajectory, each_member, largest_difference, plain_adamw, train
from tests.support.zoo import BY_NAME, Member
from zenflow_compile.runtime.parameters import state_exchange
from zenflow_compile.runtime.parameters.device_state import exchange_rows
from zenflow_compile.runtime.state_forms import StateRows

# The shortest windows, and a re-selection at every second step.
RESELECTING = {"update_interval": 1, "select_interval": 2}

STATE_BYTES = 12  # of an element: fp32 master and moments

# A sample of models for options that only the runtime reads: it treats all models alike.
FEW = ["mlp", "gpt_tied", "unused_parameters", "experts_without_tokens"]


def check_in_graph(run: Trajectory) -> None:
    """Gradients were taken in rewritten graphs, none through ``.grad``, and the host has applied updates."""
    assert run.offloaded
    assert run.through_grad == ()
    assert run.inserted >= 2
    assert run.windows_flushed > 0


@pytest.mark.matrix(3)
@each_member()
def test_zero_offload_is_adamw(member: Member) -> None:
    run = train(member, "eager", 20, policy="zero_offload")
    check_in_graph(run)
    assert run.windows_flushed >= 20
    assert largest_difference(run, plain_adamw(member, "eager", 20), member) < member.tolerance


@pytest.mark.matrix(3)
@each_member()
def test_zero_infinity_is_adamw(member: Member, tmp_path: Path) -> None:
    """With the smallest cache in host memory, the run equals the one with state in memory bit for bit."""
    sizes = [param.numel() for param in member.build().parameters() if param.dim() > 1 and param.requires_grad]
    run = train(
        member, "eager", 20, policy="zero_infinity", nvme_path=tmp_path, host_window_bytes=STATE_BYTES * max(sizes)
    )
    check_in_graph(run)
    assert largest_difference(run, plain_adamw(member, "eager", 20), member) < member.tolerance
    in_memory = train(member, "eager", 20, policy="zero_offload")
    assert all(torch.equal(weights, in_memory.weights[name]) for name, weights in run.weights.items())


@pytest.mark.matrix(2)
@each_member(FEW)
@pytest.mark.parametrize("topk_ratio", [0.0, 0.2])
@pytest.mark.parametrize("inner", ["eager", None])
def test_zenflow_in_files_is_adamw_across_reselections(
    member: Member, topk_ratio: float, inner: str | None, tmp_path: Path
) -> None:
    files = {"offload_device": "nvme", "nvme_path": tmp_path}
    run = train(member, inner, 40, topk_ratio=topk_ratio, **RESELECTING, **files)
    assert (run.moved_slices > 0) == (topk_ratio > 0.0)
    assert largest_difference(run, plain_adamw(member, inner, 40), member) < member.tolerance


@each_member(FEW)
@pytest.mark.parametrize("inner", ["eager", None])
def test_resident_is_adamw(member: Member, inner: str | None) -> None:
    run = train(member, inner, 20, policy="resident")
    assert run.offloaded == ()
    assert largest_difference(run, plain_adamw(member, inner, 20), member) < member.tolerance


@each_member(FEW)
def test_eager_zero_offload_is_adamw(member: Member) -> None:
    run = train(member, None, 20, policy="zero_offload")
    assert run.offloaded
    assert run.windows_flushed > 0
    assert largest_difference(run, plain_adamw(member, None, 20), member) < member.tolerance


@pytest.mark.matrix(3)
@each_member()
def test_one_step_windows_reselecting_are_adamw(member: Member) -> None:
    run = train(member, "eager", 40, topk_ratio=0.2, **RESELECTING)
    check_in_graph(run)
    assert run.selections > 20
    assert run.moved_slices > 10
    assert largest_difference(run, plain_adamw(member, "eager", 40), member) < member.tolerance


@pytest.mark.matrix(3)
@each_member(["mlp", "conv_batch_norm", "gpt_tied"])
@pytest.mark.parametrize("topk_ratio", [0.0, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("inner", ["eager", None])
def test_one_step_windows_are_adamw_at_any_ratio(member: Member, topk_ratio: float, inner: str | None) -> None:
    run = train(member, inner, 40, topk_ratio=topk_ratio, **RESELECTING)
    assert run.offloaded
    assert (run.moved_slices > 0) == (0.0 < topk_ratio < 1.0)
    assert (run.windows_flushed > 0) == (topk_ratio < 1.0)
    assert largest_difference(run, plain_adamw(member, inner, 40), member) < member.tolerance


@each_member(["mlp", "gpt_tied", "unused_parameters"])
@pytest.mark.parametrize("inner", ["eager", None])
def test_selecting_everything_is_adamw_at_any_interval(member: Member, inner: str | None) -> None:
    run = train(member, inner, 40, topk_ratio=1.0, update_interval=4)
    assert run.offloaded
    assert largest_difference(run, plain_adamw(member, inner, 40), member) < member.tolerance


@each_member(["mlp", "gpt"])
@pytest.mark.parametrize("transfer", ["each", "mean"])
def test_synchronous_start_is_adamw(member: Member, transfer: str) -> None:
    run = train(member, "eager", 20, full_warm_up_rounds=20, update_interval=4, gradient_transfer=transfer)
    check_in_graph(run)
    assert run.windows_flushed == 20 * len(run.offloaded)
    assert largest_difference(run, plain_adamw(member, "eager", 20), member) < member.tolerance


@each_member(["conv_batch_norm", "gpt_tied", "unused_parameters"])
@pytest.mark.parametrize("inner", ["eager", None])
def test_evaluation_between_steps_sees_every_step(member: Member, inner: str | None) -> None:
    run = train(member, inner, 20, evaluate=True, topk_ratio=0.2, **RESELECTING)
    plain = plain_adamw(member, inner, 20, evaluate=True)
    torch.testing.assert_close(run.evaluations, plain.evaluations[:20], rtol=0, atol=1e-5)
    assert len(set(run.evaluations)) == 20
    assert largest_difference(run, plain, member) < member.tolerance


def with_moments_reset(device_side: StateRows, host_side: StateRows, device_rows: Tensor, host_rows: Tensor) -> int:
    """A wrong exchange: a slice that changes sides keeps its master and loses its moments."""
    moved = exchange_rows(device_side, host_side, device_rows, host_rows)
    swapped = host_rows[host_rows >= 0].long()
    for on_device, on_host in zip(device_side.stored[1:], host_side.stored[1:], strict=True):
        on_device[device_rows[: len(swapped)]] = 0.0
        on_host[swapped] = 0.0
    return moved


def moments_reset() -> Any:
    """Let exchanges be wrong."""
    return mock.patch.object(state_exchange, "exchange_rows", with_moments_reset)


@each_member(["mlp", "gpt"])
@pytest.mark.parametrize("inner", ["eager", None])
@moments_reset()
def test_control_reset_moments_differ(member: Member, inner: str | None) -> None:
    """This is a control: one injected error changes weights by orders of magnitude more than rounding."""
    run = train(member, inner, 40, topk_ratio=0.2, **RESELECTING)
    assert run.moved_slices > 10
    assert largest_difference(run, plain_adamw(member, inner, 40), member) > 1e-3


def test_control_longer_windows_differ() -> None:
    """Control: the default defers updates, so it differs from AdamW by far more than rounding."""
    member = BY_NAME["mlp"]
    options: dict[str, Any] = {"update_interval": 4}
    assert largest_difference(train(member, "eager", 20, **options), plain_adamw(member, "eager", 20), member) > 1e-3
