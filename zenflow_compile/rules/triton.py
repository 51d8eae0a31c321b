"""Prints a rule as the Triton kernel that ``runtime/device_updates/triton_updates.py`` launches."""

from __future__ import annotations

from functools import lru_cache

from zenflow_compile.rules.rule import Rule
from zenflow_compile.rules.tracing import Function, trace


@lru_cache(maxsize=32)
def printed(rule: Rule) -> str:
    """The text of ``update_slices``, which updates a tile of slices in place by one gradient, and casts its weights.

    Arguments of the kernel are by number, in the order of the rule: its arrays, the numbers of a gradient (``g0``) and
    those of a window (``w0``).

    Raises:
        ValueError: see ``trace``.
    """
    traced, arrays = trace(rule), rule.arrays
    rounded = sum(array.rounded for array in arrays)
    values = [f"value{number}" for number, _ in enumerate(rule.values)]
    gradient = [f"g{number}" for number, _ in enumerate(rule.of_gradient)]
    window = [f"w{number}" for number, _ in enumerate(rule.of_window)]
    names = {f"state.{name}": value for name, value in zip(rule.values, values, strict=True)}
    of_gradient = names | {f"c.{name}": number for name, number in zip(rule.of_gradient, gradient, strict=True)}
    of_window = names | {f"c.{name}": number for name, number in zip(rule.of_window, window, strict=True)}
    given = ", ".join(["scale", "step", *(f"array{number}" for number, _ in enumerate(arrays)), *gradient, *window])
    tile = "number, element, k, length"

    loads, stores = [], []
    for number, array in enumerate(arrays):
        if array.rounded:
            form = f"{tile}, not_below_zero={array.nonnegative}, MOMENTS=MOMENTS, ALIGNED=ALIGNED"
            loads.append(f"value{number} = load_rounded(array{number}, {form})")
            stores.append(f"store_rounded(array{number}, value{number}, random, {form}, second={number == 1})")
        else:
            loads.append(f"value{number} = load_plain(array{number}, {tile})")
            stores.append(f"store_plain(array{number}, value{number}, {tile})")
    loads += [f"{name} = tl.zeros_like(weight)" for name in values[len(arrays) :]]
    if rounded:
        second = "value1" if rounded > 1 else "tl.zeros_like(weight)"
        stores.insert(0, f"random = random_bits(value0, {second}, step)")
    lines = [
        "number, element = tile_of(k, BLOCK_SLICES, BLOCK_LENGTH)",
        f"gradient = load_gradient(gradients, scale, {tile}, SCALE_ON_DEVICE)",
        f"weight = load_plain(master, {tile})",
        *loads,
        *_body(traced.accumulate, of_gradient),
        f"{', '.join(values)}, = {traced.accumulate.results_as(of_gradient)},",
        *_body(traced.apply, of_window),
        f"weight = {traced.apply.results_as(of_window)}",
        f"store_plain(master, weight, {tile})",
        *stores,
        f"cast_weights(matrix, stride_row, stride_column, selected, weight, {tile}, ALL, DIM)",
    ]
    body = "\n".join(f"    {line}" for line in lines)
    comment = "; ".join(", ".join(each) for each in (rule.values, rule.of_gradient, rule.of_window))
    return f"""# {type(rule).__name__}: {comment}
def update_slices(
    matrix, stride_row, stride_column, selected, gradients, master, k, length, {given},
    SCALE_ON_DEVICE: tl.constexpr, MOMENTS: tl.constexpr, ALIGNED: tl.constexpr, ALL: tl.constexpr,
    DIM: tl.constexpr, BLOCK_SLICES: tl.constexpr, BLOCK_LENGTH: tl.constexpr,
):
{body}
"""


def _body(function: Function, names: dict[str, str]) -> list[str]:
    return [f"{name} = {value}" for name, value in function.expressions(names, "{!r}", "quotient({}, {})").items()]
