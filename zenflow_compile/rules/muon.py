"""Muon: Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024), as ``torch.optim.Muon`` has it.

``match_rms_adamw`` is of Liu et al., Muon is Scalable for LLM Training (arXiv 2502.16982), section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from zenflow_compile.checks.validate import check_flag, check_integer, check_number
from zenflow_compile.rules.rule import Array, Rule, counted, decay_of, rate_of

_ADJUSTMENTS = ("original", "match_rms_adamw")


class Muon(Rule):
    """For matrices: their momentum, orthogonalized by Newton-Schulz iterations in bf16, moves them.

    Args:
        nesterov, ns_coefficients, ns_steps, adjust_lr_fn: as in ``torch.optim.Muon``; alike in all groups of the rule.
        numbers: ``lr``, ``weight_decay``, ``momentum``, ``eps``.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "eps": 1e-7}
    arguments: ClassVar[tuple[str, ...]] = ("nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
    decoupled: ClassVar[bool | None] = True
    arrays: ClassVar[tuple[Array, ...]] = (Array("momentum_buffer"),)
    window = ("direction",)
    of_matrix: ClassVar[str] = "direction"
    # In fp32 the new momentum and the direction, and three temporaries of ``apply``; stacks of matrices take 16.
    matrix_scratch: ClassVar[int] = 20
    of_gradient: ClassVar[tuple[str, ...]] = ("rest", "of_nesterov")
    of_window = ("decay", "rate")

    def __init__(
        self,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **numbers: Any,
    ) -> None:
        super().__init__(**numbers)
        if adjust_lr_fn not in (None, *_ADJUSTMENTS):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} must be None or one of {', '.join(_ADJUSTMENTS)}")
        if not isinstance(ns_coefficients, (tuple, list)) or len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients={ns_coefficients!r} must be three numbers")
        limit = 1e3
        found = [check_number(f"ns_coefficients[{at}]", each, -limit, limit) for at, each in enumerate(ns_coefficients)]
        self.fixed = {
            "nesterov": check_flag("nesterov", nesterov),
            "ns_coefficients": tuple(found),
            "ns_steps": check_integer("ns_steps", ns_steps, 1, 99),
            "adjust_lr_fn": adjust_lr_fn,
        }

    def from_pytorch(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """PyTorch counts no steps: a buffer has had a gradient."""
        return counted(entry, "momentum_buffer")

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        rest = 1.0 - options.momentum
        return rest, rest if self.fixed["nesterov"] else 0.0

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        return decay_of(options), rate_of(options)

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        momentum = state.momentum_buffer + c.rest * (gradient - state.momentum_buffer)
        return momentum, momentum - c.of_nesterov * (momentum - gradient)

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return c.decay * weight - c.rate * state.direction

    def on_matrices(self, values: Any, options: Any) -> Any:
        """Newton-Schulz iterations (``ns_steps`` of them), times the factor of the learning rate."""
        rows, columns = values.shape[1:]
        a, b, c = self.fixed["ns_coefficients"]
        found = values.bfloat16()
        found = found.mT if rows > columns else found
        found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=options.eps)
        for _ in range(self.fixed["ns_steps"]):
            gram = found @ found.mT
            found = found.baddbmm(gram.baddbmm(gram, gram, beta=b, alpha=c), found, beta=a)
        found = found.mT if rows > columns else found
        return found.to(values.dtype).mul_(self._factor(rows, columns))

    def _factor(self, rows: int, columns: int) -> float:
        if self.fixed["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def matrix_flops(self, rows: int, columns: int) -> float:
        """Of an update: per iteration two products with the longer side, and one of the shorter side alone."""
        short, long = sorted((rows, columns))
        return float(self.fixed["ns_steps"] * (4 * short * short * long + 2 * short**3))
