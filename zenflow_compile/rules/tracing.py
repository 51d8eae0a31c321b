"""Traces the functions of a rule to pointwise operations, each with one result per element."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from zenflow_compile.rules.rule import MOST_ARRAYS, MOST_NUMBERS, MOST_ROUNDED, Array, Rule, named

_ATEN = torch.ops.aten
_QUOTIENT = "{} / {}"
OPERATIONS = {
    _ATEN.add.Tensor: "{} + {}",
    _ATEN.sub.Tensor: "{} - {}",
    _ATEN.rsub.Scalar: "{} - {}",
    _ATEN.mul.Tensor: "{} * {}",
    _ATEN.div.Tensor: _QUOTIENT,
    _ATEN.reciprocal.default: _QUOTIENT,
    _ATEN.neg.default: "negative({})",
    _ATEN.abs.default: "magnitude({})",
    _ATEN.sign.default: "sign({})",
    _ATEN.sqrt.default: "root({})",
    _ATEN.maximum.default: "larger({}, {})",
}
"""What a rule may compute with, and how it is printed: each is exact, or rounded one time, wherever it runs."""
_ALLOWED = ("+", "-", "*", "/", "abs", "sign", "sqrt", "maximum")
OTHER_ENTRIES = re.compile(
    r"step|master|score|mask|selected_at|selecting_ranks|open|coefficients|window_sum|window\d+|scale\d+|residual"
    r"|visible_at|shown|schedule|plan|chosen|optimizer_step|shortest_window"
)
"""Entries of a state dict besides the arrays of the rule: see ``layout`` in runtime/checkpoint/format.py."""
_ELEMENTS = 3  # of the tensors that are traced


class Line(NamedTuple):
    """``name = operation(arguments)``: a form of ``OPERATIONS``; names, or numbers as they were written."""

    name: str
    operation: str
    arguments: tuple[str | float, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A traced function. Inputs are named ``weight``, ``gradient``, ``state.NAME`` and ``c.NAME``."""

    lines: tuple[Line, ...]
    results: tuple[str, ...]

    @property
    def reads_weight(self) -> bool:
        return "weight" in self.results or any("weight" in line.arguments for line in self.lines)

    def expressions(self, names: Mapping[str, str], number: str, quotient: str = _QUOTIENT) -> dict[str, str]:
        """The right side of each line, as text: with ``names`` for inputs, and ``number`` as the form of literals."""
        found = {}
        for name, operation, arguments in self.lines:
            given = [names.get(each, each) if isinstance(each, str) else number.format(each) for each in arguments]
            found[name] = (quotient if operation == _QUOTIENT else operation).format(*given)
        return found

    def results_as(self, names: Mapping[str, str]) -> str:
        return ", ".join(names.get(each, each) for each in self.results)


@dataclass(frozen=True, slots=True)
class Traced:
    """Both functions of a rule."""

    accumulate: Function
    apply: Function


