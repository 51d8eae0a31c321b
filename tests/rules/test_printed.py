"""Printed C++ has the bits of the rule's own functions, for any number of arrays and in every form of the state."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.exact import Exact
from tests.support.made_up_rules import RULES, OneArray, ThreeArrays
from zenflow_compile.native.library import DTYPES, MOST_NUMBERS, Step, UpdateWindow, rule_address
from zenflow_compile.rules import tracing, triton
from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.rules.eager import run_window
from zenflow_compile.rules.rule import Rule, named
from zenflow_compile.runtime.state_forms import StateForm

LENGTH, SLICES = 72, 60  # not whole blocks, so that slices end in the middle of them


def numbers(count: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return (0.1 + 0.8 * torch.rand(count, generator=generator)).tolist()


class Case:
    """The state, gradients and numbers of one update window."""

    def __init__(self, rule: Rule, count: int, form: StateForm, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(len(rule.arrays) * 10 + count)
        self.rule, self.form, self.step = rule, form, 7 + count
        self.weight = torch.randn(SLICES, LENGTH, generator=generator)
        drawn = [torch.randn(SLICES, LENGTH, generator=generator) for _ in rule.arrays]
        self.arrays = [each.abs() if of.nonnegative else each for each, of in zip(drawn, rule.arrays, strict=True)]
        self.gradients = [torch.randn(SLICES, LENGTH, generator=generator).to(dtype) for _ in range(count)]
        self.of_gradient = [numbers(len(rule.of_gradient), seed) for seed in range(count)]
        self.of_window = numbers(len(rule.of_window), 99)
        self.scales = [(1.0, -0.5, 3.0)[number % 3] for number in range(count)]
        self.out = torch.zeros(SLICES, LENGTH, dtype=dtype)

    def expected(self) -> list[Tensor]:
        """Weight and arrays, all in fp32, by the rule's own functions."""
        rule = self.rule
        values = [Exact(each) for each in (*self.arrays, *(torch.zeros_like(self.weight) for _ in rule.window))]
        for gradient, scale, given in zip(self.gradients, self.scales, self.of_gradient, strict=True):
            state, c = named(rule.values, values), named(rule.of_gradient, given)
            scaled: Any = Exact(gradient.float() * scale)
            values = list(rule.accumulate(Exact(self.weight), state, scaled, c))  # type: ignore[arg-type]
        moved: Any = rule.apply(
            Exact(self.weight),  # type: ignore[arg-type]
            named(rule.values, values),
            named(rule.of_window, self.of_window),
        )
        return [moved.value, *(each.value for each in values[: len(rule.arrays)])]  # type: ignore[attr-defined]

    def run(self, stored: list[Tensor], cuts: tuple[int, ...] = ()) -> None:
        """Update ``stored`` in place: the master, and the arrays as they are stored."""
        steps = (Step * len(self.gradients))()
        for step, scale, given in zip(steps, self.scales, self.of_gradient, strict=True):
            step.grad_scale, step.numbers = scale, (ctypes.c_float * MOST_NUMBERS)(*given)
        window = UpdateWindow(
            state=self.form.describe(stored, None),
            out=self.out.data_ptr(),
            steps=steps,
            count=len(steps),
            random=self.step,
            gradient_dtype=DTYPES[self.out.dtype],
            out_dtype=DTYPES[self.out.dtype],
            gradients=(ctypes.c_void_p * len(steps))(*(each.data_ptr() for each in self.gradients)),
            numbers=(ctypes.c_float * MOST_NUMBERS)(*self.of_window),
        )
        update = ctypes.CFUNCTYPE(None, ctypes.POINTER(UpdateWindow), ctypes.c_int64, ctypes.c_int64)
        for begin, end in itertools.pairwise((0, *cuts, self.weight.numel())):
            update(rule_address(self.rule))(window, begin, end)


@pytest.mark.parametrize("cuts", [(), (1000, 1003)], ids=["whole", "cut"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [ADAMW, *RULES], ids=lambda rule: type(rule).__name__)
def test_bits_are_those_of_the_rule(rule: Rule, dtype: torch.dtype, count: int, cuts: tuple[int, ...]) -> None:
    case = Case(rule, count, StateForm(length=LENGTH, arrays=rule.arrays), dtype)
    stored, expected = [case.weight.clone(), *(each.clone() for each in case.arrays)], case.expected()
    case.run(stored, cuts)
    for actual, wanted in zip(stored, expected, strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(case.out, expected[0].to(dtype))
    assert not torch.equal(stored[0], case.weight)


@pytest.mark.parametrize("rule", [ADAMW, *RULES], ids=lambda rule: type(rule).__name__)
def test_operators_agree_to_rounding(rule: Rule) -> None:
    case = Case(rule, 3, StateForm(length=LENGTH, arrays=rule.arrays), torch.float32)
    scaled = [gradient * scale for gradient, scale in zip(case.gradients, case.scales, strict=True)]
    moved, arrays = run_window(rule, case.weight, case.arrays, scaled, case.of_gradient, case.of_window)
    for actual, wanted in zip((moved, *arrays), case.expected(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def test_kernels_are_printed_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread prints them while the model is compiled, and tracing changes what all threads decompose."""
    rule = OneArray()
    rule_address(rule)
    monkeypatch.setattr(tracing, "make_fx", None)
    assert "def update_slices(" in triton.printed(rule)


@pytest.mark.parametrize("moments", ["bf16", "fp8"])
def test_one_array_is_rounded_as_the_first_of_two(moments: str) -> None:
    """The second one adds nothing to the random bits if it is zero."""
    rule = OneArray()
    case = Case(rule, 2, StateForm(moments=moments, length=LENGTH, arrays=rule.arrays), torch.bfloat16)
    pair = StateForm(moments=moments, length=LENGTH)
    stored, _ = pair.compress(case.arrays[0], torch.zeros_like(case.arrays[0]), step=1)
    case.arrays = [pair.expand(stored, stored)[0]]
    expected = case.expected()
    wanted, _ = pair.compress(expected[1], torch.zeros_like(expected[1]), step=case.step)
    made = [case.weight.clone(), stored.clone()]
    case.run(made)
    assert torch.equal(made[1], wanted)
    assert torch.equal(made[0], expected[0])


@pytest.mark.parametrize("moments", ["bf16", "fp8"])
def test_array_that_is_never_rounded_is_fp32(moments: str) -> None:
    rule = ThreeArrays()
    case = Case(rule, 2, StateForm(moments=moments, length=LENGTH, arrays=rule.arrays), torch.bfloat16)
    pair = StateForm(moments=moments, length=LENGTH)
    stored = pair.compress(case.arrays[0], case.arrays[1], step=1)
    case.arrays[:2] = pair.expand(*stored)
    expected = case.expected()
    made = [case.weight.clone(), *(each.clone() for each in stored), case.arrays[2].clone()]
    case.run(made)
    for actual, wanted in zip(made[1:3], pair.compress(expected[1], expected[2], step=case.step), strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(made[3], expected[3])
    assert torch.equal(made[0], expected[0])
