"""Stochastic gradient descent with momentum: Sutskever et al. (ICML 2013), as ``torch.optim.SGD`` has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule, counted


class SGD(Rule):
    """With momentum. Weight decay is part of the gradient, which sees the weight that the window began with."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0}
    arrays: ClassVar[tuple[Array, ...]] = (Array("momentum_buffer"),)
    window = ("moves",)
    switches: ClassVar[Mapping[str, str]] = {"nesterov": "NesterovSGD"}
    _looks_ahead = False
    of_gradient: ClassVar[tuple[str, ...]] = ("momentum", "rest", "weight_decay", "lr", "of_momentum", "of_gradient")
    of_window = ()

    def check_change(self, first: Any, now: Any) -> None:
        """PyTorch does not dampen the first gradient of a momentum that comes later; the state does not tell which."""
        if getattr(now, "dampening", 0.0) and first.momentum == 0.0 != now.momentum:
            raise ValueError(
                f"momentum={now.momentum} with dampening={now.dampening} is not supported where training began with "
                "momentum=0: its first gradient would not be dampened, which is not known later; set dampening=0"
            )

    def from_pytorch(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """PyTorch counts no steps: a buffer has had a gradient."""
        return counted(entry, "momentum_buffer")

    def stable_share(self, momentum: float, steps: int) -> float:
        return _stable_rate(momentum, steps, self._looks_ahead) / _stable_rate(momentum, 1, self._looks_ahead)

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        """Where ``momentum`` is 0, the buffer stays, and the gradient alone moves the weight."""
        if options.momentum == 0.0:
            return 1.0, 0.0, options.weight_decay, options.lr, 0.0, 1.0
        rest = 1.0 if count == 1 else 1.0 - options.dampening  # the first gradient is the momentum
        return options.momentum, rest, options.weight_decay, options.lr, 1.0, 0.0

    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        return ()

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        gradient = gradient + c.weight_decay * weight
        momentum = c.momentum * state.momentum_buffer + c.rest * gradient
        return momentum, state.moves + c.lr * (c.of_momentum * momentum + c.of_gradient * gradient)

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight - state.moves


class NesterovSGD(SGD):
    """With Nesterov's momentum, and without dampening."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}
    switches: ClassVar[Mapping[str, str]] = {"dampening": "SGD"}
    fixed = MappingProxyType({"nesterov": True})
    _looks_ahead = True

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        momentum, is_used = options.momentum, options.momentum != 0.0
        numbers = (momentum, 1.0) if is_used else (1.0, 0.0)
        return *numbers, options.weight_decay, options.lr, momentum, 1.0


class PlainSGD(SGD):
    """Without momentum, and without state but the master."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "weight_decay": 0.0}
    arrays: ClassVar[tuple[Array, ...]] = ()
    switches: ClassVar[Mapping[str, str]] = {"momentum": "SGD"}
    of_gradient: ClassVar[tuple[str, ...]] = ("weight_decay", "lr")

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return options.weight_decay, options.lr

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        return (state.moves + c.lr * (gradient + c.weight_decay * weight),)


def _stable_rate(momentum: float, steps: int, looks_ahead: bool) -> float:
    """Return the largest stable rate, times the curvature of a quadratic, with update windows of so many steps.

    An update window multiplies weight and momentum buffer by a 2 x 2 matrix. Its eigenvalues are inside the unit circle
    if 1 + trace + determinant > 0 and determinant < 1 (Jury's criterion).
    """
    kept, taken = 1.0, 0.0  # factors of the old buffer and of the gradient, in the new buffer
    from_buffer = from_gradient = 0.0  # the same factors, in the move of the weight
    for _ in range(steps):
        kept, taken = momentum * kept, momentum * taken + 1.0
        from_buffer += momentum * kept if looks_ahead else kept
        from_gradient += momentum * taken + 1.0 if looks_ahead else taken
    crossed, direct = taken * from_buffer, from_gradient
    oscillates = direct * (1.0 + kept) - crossed
    grows = crossed - direct * kept
    return min(
        2.0 * (1.0 + kept) / oscillates if oscillates > 0.0 else math.inf,
        (1.0 - kept) / grows if grows > 0.0 else math.inf,
    )
