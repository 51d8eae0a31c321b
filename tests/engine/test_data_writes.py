"""Writes through ``.data``: replaced memory counts as an external write; writes in place need a remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.support.training import (
    ADAM,
    EAGER_BACKEND,
    ENTRIES,
    ENTRY_IDS,
    IN_FLIGHT,
    LARGEST_STATE,
    OFFLOAD_ALL,
    Training,
    batch,
    mlp,
    take_step,
)
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(60)

BOUND = 0.0625  # exact in bf16
EXACT: dict[str, Any] = {"update_interval": 1}

POLICIES: dict[str, dict[str, Any]] = {
    "zenflow": {"update_interval": 1, "overlap_step": False},
    "zero_offload": {"policy": "zero_offload"},
    "streamed": {"policy": "deep_optimizer_states", "ratio": 1.0, "update_stride": 2},
    "files": {"policy": "zero_infinity", "host_window_bytes": LARGEST_STATE},
    "resident": {"policy": "resident"},
}


def in_no_grad(param: Parameter) -> None:
    with torch.no_grad():
        param.clamp_(-BOUND, BOUND)


def with_version(param: Parameter) -> None:
    param.data.clamp_(-BOUND, BOUND)
    torch.autograd.graph.increment_version(param)


def replaced(param: Parameter) -> None:
    param.data = param.data.clamp(-BOUND, BOUND)


def replaced_twice(param: Parameter) -> None:
    """Replace the weights two times: the second tensor may get the memory that the first one has freed."""
    param.data = param.data * 1.0
    param.data = param.data.clamp(-BOUND, BOUND)


def in_place(param: Parameter) -> None:
    param.data.clamp_(-BOUND, BOUND)


WRITES = [in_no_grad, with_version, replaced, replaced_twice]


def clipped(
    policy: str, entry: dict[str, Any] | None, write: Callable[[Parameter], None], dtype: torch.dtype, folder: Path
) -> float:
    """WGAN's loop: weights are clipped after every step. Returns how far weights are from AdamW's, in the end."""
    options = {**POLICIES[policy], "nvme_path": folder} if policy == "files" else POLICIES[policy]
    training = Training(entry, options, dtype)
    expected = mlp(dtype).float()
    adamw = torch.optim.AdamW(expected.parameters(), **ADAM)
    for step in range(6):
        training.backward(step)
        for ours, theirs in zip(training.model.parameters(), expected.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.float().clone()
        training.optimizer.step()
        training.optimizer.zero_grad()
        adamw.step()
        for ours, theirs in zip(training.model.parameters(), expected.parameters(), strict=True):
            write(ours)
            theirs.data.clamp_(-BOUND, BOUND)
    difference = parameters_to_vector(training.weights()).float() - parameters_to_vector(expected.parameters())
    return difference.abs().max().item()


@pytest.mark.matrix(3)
@pytest.mark.filterwarnings("ignore:policy=:UserWarning")
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", POLICIES)
def test_clipped_weights_equal_adamw(
    policy: str, write: Callable[[Parameter], None], dtype: torch.dtype, entry: dict[str, Any] | None, tmp_path: Path
) -> None:
    assert clipped(policy, entry, write, dtype, tmp_path) < (1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.filterwarnings("ignore:policy=:UserWarning")
@pytest.mark.parametrize("policy", POLICIES)
def test_in_place_data_writes_reach_residents_or_raise(policy: str, tmp_path: Path) -> None:
    """Only weights that are their own masters take these writes."""
    if policy == "resident":
        assert clipped(policy, None, in_place, torch.float32, tmp_path) < 1e-6
    else:
        with pytest.raises(RuntimeError, match=r"was written through \.data"):
            clipped(policy, None, in_place, torch.float32, tmp_path)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("interval", [1, 4])
def test_vector_to_parameters_is_an_external_write(interval: int, entry: dict[str, Any] | None) -> None:
    training = Training(entry, {"update_interval": interval}).run(0, 3)
    twin = Training(entry, {"update_interval": interval}).run(0, 3)
    for each in (training, twin):
        each.optimizer.synchronize()
    vector = parameters_to_vector(training.model.parameters()).detach() * 0.5
    vector_to_parameters(vector, training.model.parameters())
    with torch.no_grad():
        for param in twin.model.parameters():
            param.mul_(0.5)
    training.run(3, 8)
    twin.run(3, 8)
    assert torch.equal(parameters_to_vector(training.weights()), parameters_to_vector(twin.weights()))


def test_write_warns_of_held_back_updates() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1, "staleness": 1}).run(0, 3)
    training.optimizer.synchronize()
    with torch.no_grad():
        next(training.model.parameters()).mul_(0.5)
    with pytest.warns(UserWarning, match=r"staleness=1 had held back are dropped.*call optimizer\.flush\(\)"):
        training.step(3)


def test_replaced_data_over_an_update_raises() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    param = next(training.model.parameters())
    with pytest.raises(RuntimeError, match=IN_FLIGHT):
        param.data = param.data.clone()
    param.data = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="which is lost now"):
        training.step(3)


def test_cast_to_the_same_dtype_is_no_write() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    twin = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    training.model.to(device="cpu", dtype=torch.float32)
    for ours, expected in zip(training.run(3, 6).weights(), twin.run(3, 6).weights(), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0,)], ids=str)
def test_parameters_without_elements_train(shape: tuple[int, ...]) -> None:
    layer = torch.nn.Linear(8, 8)
    empty = Parameter(torch.zeros(shape))
    optimizer = ZenFlowAdamW([*layer.parameters(), empty], device_share=0.0, min_offload_size=0)
    before = layer.weight.detach().clone()
    for _ in range(2):
        take_step((layer(torch.ones(2, 8)).sum() + empty.sum()), optimizer)
    optimizer.close()
    assert not torch.equal(layer.weight, before)


class MaxNorm(nn.Linear):
    """EEGNet's constraint."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


def test_forward_that_assigns_data_is_refused() -> None:
    model = nn.Sequential(MaxNorm(16, 32), nn.Linear(32, 10))
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, **OFFLOAD_ALL, **EXACT)
    with pytest.raises(Exception, match=r"compiled forward assigns \.data.*torch\.no_grad\(\).*overlap_step=False"):
        torch.compile(model, **EAGER_BACKEND)(batch(0)[0])
    expected = copy.deepcopy(model)
    adamw = torch.optim.AdamW(expected.parameters(), **ADAM)
    for step in range(4):
        for each, stepping in ((model, optimizer), (expected, adamw)):
            take_step(each(batch(step)[0]).square().mean(), stepping)
    optimizer.synchronize()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_forward_may_write_weights_without_overlap() -> None:
    """The remedy that the error above names."""

    def constrain(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    options = {**OFFLOAD_ALL, **EXACT, "overlap_step": False}
    losses: list[list[float]] = [[], []]
    for number, entry in enumerate((EAGER_BACKEND, None)):
        model = mlp()
        model[2].register_forward_pre_hook(constrain)  # which Dynamo traces
        params = model.parameters()
        optimizer: Any = ZenFlowAdamW(params, **ADAM, **options) if entry else torch.optim.AdamW(params, **ADAM)
        call = torch.compile(model, **entry) if entry else model
        for step in range(5):
            loss = call(batch(step)[0]).square().mean()
            take_step(loss, optimizer)
            losses[number].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-6)
