"""What a rule may be: everything else is named before anything is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.made_up_rules import RULES, OneArray, OneNonnegative
from zenflow_compile.options.options import Options
from zenflow_compile.planning.planners import ParamSpec, make_plan
from zenflow_compile.rules.adamw import ADAMW, AdamW
from zenflow_compile.rules.cpp import printed
from zenflow_compile.rules.rule import Array, Rule
from zenflow_compile.rules.tracing import OTHER_ENTRIES, Function, trace
from zenflow_compile.runtime.checkpoint.format import layout


class Changed(AdamW):
    """AdamW with another function."""

    def __init__(self, accumulate: Any = None, apply: Any = None) -> None:
        super().__init__()
        self.given = accumulate, apply

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> Any:
        own, _ = self.given
        return own(weight, state, gradient, c) if own else super().accumulate(weight, state, gradient, c)

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        _, own = self.given
        return own(weight, state, c) if own else super().apply(weight, state, c)


def operations(function: Function) -> list[str]:
    return [line.operation.translate(str.maketrans("", "", "{}(), ")) for line in function.lines]


def test_adamw_has_fourteen_operations() -> None:
    traced = trace(ADAMW)
    assert operations(traced.accumulate) == ["*", "*", "+", "*", "*", "*", "+"]
    assert operations(traced.apply) == ["root", "/", "+", "*", "*", "/", "-"]
    assert traced.accumulate.results == ("v2", "v6")
    assert traced.accumulate.lines[0].arguments == ("c.beta1", "state.exp_avg")


def test_only_rules_that_read_the_weight_load_it_early() -> None:
    assert [trace(rule).accumulate.reads_weight for rule in RULES] == [False, True, False, False]
    assert "reads_weight = true" in printed(OneNonnegative())
    assert "reads_weight = false" in printed(OneArray())


def both(state: Any) -> Any:
    return state.exp_avg, state.exp_avg_sq


@pytest.mark.parametrize(
    ("accumulate", "message"),
    [
        (
            lambda w, s, g, c: (s.exp_avg.exp(), s.exp_avg_sq),
            "uses aten.exp.default; a rule may use \\+, -, \\*, /, abs, sign, sqrt, maximum",
        ),
        (lambda w, s, g, c: (s.exp_avg, g.cumsum(0)), "uses aten.cumsum.default"),
        (lambda w, s, g, c: (s.exp_avg, g * g.sum()), "uses aten.sum.default"),
        (lambda w, s, g, c: (s.exp_avg, torch.rand_like(g)), "uses aten.rand_like.default"),
        (lambda w, s, g, c: (s.exp_avg, torch.add(g, g, alpha=2)), "uses aten.add.Tensor"),
        (lambda w, s, g, c: (s.exp_avg * (c.beta1 * c.beta2), s.exp_avg_sq), "of numbers alone; compute it where"),
        (lambda w, s, g, c: (s.exp_avg,), "must return 2 values, one for each of its arrays"),
        (lambda w, s, g, c: s.exp_avg, "must return 2 values"),
        (lambda w, s, g, c: (s.exp_avg, c.beta1), "must return a number for each element"),
        (lambda w, s, g, c: (s.exp_avg, 1.0), "must return a number for each element"),
        (
            lambda w, s, g, c: both(s) if g.sum() > 0 else (s.exp_avg, g),
            "cannot be traced: .* it must be pure arithmetic",
        ),
        (lambda w, s, g, c: (s.exp_avg, s.missing), "cannot be traced: .*'missing'"),
        (lambda w, s, g, c: (s.exp_avg, s.exp_avg_sq[1:]), "uses aten.slice.Tensor"),
        (lambda w, s, g, c: (s.exp_avg, s.exp_avg_sq * torch.tensor(2.0)), "uses a tensor that is no argument"),
    ],
)
def test_other_functions_are_refused(accumulate: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"Changed.accumulate,? ?.*{message}"):
        trace(Changed(accumulate))


def test_division_of_a_number() -> None:
    """PyTorch makes a reciprocal of it."""
    rule = Changed(apply=lambda w, s, c: w - 2.0 / s.exp_avg_sq)
    assert operations(trace(rule).apply) == ["/", "*", "-"]
    assert "1.0f / values.at[1]" in printed(rule)


def test_names_of_all_entries_are_reserved() -> None:
    """A state dict has other entries under them."""
    options = {"policy": "zenflow", "select_interval": "auto", "update_interval": 3, "topk_ratio": 0.25}
    spec = ParamSpec("weight", (64, 64), torch.bfloat16)
    names: set[str] = set()
    for more in ({}, {"gradient_transfer": "mean"}, {"gradient_transfer": "int8"}, {"staleness": 1}):
        plan = make_plan([spec], Options.from_keywords(min_offload_size=1, device_share=0.0, **options, **more))
        names |= set(layout(plan.params[0], adaptive=True))
    assert {name for name in names if not OTHER_ENTRIES.fullmatch(name)} == {"exp_avg", "exp_avg_sq"}
    assert {"window1", "scale1", "window_sum", "residual", "shown", "mask"} <= names


def test_apply_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"Changed.apply uses aten.sigmoid.default"):
        trace(Changed(apply=lambda w, s, c: w.sigmoid()))
    with pytest.raises(ValueError, match=r"Changed.apply must return a number for each element"):
        trace(Changed(apply=lambda w, s, c: 0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrays": tuple(Array(f"a{i}", rounded=False) for i in range(5))}, "has 5 arrays and values of a window"),
        ({"window": ("x", "y", "z")}, "has 5 arrays and values of a window; a rule has at most 4"),
        ({"arrays": tuple(Array(f"a{i}") for i in range(3))}, "has 3 arrays that may be rounded"),
        ({"of_gradient": tuple("abcdefghi")}, "has 9 numbers of_gradient"),
        ({"of_window": tuple("abcdefghi")}, "has 9 numbers of_window"),
        ({"arrays": (Array("a", rounded=False), Array("b"))}, "those that may be rounded first"),
        (
            {"arrays": (Array("exp avg"), Array("b"))},
            "called 'exp avg'; it must be a name that Python can read",
        ),
        ({"of_window": ("a\n",)}, r"a number called 'a\\n'; it must be a name"),
        ({"arrays": ()}, "has neither arrays nor values of a window"),
        ({"of_gradient": ("a", "a")}, "has a, a: two of one name"),
        ({"arrays": (Array("a"), Array("a"))}, "has a, a: two of one name"),
        ({"arrays": (Array("exp_avg"), Array("window3"))}, "an array 'window3', a name of something else in states"),
    ],
)
def test_too_large_rules_are_refused(changes: dict[str, Any], message: str) -> None:
    rule: Rule = type("Large", (AdamW,), changes)()
    with pytest.raises(ValueError, match=message):
        trace(rule)
