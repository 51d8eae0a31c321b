"""The form without an optimizer object: one optimizer per torch.compile call, alive as long as the model is."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zenflow_compile.backend import zenflow
from zenflow_compile.compiler.optimizer_in_backward import KEEPER_ATTRIBUTE
from zenflow_compile.compiler.ownership import optimizer_of
from zenflow_compile.optimizer import ZenFlowAdamW

OPTIONS: dict[str, Any] = {
    "inner": "eager", "lr": 1e-2, "update_interval": 1, "min_offload_size": 16, "device_share": 0.0,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        if self.broken:
            torch._dynamo.graph_break()
        return self.down(x)


def batches(count: int = 4) -> list[Tensor]:
    return [torch.randn(4, 8) for _ in range(count)]


def adamw(model: nn.Module, data: list[Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in data:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("broken", [False, True])
def test_trains_like_adamw(broken: bool) -> None:
    model = Net(broken)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=zenflow, options=OPTIONS)
    data = batches()
    for x in data:
        compiled(x).pow(2).mean().backward()
    adamw(reference, data)
    for (name, param), expected in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(param, expected, msg=lambda m, n=name: f"{n}: {m}", rtol=1e-4, atol=1e-6)
    optimizer = optimizer_of(compiled)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4, "one optimizer has all parameters"


def test_each_compile_call_has_its_own_optimizer() -> None:
    models = [Net(), Net()]
    compiled = [torch.compile(model, backend=zenflow, options=OPTIONS) for model in models]
    for x in batches(2):
        for each in compiled:
            each(x).sum().backward()
    first, second = (optimizer_of(each) for each in compiled)
    assert first is not second
    assert {id(p) for group in first.param_groups for p in group["params"]} == {id(p) for p in models[0].parameters()}


def test_recompiling_keeps_the_optimizer() -> None:
    model = Net()
    compiled = torch.compile(model, backend=zenflow, options=OPTIONS)
    compiled(torch.randn(4, 8)).sum().backward()
    optimizer = optimizer_of(compiled)
    compiled(torch.randn(7, 8)).sum().backward()
    with torch.no_grad():
        compiled(torch.randn(7, 8))
    assert optimizer_of(compiled) is optimizer


def test_owned_parameters_keep_their_optimizer() -> None:
    model = Net()
    keywords = {key: value for key, value in OPTIONS.items() if key != "inner"}
    with ZenFlowAdamW(model.up.named_parameters(), **keywords) as mine:
        torch.compile(model, backend=zenflow, options=OPTIONS)(batches(1)[0]).sum().backward()
        assert optimizer_of(model.up) is mine
        assert optimizer_of(model.down) is not mine
        with pytest.raises(ValueError, match="2 optimizers"):
            optimizer_of(model)


def test_optimizer_lives_as_long_as_the_model() -> None:
    model = Net()
    compiled = torch.compile(model, backend=zenflow, options=OPTIONS)
    compiled(batches(1)[0]).sum().backward()
    optimizer = weakref.ref(optimizer_of(compiled))
    gc.collect()
    assert optimizer() is not None
    del model, compiled
    gc.collect()
    assert optimizer() is None


def test_copy_of_the_model_has_no_optimizer() -> None:
    model = Net()
    torch.compile(model, backend=zenflow, options=OPTIONS)(batches(1)[0]).sum().backward()
    twin = copy.deepcopy(model)
    assert getattr(twin, KEEPER_ATTRIBUTE).optimizer is None
    with pytest.raises(ValueError, match="no ZenFlowAdamW owns"):
        optimizer_of(twin)


def test_only_training_raises_after_close() -> None:
    model = Net()
    compiled = torch.compile(model, backend=zenflow, options=OPTIONS)
    x = batches(1)[0]
    compiled(x).sum().backward()
    optimizer_of(compiled).close()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    with pytest.raises(RuntimeError, match="closed"):
        compiled(x)


def test_compiled_function_shares_the_models_optimizer() -> None:
    model = Net()

    def loss(x: Tensor) -> Tensor:
        return model(x).pow(2).mean()

    compiled = torch.compile(loss, backend=zenflow, options=OPTIONS)
    for x in batches(2):
        compiled(x).backward()
    assert optimizer_of(compiled) is optimizer_of(model)


def test_optimizer_of_before_the_first_forward() -> None:
    with pytest.raises(ValueError, match="run one forward first"):
        optimizer_of(torch.compile(Net(), backend=zenflow, options=OPTIONS))
    with pytest.raises(TypeError, match="pass the module"):
        optimizer_of(3)
