"""Compiled code that reads, writes and clears ``.grad``, and recompilation while ``.grad`` is not a plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from tests.support.loops import (
    EXACT,
    WINDOWED,
    ZERO_OFFLOAD,
    Call,
    Loop,
    Numbers,
    both_entries,
    compare,
    difference,
    gradients,
    loss_of,
    run_of,
    train,
    with_tool,
)
from tests.support.training import EAGER_BACKEND, batch
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(120)

backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def grads_of(params: list[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


# Compiled functions of gradients


@both_entries
@backends
def test_compiled_readers_see_gradients(backend: str, entry: dict[str, Any] | None) -> None:
    """Gradients are attributes of captured parameters, and arguments."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        params = list(model.parameters())

        @torch.compile(backend=backend)
        def of_params() -> list[Tensor]:
            grads = grads_of(params)
            norms = torch.stack([grad.norm() for grad in grads])
            return [*(grad.abs().sum() for grad in grads), norms, grads[0].sum(0)]

        @torch.compile(backend=backend)
        def of_grads(grads: list[Tensor]) -> list[Tensor]:
            return [grad.abs().mean() for grad in grads]

        numbers: list[float | Tensor] = []
        for step in range(4):
            for part in range(2):
                loss_of(call, 10 * step + part).backward()
                numbers += [*of_params(), *of_grads(grads_of(params))]
            optimizer.step()
            optimizer.zero_grad()
        return numbers

    compare(loop, entry, rel=1e-5)


@both_entries
@backends
def test_compiled_writers_change_gradients(backend: str, entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        params = list(model.parameters())

        @torch.compile(backend=backend)
        def edit() -> None:
            for param in params:
                assert param.grad is not None
                param.grad.mul_(0.5)
                param.grad.add_(param, alpha=0.01)
                param.grad.clamp_(-0.02, 0.02)
                param.grad[0] = 0.0

        @torch.compile(backend=backend)
        def assign() -> None:
            for param in params:
                assert param.grad is not None
                param.grad = param.grad * 2 + 0.01

        @torch.compile(backend=backend)
        def scale(grads: list[Tensor]) -> None:
            for grad in grads:
                grad.mul_(0.5)
                grad.neg_()

        numbers: list[float | Tensor] = []
        for step in range(6):
            loss_of(call, 10 * step).backward()
            [edit, assign, lambda: scale(grads_of(params))][step % 3]()
            numbers += gradients(model)
            loss_of(call, 10 * step + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        return numbers

    compare(loop, entry, effect=with_tool(None, steps=6, backwards=2), rel=1e-5)


@both_entries
def test_compiled_clearing_discards_gradients(entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        params = list(model.parameters())

        @torch.compile(backend="eager")
        def to_none() -> None:
            for param in params:
                param.grad = None

        @torch.compile(backend="eager")
        def to_zero() -> None:
            for param in params:
                if param.grad is not None:
                    param.grad.zero_()

        clear = [to_none, to_zero, torch.compile(lambda: optimizer.zero_grad(), backend="eager")]
        for step in range(6):
            loss_of(call, 10 * step + 1).backward()
            clear[step % 3]()
            loss_of(call, 10 * step).backward()
            optimizer.step()
            clear[(step + 1) % 3]()
        return None

    compare(loop, entry, effect=with_tool(None, steps=6, backwards=2))


@backends
def test_compiled_method_step_equals_adamw(backend: str) -> None:
    """``torch.compile(optimizer.step)``, with clipped and plain gradients, and missing ones."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        step = torch.compile(optimizer.step, backend=backend)
        for number in range(6):
            loss_of(call, number).backward()
            if number % 2:
                clip_grad_norm_(model.parameters(), 0.05)
            if number % 3 == 2:
                model.up.weight.grad = None
            step()
            optimizer.zero_grad()
        return None

    compare(loop, EAGER_BACKEND, effect=with_tool(None, steps=6))


# Whole training steps


@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD], ids=["exact", "zero_offload"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "zenflow"])
def test_compiled_step_with_clip_equals_adamw(backend: str, options: dict[str, Any]) -> None:
    """Two backwards, a clip, the step and ``zero_grad()`` are in one compiled function."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        params = list(model.parameters())

        def train_step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            for part in (inputs, 2 * inputs):
                loss = F.cross_entropy(model(part), targets)
                loss.backward()
            norm = clip_grad_norm_(params, 0.05)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), norm

        if isinstance(optimizer, ZenFlowAdamW):
            inner = {"options": {"inner": "eager"}} if backend == "zenflow" else {}
            train_step = torch.compile(train_step, backend=backend, **inner)
        return [number for step in range(5) for number in train_step(*batch(step))]

    compare(loop, None, options, rel=1e-5)


# Recompilation of the forward

SIZES = [8, 5, 3, 8, 6, 2, 7, 4]


def part_of(call: Call, number: int, size: int) -> Tensor:
    inputs, targets = batch(number)
    return F.cross_entropy(call(inputs[:size]), targets[:size])


def while_away(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    for step, size in enumerate(SIZES):
        loss_of(call, 10 * step).backward()
        part_of(call, 10 * step + 1, size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return None


def while_consumed(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    """``zero_grad()`` comes after the next forward, as in loops that call it before ``backward()``."""
    for step, size in enumerate(SIZES):
        loss = part_of(call, step, size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return None


def zeroed_after_forward(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    """Gradients are offloaded during the forward, and None or zero in its backward."""
    for step, size in enumerate(SIZES):
        loss_of(call, 10 * step + 1).backward()
        loss = part_of(call, 10 * step, size)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        optimizer.step()
    return None


def while_dense(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    for step, size in enumerate(SIZES):
        loss_of(call, 10 * step).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad[0] *= 2
        part_of(call, 10 * step + 1, size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return None


def while_evaluating(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    """Graphs for inference are captured between backward and step, and after it."""
    numbers: list[float | Tensor] = []
    for step, size in enumerate(SIZES):
        loss_of(call, step).backward()
        if step % 2:
            optimizer.step()
        model.eval()
        with torch.no_grad():
            numbers.append(part_of(call, step, size))
        model.train()
        if not step % 2:
            optimizer.step()
        optimizer.zero_grad()
    return numbers


RECOMPILING: list[Loop] = [while_away, while_consumed, zeroed_after_forward, while_dense, while_evaluating]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "automatic"])
@pytest.mark.parametrize("loop", RECOMPILING, ids=lambda loop: loop.__name__)
def test_recompiled_forward_equals_adamw(loop: Loop, dynamic: bool | None) -> None:
    compare(loop, {**EAGER_BACKEND, "dynamic": dynamic}, rel=1e-5)


@pytest.mark.parametrize("loop", [while_away, while_consumed, zeroed_after_forward], ids=lambda loop: loop.__name__)
def test_recompiled_forward_with_windows(loop: Callable[..., Numbers]) -> None:
    """At S = 4, graphs for new shapes see the weights that the loop without compilation sees."""
    compiled = train(run_of(loop), WINDOWED, {**EAGER_BACKEND, "dynamic": False})
    assert difference(compiled, train(run_of(loop), WINDOWED, None)) < 1e-6
