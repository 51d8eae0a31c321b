"""``torch.compile(dynamic=True)``, under which Dynamo may trace a frame again after the backend has compiled it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow_compile
from tests.support.training import ADAM, OFFLOAD_ALL
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(120)

EXACT: dict[str, Any] = {**OFFLOAD_ALL, "update_interval": 1}
SIZES = (5, 3, 8, 5)


class Normalized(nn.Module):
    def __init__(self, traced_twice: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(24, 24)
        self.part = traced_twice()
        self.down = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.part, nn.Embedding):
            x = x + self.part(torch.arange(x.shape[0], device=x.device))
            return self.down(torch.tanh(self.up(x)))
        return self.down(self.part(self.up(x)))


PARTS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(24),
    "embedding": lambda: nn.Embedding(24, 24),
    "dropout": lambda: nn.Dropout(0.0),
}
INNER = ["eager", "inductor"]


def inputs(step: int) -> Tensor:
    return torch.randn(SIZES[step], 24, generator=torch.Generator().manual_seed(step))


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def train(model: nn.Module, call: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer | None) -> None:
    for step in range(len(SIZES)):
        call(inputs(step)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def reference(part: str) -> nn.Module:
    model = Normalized(PARTS[part])
    train(model, model, torch.optim.AdamW(model.parameters(), **ADAM))
    return model


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("part", PARTS)
def test_dynamic_shapes_train_as_in_adamw(part: str, inner: str) -> None:
    model = Normalized(PARTS[part])
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, **EXACT)
    compiled = torch.compile(model, backend="zenflow", dynamic=True, options={"inner": inner})
    train(model, compiled, optimizer)
    expected = reference(part)
    torch.testing.assert_close(model(inputs(0)), expected(inputs(0)), atol=1e-5, rtol=0)  # through the module hooks
    optimizer.synchronize()
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()), atol=1e-5, rtol=0)
    optimizer.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("part", PARTS)
def test_dynamic_shapes_with_the_optimizer_in_backward(part: str) -> None:
    model = Normalized(PARTS[part])
    options = {"inner": "eager", **ADAM, **EXACT}
    compiled = torch.compile(model, backend="zenflow", dynamic=True, options=options)
    train(model, compiled, None)
    zenflow_compile.optimizer_of(compiled).close()
    torch.testing.assert_close(list(model.parameters()), list(reference(part).parameters()), atol=1e-5, rtol=0)


def test_modules_are_hooked_after_the_second_trace() -> None:
    """Uncompiled code that calls a module sees an update in flight."""
    model = Normalized(PARTS["layer norm"])
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, **EXACT)
    compiled = torch.compile(model, backend="zenflow", dynamic=True, options={"inner": "eager"})
    compiled(inputs(0)).square().mean().backward()
    assert len(model.up._forward_pre_hooks) == len(model._forward_pre_hooks) == 1
    optimizer.step()
    seen = model.up(inputs(1))
    optimizer.synchronize()
    assert torch.equal(seen, model.up(inputs(1)))
    optimizer.close()
