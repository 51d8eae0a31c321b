"""Errors for uses of a gradient that ``step()`` has consumed, and for uses of the optimizer in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer

import zenflow_compile
from tests.support.loops import (
    ADAM,
    EXACT,
    STEPS,
    SUMMED,
    WINDOWED,
    ZERO_OFFLOAD,
    Call,
    Numbers,
    Side,
    both_entries,
    compare,
    compare_runs,
    difference,
    in_backward,
    loss_of,
    plain,
    run_of,
    small,
    train,
    weights_of,
    with_tool,
)
from zenflow_compile import ZenFlowAdamW

NAME = "inner.weight"
OPTIONS = {"exact": EXACT, "windowed": WINDOWED, "zero_offload": ZERO_OFFLOAD, "summed": SUMMED}
every_policy = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@contextmanager
def refusing(*words: str) -> Iterator[None]:
    """Expect a RuntimeError whose message has all of ``words``, raised by a check and not by a later failure."""
    with pytest.raises(RuntimeError) as caught:
        yield
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@contextmanager
def trained(options: dict[str, Any], entry: dict[str, Any] | None) -> Iterator[tuple[nn.Module, Call, Optimizer]]:
    """A model after one step whose gradients have not been cleared."""
    model = small()
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **options)
    call = torch.compile(model, **entry) if entry else model
    loss_of(call, 0).backward()
    optimizer.step()
    try:
        yield model, call, optimizer
    finally:
        optimizer.zero_grad()
        optimizer.close()


READS: dict[str, Callable[[Tensor], Any]] = {
    "clone": torch.clone,
    "item": lambda grad: grad[0, 0].item(),
    "tolist": lambda grad: grad.tolist(),
    "numpy": lambda grad: grad.numpy(),
    "mean": lambda grad: grad.mean(),
    "product": lambda grad: grad * 2 + 1,
    "equal": lambda grad: torch.equal(grad, torch.zeros_like(grad)),
    "copy": lambda grad: torch.empty(grad.shape).copy_(grad),
    "value_clip": lambda grad: grad.clamp_(-1, 1),
    "view": lambda grad: grad.view(-1)[0].item(),
}


@both_entries
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_values_after_step_are_refused(read: Callable[[Tensor], Any], entry: dict[str, Any] | None) -> None:
    with trained(EXACT, entry) as (model, _, _), refusing(NAME, "zero_grad()"):
        read(model.inner.weight.grad)


@every_policy
def test_values_after_step_under_every_policy(options: dict[str, Any]) -> None:
    with trained(options, None) as (model, _, _), refusing(NAME, "zero_grad()"):
        model.inner.weight.grad.clone()


def test_consumed_gradient_can_be_printed() -> None:
    with trained(EXACT, None) as (model, _, _):
        assert model.inner.weight.grad is not None
        assert repr(model.inner.weight.grad)


@both_entries
@every_policy
def test_second_step_on_one_gradient_is_refused(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    """Weights do not change, and the next usual step works."""
    with trained(options, entry) as (model, call, optimizer):
        optimizer.synchronize()
        before = weights_of(model)
        with refusing("zero_grad()"):
            optimizer.step()
        optimizer.synchronize()
        for param, weight in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, weight)
        optimizer.zero_grad()
        loss_of(call, 1).backward()
        optimizer.step()


USES: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "step": lambda _, optimizer: optimizer.step(),
    "read": lambda model, _: model.inner.weight.grad.clone(),
    "norm": lambda model, _: model.inner.weight.grad.norm().item(),
    "total_norm": lambda model, _: get_total_norm([param.grad for param in model.parameters()]),
    "clip": lambda model, _: clip_grad_norm_(model.parameters(), 1.0),
    "value_clip": lambda model, _: clip_grad_value_(model.parameters(), 1.0),
}


@both_entries
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_backward_onto_used_gradient_raises_at_use(
    use: Callable[[nn.Module, Optimizer], Any], entry: dict[str, Any] | None
) -> None:
    with trained(EXACT, entry) as (model, call, optimizer):
        loss_of(call, 1).backward()
        with refusing("zero_grad()"):
            use(model, optimizer)


@both_entries
@every_policy
def test_backward_onto_used_gradient_can_be_cleared(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    """The cleared backward leaves no trace, in update windows neither."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(STEPS):
            loss_of(call, 10 * step).backward()
            optimizer.step()
            loss_of(call, 10 * step + 1).backward()
            optimizer.zero_grad()
        return None

    if options is WINDOWED:
        assert difference(train(run_of(loop), options, entry), train(run_of(plain), options, entry)) <= 1e-6
    else:
        compare(loop, entry, options)


