"""Runs one training loop under ``ZenFlowAdamW`` and under ``torch.optim.AdamW``, and compares the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import zenflow_compile
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, batch
from zenflow_compile import ZenFlowAdamW

STEPS = 12

# With this eps the scale of a gradient counts: plain Adam would hide a lost or doubled factor.
ADAM: dict[str, Any] = {"lr": 5e-3, "weight_decay": 0.01, "eps": 1e-3}

# Every matrix is offloaded, and a quarter of its columns is selected.
PLACEMENT: dict[str, Any] = {"topk_ratio": 0.25, "min_offload_size": 1, "device_share": 0.0}
EXACT: dict[str, Any] = {**PLACEMENT, "update_interval": 1}
WINDOWED: dict[str, Any] = {**PLACEMENT, "update_interval": 4}
ZERO_OFFLOAD: dict[str, Any] = {"policy": "zero_offload", "min_offload_size": 1}
SUMMED: dict[str, Any] = {**WINDOWED, "gradient_transfer": "mean", "full_warm_up_rounds": 100}

INDUCTOR: dict[str, Any] = {"backend": "zenflow"}
both_entries = pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)

Call = Callable[..., Any]
Numbers = Sequence[float | Tensor] | None
Loop = Callable[[nn.Module, Call, Optimizer], Numbers]
Tool = Callable[[nn.Module, Optimizer], Any]


class Small(nn.Module):
    """Three matrices of 192, 256 and 160 elements; ``inner`` is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 12)
        self.inner = nn.Linear(16, 16)
        self.down = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(torch.tanh(self.inner(torch.tanh(self.inner(x)))))))


def small() -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(1)
    return Small()


def loss_of(call: Call, number: int) -> Tensor:
    """Cross entropy on batch ``number``, computed outside of the compiled graph."""
    inputs, targets = batch(number)
    return F.cross_entropy(call(inputs), targets)


def gradients(model: nn.Module) -> list[Tensor]:
    """Copy all gradients into plain tensors."""
    return [param.grad.detach().clone() for param in model.parameters() if param.grad is not None]


def weights_of(model: nn.Module) -> list[Tensor]:
    """Copy all weights."""
    return [param.detach().clone() for param in model.parameters()]


def in_backward(model: nn.Module, options: dict[str, Any] = EXACT) -> Call:
    """The model compiled with an optimizer that steps in the backward."""
    return torch.compile(model, backend="zenflow", options={**EAGER_BACKEND["options"], **ADAM, **options})


def synchronize(optimizer: Optimizer) -> None:
    """Make all updates visible before weights are read or written outside of the compiled model."""
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.synchronize()


def with_tool(tool: Tool | None, *, steps: int = STEPS, backwards: int = 1) -> Loop:
    """A loop that calls ``tool`` between backward and step, and returns the numbers that it returned."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        numbers: list[float | Tensor] = []
        for step in range(steps):
            for part in range(backwards):
                loss_of(call, 10 * step + part).backward()
            returned = None if tool is None else tool(model, optimizer)
            if isinstance(returned, list):
                numbers += returned
            elif returned is not None:
                numbers.append(returned)
            optimizer.step()
            optimizer.zero_grad()
        return numbers

    return loop


plain = with_tool(None)


@dataclass
class Side:
    """One of the two optimizers, and how its models are called.

    Attributes:
        options: of ``ZenFlowAdamW``; None for ``torch.optim.AdamW``.
        entry: arguments for ``torch.compile``; None to train without it.
    """

    options: dict[str, Any] | None
    entry: dict[str, Any] | None = None
    made: list[Optimizer] = field(default_factory=list)

    def optimizer(self, params: Any, **adam: Any) -> Optimizer:
        if self.options is None:
            self.made.append(torch.optim.AdamW(params, **{**ADAM, **adam}))
        else:
            self.made.append(ZenFlowAdamW(params, **{**ADAM, **adam, **self.options}))
            if self.options.get("policy") != "resident":
                assert self.made[-1].engine.offloaded, "no parameter is offloaded: the test would show nothing"
        return self.made[-1]

    def compile(self, model: Call) -> Call:
        return model if self.options is None or self.entry is None else torch.compile(model, **self.entry)

    def synchronize(self) -> None:
        for optimizer in self.made:
            synchronize(optimizer)

    def close(self) -> None:
        for optimizer in self.made:
            if isinstance(optimizer, ZenFlowAdamW):
                with suppress(RuntimeError):  # follows from the error to see
                    optimizer.__exit__(RuntimeError, None, None)


@dataclass(frozen=True)
class Trained:
    """The results of a loop: copies of all weights, and the returned numbers."""

    weights: list[Tensor]
    numbers: list[float | Tensor]


Run = Callable[[Side], tuple[nn.Module, Numbers]]


def train(run: Run, options: dict[str, Any] | None, entry: dict[str, Any] | None = None) -> Trained:
    """Train once. With ``options`` None, the optimizer is ``torch.optim.AdamW`` and nothing is compiled."""
    side = Side(options, entry)
    try:
        torch.manual_seed(2)
        model, numbers = run(side)
        side.synchronize()
        return Trained(weights_of(model), list(numbers or ()))
    finally:
        side.close()


def run_of(loop: Loop, build: Callable[[], nn.Module] = small, groups: Callable[[nn.Module], Any] | None = None) -> Run:
    """The run that builds one model and one optimizer for ``loop``."""

    def run(side: Side) -> tuple[nn.Module, Numbers]:
        model = build()
        optimizer = side.optimizer(groups(model) if groups else model.named_parameters())
        return model, loop(model, side.compile(model), optimizer)

    return run


def difference(a: Trained, b: Trained) -> float:
    """Return the largest difference of two runs' weights."""
    return max(float((x - y).abs().max()) for x, y in zip(a.weights, b.weights, strict=True))


