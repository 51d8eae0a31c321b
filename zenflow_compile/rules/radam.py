"""RAdam: Liu et al., On the Variance of the Adaptive Learning Rate (arXiv 1908.03265), Algorithm 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule, rate_of


class RAdam(Rule):
    """As ``torch.optim.RAdam``. Weight decay is part of the gradient, with the weight that the window began with."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "eps": 1e-8}
    decoupled: ClassVar[bool | None] = False
    arrays: ClassVar[tuple[Array, ...]] = (Array("exp_avg"), Array("exp_avg_sq", nonnegative=True))
    of_gradient: ClassVar[tuple[str, ...]] = ("beta1", "beta1_rest", "beta2", "beta2_rest", "weight_decay")
    of_window = ("step_size", "adaptive", "plain", "eps")

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return options.beta1, 1.0 - options.beta1, options.beta2, 1.0 - options.beta2, options.weight_decay

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        last, kept = options[-1], options[-1].beta2 ** count
        step_size, most = rate_of(options) / (1.0 - last.beta1**count), 2.0 / (1.0 - last.beta2) - 1.0
        length = most - 2.0 * count * kept / (1.0 - kept)  # of the approximated simple moving average
        if length <= 5.0:
            return step_size, 0.0, 1.0, 1.0
        of_length = (length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length)
        return step_size, math.sqrt(of_length) * math.sqrt(1.0 - kept), 0.0, last.eps

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        gradient = gradient + c.weight_decay * weight
        exp_avg = c.beta1 * state.exp_avg + c.beta1_rest * gradient
        return exp_avg, c.beta2 * state.exp_avg_sq + c.beta2_rest * gradient * gradient

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight - c.step_size * state.exp_avg * (c.adaptive / (state.exp_avg_sq.sqrt() + c.eps) + c.plain)
