"""bf16 and fp16 weights are the rounded fp32 masters, which AdamW updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.trajectories import ADAM, OFFLOAD_ALL, compiled, seeded
from tests.support.zoo import generator, gpt, tokens
from zenflow_compile.optimizer import ZenFlowAdamW

STEPS = 40
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
EXACT: dict[str, dict[str, Any]] = {
    "windows_of_one": {"update_interval": 1, "topk_ratio": 0.2, "select_interval": 2},
    "summed_windows_of_one": {"gradient_transfer": "mean", "full_warm_up_rounds": STEPS},
    "zero_offload": {"policy": "zero_offload"},
    "zero_infinity": {"policy": "zero_infinity", "host_window_bytes": 12 * 24 * 40},
    "files": {"offload_device": "nvme", "update_interval": 1, "topk_ratio": 0.2},
    "resident": {"policy": "resident"},
    "twinflow": {"policy": "twinflow", "ratio": 0.6},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 1},
    "every_second_streamed": {"policy": "deep_optimizer_states", "update_stride": 2},
    "windows_of_one_and_streamed": {"update_interval": 1, "update_stride": 2},
}
WITHOUT_HOST_UPDATES = ("resident", "streamed")


class Given(nn.Module):
    """A module whose gradients are its inputs: rounded weights do not change later gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall = nn.Parameter(0.1 * torch.randn(24, 40)), nn.Parameter(0.1 * torch.randn(40, 24))
        self.vector = nn.Parameter(0.1 * torch.randn(40))

    def forward(self, wide: Tensor, tall: Tensor, vector: Tensor) -> Tensor:
        return (self.wide * wide).sum() + (self.tall * tall).sum() + (self.vector * vector).sum()


def given(dtype: torch.dtype, step: int) -> tuple[Tensor, ...]:
    """Return the gradients of ``Given`` at a step."""
    source = generator(step)
    shapes = ((24, 40), (40, 24), (40,))
    return tuple(torch.randn(shape, generator=source).to(dtype) for shape in shapes)


class MasterAdamW:
    """``torch.optim.AdamW`` on fp32 copies of the weights."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.masters = [nn.Parameter(param.detach().float().clone()) for param in params]
        self.optimizer = torch.optim.AdamW(self.masters, **ADAM)

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters from the weights' gradients, and the weights from the masters."""
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    def zero_grad(self) -> None:
        """Discard the weights' gradients."""
        for param in self.params:
            param.grad = None


def trained(
    build: Callable[[], nn.Module],
    inputs: Callable[[int], tuple[Tensor, ...]],
    dtype: torch.dtype,
    make_optimizer: Callable[[nn.Module], Any],
    inner: str | None,
) -> tuple[list[Tensor], float, Any]:
    """Return weights and loss after all steps, and the optimizer."""
    model = seeded(build).to(dtype)
    optimizer = make_optimizer(model)
    run = compiled(model, inner)
    loss = torch.zeros(())
    for step in range(STEPS):
        loss = run(*inputs(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.synchronize()
    return [param.detach().clone() for param in model.parameters()], loss.item(), optimizer


def zenflow_adamw(options: dict[str, Any]) -> Callable[[nn.Module], ZenFlowAdamW]:
    """Make the optimizer under test."""
    return lambda model: ZenFlowAdamW(model.named_parameters(), **{**ADAM, **OFFLOAD_ALL, **options})


def master_adamw(model: nn.Module) -> MasterAdamW:
    """Make the oracle."""
    return MasterAdamW(list(model.parameters()))


def plain_adamw(model: nn.Module) -> torch.optim.AdamW:
    """Make an optimizer without masters."""
    return torch.optim.AdamW(model.parameters(), **ADAM)


def unequal_share(weights: list[Tensor], others: list[Tensor]) -> float:
    """Return the share of the elements that are not bitwise equal."""
    different = sum(int((one != other).sum()) for one, other in zip(weights, others, strict=True))
    return different / sum(weight.numel() for weight in weights)


@pytest.mark.matrix(2)
@HALF
@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("inner", ["eager", None])
def test_weights_are_roundings_of_exact_masters(
    dtype: torch.dtype, case: str, inner: str | None, tmp_path: Path
) -> None:
    """Masters agree up to the last bits of fp32, so almost no weight rounds to another value."""
    make = zenflow_adamw({"nvme_path": tmp_path, **EXACT[case]})
    weights, _, optimizer = trained(Given, partial(given, dtype), dtype, make, inner)
    with optimizer:
        on_host = case not in WITHOUT_HOST_UPDATES
        assert bool(optimizer.engine.offloaded) == (optimizer.engine.steps.windows_flushed > 0) == on_host
        assert bool(optimizer.engine.registry.streamed.params) == ("streamed" in case)
        assert (optimizer.engine.uploads.selections > 0) == ("windows_of_one" in case or case == "files")
        for each in optimizer.engine.offloaded.values():
            with each.host.acquire() as state:
                assert {side.dtype for side in (*each.device.rows.stored, *state.stored)} == {torch.float32}
    expected, _, _ = trained(Given, partial(given, dtype), dtype, master_adamw, inner)
    assert all(weight.dtype == dtype for weight in weights)
    assert unequal_share(weights, expected) < 2e-3
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=torch.finfo(dtype).eps, atol=1e-6)


@HALF
def test_control_weights_without_masters_differ(dtype: torch.dtype) -> None:
    """Control: AdamW on the half precision weights themselves loses most of its updates."""
    weights, _, _ = trained(Given, partial(given, dtype), dtype, plain_adamw, None)
    expected, _, _ = trained(Given, partial(given, dtype), dtype, master_adamw, None)
    assert unequal_share(weights, expected) > 0.2


@HALF
@pytest.mark.parametrize("inner", ["eager", None])
def test_real_model_follows_its_masters(dtype: torch.dtype, inner: str | None) -> None:
    """One different rounding changes the last digit of all later gradients, so weights are only close."""
    weights, loss, optimizer = trained(gpt, tokens, dtype, zenflow_adamw(EXACT["windows_of_one"]), inner)
    with optimizer:
        assert optimizer.engine.steps.windows_flushed > 0
        assert optimizer.engine.uploads.selections > 0
    expected, expected_loss, _ = trained(gpt, tokens, dtype, master_adamw, inner)
    assert abs(loss - expected_loss) < 1e-3
    for weight, other in zip(weights, expected, strict=True):
        # 40 steps of 1e-3 have moved weights by up to 0.04.
        torch.testing.assert_close(weight, other, rtol=torch.finfo(dtype).eps, atol=5e-4)


@HALF
def test_entries_agree_in_half_precision(dtype: torch.dtype) -> None:
    in_graph, _, first = trained(gpt, tokens, dtype, zenflow_adamw({}), "eager")
    through_grad, _, second = trained(gpt, tokens, dtype, zenflow_adamw({}), None)
    with first, second:
        assert first.engine.steps.windows_flushed == second.engine.steps.windows_flushed > 0
    for weight, other in zip(in_graph, through_grad, strict=True):
        torch.testing.assert_close(weight, other, rtol=torch.finfo(dtype).eps, atol=1e-5)
