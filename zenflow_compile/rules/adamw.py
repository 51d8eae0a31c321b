"""AdamW: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101), Algorithm 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zenflow_compile.rules.rule import Array, Rule

if TYPE_CHECKING:
    from torch import Tensor


class AdamW(Rule):
    """The order of operations is that of ``torch.optim.AdamW``, one rounding each.

    ``beta1_rest`` is 1 - beta1, computed in double precision; ``step_size`` the rate over 1 - beta1 ** step.
    """

    arrays = (Array("exp_avg"), Array("exp_avg_sq", nonnegative=True))
    of_gradient = ("beta1", "beta1_rest", "beta2", "beta2_rest")
    of_window = ("decay", "step_size", "bias_correction2_sqrt", "eps")

    def accumulate(self, weight: Tensor, state: Any, gradient: Tensor, c: Any) -> tuple[Tensor, ...]:
        exp_avg = c.beta1 * state.exp_avg + c.beta1_rest * gradient
        exp_avg_sq = c.beta2 * state.exp_avg_sq + c.beta2_rest * gradient * gradient
        return exp_avg, exp_avg_sq

    def apply(self, weight: Tensor, state: Any, c: Any) -> Tensor:
        denominator = state.exp_avg_sq.sqrt() / c.bias_correction2_sqrt + c.eps
        moved: Tensor = c.decay * weight - c.step_size * state.exp_avg / denominator
        return moved


ADAMW = AdamW()
