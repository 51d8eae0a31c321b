"""The update rule equals torch.optim.AdamW and a literal implementation of rule P."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_, window_numbers

Make = Callable[..., Tensor]


@pytest.fixture
def make() -> Make:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return randn


def literal_rule_p(
    w: float, m: float, v: float, grads: list[float], coefficients: list[StepCoefficients], step: int, eps: float
) -> tuple[float, float, float]:
    """Rule P for one weight, in Python floats: sums, products and powers written out."""
    decay, rate = 1.0, 0.0
    for gradient, own in zip(grads, coefficients, strict=True):
        g, of_step = gradient * own.grad_scale.value, own.options
        m = of_step.beta1 * m + (1 - of_step.beta1) * g
        v = of_step.beta2 * v + (1 - of_step.beta2) * g * g
        decay *= 1 - of_step.lr * of_step.weight_decay
        rate += of_step.lr
    m_hat = m / (1 - coefficients[-1].options.beta1 ** step)
    v_hat = v / (1 - coefficients[-1].options.beta2 ** step)
    return w * decay - rate * m_hat / (math.sqrt(v_hat) + eps), m, v


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_one_gradient_is_adamw(make: Make, dtype: torch.dtype, tolerance: float) -> None:
    weight = make(33, 17, dtype=dtype)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=False)
    exp_avg, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 41):
        lr = 1e-2 / step
        gradient = make(33, 17, dtype=dtype)
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        own = StepCoefficients.known(lr, 0.8, 0.95, 0.1, eps=1e-6)
        update_window_((weight, exp_avg, exp_avg_sq), [gradient], [own], step=step)
    torch.testing.assert_close(weight, parameter.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(exp_avg, optimizer.state[parameter]["exp_avg"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("per_window", [1, 2, 3, 4, 8])
def test_windows_equal_the_literal_rule(make: Make, per_window: int) -> None:
    size, eps = 5, 1e-8
    weight, (exp_avg, exp_avg_sq) = make(size, dtype=torch.float64), torch.zeros(2, size, dtype=torch.float64)
    literal = [(float(w), 0.0, 0.0) for w in weight]
    step = 0
    for window in range(3):
        coefficients = [
            StepCoefficients.known(1e-2 / (1 + i), 0.9 - 0.02 * i, 0.99, 0.1 * i, grad_scale=0.5)
            for i in range(per_window - window % 2 if per_window > 1 else 1)
        ]
        gradients = [make(size, dtype=torch.float64) for _ in coefficients]
        step += len(coefficients)
        update_window_((weight, exp_avg, exp_avg_sq), gradients, coefficients, step=step)
        literal = [
            literal_rule_p(w, m, v, [float(g[i]) for g in gradients], coefficients, step, eps)
            for i, (w, m, v) in enumerate(literal)
        ]
    for tensor, column in zip((weight, exp_avg, exp_avg_sq), zip(*literal, strict=True), strict=True):
        torch.testing.assert_close(tensor, torch.tensor(column, dtype=torch.float64), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_widened_first(make: Make, dtype: torch.dtype) -> None:
    weight, exp_avg, exp_avg_sq = make(64), torch.zeros(64), torch.zeros(64)
    gradient = make(64, dtype=dtype)
    untouched = gradient.clone()
    out = torch.empty(64, dtype=dtype)
    own = StepCoefficients.known(1e-2, 0.9, 0.999, 0.01, 1 / 3)
    update_window_((weight, exp_avg, exp_avg_sq), [gradient], [own], step=1, out=out)
    torch.testing.assert_close(exp_avg, (gradient.float() * (1 / 3)) * 0.1, rtol=1e-6, atol=0)
    assert torch.equal(out, weight.to(dtype))
    assert torch.equal(gradient, untouched)


def test_scaling_leaves_the_gradient_unchanged(make: Make) -> None:
    gradient = make(8)
    untouched = gradient.clone()
    own = StepCoefficients.known(1e-2, 0.9, 0.999, 0.01, 0.25)
    update_window_((make(8), torch.zeros(8), torch.zeros(8)), [gradient], [own], step=1)
    assert torch.equal(gradient, untouched)


def test_window_of_missing_gradients_writes_out_only(make: Make) -> None:
    state = make(8), make(8), make(8).abs()
    before = [tensor.clone() for tensor in state]
    out = torch.full((8,), torch.nan, dtype=torch.bfloat16)
    update_window_(state, [], [], step=0, out=out)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
    assert torch.equal(out, before[0].bfloat16())


def test_rate_of_zero_moves_moments_only(make: Make) -> None:
    weight, exp_avg, exp_avg_sq = make(8), torch.zeros(8), torch.zeros(8)
    before = weight.clone()
    coefficients = [StepCoefficients.known(0.0, 0.9, 0.999, 0.1)] * 2
    update_window_((weight, exp_avg, exp_avg_sq), [make(8), make(8)], coefficients, step=2)
    assert torch.equal(weight, before)
    assert exp_avg.abs().min() > 0


def test_bad_windows_raise_and_write_nothing(make: Make) -> None:
    own = StepCoefficients.known(1e-2, 0.9, 0.999, 0.01)
    state = make(8), make(8), make(8).abs()
    before = [tensor.clone() for tensor in state]
    with pytest.raises(ValueError, match="1 gradients for 2 coefficients"):
        update_window_(state, [make(8)], [own, own], step=2)
    with pytest.raises(ValueError, match="step=1 must be at least 2"):
        update_window_(state, [make(8), make(8)], [own, own], step=1)
    with pytest.raises(ValueError, match="no coefficients"):
        window_numbers([], 3)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
