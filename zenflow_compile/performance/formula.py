"""A named equation: a symbolic expression that is evaluated, and printed with its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
from sympy import Expr, Symbol


@dataclass(frozen=True, slots=True)
class Formula:
    """One equation.

    Attributes:
        symbol: stands for the result in other equations.
        unit: of the result; empty for a plain number.
        expression: of symbols whose names are words.
        meaning: one sentence.
        source: paper and equation, or how it follows.
    """

    symbol: Symbol
    unit: str
    expression: Expr
    meaning: str
    source: str

    @property
    def name(self) -> str:
        """The symbol with its unit, as in ``step [s]``."""
        return f"{self.symbol} [{self.unit}]" if self.unit else str(self.symbol)

    def evaluate(self, values: Mapping[Symbol, float]) -> float:
        """The value of the expression.

        Raises:
            KeyError: a symbol of the expression has no value.
        """
        return evaluated(self.expression, values)

    def explain(self, values: Mapping[Symbol, float] | None = None) -> str:
        """``name = expression``; with ``values`` also the expression with its numbers, and the result."""
        line = f"{self.name} = {self.expression}"
        if values is None:
            return line
        # Symbols named like numbers: sympy would evaluate real numbers, and only the result would be left to print.
        numbers = {symbol: Symbol(f"{values[symbol]:.4g}") for symbol in self.expression.free_symbols}
        return f"{line} = {self.expression.xreplace(numbers)} = {self.evaluate(values):.4g}"


def evaluated(expression: Expr, values: Mapping[Symbol, float]) -> float:
    """The value of ``expression``; raises as :meth:`Formula.evaluate`."""
    symbols, function = _compiled(expression)
    return float(function(*[values[symbol] for symbol in symbols]))


@cache  # planners evaluate the same expressions thousands of times
def _compiled(expression: Expr) -> tuple[tuple[Symbol, ...], Callable[..., Any]]:
    symbols = tuple(sorted(expression.free_symbols, key=str))
    return symbols, sympy.lambdify(symbols, expression, modules="math")


def positive_symbols(names: str) -> tuple[Symbol, ...]:
    """One symbol per word of ``names``. Zero is a valid value, too: the assumption only helps sympy to simplify."""
    return tuple(Symbol(name, positive=True) for name in names.split())
