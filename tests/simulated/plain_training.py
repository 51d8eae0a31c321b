"""Trains small models with PyTorch's own AdamW, on any device: the control of the simulated device itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.gpt import GPT, GPTConfig

STEPS = 6


def _interpret(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)


GRAPH = aot_autograd(fw_compiler=_interpret, bw_compiler=_interpret)
"""A backend of ``torch.compile``: forward and backward graphs as on any backend, run operator by operator."""

Loss = Callable[[nn.Module, int, torch.device], Tensor]


def mlp() -> nn.Module:
    """Three matrices."""
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 10))


def mlp_loss(model: nn.Module, step: int, device: torch.device) -> Tensor:
    """The loss of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 16, generator=generator).to(device)
    targets = torch.randint(0, 10, (8,), generator=generator).to(device)
    return F.cross_entropy(model(inputs), targets)


def gpt() -> nn.Module:
    """Two blocks of the examples' model."""
    return GPT(GPTConfig(vocabulary=64, context=16, layers=2, width=32, heads=2))


def gpt_loss(model: nn.Module, step: int, device: torch.device) -> Tensor:
    """The loss of a step's batch. Attention by its plain formula, which all devices have."""
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(step)).to(device)
    with sdpa_kernel(SDPBackend.MATH):
        loss: Tensor = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {"mlp": (mlp, mlp_loss), "gpt": (gpt, gpt_loss)}


def train(
    name: str,
    device: torch.device,
    *,
    compiled: bool | Callable[[nn.Module], Callable[..., Any]] = False,
    forward_in: AbstractContextManager[object] | None = None,
    step_in: AbstractContextManager[object] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Return weights and losses after a few steps of AdamW, on the host.

    Args:
        compiled: by ``GRAPH``, or the function that compiles.
        forward_in: a context for each forward.
        step_in: a context for each optimizer step.
        options: of AdamW.
    """
    build, loss_of = MODELS[name]
    torch.manual_seed(0)
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    if callable(compiled):
        call: Any = compiled(model)
    else:
        call = torch.compile(model, backend=GRAPH) if compiled else model
    losses = []
    for step in range(STEPS):
        with forward_in or nullcontext():
            loss = loss_of(call, step, device)
        loss.backward()
        with step_in or nullcontext():
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [tensor.cpu() for tensor in [*(param.detach() for param in model.parameters()), *losses]]


@cache
def trained_on_cpu(name: str, compiled: bool, fused: bool) -> list[Tensor]:
    """What ``train`` returns on the CPU: what every device must return."""
    return train(name, torch.device("cpu"), compiled=compiled, fused=fused)


def equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
