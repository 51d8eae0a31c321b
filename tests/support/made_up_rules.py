"""Rules with one to four arrays and values, of every kind that can be printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from zenflow_compile.rules.rule import Array, Rule


class MadeUp(Rule):
    """A rule whose numbers do not matter: tests pass them."""

    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1.0}

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return (0.5,) * len(self.of_gradient)

    def window_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return (0.5,) * len(self.of_window)


class OneArray(MadeUp):
    """Like Lion: a sign, and a value that lives in a window."""

    arrays = (Array("moment"),)
    window = ("moves",)
    of_gradient = ("beta", "rest", "rate")
    of_window = ("decay",)

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> Any:
        mixed = c.beta * state.moment + c.rest * gradient
        return mixed * 0.75, state.moves + c.rate * mixed.sign()

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return c.decay * weight - state.moves


class OneNonnegative(MadeUp):
    """Like Adagrad, with a gradient that has the weight in it."""

    arrays = (Array("total", nonnegative=True),)
    window = ("moves",)
    of_gradient = ("rate", "eps", "decay")
    of_window = ()

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> Any:
        whole = gradient + c.decay * weight
        total = state.total + whole * whole
        return total, state.moves + c.rate * whole / (total.sqrt() + c.eps)

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight - state.moves


class ThreeArrays(MadeUp):
    """Like AMSGrad: the last array is never rounded."""

    arrays = (Array("first"), Array("second", nonnegative=True), Array("most", nonnegative=True, rounded=False))
    of_gradient = ("beta", "rest")
    of_window = ("step", "eps")

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> Any:
        first = c.beta * state.first + c.rest * gradient
        second = c.beta * state.second + c.rest * gradient * gradient
        return first, second, state.most.maximum(second)

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight - c.step * state.first / (state.most.sqrt() + c.eps)


class FourValues(MadeUp):
    """Swaps two arrays, whose order must not matter, and uses every operation; no array is rounded."""

    arrays = (Array("one", rounded=False), Array("other", rounded=False), Array("third", rounded=False))
    window = ("kept",)
    of_gradient = ("beta",)
    of_window = ("eps",)

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> Any:
        return state.other, state.one, -gradient * c.beta, 1.0 - state.kept / 2.0 + gradient.abs()

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight + state.one - state.third.maximum(state.other) / (state.kept.sqrt() + c.eps)


RULES: tuple[Rule, ...] = (OneArray(), OneNonnegative(), ThreeArrays(), FourValues())
