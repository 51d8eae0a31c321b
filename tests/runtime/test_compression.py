"""int8 gradients: what rounding loses of a slice is bounded, is sent later, and never reaches another slice."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.expanded import expanded
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.gradients.pending_gradient import Residual
from zenflow_compile.runtime.host.host_kernel import scales_and_values
from zenflow_compile.runtime.update_rule import StepCoefficients

REST, LENGTH = 24, 10
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def plan_of(dtype: torch.dtype) -> ParamPlan:
    return ParamPlan(
        index=0, name="w", shape=(LENGTH, 32), dtype=dtype, placement=Placement.SPLIT_COLUMNS, dim=1, slices=32,
        length=LENGTH, k=32 - REST, compressed=True,
    )  # fmt: skip


def coefficients(grad_scale: float = 1.0) -> StepCoefficients:
    return StepCoefficients.known(lr=0.01, beta1=0.9, beta2=0.999, weight_decay=0.1, grad_scale=grad_scale)


def block_of(plan: ParamPlan) -> Tensor:
    buffers = plan.gradient_buffers
    return torch.full(buffers.shape, 55, dtype=buffers.dtype)


def received(block: Tensor) -> Tensor:
    """The whole block as the host reads it."""
    return expanded(block, slice(0, REST * LENGTH)).view(REST, LENGTH)


def gradient_of(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Slices of very different magnitude."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.logspace(-3, 1, REST).unsqueeze(1)
    return (magnitudes * torch.randn(REST, LENGTH, generator=generator)).to(dtype)


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-16])
def test_rounding_error_is_at_most_half_a_quantum(dtype: torch.dtype, scale: float) -> None:
    plan = plan_of(dtype)
    residual, block, gradient = Residual.allocate(plan, torch.device("cpu")), block_of(plan), gradient_of(dtype)
    kept = gradient.clone()
    assert residual.compress(gradient, coefficients(scale), block) == coefficients(1.0)
    assert torch.equal(gradient, kept)
    exact = gradient.double() * scale
    quantum = exact.abs().amax(1, keepdim=True) / 127
    lost = exact - received(block).double()
    assert (lost.abs() <= 0.5001 * quantum).all()
    assert lost.abs().max() > 0
    tolerance = 2.0**-8 if dtype != torch.float32 else 1e-4
    assert ((residual.lost.double() - lost).abs() <= tolerance * quantum).all()


@DTYPES
def test_residual_is_sent_later(dtype: torch.dtype) -> None:
    """Over any number of steps, whatever their scales, the host has received all but the last rounding."""
    plan = plan_of(dtype)
    residual, block = Residual.allocate(plan, torch.device("cpu")), block_of(plan)
    sent, exact = torch.zeros(REST, LENGTH, dtype=torch.float64), torch.zeros(REST, LENGTH, dtype=torch.float64)
    without_feedback = sent.clone()
    steps, quantum = 200, torch.zeros(REST, 1, dtype=torch.float64)
    constant = gradient_of(dtype, seed=99) * 0.01  # on its own it would often round to nothing
    for step in range(steps):
        gradient, scale = gradient_of(dtype, step) + constant, 0.5 + 0.5 * (step % 3)
        residual.compress(gradient, coefficients(scale), block)
        sent += received(block)
        exact += gradient.double() * scale
        alone = Residual.allocate(plan, torch.device("cpu"))
        alone.compress(gradient, coefficients(scale), block)
        without_feedback += received(block)
        quantum = torch.maximum(quantum, gradient.double().abs().amax(1, keepdim=True) * scale / 127)
    # Where the residual is in bf16, each step may lose 2**-9 of it for good.
    lasting = steps * 2.0**-10 if dtype != torch.float32 else 1e-3
    assert ((sent - exact).abs() <= (0.6 + lasting) * quantum).all()
    torch.testing.assert_close(sent + residual.lost.double(), exact, atol=float(lasting * quantum.max()), rtol=0)
    assert ((without_feedback - exact).abs() > 2 * quantum).any(), "the control: without feedback errors add up"


def test_zero_inf_and_nan_stay_in_their_slices() -> None:
    plan = plan_of(torch.float32)
    residual, block, gradient = Residual.allocate(plan, torch.device("cpu")), block_of(plan), gradient_of(torch.float32)
    gradient[3], gradient[4, 1], gradient[5, 2], gradient[6] = 0.0, math.inf, math.nan, 1e-44
    residual.compress(gradient, coefficients(), block)
    result = received(block)
    assert torch.equal(result[3], torch.zeros(LENGTH))
    assert result[4:6].isnan().all()
    others = [line for line in range(REST) if line not in (4, 5)]
    assert result[others].isfinite().all()
    assert residual.lost[others].isfinite().all()
    torch.testing.assert_close(result[6] + residual.lost[6], gradient[6], atol=0, rtol=0)


def test_changed_slices_have_no_residual() -> None:
    plan = plan_of(torch.float32)
    residual = Residual.allocate(plan, torch.device("cpu"))
    residual.compress(gradient_of(torch.float32), coefficients(), block_of(plan))
    before = residual.lost.clone()
    changed = torch.zeros(REST, dtype=torch.bool)
    changed[[2, 7]] = True
    residual.drop(changed)
    assert not residual.lost[changed].any()
    assert torch.equal(residual.lost[~changed], before[~changed])


@DTYPES
def test_chunks_change_no_result(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are compressed and expanded in chunks equal those of one piece."""
    plan = plan_of(dtype)
    whole, cut = (Residual.allocate(plan, torch.device("cpu")) for _ in range(2))
    block, other = block_of(plan), block_of(plan)
    whole.compress(gradient_of(dtype), coefficients(0.3), block)
    monkeypatch.setattr(column_ops, "_CHUNK_ELEMENTS", 5 * LENGTH)
    cut.compress(gradient_of(dtype), coefficients(0.3), other)
    assert torch.equal(block, other)
    assert torch.equal(whole.lost, cut.lost)
    parts = [expanded(other, slice(a * LENGTH, b * LENGTH)) for a, b in ((0, 7), (7, 8), (8, REST))]
    assert torch.equal(torch.cat(parts).view(REST, LENGTH), received(block))


def test_block_is_contiguous() -> None:
    plan = plan_of(torch.bfloat16)
    block = block_of(plan)
    scales, values = scales_and_values(block)
    assert scales.nbytes + values.nbytes == block.nbytes == plan.gradient_buffers.nbytes == REST * (LENGTH + 4)
    scales.fill_(2.0)
    values.fill_(-3)
    assert torch.equal(received(block), torch.full((REST, LENGTH), -6.0))
