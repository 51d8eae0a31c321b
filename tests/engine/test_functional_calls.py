"""``torch.func.functional_call`` of compiled models: other weights, the model's own, and weights made from these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.support.training import ADAM, EAGER_BACKEND, take_step
from zenflow_compile import ZenFlowAdamW, optimizer_of
from zenflow_compile.runtime import ops

pytestmark = pytest.mark.usefixtures("small_weights")

EXACT: dict[str, Any] = {"min_offload_size": 1, "update_interval": 1, "topk_ratio": 0.25, "device_share": 0.0}
OPTIONS = [EXACT, {**EXACT, "offload_weights": 1.0}, {"policy": "resident"}]
Weights = Mapping[str, Tensor]
Loss = Callable[[nn.Module, int], Tensor]


def build(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24))


def batch(step: int) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(step))


def loss_of(call: nn.Module, step: int, weights: Weights | None = None) -> Tensor:
    output = call(batch(step)) if weights is None else functional_call(call, dict(weights), (batch(step),))
    return output.square().mean()


def own(call: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix("_orig_mod."): param for name, param in call.named_parameters()}


def through_functional_call(call: nn.Module, step: int) -> Tensor:
    return loss_of(call, step, own(call))


def adapted(call: nn.Module, step: int, *, create_graph: bool) -> Tensor:
    """The loss after one step of gradient descent on another batch."""
    weights = own(call)
    inner = loss_of(call, step, weights)
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=create_graph)
    moved = {name: weight - 0.1 * each for (name, weight), each in zip(weights.items(), gradients, strict=True)}
    return loss_of(call, step + 50, moved)


def first_order(call: nn.Module, step: int) -> Tensor:
    return adapted(call, step, create_graph=False)


def second_order(call: nn.Module, step: int) -> Tensor:
    return adapted(call, step, create_graph=True)


def train(call: Any, optimizer: Any, *losses: Loss, first: int = 0) -> list[float]:
    found = []
    for step, each in enumerate(losses, start=first):
        loss = each(call, step)
        take_step(loss, optimizer)
        found.append(float(loss.detach()))
    return found


def adamw(*losses: Loss) -> list[float]:
    model = build()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), *losses)


class Run:
    def __init__(self, options: dict[str, Any]) -> None:
        torch._dynamo.reset()
        self.model = build()
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), lr=1e-2, **options)
        self.call: Any = torch.compile(self.model, **EAGER_BACKEND)


def some(weights: Weights) -> Weights:
    return {"0.weight": weights["0.weight"], "2.bias": weights["2.bias"]}


@pytest.mark.parametrize("kind", ["tensors", "parameters", "some"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_weights_are_evaluated(options: dict[str, Any], kind: str) -> None:
    """Before the model's first training step, too, and with updates in flight."""
    run, reference, other = Run(options), build(), dict(build(5).named_parameters())
    adamw = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    given = {"tensors": {name: param.detach() for name, param in other.items()}, "some": some(other)}.get(kind, other)
    for step in range(4):
        with torch.no_grad():
            found, expected = (functional_call(each, dict(given), (batch(99),)) for each in (run.call, reference))
        assert torch.allclose(found, expected, rtol=0, atol=1e-7)
        losses = train(run.call, run.optimizer, loss_of, first=step)
        assert losses == pytest.approx(train(reference, adamw, loss_of, first=step), rel=0, abs=1e-7)
    assert not any(map(ops.is_owned, other.values()))
    run.optimizer.close()


@pytest.mark.parametrize("losses", [[through_functional_call] * 4, [loss_of, through_functional_call] * 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_own_parameters_train_as_adamw(options: dict[str, Any], losses: list[Loss]) -> None:
    run = Run(options)
    assert train(run.call, run.optimizer, *losses) == pytest.approx(adamw(*losses), rel=0, abs=1e-7)
    run.optimizer.close()


@pytest.mark.parametrize("options", [EXACT, {"policy": "resident"}], ids=str)
def test_first_order_meta_gradient_equals_adamw(options: dict[str, Any]) -> None:
    run, losses = Run(options), [first_order, first_order, loss_of, first_order]
    assert train(run.call, run.optimizer, *losses) == pytest.approx(adamw(*losses), rel=0, abs=1e-7)
    run.optimizer.close()


def test_second_order_needs_the_plain_module() -> None:
    """PyTorch's compiled backwards have no second derivative under any backend."""
    run = Run(EXACT)
    losses = train(run.call, run.optimizer, loss_of)
    with pytest.raises(RuntimeError, match="create_graph"):
        second_order(run.call, 1)
    losses += train(run.model, run.optimizer, second_order, second_order, first=1)
    losses += train(run.call, run.optimizer, loss_of, first=3)
    assert losses == pytest.approx(adamw(loss_of, second_order, second_order, loss_of), rel=0, abs=1e-7)
    run.optimizer.close()


def test_weights_with_an_update_in_flight_are_refused() -> None:
    run = Run(EXACT)
    train(run.call, run.optimizer, loss_of)
    with pytest.raises(RuntimeError, match=r"after optimizer\.synchronize\(\)"):
        {name: param * 1.01 for name, param in run.model.named_parameters()}
    run.optimizer.close()


def test_options_of_compile_train_only_the_model() -> None:
    torch._dynamo.reset()
    model, other = build(), build(5)
    options = {**EAGER_BACKEND["options"], **ADAM, **EXACT}
    call: Any = torch.compile(model, backend="zenflow", options=options)
    with pytest.raises(RuntimeError, match="call the compiled model directly first"):
        loss_of(call, 0, dict(other.named_parameters()))
    loss_of(call, 0).backward()
    expected = [param.detach().clone() for param in other.parameters()]
    loss_of(call, 1, dict(other.named_parameters())).backward()
    assert all(map(torch.equal, other.parameters(), expected))
    assert all(param.grad is not None for param in other.parameters())
    assert not any(map(ops.is_owned, other.parameters()))
    assert all(map(ops.is_owned, model.parameters()))
    optimizer_of(call).close()