@lru_cache(maxsize=256)
def trace(rule: Rule) -> Traced:
    """Trace the functions of ``rule``, at the first call.

    Hazard: ``make_fx`` changes PyTorch's table of decompositions, which all threads share. So an optimizer traces its
    rules when it is made, and threads that print kernels find them here while the model is compiled.

    Raises:
        ValueError: a function uses another operation, reads other elements, or returns something else than a number
            per element; or the rule has too many arrays or numbers.
    """
    kind = type(rule).__name__
    if not all(isinstance(array, Array) for array in rule.arrays):
        raise ValueError(f"{kind}.arrays={rule.arrays!r} must be Array(...) of zenflow_compile.rules; change them")
    rounded = [array.rounded for array in rule.arrays]
    for what, count, most in (
        ("arrays and values of a window", len(rule.values), MOST_ARRAYS),
        ("arrays that may be rounded", sum(rounded), MOST_ROUNDED),
        ("numbers of_gradient", len(rule.of_gradient), MOST_NUMBERS),
        ("numbers of_window", len(rule.of_window), MOST_NUMBERS),
    ):
        if count > most:
            raise ValueError(f"{kind} has {count} {what}; a rule has at most {most}: compute with fewer")
    for name in (*rule.values, *rule.of_gradient, *rule.of_window):
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"{kind} has a number called {name!r}; it must be a name that Python can read: change it")
    for names in (rule.values, rule.of_gradient, rule.of_window):
        if len({*names}) < len(names):
            raise ValueError(f"{kind} has {', '.join(names)}: two of one name; change one of them")
    if not rule.values:
        raise ValueError(f"{kind} has neither arrays nor values of a window, so it cannot use gradients; add one")
    for array in rule.arrays:
        if OTHER_ENTRIES.fullmatch(array.name):
            raise ValueError(f"{kind} has an array {array.name!r}, a name of something else in states; change it")
    if rule.of_matrix and (rule.of_matrix not in rule.window or type(rule).on_matrices is Rule.on_matrices):
        raise ValueError(
            f"{kind}.of_matrix={rule.of_matrix!r} must be in {kind}.window, and {kind}.on_matrices changes it; add both"
        )
    if rounded != sorted(rounded, reverse=True):
        raise ValueError(f"{kind}.arrays must have those that may be rounded first; change their order")
    options = rule.initial
    for what, asked, found in (
        ("gradient_numbers", rule.of_gradient, rule.gradient_numbers(options, 1)),
        ("window_numbers", rule.of_window, rule.window_numbers([options], 1)),
    ):
        numbers = found if isinstance(found, (tuple, list)) else ()
        if len(numbers) != len(asked) or not all(isinstance(each, (int, float)) for each in numbers):
            raise ValueError(
                f"{kind}.{what} returned {found!r}; it must return {len(asked)} numbers, {', '.join(asked)}"
            )

    def accumulate(weight: Any, gradient: Any, values: Sequence[Any], numbers: Sequence[Any]) -> Any:
        return rule.accumulate(weight, named(rule.values, values), gradient, named(rule.of_gradient, numbers))

    def apply(weight: Any, _: Any, values: Sequence[Any], numbers: Sequence[Any]) -> Any:
        return (rule.apply(weight, named(rule.values, values), named(rule.of_window, numbers)),)

    return Traced(
        _function(f"{kind}.accumulate", accumulate, rule.values, rule.of_gradient, len(rule.values)),
        _function(f"{kind}.apply", apply, rule.values, rule.of_window, 1),
    )


def _function(
    name: str, function: Callable[..., Any], values: Sequence[str], numbers: Sequence[str], results: int
) -> Function:
    def element() -> torch.Tensor:
        return torch.ones(_ELEMENTS, device="cpu")

    given = (element(), element(), [element() for _ in values], [torch.ones((), device="cpu") for _ in numbers])
    try:
        graph = make_fx(function)(*given).graph
    except Exception as error:
        raise ValueError(f"{name} cannot be traced: {error}; it must be pure arithmetic on its arguments") from error
    inputs = iter(["weight", "gradient", *(f"state.{each}" for each in values), *(f"c.{each}" for each in numbers)])
    names: dict[Node, str] = {}
    of_elements: set[str] = set()
    lines: list[Line] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = next(inputs)
            if not names[node].startswith("c."):
                of_elements.add(names[node])
        elif node.op == "get_attr":
            raise ValueError(f"{name} uses a tensor that is no argument; use a number, or one of the rule's")
        elif node.op == "call_function":
            if node.target not in OPERATIONS or node.kwargs:
                raise ValueError(f"{name} uses {node.target}; a rule may use {', '.join(_ALLOWED)} on elements")
            arguments = tuple(names[each] if isinstance(each, Node) else float(each) for each in node.args)
            if not all(isinstance(each, str) or math.isfinite(each) for each in arguments):
                raise ValueError(f"{name} uses a number that is not finite; a rule has finite ones")
            if node.target is _ATEN.reciprocal.default:
                arguments = (1.0, *arguments)
            if node.target is _ATEN.rsub.Scalar:
                arguments = arguments[::-1]
            if of_elements.isdisjoint(arguments):
                raise ValueError(f"{name}: {_short(node.target)} of numbers alone; compute it where they are made")
            names[node] = made = f"v{len(lines)}"
            of_elements.add(made)
            lines.append(Line(made, OPERATIONS[node.target], arguments))
    returned = graph.output_node().args[0]
    if not isinstance(returned, (tuple, list)) or len(returned) != results:
        raise ValueError(f"{name} must return {results} values, one for each of its arrays and values of a window")
    found = tuple(names.get(each, "") if isinstance(each, Node) else "" for each in returned)
    if not of_elements.issuperset(found):
        raise ValueError(f"{name} must return a number for each element, computed from its arguments")
    return Function(tuple(lines), found)


def _short(target: Any) -> str:
    return str(target).removeprefix("aten.").partition(".")[0]
