"""ResidentUpdates equals torch.optim.AdamW bit for bit in fp32, and over fp32 masters of low-precision weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support.coefficients import with_lr
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import resident_updates
from zenflow_compile.runtime.device_updates.resident_updates import ResidentState, ResidentUpdates
from zenflow_compile.runtime.state_forms import StateForm
from zenflow_compile.runtime.update_rule import StepCoefficients

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
SHAPES = [(33, 17), (64,), (3, 2, 5, 5), ()]
EPS = 1e-6
COEFFICIENTS = StepCoefficients.known(lr=1e-2, beta1=0.8, beta2=0.95, weight_decay=0.1, eps=EPS)


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[Parameter]:
    return [Parameter(torch.randn(shape, device=device).to(dtype)) for shape in SHAPES]


def baseline(params: list[Parameter]) -> torch.optim.AdamW:
    copies = [Parameter(param.detach().float()) for param in params]
    return torch.optim.AdamW(copies, lr=1e-2, betas=(0.8, 0.95), eps=EPS, weight_decay=0.1, fused=True)


def baseline_params(optimizer: torch.optim.AdamW) -> list[Parameter]:
    params: list[Parameter] = optimizer.param_groups[0]["params"]
    return params


@pytest.mark.parametrize("device", DEVICES)
def test_fp32_equals_adamw_bit_for_bit(device: str) -> None:
    params = parameters(torch.float32, device)
    theirs = baseline(params)
    ours = ResidentUpdates()
    for step in range(10):
        # The second parameter gets a gradient in every third step only.
        present = [i for i in range(len(params)) if i != 1 or step % 3 == 2]
        grads = [torch.randn_like(params[i]) for i in present]
        theirs.param_groups[0]["lr"] = lr = 1e-2 / (step + 1)
        theirs.zero_grad()
        for i, grad in zip(present, grads, strict=True):
            baseline_params(theirs)[i].grad = grad.clone()
        theirs.step()
        ours.update([params[i] for i in present], grads, with_lr(COEFFICIENTS, lr))
    assert [int(ours.states[param].step) for param in params] == [10, 3, 10, 10]
    for mine, other in zip(params, baseline_params(theirs), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(ours.states[mine].arrays[0], theirs.state[other]["exp_avg"])
        assert torch.equal(ours.states[mine].arrays[1], theirs.state[other]["exp_avg_sq"])
        assert ours.states[mine].master is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_the_cast_of_fp32_adamw(dtype: torch.dtype, device: str) -> None:
    params = parameters(dtype, device)
    theirs = baseline(params)
    ours = ResidentUpdates()
    for _ in range(10):
        grads = [torch.randn_like(param) for param in params]
        for other, grad in zip(baseline_params(theirs), grads, strict=True):
            other.grad = grad.float()
        theirs.step()
        ours.update(params, grads, COEFFICIENTS)
    for mine, other in zip(params, baseline_params(theirs), strict=True):
        master = ours.states[mine].master
        assert master is not None
        assert torch.equal(master, other)
        assert torch.equal(mine, other.to(dtype))


def test_scaled_gradients_are_not_written() -> None:
    params = parameters(torch.float32)
    twins = [Parameter(param.detach().clone()) for param in params]
    grads = [torch.randn_like(param) for param in params]
    before = [grad.clone() for grad in grads]
    ResidentUpdates().update(params, grads, COEFFICIENTS._replace(grad_scale=Number.known(0.3)))
    ResidentUpdates().update(twins, [grad * 0.3 for grad in grads], COEFFICIENTS)
    assert all(torch.equal(grad, kept) for grad, kept in zip(grads, before, strict=True))
    assert all(torch.equal(mine, twin) for mine, twin in zip(params, twins, strict=True))


def test_mixed_dtypes_and_batches_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(torch.float32) + parameters(torch.bfloat16) + parameters(torch.float64)
    twins = [Parameter(param.detach().clone()) for param in params]
    grads = [torch.randn_like(param) for param in params]
    coefficients = COEFFICIENTS._replace(grad_scale=Number.known(0.5))
    ResidentUpdates().update(params, grads, coefficients)
    monkeypatch.setattr(resident_updates, "_SCRATCH_ELEMENTS", 100)
    ResidentUpdates().update(twins, grads, coefficients)
    assert all(torch.equal(mine, twin) for mine, twin in zip(params, twins, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "with_holes", "expanded_gradient"])
def test_memory_layout_changes_no_bit(layout: str, dtype: torch.dtype) -> None:
    weight = torch.randn(6, 4, 3, 3).to(dtype)
    gradient = torch.randn(6, 4, 3, 3).to(dtype)
    plain = Parameter(weight.clone())
    pair = torch.stack([weight, weight], dim=-1)
    match layout:
        case "channels_last":
            mine = Parameter(weight.to(memory_format=torch.channels_last))
        case "transposed":
            mine = Parameter(weight.transpose(0, 1).contiguous().transpose(0, 1))
        case "with_holes":
            mine = Parameter(pair[..., 0])
        case _:
            mine, gradient = Parameter(weight.clone()), gradient[:1].expand_as(weight)
    optimizers = ResidentUpdates(), ResidentUpdates()
    for _ in range(3):
        for optimizer, param, grad in zip(optimizers, (mine, plain), (gradient, gradient.contiguous()), strict=True):
            optimizer.update([param], [grad], COEFFICIENTS)
    torch.testing.assert_close(mine, plain, rtol=1e-6 if dtype == torch.float32 else 0.01, atol=1e-6)
    assert torch.equal(pair[..., 1], weight)


@pytest.mark.parametrize("moments", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_changes_no_bit_of_rounded_moments(dtype: torch.dtype, moments: str) -> None:
    """Of a parameter that gets another layout before its first update, or between two of them."""
    weight = torch.randn(96, 64).to(dtype)
    params = [Parameter(weight.t().contiguous().t()), Parameter(weight.clone()), Parameter(weight.clone())]
    optimizer = ResidentUpdates()
    for step in range(3):
        if step == 1:
            params[1].data = params[1].data.t().contiguous().t()
        for param in params:
            optimizer.forms[param] = StateForm(moments=moments, length=64)
            optimizer.update([param], [torch.randn(96, 64, generator=seeded(step)).to(dtype)], COEFFICIENTS)
    assert not params[0].is_contiguous()
    for param in params[:2]:
        assert torch.equal(param, params[2])
        for mine, theirs in zip(optimizer.states[param].tensors(), optimizer.states[params[2]].tensors(), strict=True):
            assert torch.equal(mine, theirs)


def seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def test_external_write_updates_the_master() -> None:
    param = Parameter(torch.randn(64).bfloat16())
    optimizer = ResidentUpdates()
    optimizer.update([param], [torch.randn(64).bfloat16()], COEFFICIENTS)
    master = optimizer.states[param].master
    assert master is not None
    before = master.clone()
    with torch.no_grad():
        param[:10] = 3.0
    optimizer.update(
        [param],
        [torch.zeros(64, dtype=torch.bfloat16)],
        with_lr(COEFFICIENTS, 0.0),
    )
    assert torch.equal(master[:10], torch.full((10,), 3.0))
    assert torch.equal(master[10:], before[10:])
    assert not torch.equal(master[10:], param[10:].float())


def test_update_moves_the_version_counter() -> None:
    param = Parameter(torch.ones(3))
    loss = (param * param).sum()
    ResidentUpdates().update([param], [torch.ones(3)], COEFFICIENTS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    def gradients() -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [[torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(6)]

    params = parameters(dtype)
    whole = ResidentUpdates()
    for grads in gradients()[:3]:
        whole.update(params, grads, COEFFICIENTS)
    copies = [Parameter(param.detach().clone()) for param in params]
    resumed = ResidentUpdates()
    for param, copy in zip(params, copies, strict=True):
        state = whole.states[param]
        saved = [tensor.clone() for tensor in state.arrays]
        master = None if state.master is None else state.master.clone()
        resumed.load(copy, ResidentState(saved, state.step, master))
    for grads in gradients()[3:]:
        whole.update(params, grads, COEFFICIENTS)
        resumed.update(copies, grads, COEFFICIENTS)
    assert all(torch.equal(param, copy) for param, copy in zip(params, copies, strict=True))


def test_state_of_another_model_is_refused() -> None:
    param = Parameter(torch.zeros(3))
    optimizer = ResidentUpdates()
    with pytest.raises(ValueError, match="shape"):
        optimizer.load(param, ResidentState.zeros_like(Parameter(torch.zeros(4))))
    with pytest.raises(ValueError, match="must not have a master"):
        optimizer.load(param, ResidentState.zeros_like(Parameter(torch.zeros(3).bfloat16())))
    assert not optimizer.states


def test_state_bytes_are_counted() -> None:
    params = [Parameter(torch.zeros(10)), Parameter(torch.zeros(10).bfloat16())]
    optimizer = ResidentUpdates()
    optimizer.update(params, [torch.zeros_like(param) for param in params], COEFFICIENTS)
    assert optimizer.nbytes == 2 * 40 + 3 * 40
