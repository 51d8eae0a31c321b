"""Adamax: Kingma and Ba (arXiv 1412.6980), Algorithm 2, as ``torch.optim.Adamax`` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule, rate_of


class Adamax(Rule):
    """Weight decay is part of the gradient, which sees the weight that the window began with."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 2e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "eps": 1e-8}
    arrays: ClassVar[tuple[Array, ...]] = (Array("exp_avg"), Array("exp_inf", nonnegative=True, rounded=False))
    of_gradient: ClassVar[tuple[str, ...]] = ("beta1", "beta1_rest", "beta2", "weight_decay", "eps")
    of_window = ("step_size",)

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return options.beta1, 1.0 - options.beta1, options.beta2, options.weight_decay, options.eps

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        return (rate_of(options) / (1.0 - options[-1].beta1 ** count),)

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        gradient = gradient + c.weight_decay * weight
        exp_avg = c.beta1 * state.exp_avg + c.beta1_rest * gradient
        return exp_avg, (c.beta2 * state.exp_inf).maximum(gradient.abs() + c.eps)

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight - c.step_size * state.exp_avg / state.exp_inf
