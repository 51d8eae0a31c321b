"""Regressions in uses of ``.grad``: results of a tool are its own memory, and a failed tool changes nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from tests.support.loops import (
    ADAM,
    EXACT,
    Call,
    Numbers,
    Side,
    both_entries,
    compare,
    compare_runs,
    loss_of,
    plain,
    small,
    with_tool,
)
from zenflow_compile import ZenFlowAdamW


def grads(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


@both_entries
def test_norm_written_in_place_keeps_the_clip_exact(entry: dict[str, Any] | None) -> None:
    def write_norms_and_clip(model: nn.Module, optimizer: Optimizer) -> Tensor:
        for grad in grads(model):
            grad.norm().mul_(100.0)
        return clip_grad_norm_(model.parameters(), 0.1)

    compare(with_tool(write_norms_and_clip), entry, effect=plain)


@both_entries
def test_failed_copy_leaves_the_gradient(entry: dict[str, Any] | None) -> None:
    def copy_another_shape(model: nn.Module, optimizer: Optimizer) -> None:
        for grad in grads(model):
            with suppress(RuntimeError):
                grad.copy_(torch.ones(5))

    compare(with_tool(copy_another_shape), entry)


@both_entries
def test_reading_arguments_stay_without_memory(entry: dict[str, Any] | None) -> None:
    """Only the arguments that an in-place operator writes become dense."""
    dense: list[int] = []

    def average(model: nn.Module, optimizer: Optimizer) -> list[float | Tensor]:
        averages = [torch.ones_like(param) for param in model.parameters()]
        for mean, grad in zip(averages, grads(model), strict=True):
            mean.lerp_(grad, 0.1)
        torch._foreach_add_(averages, grads(model))
        if isinstance(optimizer, ZenFlowAdamW):
            dense.append(optimizer.engine.registry.gradients.dense)
        return list(averages)

    compare(with_tool(average), entry)
    assert dense
    assert not any(dense)


class TwoLayers(nn.Module):
    """Weights of one shape, both used in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) + self.b(x).square()


def two_layers() -> nn.Module:
    torch.manual_seed(1)
    return TwoLayers()


@both_entries
def test_two_parameters_share_a_zeroed_gradient(entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        loss_of(call, 0).backward()
        optimizer.step()
        for step in range(1, 5):
            optimizer.zero_grad(set_to_none=False)
            model.b.weight.grad = model.a.weight.grad
            loss_of(call, step).backward()
            optimizer.step()
        return None

    compare(loop, entry, build=two_layers)


@both_entries
def test_gradient_outlives_a_deleted_optimizer(entry: dict[str, Any] | None) -> None:
    def run(side: Side) -> tuple[nn.Module, Numbers]:
        model = small()
        first = side.optimizer(model.named_parameters())
        loss_of(side.compile(model), 0).backward()
        side.made.clear()
        del first
        optimizer = side.optimizer(model.named_parameters())
        loss_of(side.compile(model), 1).backward()
        optimizer.step()
        return model, None

    compare_runs(run, entry)


@both_entries
def test_cast_addition_in_a_hook_is_exact(entry: dict[str, Any] | None) -> None:
    """A hook adds gradients in another dtype than autograd would."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        def add(param: Tensor) -> None:
            assert param.grad is not None
            param.grad.add_(torch.full(param.shape, 1e-3, dtype=torch.float64))

        handles = [param.register_post_accumulate_grad_hook(add) for param in model.parameters()]
        numbers = plain(model, call, optimizer)
        for handle in handles:
            handle.remove()
        return numbers

    compare(loop, entry, effect=plain)


def test_closed_optimizer_leaves_dense_gradients() -> None:
    model, reference = small(), small()
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **EXACT)
    for each in (model, reference):
        loss_of(each, 0).backward()
    optimizer.close()
    torch.testing.assert_close(grads(model), grads(reference), atol=1e-6, rtol=0)
    assert all(type(grad) is Tensor for grad in grads(model))
