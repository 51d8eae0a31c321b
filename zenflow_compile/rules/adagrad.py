"""Adagrad: Duchi et al., Adaptive Subgradient Methods (JMLR 12, 2011), as ``torch.optim.Adagrad`` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule


class Adagrad(Rule):
    """Weight decay is part of the gradient, which sees the weight that the window began with."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10}
    arrays: ClassVar[tuple[Array, ...]] = (Array("sum", nonnegative=True),)
    window = ("moves",)
    of_gradient: ClassVar[tuple[str, ...]] = ("rate", "weight_decay", "eps")
    of_window = ()

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return options.lr / (1.0 + (count - 1) * options.lr_decay), options.weight_decay, options.eps

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        return ()

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        gradient = gradient + c.weight_decay * weight
        total = state.sum + gradient * gradient
        return total, state.moves + c.rate * gradient / (total.sqrt() + c.eps)

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight - state.moves
