"""AdamW: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101), Algorithm 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule, decay_of, rate_of


class AdamW(Rule):
    """Operations are in the order of ``torch.optim.AdamW``, one rounding each."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, "eps": 1e-8}
    fused: ClassVar[bool] = True
    decoupled: ClassVar[bool | None] = True
    switches: ClassVar[Mapping[str, str]] = {"amsgrad": "AdamWAMSGrad"}
    arrays: ClassVar[tuple[Array, ...]] = (Array("exp_avg"), Array("exp_avg_sq", nonnegative=True))
    of_gradient: ClassVar[tuple[str, ...]] = ("beta1", "beta1_rest", "beta2", "beta2_rest")
    of_window = ("decay", "step_size", "bias_correction2_sqrt", "eps")

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return options.beta1, 1.0 - options.beta1, options.beta2, 1.0 - options.beta2

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        """The decays are multiplied and the rates added up; corrections of the bias have the last gradient's betas."""
        last = options[-1]
        step_size = rate_of(options) / (1.0 - last.beta1**count)
        return decay_of(options), step_size, math.sqrt(1.0 - last.beta2**count), last.eps

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        exp_avg = c.beta1 * state.exp_avg + c.beta1_rest * gradient
        exp_avg_sq = c.beta2 * state.exp_avg_sq + c.beta2_rest * gradient * gradient
        return exp_avg, exp_avg_sq

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        denominator = state.exp_avg_sq.sqrt() / c.bias_correction2_sqrt + c.eps
        return c.decay * weight - c.step_size * state.exp_avg / denominator


class AdamWAMSGrad(AdamW):
    """With the maximum of second moments: Reddi et al., On the Convergence of Adam and Beyond (arXiv 1904.09237)."""

    switches: ClassVar[Mapping[str, str]] = {}
    fixed = MappingProxyType({"amsgrad": True})
    arrays: ClassVar[tuple[Array, ...]] = (*AdamW.arrays, Array("max_exp_avg_sq", nonnegative=True, rounded=False))

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        exp_avg, exp_avg_sq = super().accumulate(weight, state, gradient, c)
        return exp_avg, exp_avg_sq, state.max_exp_avg_sq.maximum(exp_avg_sq)

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        denominator = state.max_exp_avg_sq.sqrt() / c.bias_correction2_sqrt + c.eps
        return c.decay * weight - c.step_size * state.exp_avg / denominator


ADAMW = AdamW()
