"""Prints a rule as the C++ that ``native/update_rule.h`` includes."""

from __future__ import annotations

from functools import lru_cache

from zenflow_compile.rules.rule import Rule
from zenflow_compile.rules.tracing import Function, trace


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
  values = {{{{{traced.accumulate.results_as(values | gradient)}}}}};
}}

// {", ".join(rule.of_window)}
inline Floats apply(const Numbers& c, Floats weight, const Values<{len(rule.values)}>& values) {{
{_body(traced.apply, values | window)}
  return {traced.apply.results_as(values | window)};
}}

}}  // namespace zenflow
"""


def _body(function: Function, names: dict[str, str]) -> str:
    expressions = function.expressions(names, "{!r}f")
    return "\n".join(f"  const Floats {name} = {value};" for name, value in expressions.items())
