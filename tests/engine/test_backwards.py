"""Tests backwards that raise, or that run inside each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.calls import interrupted
from tests.support.training import ADAM, EAGER_BACKEND, OFFLOAD_ALL, Training, batch, take_step
from zenflow_compile import ZenFlowAdamW, optimizer_of
from zenflow_compile.runtime.gradients.gradient_record import GradientState

pytestmark = pytest.mark.timeout(60)


class Product(nn.Module):
    """Its backward reads both weights themselves, so that their updates are on its tail."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, 32) / 4)
        self.bias = nn.Parameter(torch.zeros(32))
        self.second = nn.Parameter(torch.randn(32, 10) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first + self.bias) @ self.second


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_failed_backward_is_dropped_or_stops(max_grad_norm: float | None) -> None:
    """If parameters were updated before it failed, the step is half made: nothing goes on until a state is loaded."""
    torch.manual_seed(1)
    model = Product()
    keywords = {"inner": "eager", **ADAM, **OFFLOAD_ALL, "update_interval": 2, "max_grad_norm": max_grad_norm}
    call = torch.compile(model, backend="zenflow", options=keywords)

    def loss(step: int) -> Tensor:
        inputs = batch(step)[0].requires_grad_()
        return nn.functional.cross_entropy(call(inputs), batch(step)[1])

    for step in range(3):
        loss(step).backward()
    optimizer = optimizer_of(call)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps = optimizer.engine.step
    handle = model.bias.register_post_accumulate_grad_hook(lambda param: 1 / 0)
    failing = loss(3)
    with pytest.raises(ZeroDivisionError):
        failing.backward()
    handle.remove()
    offloaded = optimizer.engine.offloaded.values()
    updated = [each.plan.name for each in offloaded if each.shown.state is GradientState.CONSUMED]
    assert bool(updated) == (max_grad_norm is None)
    if updated:
        failing = loss(4)
        with pytest.raises(RuntimeError, match="half-way") as raised:
            failing.backward()
        assert "some parameters had been updated in it, 2 of 3 (first, ...)" in str(raised.value.__cause__)
        with pytest.raises(RuntimeError, match="half-way"):
            optimizer.synchronize()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    loss(4).backward()
    optimizer.synchronize()
    assert optimizer.engine.step == steps + 1
    assert model.bias.grad is None
    assert all(each.shown.record is None for each in optimizer.engine.offloaded.values())
    for each in optimizer.engine.offloaded.values():
        attempts = each.host.taken + len(each.host.open)
        assert each.device.steps == attempts == steps + 1
        assert len(each.host.open) < each.plan.interval
    before = [param.detach().clone() for param in model.parameters()]
    for step in range(5, 7):
        loss(step).backward()
    optimizer.synchronize()
    for old, new in zip(before, model.parameters(), strict=True):
        assert 0 < (new - old).abs().max() < 0.05


class HeadOutside(nn.Module):
    """Its backward begins outside of the graphs: the first gradient of all is ``out``'s, else ``head``'s."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, 32) / 4)
        self.bias = nn.Parameter(torch.zeros(32))
        self.head = nn.Parameter(torch.randn(32, 10) / 4)
        self.out = nn.Parameter(torch.zeros(10))
        self.has_out = False

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(torch.tanh(x @ self.first + self.bias))

    @torch.compiler.disable
    def outside(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head + self.out if self.has_out else hidden @ self.head


class Cut:
    """A model with its head outside of the graphs in the optimizer-in-backward form, and AdamW of the same steps."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = HeadOutside()
        self.other = copy.deepcopy(self.model)
        keywords = {"inner": "eager", **ADAM, **OFFLOAD_ALL, "policy": "zero_offload", "max_grad_norm": 1e3, **options}
        self.call = torch.compile(self.model, backend="zenflow", options=keywords)
        self.adam = torch.optim.AdamW(self.other.parameters(), **ADAM)

    def run(self, step: int) -> None:
        """Make one step of both."""
        self.loss(step).backward()
        inputs, targets = batch(step)
        self.other.has_out = self.model.has_out
        take_step(nn.functional.cross_entropy(self.other(inputs), targets), self.adam)

    def loss(self, step: int) -> Tensor:
        inputs, targets = batch(step)
        return nn.functional.cross_entropy(self.call(inputs.requires_grad_()), targets)

    def fail(self, step: int) -> None:
        """Run a backward that raises after the first gradient."""
        handle = self.model.bias.register_post_accumulate_grad_hook(lambda param: 1 / 0)
        loss = self.loss(step)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()

    def check(self) -> None:
        optimizer_of(self.call).synchronize()
        torch.testing.assert_close(list(self.model.parameters()), list(self.other.parameters()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("has_out", [False, True], ids=["offloaded", "resident"])
def test_first_gradient_detects_a_failed_backward(has_out: bool) -> None:
    """The first gradient of the next backward reveals that the previous backward failed; it is itself applied."""
    cut = Cut()
    for step in range(3):
        cut.run(step)
    cut.fail(3)
    cut.model.has_out = has_out  # the failed backward had no gradient of it
    for step in range(4, 7):
        cut.run(step)
        cut.check()


def test_first_gradient_after_a_half_made_step_raises() -> None:
    cut = Cut(policy="zenflow", update_interval=2, max_grad_norm=None)
    for step in range(3):
        cut.run(step)
    engine = optimizer_of(cut.call).engine
    first, head = (each for each in engine.offloaded.values())
    cut.fail(3)
    assert (first.shown.state, head.shown.state) == (GradientState.CONSUMED, GradientState.PARTS)
    with pytest.raises(RuntimeError, match="half-way"):
        cut.run(4)
    assert (engine.step, first.device.steps, head.device.steps) == (3, 4, 3)


def test_gradient_added_to_a_failed_one_raises_once() -> None:
    cut = Cut()
    cut.model.has_out = True
    for step in range(3):
        cut.run(step)
    cut.fail(3)
    loss = cut.loss(4)
    with pytest.raises(RuntimeError, match=r"gradient of out was added to .*; run this forward and backward again"):
        loss.backward()
    for step in range(4, 7):
        cut.run(step)
        cut.check()


@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_eager_use_after_a_failed_backward(clear: str) -> None:
    """A compiled backward that failed in a hook leaves nothing that a gradient from elsewhere could be taken for."""
    training, undisturbed = (Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3) for _ in range(2))

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    hook = training.model[4].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        training.backward(3)
    hook.remove()
    (training.optimizer if clear == "optimizer" else training.model).zero_grad()
    for each in (training, undisturbed):
        each.optimizer.synchronize()
        each.call = each.model  # without compilation from here on
        each.run(3, 6)
    for actual, expected in zip(training.weights(), undisturbed.weights(), strict=True):
        assert torch.equal(actual, expected)


def test_model_cast_to_double_and_back() -> None:
    """Autograd then accumulates the gradients of its parameters in new nodes."""
    training, undisturbed = (Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3) for _ in range(2))
    training.optimizer.synchronize()
    training.model.double().float()
    for actual, expected in zip(training.run(3, 6).weights(), undisturbed.run(3, 6).weights(), strict=True):
        assert torch.equal(actual, expected)


