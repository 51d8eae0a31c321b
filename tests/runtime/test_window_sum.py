"""Tests the sum of an update window on the device, and the host's step with its mean."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zenflow_compile.runtime.gradients.pending_gradient import Scales, WindowSum
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_

SHAPE = (24, 8)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def coefficients(grad_scale: float = 1.0, number: int = 0) -> StepCoefficients:
    return StepCoefficients.known(0.01 * (1 + number), 0.9 - 0.1 * number, 0.99, 0.1, grad_scale)


def sum_of(gradients: list[Tensor], scales: list[float]) -> WindowSum:
    window = WindowSum(torch.full(SHAPE, math.nan), Scales())  # whatever the window before left there
    for number, (gradient, scale) in enumerate(zip(gradients, scales, strict=True)):
        window.add(gradient, coefficients(scale, number))
    return window


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-16 * 0.77])
def test_one_gradient_is_unchanged(dtype: torch.dtype, scale: float) -> None:
    gradient = torch.randn(SHAPE).to(dtype)
    mean = torch.empty_like(gradient)
    window = sum_of([gradient], [scale])
    assert window.take_mean(mean) == [coefficients(scale)]
    assert torch.equal(mean, gradient)


@DTYPES
@pytest.mark.parametrize("scales", [[1.0] * 4, [1.0, 0.2, 1.0, 0.7], [2.0**-16, 2.0**-15, 0.3 * 2.0**-15], [0.5] * 3])
def test_mean_is_rounded_one_time(dtype: torch.dtype, scales: list[float]) -> None:
    """This holds for all clip factors and loss scales of its steps."""
    gradients = [torch.randn(SHAPE).to(dtype) for _ in scales]
    expected = torch.stack([g.double() * scale for g, scale in zip(gradients, scales, strict=True)]).mean(0)
    mean = torch.empty(SHAPE, dtype=dtype)
    returned = sum_of(gradients, scales).take_mean(mean)
    assert {each.grad_scale.value for each in returned} == {max(scales)}
    assert [each.options.lr for each in returned] == [
        coefficients(number=number).options.lr for number in range(len(scales))
    ]
    largest = torch.stack([g.double().abs() * max(scales) for g in gradients]).max()
    error = (mean.double() * max(scales) - expected).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * expected.abs() + 1e-6 * largest).all()


def test_fp16_mean_stays_in_range() -> None:
    """The sum of these is beyond fp16's range, and unscaled they are below it."""
    gradients = [torch.full(SHAPE, 60000.0, dtype=torch.float16) for _ in range(4)]
    mean = torch.empty(SHAPE, dtype=torch.float16)
    returned = sum_of(gradients, [2.0**-40] * 4).take_mean(mean)
    assert torch.equal(mean, gradients[0])
    assert returned[0].grad_scale.value == 2.0**-40


def test_zero_and_nan_clip_factors() -> None:
    """The mean gradient equals ``gradient * factor``: zeros, or NaN."""
    ones = torch.ones(SHAPE)
    mean = torch.empty(SHAPE)
    for scales in ([0.0, 1.0], [1.0, 0.0]):
        returned = sum_of([ones, ones], scales).take_mean(mean)
        assert torch.equal(mean * returned[0].grad_scale.value, ones / 2)
    returned = sum_of([ones, ones], [0.0, 0.0]).take_mean(mean)
    assert torch.equal(mean * returned[0].grad_scale.value, torch.zeros(SHAPE))
    for scales in ([math.nan, 1.0], [1.0, math.nan]):
        sum_of([ones, ones], scales).take_mean(mean)
        assert mean.isnan().all()


def test_take_mean_empties_the_window() -> None:
    mean = torch.empty(SHAPE)
    window = sum_of([torch.ones(SHAPE)] * 3, [1.0] * 3)
    window.take_mean(mean)
    assert window.coefficients == []
    window.add(torch.full(SHAPE, 5.0), coefficients())
    assert len(window.take_mean(mean)) == 1
    assert torch.equal(mean, torch.full(SHAPE, 5.0))


def test_mean_step_weighs_all_gradients() -> None:
    """Moments decayed by the product of betas, rates summed, decay multiplied; bias corrections count gradients."""
    state = [torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64)]
    state.append(torch.rand(SHAPE, dtype=torch.float64))
    master, exp_avg, exp_avg_sq = (tensor.clone() for tensor in state)
    gradients = [torch.randn(SHAPE) for _ in range(3)]
    mean = torch.empty(SHAPE)
    returned = sum_of(gradients, [1.0, 0.5, 1.0]).take_mean(mean)
    update_window_(state, [mean] * 3, returned, step=10)

    g = (gradients[0].double() + 0.5 * gradients[1].double() + gradients[2].double()) / 3
    kept1, kept2 = 0.9 * 0.8 * 0.7, 0.99**3
    exp_avg = kept1 * exp_avg + (1 - kept1) * g
    exp_avg_sq = kept2 * exp_avg_sq + (1 - kept2) * g**2
    master = master * (1 - 0.01 * 0.1) * (1 - 0.02 * 0.1) * (1 - 0.03 * 0.1)
    corrected = exp_avg / (1 - 0.7**10), exp_avg_sq / (1 - 0.99**10)
    master = master - (0.01 + 0.02 + 0.03) * corrected[0] / (corrected[1].sqrt() + 1e-8)
    for actual, expected in zip(state, (master, exp_avg, exp_avg_sq), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