def assert_close(actual: Trained, expected: Trained, *, atol: float = 1e-5, rel: float = 1e-6) -> None:
    """Numbers that are floats or scalars agree to ``rel``, other tensors and all weights to ``atol``."""
    counts = len(actual.numbers), len(expected.numbers)
    assert counts[0] == counts[1], f"the loop returned {counts[0]} numbers, and {counts[1]} under AdamW"
    for index, (a, b) in enumerate(zip(actual.numbers, expected.numbers, strict=True)):
        if isinstance(b, Tensor) and b.dim() > 0:
            torch.testing.assert_close(a, b, atol=atol, rtol=0, msg=lambda m, i=index: f"number {i}: {m}")
        elif math.isfinite(float(b)):
            assert float(a) == pytest.approx(float(b), rel=rel, abs=0.0), (
                f"number {index} is {float(a)}, not {float(b)}"
            )
        else:
            assert str(float(a)) == str(float(b)), f"number {index} is {float(a)}, not {float(b)}"
    for index, (a, b) in enumerate(zip(actual.weights, expected.weights, strict=True)):
        torch.testing.assert_close(a, b, atol=atol, rtol=0, msg=lambda m, i=index: f"weight {i}: {m}")


def compare_runs(
    run: Run,
    entry: dict[str, Any] | None = None,
    options: dict[str, Any] = EXACT,
    *,
    effect: Run | None = None,
    rel: float = 1e-6,
) -> None:
    """Run under both optimizers and compare.

    Args:
        effect: the same run without the tested feature; under AdamW its weights must differ, or nothing is tested.
        rel: relative tolerance of returned numbers.
    """
    expected = train(run, None)
    assert all(torch.isfinite(weight).all() for weight in expected.weights)
    if effect is not None:
        assert difference(train(effect, None), expected) > 2e-4, "the loop does not depend on what is tested"
    assert_close(train(run, options, entry), expected, rel=rel)


def compare(
    loop: Loop,
    entry: dict[str, Any] | None = None,
    options: dict[str, Any] = EXACT,
    build: Callable[[], nn.Module] = small,
    *,
    groups: Callable[[nn.Module], Any] | None = None,
    effect: Loop | None = None,
    rel: float = 1e-6,
) -> None:
    """Run ``loop(model, call, optimizer)`` under both optimizers, on equal models and data, and compare.

    Args:
        groups: returns the optimizer's parameters or groups of the model; None for its named parameters.
        effect: the same loop without the tested feature, as in :func:`compare_runs`.
    """
    without = None if effect is None else run_of(effect, build, groups)
    compare_runs(run_of(loop, build, groups), entry, options, effect=without, rel=rel)


def compare_in_backward(
    loop: Callable[[nn.Module, Call, Callable[[], None]], Numbers],
    build: Callable[[], nn.Module] = small,
    options: dict[str, Any] = EXACT,
) -> None:
    """Compare the optimizer in backward with AdamW. ``loop(model, call, step)`` calls ``step`` after each backward."""

    def reference(side: Side) -> tuple[nn.Module, Numbers]:
        model = build()
        optimizer = side.optimizer(model.parameters())

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return model, loop(model, model, step)

    expected = train(reference, None)
    torch.manual_seed(2)
    model = build()
    call = in_backward(model, options)
    numbers = loop(model, call, lambda: None)
    optimizer = zenflow_compile.optimizer_of(call)
    try:
        assert optimizer.engine.offloaded
        optimizer.synchronize()
        assert_close(Trained(weights_of(model), list(numbers or ())), expected)
    finally:
        with suppress(RuntimeError):
            optimizer.close()
