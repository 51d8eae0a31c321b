"""Models that are cast while their optimizer lives: they can be read, and train on in their first dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.training import EAGER_BACKEND, take_step
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.usefixtures("small_weights")

EXACT: dict[str, Any] = {"min_offload_size": 1, "update_interval": 1, "topk_ratio": 0.25, "device_share": 0.0}
WINDOWS: dict[str, Any] = {**EXACT, "update_interval": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "zenflow": EXACT,
    "zero_offload": {"policy": "zero_offload", "min_offload_size": 1},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2, "min_offload_size": 1},
    "resident": {"policy": "resident"},
    "weights": {**EXACT, "offload_weights": 1.0},
    "resident weights": {"policy": "resident", "offload_weights": 1.0},
}
CHANGED = r"0\.weight was float32\[32, 24\] on cpu .* and is bfloat16"


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24))


class Fused(nn.Module):
    """Two weights that are views of one tensor, and share its version counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        one, other = torch.randn(48, 24).div(5).chunk(2)
        self.one, self.other = nn.Parameter(one), nn.Parameter(other)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.one) @ self.other


def batch(step: int) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(step))


class Run:
    def __init__(
        self, options: dict[str, Any], *, compiled: bool = True, make: Callable[[], nn.Module] = build
    ) -> None:
        torch._dynamo.reset()
        self.model = make()
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), lr=1e-2, **options)
        self.call: Any = torch.compile(self.model, **EAGER_BACKEND) if compiled else self.model

    def train(self, *steps: int) -> list[float]:
        return train(self.call, self.optimizer, *steps)

    def save(self) -> None:
        """Save and evaluate a half-size copy, in the middle of training."""
        self.optimizer.flush()
        expected = [param.detach().bfloat16() for param in self.model.parameters()]
        self.model.bfloat16()
        saved = self.model.state_dict()
        assert all(map(torch.equal, saved.values(), expected))
        self.optimizer.state_dict()
        with torch.no_grad():
            assert torch.equal(self.call(batch(99).bfloat16()), self.model(batch(99).bfloat16()))
        self.optimizer.synchronize()
        self.optimizer.flush()
        self.model.float()


def train(call: Any, optimizer: Any, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        loss = call(batch(step)).square().mean()
        take_step(loss, optimizer)
        losses.append(float(loss.detach()))
    return losses


def adamw(make: Callable[[], nn.Module] = build) -> list[float]:
    """Losses of eight steps of AdamW, with weights that are rounded to bf16 after the third."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = train(model, optimizer, *range(3))
    model.bfloat16().float()
    return [*first, *train(model, optimizer, *range(3, 8))]


@pytest.mark.filterwarnings("ignore:offload_weights")  # which needs compiled graphs
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_half_size_save_in_mid_run_equals_adamw(options: dict[str, Any], compiled: bool) -> None:
    run = Run(options, compiled=compiled)
    losses = run.train(0, 1, 2)
    run.save()
    losses += run.train(3, 4, 5, 6, 7)
    assert losses == pytest.approx(adamw(), rel=0, abs=1e-7)
    run.optimizer.close()


def test_weights_of_one_counter_are_read_after_a_cast() -> None:
    run = Run(EXACT, make=Fused)
    losses = run.train(0, 1, 2)
    run.save()
    losses += run.train(3, 4, 5, 6, 7)
    assert losses == pytest.approx(adamw(Fused), rel=0, abs=1e-7)
    run.optimizer.close()


@pytest.mark.parametrize("reader", ["state dict", "forward", "compiled forward", "synchronize", "flush"])
def test_cast_applies_an_update_in_flight(reader: str) -> None:
    runs = Run(EXACT), Run({**EXACT, "overlap_step": False})
    for run in runs:
        run.train(0, 1)
        run.model.bfloat16()
        readers: dict[str, Callable[[], Any]] = {
            "state dict": run.model.state_dict,
            "forward": lambda run=run: run.model(batch(9).bfloat16()),
            "compiled forward": lambda run=run: run.call(batch(9).bfloat16()),
            "synchronize": run.optimizer.synchronize,
            "flush": run.optimizer.flush,
        }
        with torch.no_grad():
            readers[reader]()
    assert all(map(torch.equal, runs[0].model.parameters(), runs[1].model.parameters()))
    for run in runs:
        run.model.float()
    assert runs[0].train(2, 3) == runs[1].train(2, 3)
    for run in runs:
        run.optimizer.close()


def test_cast_over_open_windows_is_read_and_not_flushed() -> None:
    run = Run(WINDOWS)
    run.train(0, 1)
    run.optimizer.synchronize()
    assert any(each.window_gradients for each in run.optimizer.engine.offloaded.values())
    run.model.bfloat16()
    run.model.state_dict()
    with pytest.raises(RuntimeError, match=CHANGED):
        run.optimizer.flush()
    with pytest.warns(UserWarning, match="were dropped"):
        run.optimizer.close()


@pytest.mark.parametrize("compiled", [True, False])
def test_cast_model_does_not_train(compiled: bool) -> None:
    run = Run(EXACT, compiled=compiled)
    run.train(0, 1)
    run.optimizer.flush()
    run.model.bfloat16()
    with torch.no_grad():
        run.call(batch(9).bfloat16())
    with pytest.raises(RuntimeError, match=CHANGED):
        run.call(batch(2).bfloat16()).square().mean().backward()
    run.optimizer.close()
