"""A named equation: a symbolic expression with its meaning and source, evaluated and printed with numbers put in."""

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
        name: what the expression gives, with its unit: ``stride_ratio``, ``traffic [model sizes per step]``.
        expression: of symbols that are named in words.
        meaning: one sentence.
        source: paper and equation, or how it follows.
    """

    name: str
    expression: Expr
    meaning: str
    source: str

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of what has to be put in, sorted."""
        return _compiled(self.expression)[0]

    def evaluate(self, **values: float) -> float:
        """The expression's value.

        Raises:
            KeyError: a symbol has no value. Values that the expression does not have are ignored.
        """
        return evaluated(self.expression, values)

    def explain(self, values: Mapping[str, float] | None = None) -> str:
        """``name = expression``; with ``values`` also the same with numbers put in, and the result."""
        line = f"{self.name} = {self.expression}"
        if values is None:
            return line
        # Symbols named like numbers: sympy would evaluate numbers, and there would be nothing to read.
        numbers = {symbol: Symbol(f"{values[str(symbol)]:.4g}") for symbol in self.expression.free_symbols}
        return f"{line} = {self.expression.xreplace(numbers)} = {self.evaluate(**values):.4g}"


def evaluated(expression: Expr, values: Mapping[str, float]) -> float:
    """The expression with a value for each of its symbols, and maybe others. Raises: see ``Formula.evaluate``."""
    symbols, function = _compiled(expression)
    return float(function(*[values[name] for name in symbols]))


@cache
def _compiled(expression: Expr) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """Names of the symbols, sorted, and a function of their values. Kept, since planners evaluate thousands."""
    arguments = sorted(expression.free_symbols, key=str)
    return tuple(map(str, arguments)), sympy.lambdify(arguments, expression, modules="math")


def positive_symbols(names: str) -> tuple[Symbol, ...]:
    """One symbol per word of ``names``. Zero may be put in for them: being positive only helps to simplify."""
    return tuple(Symbol(name, positive=True) for name in names.split())
