"""Adam: Kingma and Ba (arXiv 1412.6980), Algorithm 1, with weight decay in the gradient as ``torch.optim.Adam``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from zenflow_compile.rules.adamw import AdamW, AdamWAMSGrad
from zenflow_compile.rules.rule import Rule


class _InGradient(Rule):
    """Weight decay is part of the gradient, which sees the weight that the window began with."""

    decoupled: ClassVar[bool | None] = False

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return *super().gradient_numbers(options, count), options.weight_decay  # type: ignore[safe-super]

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        _, *numbers = super().window_numbers(options, count)  # type: ignore[safe-super]
        return 1.0, *numbers

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        return super().accumulate(weight, state, gradient + c.weight_decay * weight, c)  # type: ignore[safe-super]


class Adam(_InGradient, AdamW):
    """See the module."""

    defaults: ClassVar[Mapping[str, Any]] = {**AdamW.defaults, "weight_decay": 0.0}
    switches: ClassVar[Mapping[str, str]] = {"amsgrad": "AMSGrad"}
    of_gradient: ClassVar[tuple[str, ...]] = (*AdamW.of_gradient, "weight_decay")


class AMSGrad(_InGradient, AdamWAMSGrad):
    """Adam with the maximum of all second moments."""

    defaults: ClassVar[Mapping[str, Any]] = Adam.defaults
    of_gradient: ClassVar[tuple[str, ...]] = Adam.of_gradient
