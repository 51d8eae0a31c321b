"""One parameter is passed at several inputs of a graph that was compiled for different parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.trajectories import seeded
from zenflow_compile.optimizer import ZenFlowAdamW
from zenflow_compile.runtime import ops

pytestmark = pytest.mark.usefixtures("small_weights")

STEPS = 8
ADAM = {"lr": 1e-2, "weight_decay": 0.01}
POLICIES: dict[str, dict[str, Any]] = {
    "zenflow": {"policy": "zenflow", "update_interval": 1, "topk_ratio": 0.25},
    "zero_offload": {"policy": "zero_offload"},
    "weights": {"policy": "zenflow", "update_interval": 1, "topk_ratio": 0.25, "offload_weights": 1.0},
}
Step = Callable[[int], Tensor]


class Gated(nn.Module):
    """Two matrices, read through lazy products with a vector that is updated on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        return multiply(torch.tanh(self.a(x)), self.a.weight, self.b.weight, self.gate) + self.b.bias


def multiply(x: Tensor, first: Tensor, second: Tensor, gate: Tensor) -> Tensor:
    return torch.tanh(x @ (first * gate)) @ (second * gate)


def tied_later(model: Gated, compile_: Callable[..., Any]) -> Step:
    """Tie the weights after two steps; the graph compiled before is used on."""
    run = compile_(model)

    def step(number: int) -> Tensor:
        if number == 2:
            model.b.weight = model.a.weight
        out: Tensor = run(inputs(number))
        return out

    return step


def called_with_same(model: Gated, compile_: Callable[..., Any]) -> Step:
    """Call one function in turns with two parameters and with one parameter for both arguments."""
    run = compile_(multiply)
    first, second, gate = model.a.weight, model.b.weight, model.gate

    def step(number: int) -> Tensor:
        if number % 3 == 0:
            out: Tensor = run(inputs(number), first, second, gate)
        else:
            same = first if number % 3 == 1 else second
            out = run(inputs(number), same, same, gate)
        return out

    return step


def inputs(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def train(case: Callable[..., Step], inner: str | None, policy: str, in_backward: bool) -> list[Tensor]:
    """Losses of all steps, after each the loss under ``no_grad``, and weights; AdamW's if ``inner`` is None."""
    model = seeded(Gated)
    assert isinstance(model, Gated)
    keywords = {**ADAM, **POLICIES[policy], "min_offload_size": 17, "device_share": 0.0}
    params = dict(model.named_parameters())
    optimizer: torch.optim.Optimizer | None = None

    def compile_(function: Any) -> Any:
        if inner is None:
            return function
        options = {"inner": inner, **(keywords if in_backward else {})}
        return torch.compile(function, backend="zenflow", options=options)

    if inner is None:
        optimizer = torch.optim.AdamW(params.values(), **ADAM)
    elif not in_backward:
        optimizer = ZenFlowAdamW(params.items(), **keywords)
    step = case(model, compile_)
    losses: list[Tensor] = []
    for number in range(STEPS):
        for trains in (True, False):
            with nullcontext() if trains else torch.no_grad():
                loss = (step(number) - 0.1).square().mean()
            losses.append(loss.detach())
            if trains:
                loss.backward()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
    if inner is not None:
        found = ops.owner_of(model.gate)
        assert found is not None
        found[0].core.optimizer.close()  # type: ignore[attr-defined]
    return [*losses, *(param.detach() for param in params.values())]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["optimizer", "in_backward"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", [tied_later, called_with_same], ids=lambda case: case.__name__)
def test_one_parameter_at_two_inputs_is_adamw(
    case: Callable[..., Step], policy: str, in_backward: bool, inner: str
) -> None:
    expected = train(case, None, policy, in_backward)
    result = train(case, inner, policy, in_backward)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
