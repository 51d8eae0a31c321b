"""NAdam: Dozat, Incorporating Nesterov Momentum into Adam (2016), as ``torch.optim.NAdam`` has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule, rate_of


class NAdam(Rule):
    """Weight decay is part of the gradient, which sees the weight that the window began with."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 2e-3,
        "betas": (0.9, 0.999),
        "weight_decay": 0.0,
        "eps": 1e-8,
        "momentum_decay": 4e-3,
    }
    arrays: ClassVar[tuple[Array, ...]] = (Array("exp_avg"), Array("exp_avg_sq", nonnegative=True))
    window = ("last",)
    of_gradient: ClassVar[tuple[str, ...]] = ("beta1", "beta1_rest", "beta2", "beta2_rest", "weight_decay")
    of_window = ("of_last", "of_average", "bias_correction2", "eps")

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return options.beta1, 1.0 - options.beta1, options.beta2, 1.0 - options.beta2, options.weight_decay

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        last, rate = options[-1], rate_of(options)
        mu, following = (_momentum(last.beta1, last.momentum_decay, step) for step in (count, count + 1))
        product = _product(last.beta1, last.momentum_decay, count)
        return (
            rate * (1.0 - mu) / (1.0 - product),
            rate * following / (1.0 - product * following),
            1.0 - last.beta2**count,
            last.eps,
        )

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        gradient = gradient + c.weight_decay * weight
        exp_avg = c.beta1 * state.exp_avg + c.beta1_rest * gradient
        return exp_avg, c.beta2 * state.exp_avg_sq + c.beta2_rest * gradient * gradient, 1.0 * gradient

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        denominator = (state.exp_avg_sq / c.bias_correction2).sqrt() + c.eps
        return weight - c.of_last * state.last / denominator - c.of_average * state.exp_avg / denominator


def _momentum(beta1: float, decay: float, step: int) -> float:
    return float(beta1 * (1.0 - 0.5 * 0.96 ** (step * decay)))


@lru_cache(maxsize=64)
def _product(beta1: float, decay: float, count: int) -> float:
    """The product of the momenta of all steps so far. It is zero in double precision after some hundreds of them."""
    return math.prod(_momentum(beta1, decay, step) for step in range(1, min(count, 10_000) + 1))
