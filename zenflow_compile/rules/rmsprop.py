"""RMSprop: Tieleman and Hinton (lecture 6e of Neural Networks for Machine Learning, 2012), as ``torch.optim.RMSprop``.

The centered version divides by an estimate of the standard deviation: Graves (arXiv 1308.0850), equations 38 to 45.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule


class RMSprop(Rule):
    """Without momentum. Weight decay is part of the gradient, which sees the weight that the window began with."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-2, "alpha": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    arrays: ClassVar[tuple[Array, ...]] = (Array("square_avg", nonnegative=True),)
    switches: ClassVar[Mapping[str, str]] = {"centered": "CenteredRMSprop", "momentum": "MomentumRMSprop"}
    window = ("moves",)
    of_gradient: ClassVar[tuple[str, ...]] = ("alpha", "alpha_rest", "weight_decay", "eps", "lr")
    of_window = ()

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return options.alpha, 1.0 - options.alpha, options.weight_decay, options.eps, options.lr

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        return ()

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        gradient = gradient + c.weight_decay * weight
        square_avg = c.alpha * state.square_avg + c.alpha_rest * gradient * gradient
        return square_avg, state.moves + c.lr * gradient / (square_avg.sqrt() + c.eps)

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight - state.moves


class MomentumRMSprop(RMSprop):
    """With momentum."""

    defaults: ClassVar[Mapping[str, Any]] = {**RMSprop.defaults, "momentum": 0.9}
    arrays: ClassVar[tuple[Array, ...]] = (Array("momentum_buffer"), *RMSprop.arrays)
    switches: ClassVar[Mapping[str, str]] = {"centered": "CenteredRMSprop"}
    of_gradient: ClassVar[tuple[str, ...]] = (*RMSprop.of_gradient, "momentum", "of_momentum", "of_gradient")

    def from_pytorch(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """PyTorch has no buffer where there was no momentum."""
        if "momentum_buffer" in entry or "square_avg" not in entry:
            return entry
        return {"momentum_buffer": entry["square_avg"].clone().fill_(0.0), **entry}

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        """Where ``momentum`` is 0, the buffer stays, and the gradient alone moves the weight."""
        has_momentum = options.momentum != 0.0
        numbers = (options.momentum, 1.0, 0.0) if has_momentum else (1.0, 0.0, 1.0)
        return *super().gradient_numbers(options, count), *numbers

    def moved(self, state: Any, relative: Any, c: Any) -> tuple[Any, Any]:
        """The new momentum and moves; ``relative``: the gradient over its root."""
        momentum = c.momentum * state.momentum_buffer + c.of_momentum * relative
        return momentum, state.moves + c.lr * (c.of_momentum * momentum + c.of_gradient * relative)

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        gradient = gradient + c.weight_decay * weight
        square_avg = c.alpha * state.square_avg + c.alpha_rest * gradient * gradient
        momentum, moves = self.moved(state, gradient / (square_avg.sqrt() + c.eps), c)
        return momentum, square_avg, moves


class CenteredRMSprop(MomentumRMSprop):
    """Centered; without momentum by ``momentum=0``. Rounded averages might have no root, so they are kept in fp32."""

    defaults: ClassVar[Mapping[str, Any]] = {**RMSprop.defaults, "momentum": 0.0}
    switches: ClassVar[Mapping[str, str]] = {}
    fixed = MappingProxyType({"centered": True})
    arrays: ClassVar[tuple[Array, ...]] = (
        Array("momentum_buffer"),
        Array("square_avg", nonnegative=True, rounded=False),
        Array("grad_avg", rounded=False),
    )

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        gradient = gradient + c.weight_decay * weight
        square_avg = c.alpha * state.square_avg + c.alpha_rest * gradient * gradient
        grad_avg = c.alpha * state.grad_avg + c.alpha_rest * gradient
        deviation = (square_avg - grad_avg * grad_avg).sqrt() + c.eps
        momentum, moves = self.moved(state, gradient / deviation, c)
        return momentum, square_avg, grad_avg, moves
