"""A small training that the GPU tests run in several ways, on any device, from equal weights and batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import zenflow_compile as zf

STEPS = 24
# With a rate of 1e-3, bf16 weights under gradient_transfer="mean" end anywhere: a change of one weight by a hundredth
# moves the others half as far as the training does.
LR = 3e-4
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def make_model(dtype: torch.dtype = torch.float32, device: torch.device = GPU) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(512, 1024, device="cpu"), nn.GELU(), nn.Linear(1024, 512, device="cpu")]
    return nn.Sequential(*layers).to(device=device, dtype=dtype)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    compiled: bool,
    inner: str = "eager",
    steps: int = STEPS,
    forward_stream: torch.cuda.Stream | None = None,
) -> list[Tensor]:
    """Train, and return the weights on the host in fp32.

    Args:
        forward_stream: forwards run in it, and the rest in the current stream.
    """
    run = compiled_by(optimizer, model, inner) if compiled else model
    generator = torch.Generator(device="cpu").manual_seed(1)
    param = next(model.parameters())
    for _ in range(steps):
        batch = torch.randn(64, 512, generator=generator, device="cpu").to(param)
        if forward_stream is not None:
            forward_stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if forward_stream is None else torch.cuda.stream(forward_stream):
            loss = run(batch).float().square().mean()
        if forward_stream is not None:
            torch.cuda.current_stream().wait_stream(forward_stream)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, zf.ZenFlowAdamW):
        optimizer.synchronize()
    return weights_of(model)


def compiled_by(optimizer: torch.optim.Optimizer, model: nn.Module, inner: str = "eager") -> Callable[..., Any]:
    if isinstance(optimizer, zf.ZenFlowAdamW):
        return torch.compile(model, backend="zenflow", options={"inner": inner})
    return torch.compile(model, backend="aot_eager")


def weights_of(model: nn.Module) -> list[Tensor]:
    """Copies of the weights on the host, in fp32."""
    return [param.detach().to("cpu", torch.float32, copy=True) for param in model.parameters()]


def offloading(model: nn.Module, **options: Any) -> zf.ZenFlowAdamW:
    return zf.ZenFlowAdamW(model.named_parameters(), lr=LR, device_share=0.0, **options)


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """L2 norm of the difference of all weights."""
    squares = [(mine.double() - theirs.double()).square().sum() for mine, theirs in zip(found, expected, strict=True)]
    return float(torch.stack(squares).sum().sqrt())


@cache
def rounding(dtype: torch.dtype) -> float:
    """How far rounding alone moves the weights: the distance of two exact trainings, by other kernels for everything.

    Adam amplifies rounding where gradients are near zero, by as much as a whole step, so no fixed tolerance is right.
    """
    found = []
    for device, policy in ((GPU, "resident"), (CPU, "zero_offload")):
        model = make_model(dtype, device)
        start = weights_of(model)
        with offloading(model, policy=policy) as optimizer:
            found.append(train(model, optimizer, compiled=False))
    apart = distance(*found)
    # Else a lost update would not show.
    assert apart < 0.01 * distance(found[1], start), (apart, distance(found[1], start))
    return apart


@cache
def rounding_to_int8() -> float:
    """How far rounding moves fp32 weights where it decides which of 255 numbers a gradient becomes.

    A tenth of the distance between trainings with these numbers and with the gradients themselves: measured, a change
    of one weight by a hundredth gives a twentieth.
    """
    found = []
    for transfer in ("int8", "each"):
        model = make_model(device=CPU)
        start = weights_of(model)
        with offloading(model, gradient_transfer=transfer) as optimizer:
            found.append(train(model, optimizer, compiled=False))
    apart = distance(*found) / 10
    assert apart < 0.01 * distance(found[1], start)  # else a lost update would not show
    return apart


def assert_equal_but_for_rounding(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    assert (apart := distance(found, expected)) <= 4 * rounding(dtype), (apart, rounding(dtype))


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
