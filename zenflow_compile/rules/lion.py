"""Lion: Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675), Algorithm 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule, decay_of


class Lion(Rule):
    """The steps of a window move the weight together, each by its own sign."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}
    arrays: ClassVar[tuple[Array, ...]] = (Array("exp_avg"),)
    window = ("moves",)
    of_gradient: ClassVar[tuple[str, ...]] = ("beta1", "beta1_rest", "beta2", "beta2_rest", "lr")
    of_window = ("decay",)

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return options.beta1, 1.0 - options.beta1, options.beta2, 1.0 - options.beta2, options.lr

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        return (decay_of(options),)

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        direction = (c.beta1 * state.exp_avg + c.beta1_rest * gradient).sign()
        return c.beta2 * state.exp_avg + c.beta2_rest * gradient, state.moves + c.lr * direction

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return c.decay * weight - state.moves
