"""Models whose graphs read weights through pointwise operators, which Inductor keeps lazy until their results are used.

An update inside the backward graph must come after these reads. The reference is the same training with inner="eager",
which runs the graphs node by node, in their order.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from tests.support.trajectories import Trajectory, largest_difference, train, train_in_backward
from tests.support.zoo import CONTEXT, VOCABULARY, Member, cross_entropy, tokens, vectors
from zenflow_compile import backend
from zenflow_compile.passes import update_parameters
from zenflow_compile.torch_internals import torch_private_compiler as private

# Large parameters have an op of their own. If these small ones shared one, updates would come after all reads anyway.
pytestmark = pytest.mark.usefixtures("ungrouped")

STEPS = 5
OPTIONS = {"lr": 3e-2, "update_interval": 1, "topk_ratio": 0.25}
"""A large rate, so that a read of the updated weight instead of the old one shows at once."""


class Layer(nn.Module):
    """A linear layer, a matrix that subclasses read in their own way, and a small parameter that scales it.

    The first layer makes the backward read the matrix for an input gradient. The scale has fewer elements than
    ``min_offload_size``: its gradient is no argument of an op of ours, so that nothing else realizes its reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, self.rows)
        self.weight = nn.Parameter(torch.randn(self.rows, 10) * 0.2)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, self.scales))

    rows, scales = 24, 10

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x) @ self.scaled())

    def scaled(self) -> Tensor:
        """f32[24, 10]."""
        raise NotImplementedError


class Gated(Layer):
    def scaled(self) -> Tensor:
        return self.weight * self.scale


class PerChannel(Layer):
    scales = 24

    def scaled(self) -> Tensor:
        return self.weight * self.scale[:, None]


class Cast(Layer):
    """The matrix's own gradient is complete before the cast is read for the scale's."""

    def scaled(self) -> Tensor:
        return self.weight + (self.weight.detach().double() * self.scale.double()).float()


class Standardized(Layer):
    """Reads the weight like ``Cast``, through a reduction and the pointwise operators after it."""

    def scaled(self) -> Tensor:
        centered = self.weight.detach() - self.weight.detach().mean(0)
        return self.weight + centered * torch.rsqrt(centered.square().mean(0) + 1e-5) * self.scale


class Diagonal(Layer):
    """The backward gets the matrix and a view of it as two inputs, which Inductor thinks are different memory."""

    rows = 10

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.sin(self.first(x)) * (torch.diagonal(self.weight) * self.scale)
        return torch.tanh(inner) @ (self.weight * self.scale)


class Embedded(nn.Module):
    """An embedding, which Inductor reads as a pointwise gather; its table is the head, too, if it is tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, 16) * 0.5)
        self.head = self.table if tied else nn.Parameter(torch.randn(VOCABULARY, 16) * 0.5)
        self.position, self.scale = nn.Parameter(torch.randn(CONTEXT, 16)), nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        x = functional.embedding(text, self.table) * self.scale
        x = torch.tanh(x + self.position)
        logits = x @ (self.head * self.scale).t()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 24), nn.Tanh(), weight_norm(nn.Linear(24, 10)))


MEMBERS = (
    Member("gated", Gated, vectors, loss=cross_entropy),
    Member("per_channel", PerChannel, vectors, loss=cross_entropy),
    Member("cast", Cast, vectors, loss=cross_entropy),
    Member("standardized", Standardized, vectors, loss=cross_entropy),
    Member("diagonal", Diagonal, vectors, loss=cross_entropy),
    Member("weight_norm", normed, vectors, loss=cross_entropy),
    Member("embedding", lambda: Embedded(tied=False), tokens),
    Member("tied_embedding", lambda: Embedded(tied=True), tokens),
    Member("autocast", Gated, vectors, loss=cross_entropy, autocast=True),
)
BY_NAME = {member.name: member for member in MEMBERS}


def run(member: Member, inner: str, *, in_backward: bool) -> Trajectory:
    return (train_in_backward if in_backward else train)(member, inner, STEPS, **OPTIONS)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("in_backward", [False, True], ids=["optimizer", "in_backward"])
@pytest.mark.parametrize("name", BY_NAME)
def test_lazy_readers_precede_updates(name: str, in_backward: bool) -> None:
    member = BY_NAME[name]
    expected = run(member, "eager", in_backward=in_backward)
    result = run(member, "inductor", in_backward=in_backward)
    torch.testing.assert_close(result.losses, expected.losses, rtol=0, atol=member.tolerance)
    assert largest_difference(result, expected, member) < member.tolerance


@mock.patch.object(backend, "source_hash", mock.Mock(return_value="without realized readers"))  # its own cache entries
@mock.patch.object(private, "realize_readers", mock.Mock())
@pytest.mark.parametrize("name", ["gated", "per_channel", "cast", "standardized", "embedding", "autocast"])
def test_control_without_lowering_reads_lag(name: str) -> None:
    """Control: without the lowering these reads follow the updates. Other models realize them for other reasons."""
    member = BY_NAME[name]
    expected, result = run(member, "eager", in_backward=True), run(member, "inductor", in_backward=True)
    assert largest_difference(result, expected, member) > 1e-3


@mock.patch.object(update_parameters, "inputs_with_memory_of", mock.Mock(return_value=1))
def test_control_without_saved_view_updates_come_early() -> None:
    """Control: without the search for views, the update precedes a read of the diagonal."""
    member = BY_NAME["diagonal"]
    expected, result = run(member, "eager", in_backward=True), run(member, "inductor", in_backward=True)
    assert largest_difference(result, expected, member) > 1e-3
