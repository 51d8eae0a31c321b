"""Prints a rule as the C++ that ``native/update_rule.h`` includes."""

from __future__ import annotations

from functools import lru_cache

from zenflow_compile.rules.rule import Rule
from zenflow_compile.rules.tracing import Function, trace

_INFIX = "+-*/"


@lru_cache(maxsize=32)
def printed(rule: Rule) -> str:
    """The text of ``printed_rule.h``: what the rule's state is, and its two functions, on vectors.

    Raises:
        ValueError: see ``trace``.
    """
    traced = trace(rule)
    nonnegative = sum(1 << number for number, array in enumerate(rule.arrays) if array.nonnegative)
    rounded = sum(array.rounded for array in rule.arrays)
    values = {f"state.{name}": f"values.at[{number}]" for number, name in enumerate(rule.values)}
    gradient = {f"c.{name}": f"c.at[{number}]" for number, name in enumerate(rule.of_gradient)}
    window = {f"c.{name}": f"c.at[{number}]" for number, name in enumerate(rule.of_window)}
    return f"""// {type(rule).__name__}
#pragma once

namespace zenflow {{

struct Rule {{
  static constexpr int count = {len(rule.arrays)}, rounded = {rounded}, values = {len(rule.values)};
  static constexpr uint32_t nonnegative = {nonnegative};
  static constexpr bool reads_weight = {str(traced.accumulate.reads_weight).lower()};
}};

// {", ".join(rule.of_gradient)}
inline void accumulate(const Numbers& c, Floats weight, Floats gradient, Values<{len(rule.values)}>& values) {{
{_body(traced.accumulate, values | gradient)}
{_results(traced.accumulate, values | gradient)}
}}

// {", ".join(rule.of_window)}
inline Floats apply(const Numbers& c, Floats weight, const Values<{len(rule.values)}>& values) {{
{_body(traced.apply, values | window)}
  return {(values | window).get(traced.apply.results[0], traced.apply.results[0])};
}}

}}  // namespace zenflow
"""


def _body(function: Function, names: dict[str, str]) -> str:
    lines = []
    for line in function.lines:
        given = [names.get(each, each) if isinstance(each, str) else f"{each!r}f" for each in line.arguments]
        infix = line.operation in _INFIX
        value = f" {line.operation} ".join(given) if infix else f"{line.operation}({', '.join(given)})"
        lines.append(f"  const Floats {line.name} = {value};")
    return "\n".join(lines)


def _results(function: Function, names: dict[str, str]) -> str:
    """Assignments of all results at once: one may be another value's old one."""
    made = ", ".join(names.get(each, each) for each in function.results)
    return f"  values = {{{{{made}}}}};"
