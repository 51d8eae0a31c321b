"""Windows of several gradients, written out number by number: what definitions are compared with besides themselves."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from zenflow_compile import ZenFlow, rules
from zenflow_compile.rules import Rule
from zenflow_compile.rules.rule import named
from zenflow_compile.rules.sgd import _stable_rate
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_

GRADIENTS = (0.5, -2.0, 0.25)


def after(rule: Rule, weight: float, state: list[float], step: int) -> list[float]:
    """Weight and arrays after a window of ``GRADIENTS``, at whose end ``step`` gradients are in the state."""
    options = rule.initial
    tensors = [torch.full((1,), value, dtype=torch.float64) for value in (weight, *state)]
    gradients = [torch.full((1,), value, dtype=torch.float64) for value in GRADIENTS]
    update_window_(tensors, gradients, [StepCoefficients(options, Number.known(1.0), rule)] * 3, step=step)
    return [float(each) for each in tensors]


def test_lion_moves_by_the_sign_of_each_step() -> None:
    weight, average, moves = 3.0, 0.4, 0.0
    for gradient in GRADIENTS:
        moves += math.copysign(0.1, 0.9 * average + 0.1 * gradient)
        average = 0.99 * average + 0.01 * gradient
    expected = [weight * (1 - 0.1 * 0.5) ** 3 - moves, average]
    assert after(rules.Lion(lr=0.1, weight_decay=0.5), weight, [0.4], 7) == pytest.approx(expected, rel=1e-12)


def test_adagrad_has_the_rate_of_each_step() -> None:
    weight, total, moves = 3.0, 0.4, 0.0
    for count, gradient in enumerate(GRADIENTS, 5):
        whole = gradient + 0.5 * weight
        total += whole * whole
        moves += 0.1 / (1 + (count - 1) * 0.25) * whole / (math.sqrt(total) + 1e-10)
    found = after(rules.Adagrad(lr=0.1, lr_decay=0.25, weight_decay=0.5), weight, [0.4], 7)
    assert found == pytest.approx([weight - moves, total], rel=1e-12)


def test_sgd_begins_with_its_first_gradient() -> None:
    momentum, moves = GRADIENTS[0], 0.1 * GRADIENTS[0]
    for gradient in GRADIENTS[1:]:
        momentum = 0.9 * momentum + 0.75 * gradient
        moves += 0.1 * momentum
    assert after(rules.SGD(lr=0.1, dampening=0.25), 3.0, [0.0], 3) == pytest.approx([3.0 - moves, momentum], rel=1e-12)


def test_nadam_multiplies_the_momenta_of_all_steps() -> None:
    def mu(step: int) -> float:
        return 0.9 * (1 - 0.5 * 0.96 ** (step * 4e-3))

    first, second, product = 0.4, 0.3, 0.7
    for count, gradient in enumerate(GRADIENTS, 5):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        product *= mu(count)
    root = math.sqrt(second / (1 - 0.999**7)) + 1e-8
    moved = (1 - mu(7)) / (1 - product) * GRADIENTS[-1] / root + mu(8) / (1 - product * mu(8)) * first / root
    found = after(rules.NAdam(lr=0.1), 3.0, [0.4, 0.3, 1 - 0.7], 7)
    assert found == pytest.approx([3.0 - 0.3 * moved, first, second, 1 - product], rel=1e-12)


def test_radam_moves_at_the_sum_of_the_rates() -> None:
    first, second = 0.4, 0.3
    for gradient in GRADIENTS:
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
    most, kept = 2 / (1 - 0.99) - 1, 0.99**40
    length = most - 2 * 40 * kept / (1 - kept)
    of_length = math.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
    moved = 0.3 * first / (1 - 0.9**40) * of_length * math.sqrt(1 - kept) / (math.sqrt(second) + 1e-8)
    found = after(rules.RAdam(lr=0.1, betas=(0.9, 0.99)), 3.0, [0.4, 0.3], 40)
    assert found == pytest.approx([3.0 - moved, first, second], rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("rule", [rules.SGD(lr=1.0), rules.NesterovSGD(lr=1.0)], ids=lambda rule: type(rule).__name__)
def test_stable_rates_are_those_of_the_rule(rule: rules.SGD, momentum: float, steps: int) -> None:
    """A quadratic shrinks just below the rate, and grows just above it, by the rule's own functions."""
    options = rule.initial._replace(momentum=momentum)

    def size(rate: float) -> float:
        weight, buffer = 1.0, 0.0
        numbers = rule.gradient_numbers(options, 2)
        for _ in range(1000):
            moves, first = 0.0, weight
            for _ in range(steps):
                state = named(rule.values, (buffer, moves))
                buffer, moves = rule.accumulate(first, state, rate * first, named(rule.of_gradient, numbers))
            weight = rule.apply(first, named(rule.values, (buffer, moves)), None)
            if abs(weight) > 1e6:
                break
        return abs(weight) + abs(buffer)

    limit = _stable_rate(momentum, steps, isinstance(rule, rules.NesterovSGD))
    assert size(0.9 * limit) < 1e-3
    assert size(1.1 * limit) > 1e3


@pytest.mark.parametrize(
    ("rule", "options", "share"),
    [
        (rules.SGD(momentum=0.9), {}, "1.9%"),
        (rules.SGD(momentum=0.9), {"update_interval": (1, 8)}, "0.9%"),
        (rules.SGD(momentum=0.9), {"update_interval": 1}, None),
        (rules.SGD(momentum=0.9), {"policy": "zero_offload"}, None),
        (rules.SGD(momentum=0.0), {}, None),
        (rules.NesterovSGD(momentum=0.9), {}, None),
        (rules.Muon(), {}, None),
        (rules.AdamW(), {}, None),
    ],
)
def test_windows_of_momentum_are_warned_of(rule: rules.Rule, options: dict[str, Any], share: str | None) -> None:
    param = torch.nn.Parameter(torch.randn(64, 64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ZenFlow([param], rule, **options).close()
    texts = [str(each.message) for each in caught if "stable up to" in str(each.message)]
    assert len(texts) == (share is not None)
    assert all(f"stable up to {share} of the rate" in text for text in texts)


@pytest.mark.parametrize(
    ("rule", "in_files", "warned"),
    [(rules.Muon(), True, True), (rules.Muon(), False, False), (rules.Lion(), True, False)],
)
def test_state_that_is_not_in_files_is_warned_of(
    rule: rules.Rule, in_files: bool, warned: bool, tmp_path: Path
) -> None:
    options = {"policy": "zero_infinity", "nvme_path": str(tmp_path)} if in_files else {"policy": "zero_offload"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ZenFlow([torch.nn.Parameter(torch.randn(64, 64))], rule, **options).close()
    assert [True for each in caught if "updated whole (Muon) stays in host memory" in str(each.message)] == [
        True
    ] * warned


def test_later_matrices_outside_of_files_warn(tmp_path: Path) -> None:
    optimizer = ZenFlow(
        [torch.nn.Parameter(torch.randn(64, 64))], rules.AdamW(), policy="zero_infinity", nvme_path=str(tmp_path)
    )
    with pytest.warns(UserWarning, match=r"updated whole \(Muon\) stays in host memory"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.randn(8, 8))], "rule": rules.Muon()})
    optimizer.close()