@both_entries
@every_policy
def test_step_without_gradients_does_nothing(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    """Weights, step counts and update windows equal those of the run without such steps; closures still run."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        numbers: list[float | Tensor] = [optimizer.step(lambda: 3.0)]
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=STEPS)
        for step in range(STEPS):
            loss_of(call, step).backward()
            if step % 3 == 1:
                model.zero_grad()  # a skipped batch
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
            scheduler.step()
        return numbers

    if options is WINDOWED:
        without = with_tool(None, steps=STEPS)

        def skipping(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
            optimizer.step()
            return without(model, call, EmptyStepsBetween(optimizer))

        assert difference(train(run_of(skipping), options, entry), train(run_of(plain), options, entry)) == 0.0
    else:
        compare(loop, entry, options)


class EmptyStepsBetween:
    """An optimizer whose ``zero_grad()`` is followed by a step that finds no gradient."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.step = optimizer.step
        self._optimizer = optimizer

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()
        self._optimizer.step()


@both_entries
def test_two_optimizers_step_in_turns(entry: dict[str, Any] | None) -> None:
    """Each step is of one optimizer, and only its parameters have gradients, as in GAN training."""

    def run(side: Side) -> tuple[nn.Module, Numbers]:
        model = nn.ModuleDict({"generator": small(), "critic": small()})
        calls = {name: side.compile(each) for name, each in model.items()}
        optimizers = {name: side.optimizer(each.named_parameters()) for name, each in model.items()}
        for step in range(STEPS):
            name = "critic" if step % 3 else "generator"
            loss_of(calls[name], step).backward()
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        return model, None

    compare_runs(run, entry, EXACT)


def test_failed_optimizer_refuses_empty_step() -> None:
    """A step without gradients must not hide that an earlier one failed half-way."""
    model = small()
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **EXACT)
    optimizer.engine.core.failure = MemoryError("half-way")
    with refusing("half-way"):
        optimizer.step()
    optimizer.__exit__(RuntimeError, None, None)


def test_closed_optimizer_leaves_no_gradients_behind() -> None:
    """A backward after ``close()`` gives plain gradients of the model."""
    model, reference = small(), small()
    optimizer = ZenFlowAdamW(model.named_parameters(), **{**ADAM, "lr": 0.0}, **EXACT)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.close()
    model.zero_grad()
    loss_of(model, 1).backward()
    loss_of(reference, 1).backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert type(param.grad) is Tensor
        torch.testing.assert_close(param.grad, expected.grad, atol=1e-6, rtol=0)


# The optimizer in backward


@contextmanager
def closing(call: Call) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            optimizer = zenflow_compile.optimizer_of(call)
        except ValueError:  # refused before it was made
            optimizer = None
        if optimizer is not None and not optimizer.engine.core.closed:
            optimizer.__exit__(RuntimeError, None, None)


@pytest.mark.parametrize("at", [0, 2], ids=["before_compilation", "after_compilation"])
def test_post_hook_in_backward_is_refused(at: int) -> None:
    """The update runs before the hook would, so the hook's changes would be lost."""
    model = small()
    call = in_backward(model)
    with closing(call):
        for number in range(at):
            loss_of(call, number).backward()
        model.inner.weight.register_post_accumulate_grad_hook(lambda param: None)
        with pytest.raises(RuntimeError, match=r"max_grad_norm|optimizer object|ZenFlowAdamW\("):
            loss_of(call, at).backward()


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_], ids=["norm", "value"])
def test_clip_after_backward_that_stepped_is_refused(clip: Callable[..., Any]) -> None:
    """The update has run: PyTorch's clipping would have no effect."""
    model = small()
    call = in_backward(model)
    with closing(call):
        loss_of(call, 0).backward()
        with refusing("max_grad_norm"):
            clip(model.parameters(), 1.0)


def test_compiled_autograd_in_backward_is_refused() -> None:
    """Compiled autograd runs no callback at the end of a backward, which the step needs."""
    model = small()
    call = in_backward(model)
    with closing(call):
        loss_of(call, 0).backward()
        loss = loss_of(call, 1)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")), refusing("ZenFlowAdamW"):
            loss.backward()
        loss_of(call, 2).backward()
        assert zenflow_compile.optimizer_of(call).engine.step == 2
