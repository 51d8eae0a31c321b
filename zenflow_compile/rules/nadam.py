"""NAdam: Dozat, Incorporating Nesterov Momentum into Adam (2016), as ``torch.optim.NAdam`` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule, rate_of


class NAdam(Rule):
    """Weight decay is part of the gradient, which sees the weight that the window began with.

    The momenta of all steps are multiplied, as they were in each: ``mu_rest`` is one less that product.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 2e-3,
        "betas": (0.9, 0.999),
        "weight_decay": 0.0,
        "eps": 1e-8,
        "momentum_decay": 4e-3,
    }
    decoupled: ClassVar[bool | None] = False
    arrays: ClassVar[tuple[Array, ...]] = (
        Array("exp_avg"),
        Array("exp_avg_sq", nonnegative=True),
        Array("mu_rest", nonnegative=True, rounded=False),
    )
    window = ("last",)
    of_gradient: ClassVar[tuple[str, ...]] = ("beta1", "beta1_rest", "beta2", "beta2_rest", "weight_decay", "mu")
    of_window = ("of_last", "of_average", "following", "bias_correction2", "eps")

    def from_pytorch(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """PyTorch has the product of momenta once.

        Raises:
            ValueError: it is not there, although there were steps: PyTorch has read the others into a state of ours.
        """
        if "mu_product" not in entry or "exp_avg" not in entry:
            if "mu_rest" in entry and float(entry["step"]) and not bool(entry["mu_rest"].any()):
                raise ValueError(
                    "the state of torch.optim.NAdam has no 'mu_product', which PyTorch has not read into the state of "
                    "this optimizer: load it by optimizer.load_state_dict()"
                )
            return entry
        rest = entry["exp_avg"].clone().fill_(1.0 - float(entry["mu_product"]))
        return {name: value for name, value in entry.items() if name != "mu_product"} | {"mu_rest": rest}

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        betas = options.beta1, 1.0 - options.beta1, options.beta2, 1.0 - options.beta2
        return *betas, options.weight_decay, _momentum(options, count)

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        last, rate = options[-1], rate_of(options)
        following = _momentum(last, count + 1)
        of_last = rate * (1.0 - _momentum(last, count))
        return of_last, rate * following, following, 1.0 - last.beta2**count, last.eps

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        gradient = gradient + c.weight_decay * weight
        exp_avg = c.beta1 * state.exp_avg + c.beta1_rest * gradient
        exp_avg_sq = c.beta2 * state.exp_avg_sq + c.beta2_rest * gradient * gradient
        return exp_avg, exp_avg_sq, 1.0 - (1.0 - state.mu_rest) * c.mu, gradient

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        denominator = (state.exp_avg_sq / c.bias_correction2).sqrt() + c.eps
        following_rest = 1.0 - (1.0 - state.mu_rest) * c.following
        of_last = c.of_last * state.last / (state.mu_rest * denominator)
        return weight - of_last - c.of_average * state.exp_avg / (following_rest * denominator)


def _momentum(options: Any, step: int) -> float:
    return float(options.beta1 * (1.0 - 0.5 * 0.96 ** (step * options.momentum_decay)))
