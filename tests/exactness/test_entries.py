"""Invariant 4: graph nodes, hooks on ``.grad`` and the optimizer-in-backward form are three entries to one runtime."""

from __future__ import annotations

import pytest
import torch

from tests.support.trajectories import each_member, largest_difference, train, train_in_backward
from tests.support.zoo import Member


@pytest.mark.matrix(3)
@each_member()
def test_all_entries_give_the_same_trajectory(member: Member) -> None:
    in_graph = train(member, "eager", 30)
    through_grad = train(member, None, 30)
    in_backward = train_in_backward(member, "eager", 30)
    assert in_graph.through_grad == in_backward.through_grad == ()
    assert in_graph.inserted >= 2
    assert in_backward.inserted >= 2
    assert through_grad.inserted == 0
    assert in_graph.windows_flushed > 0
    assert in_graph.selections > 0
    for other in (through_grad, in_backward):
        assert set(other.offloaded) == set(in_graph.offloaded)
        assert other.windows_flushed == in_graph.windows_flushed
        torch.testing.assert_close(other.losses, in_graph.losses, rtol=0, atol=1e-5)
        assert largest_difference(other, in_graph, member) < 1e-5


@pytest.mark.matrix(3)
@each_member(["mlp", "gpt_tied", "graph_breaks"])
@pytest.mark.parametrize(
    "options",
    [
        {"staleness": 1},
        {"update_interval": (1, 4)},
        {"full_warm_up_rounds": 6},
        {"gradient_transfer": "mean"},
    ],
)
def test_entries_agree_with_any_schedule(member: Member, options: dict[str, object]) -> None:
    in_graph = train(member, "eager", 24, **options)
    assert in_graph.windows_flushed > 0
    for other in (train(member, None, 24, **options), train_in_backward(member, "eager", 24, **options)):
        assert other.windows_flushed == in_graph.windows_flushed
        assert largest_difference(in_graph, other, member) < 1e-5


@each_member(["gpt", "graph_breaks"])
def test_overlap_changes_no_number(member: Member) -> None:
    overlapped, blocking = train(member, "eager", 24), train(member, "eager", 24, overlap_step=False)
    assert overlapped.windows_flushed == blocking.windows_flushed > 0
    assert largest_difference(overlapped, blocking, member) == 0.0