def test_gradient_returned_by_a_failed_backward() -> None:
    """A graph that fails after a hooked gradient does not return that gradient from the next backward."""
    training, undisturbed = (Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3) for _ in range(2))
    hook = training.model[4].weight.register_hook(lambda grad: None)
    first = training.optimizer.engine.offloaded[0]
    with interrupted(first.gradient.receive, ArithmeticError()), pytest.raises(ArithmeticError):
        training.backward(3)
    hook.remove()
    training.optimizer.zero_grad()
    for actual, expected in zip(training.run(3, 6).weights(), undisturbed.run(3, 6).weights(), strict=True):
        assert torch.equal(actual, expected)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.second, torch.tanh(x), use_reentrant=True)


@pytest.mark.parametrize("declared", [None, 1, 2])
def test_reentrant_checkpointing(declared: int | None) -> None:
    """Every segment is a backward of its own, inside the other: none of them is the end of the step."""
    options = {"update_interval": 1, "gradient_accumulation_steps": declared}
    training = Training(None, options, build=lambda dtype: (torch.manual_seed(1), Reentrant())[1])
    torch.manual_seed(1)
    reference = Reentrant()
    adam = torch.optim.AdamW(reference.parameters(), **ADAM)
    for step in range(4):
        for _ in range(declared or 1):
            training.backward(step)
            nn.functional.cross_entropy(reference(batch(step)[0]), batch(step)[1]).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        adam.step()
        adam.zero_grad()
    torch.testing.assert_close(training.weights(), list(reference.parameters()), atol=1e-5, rtol=0)


def test_reentrant_checkpointing_in_backward_raises() -> None:
    torch.manual_seed(1)
    model = Reentrant()
    options = {"inner": "eager", **ADAM, **OFFLOAD_ALL}
    model.first = torch.compile(model.first, backend="zenflow", options=options)
    model.second = torch.compile(model.second, backend="zenflow", options=options)
    loss = nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1])
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss.backward()


def test_forward_ahead_of_a_reselecting_step() -> None:
    """Two forwards before two steps: the second gradient is split while the first step's new selection is on its way.

    A single layer needs no weight in its backward, so that autograd lets the first step go between.
    """

    def trained(optimizer_of_model: Callable[[nn.Module], torch.optim.Optimizer], backend: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(32, 48, bias=False)
        optimizer = optimizer_of_model(model)
        call = torch.compile(
            model, backend=backend, **({"options": {"inner": "eager"}} if backend == "zenflow" else {})
        )
        for _ in range(6):
            losses = [call(torch.randn(8, 32)).square().mean() for _ in range(2)]
            for loss in losses:
                take_step(loss, optimizer)
        if isinstance(optimizer, ZenFlowAdamW):
            assert optimizer.engine.uploads.selections > 2
            optimizer.close()
        return model.weight.detach()

    keywords: dict[str, Any] = {**OFFLOAD_ALL, "update_interval": 1, "select_interval": 1}
    expected = trained(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), "eager")
    actual = trained(lambda model: ZenFlowAdamW(model.parameters(), lr=0.01, topk_ratio=0.3, **keywords), "zenflow")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
