"""The invariants of exact policies and rule P, with Inductor generating code around the inserted nodes."""

from __future__ import annotations

import pytest
import torch

from tests.exactness.test_adamw import RESELECTING, check_in_graph, moments_reset
from tests.exactness.test_policies import MIXTURES, STRIDES, TWINFLOW
from tests.exactness.test_rule_p import CASES, Runs, check
from tests.support.trajectories import each_member, largest_difference, plain_adamw, train, train_in_backward
from tests.support.zoo import BY_NAME, Member

COMPILED = ["mlp", "conv_batch_norm", "gpt"]


@each_member([*COMPILED, "graph_breaks", "llama"])
def test_exact_policies_are_adamw(member: Member) -> None:
    """The reference runs the same Inductor kernels in forward and backward."""
    expected = {steps: plain_adamw(member, "inductor", steps) for steps in (20, 40)}
    zero_offload = train(member, "inductor", 20, policy="zero_offload")
    check_in_graph(zero_offload)
    assert largest_difference(zero_offload, expected[20], member) < member.tolerance
    zenflow = train(member, "inductor", 40, topk_ratio=0.2, **RESELECTING)
    check_in_graph(zenflow)
    assert zenflow.moved_slices > 10
    assert largest_difference(zenflow, expected[40], member) < member.tolerance


@each_member(["mlp", "gpt"])
@pytest.mark.parametrize("case", ["twinflow_0.5", "with_residents", "windows_and_streamed"])
def test_shares_and_streamed_state_are_adamw(member: Member, case: str) -> None:
    run = train(member, "inductor", 20, **{**TWINFLOW, **STRIDES, **MIXTURES}[case])
    check_in_graph(run)
    assert (run.flushes >= 20) == bool(run.streamed) == (case != "twinflow_0.5")
    assert largest_difference(run, plain_adamw(member, "inductor", 20), member) < member.tolerance


@each_member(COMPILED)
def test_zenflow_follows_rule_p(member: Member) -> None:
    runs = Runs(member, "inductor", CASES["defaults"])
    with runs.optimizer:
        check(runs)


@each_member(COMPILED)
def test_optimizer_in_backward_and_object_agree(member: Member) -> None:
    explicit, in_backward = train(member, "inductor", 24), train_in_backward(member, "inductor", 24)
    check_in_graph(in_backward)
    assert in_backward.windows_flushed == explicit.windows_flushed
    torch.testing.assert_close(in_backward.losses, explicit.losses, rtol=0, atol=1e-5)
    assert largest_difference(in_backward, explicit, member) < 1e-5


def test_evaluation_between_steps_sees_every_step() -> None:
    member = BY_NAME["conv_batch_norm"]
    run = train(member, "inductor", 20, evaluate=True, topk_ratio=0.2, **RESELECTING)
    plain = plain_adamw(member, "inductor", 20, evaluate=True)
    torch.testing.assert_close(run.evaluations, plain.evaluations[:20], rtol=0, atol=1e-5)


@moments_reset()
def test_control_reset_moments_differ() -> None:
    """Control: moments reset at a re-selection change the weights."""
    member = BY_NAME["mlp"]
    run = train(member, "inductor", 40, topk_ratio=0.2, **RESELECTING)
    assert largest_difference(run, plain_adamw(member, "inductor", 40), member) > 1e-3
