"""Stochastic gradient descent with momentum: Sutskever et al. (ICML 2013), as ``torch.optim.SGD`` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule


class SGD(Rule):
    """With momentum. Weight decay is part of the gradient, which sees the weight that the window began with."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0}
    arrays: ClassVar[tuple[Array, ...]] = (Array("momentum_buffer"),)
    window = ("moves",)
    of_gradient: ClassVar[tuple[str, ...]] = ("momentum", "rest", "weight_decay", "lr")
    of_window = ()

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        rest = 1.0 if count == 1 else 1.0 - options.dampening  # the first gradient is the momentum
        return options.momentum, rest, options.weight_decay, options.lr

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        return ()

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        gradient = gradient + c.weight_decay * weight
        momentum = c.momentum * state.momentum_buffer + c.rest * gradient
        return momentum, state.moves + c.lr * self.move(gradient, momentum, c)

    def move(self, gradient: Any, momentum: Any, c: Any) -> Any:
        """What a step moves the weight by, at a rate of 1."""
        return momentum

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight - state.moves


class NesterovSGD(SGD):
    """With Nesterov's momentum."""

    def move(self, gradient: Any, momentum: Any, c: Any) -> Any:
        return gradient + c.momentum * momentum


class PlainSGD(SGD):
    """Without momentum, and without state but the master."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "weight_decay": 0.0}
    arrays: ClassVar[tuple[Array, ...]] = ()
    of_gradient: ClassVar[tuple[str, ...]] = ("weight_decay", "lr")

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return options.weight_decay, options.lr

    def check_switches(self, group: Mapping[str, Any]) -> None:
        if group.get("momentum"):
            raise ValueError(f"momentum={group['momentum']!r} must be 0 in PlainSGD; pass the rule SGD, which has one")

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        return (state.moves + c.lr * (gradient + c.weight_decay * weight),)
