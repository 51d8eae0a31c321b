"""Emulates a device by sleeping: its work takes a known time and no core, so that any machine can test schedules."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from zenflow_compile.runtime.host.host_adam import HostAdam, WindowUpdate


@torch.library.custom_op("emulated::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """``x @ weight.T``, which takes ``seconds``, as does each of its two gradients."""
    time.sleep(seconds)
    return x @ weight.t()


@torch.library.custom_op("emulated::input_grad", mutates_args=())
def input_grad(grad: Tensor, weight: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return grad @ weight


@torch.library.custom_op("emulated::weight_grad", mutates_args=())
def weight_grad(grad: Tensor, x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return grad.t() @ x


@linear.register_fake
def _(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@input_grad.register_fake
def _(grad: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[1])


@weight_grad.register_fake
def _(grad: Tensor, x: Tensor, seconds: float) -> Tensor:
    return grad.new_empty(grad.shape[1], x.shape[1])


def _save(ctx: object, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.seconds = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(x, weight)  # type: ignore[attr-defined]


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
    seconds = ctx.seconds  # type: ignore[attr-defined]
    return input_grad(grad, weight, seconds), weight_grad(grad, x, seconds), None


linear.register_autograd(_backward, setup_context=_save)


class EmulatedModel(nn.Module):
    """Square layers whose forward, input gradient and weight gradient take ``seconds`` each."""

    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(layers))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.layers:
            x = torch.tanh(linear(x, weight, self.seconds))
        return x


class SlowHostAdam:
    """A host kernel that takes a given time per element, most of it asleep: slow without using a core."""

    def __init__(self, kernel: HostAdam, seconds_per_element: float) -> None:
        self.kernel = kernel
        self.seconds_per_element = seconds_per_element
        self.name = kernel.name

    def __call__(self, update: WindowUpdate, part: slice) -> None:
        end = time.perf_counter() + self.seconds_per_element * (part.stop - part.start)
        self.kernel(update, part)
        time.sleep(max(0.0, end - time.perf_counter()))
