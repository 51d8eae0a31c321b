"""Copies that run ahead of loads: taken, dropped when they are stale, and without a trace in the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support.calls import Call, at_calls, interrupted
from tests.support.training import EAGER_BACKEND, Recorded
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.parameters import host_weights
from zenflow_compile.runtime.parameters.host_values import HostValues
from zenflow_compile.runtime.parameters.host_weight import HostWeight
from zenflow_compile.runtime.parameters.weight_prefetch import WeightPrefetch

pytestmark = pytest.mark.timeout(120)

WIDTH, LAYERS = 160, 5
WEIGHT = 4 * WIDTH * WIDTH
POLICIES: dict[str, dict[str, Any]] = {
    "zero_offload": {"policy": "zero_offload"},
    "windows": {"update_interval": 2, "topk_ratio": 0.25, "device_share": 0.0},
    "late": {"update_interval": 2, "staleness": 1, "topk_ratio": 0.25, "device_share": 0.0},
    "resident": {"policy": "resident"},
}


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


class Run(Recorded):
    def __init__(self, layers: int = LAYERS, **options: Any) -> None:
        super().__init__(Net(layers), lr=1e-2, min_offload_size=1, **options)

    @property
    def ring_in_use(self) -> int:
        ring = self.optimizer.engine.registry.transport.up_ring
        return len(ring.buffers) - ring.free

    def forward(self, step: int) -> Tensor:
        return self.call(batch(step)).square().mean()

    def train(self, steps: range, *, discards: bool = False, evaluates: bool = False) -> None:
        for step in steps:
            loss = self.forward(step)
            if evaluates:
                with torch.no_grad():
                    self.losses.append(self.forward(100 + step))
            loss.backward()
            if discards:
                self.forward(200 + step)  # its backward never comes, and its copies for that stay behind
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())


@pytest.fixture
def loads() -> Iterator[dict[str, int]]:
    """How many loads had a copy that was started ahead, and how many started their own."""
    counts = {"ahead": 0, "late": 0}

    def counting(call: Call) -> None:
        counts["late" if call.arguments["staged"] is None else "ahead"] += 1

    with at_calls(counting, HostWeight.load):
        yield counts


@pytest.mark.parametrize("habit", ["plain", "discards", "evaluates"])
@pytest.mark.parametrize("policy", POLICIES)
def test_copies_ahead_change_no_number(policy: str, habit: str, loads: dict[str, int]) -> None:
    habits = {} if habit == "plain" else {habit: True}
    run, plain = Run(offload_weights=1.0, **POLICIES[policy]), Run(**POLICIES[policy])
    run.train(range(3), **habits)
    loads.update(ahead=0, late=0)
    run.train(range(3, 9), **habits)
    assert loads["ahead"] >= 6 * (LAYERS - 1)
    assert run.ring_in_use <= 2
    plain.train(range(9), **habits)
    assert run.equals(plain)


@mock.patch.object(HostValues, "is_current", mock.Mock(return_value=True))
def test_stale_copy_is_not_taken() -> None:
    """Mutant: a copy from before the update is taken for a current one. The run above finds it."""
    run, plain = Run(offload_weights=1.0, **POLICIES["zero_offload"]), Run(**POLICIES["zero_offload"])
    run.train(range(9), discards=True)
    plain.train(range(9), discards=True)
    assert not run.equals(plain)


@mock.patch.object(WeightPrefetch, "go_on", mock.Mock())
def test_without_copies_ahead_loads_start_their_own(loads: dict[str, int]) -> None:
    run, plain = Run(offload_weights=1.0, **POLICIES["windows"]), Run(**POLICIES["windows"])
    run.train(range(6))
    plain.train(range(6))
    assert loads["ahead"] == 0
    assert run.equals(plain)


def test_last_weights_of_a_forward_stay(loads: dict[str, int]) -> None:
    """Three weights at a time: two of them need no load in the backward, and the budget holds."""
    run, plain = Run(offload_weights=3 * WEIGHT, **POLICIES["zero_offload"]), Run(**POLICIES["zero_offload"])
    run.train(range(3))
    loads.update(ahead=0, late=0)
    run.train(range(3, 6))
    assert loads == {"ahead": 3 * (LAYERS + LAYERS - 1 - 2), "late": 0}, "the backward does not read the first weight"
    assert run.weights.peak_bytes <= run.weights.ring_bytes
    plain.train(range(6))
    assert run.equals(plain)


def test_budget_beyond_the_ring_keeps_weights() -> None:
    """The ring has two blocks of two layers."""
    run, plain = Run(8, offload_weights=6 * WEIGHT, **POLICIES["windows"]), Run(8, **POLICIES["windows"])
    kept = [p for p, reason in run.weights.kept.items() if reason == host_weights.WITHIN_BUDGET]
    assert (run.weights.ring_bytes, kept) == (4 * WEIGHT, [0, 1])
    run.train(range(6))
    plain.train(range(6))
    assert run.equals(plain)


def test_load_without_memory_leaves_no_trace() -> None:
    """A loop that goes on with the next batch, as after ``torch.OutOfMemoryError``."""
    run, plain = Run(offload_weights=1.0, **POLICIES["windows"]), Run(**POLICIES["windows"])
    run.train(range(3))
    error = torch.OutOfMemoryError("no memory")
    for after in range(5):  # a forward that fails leaves weights behind, which need no load until the next step
        with interrupted(HostValues.fill, error, after=after), pytest.raises(torch.OutOfMemoryError):
            run.forward(50).backward()
        run.optimizer.zero_grad()
        assert run.ring_in_use <= 2
    run.train(range(3, 8))
    assert run.weights.loaded_bytes == 0
    plain.train(range(8))
    assert run.equals(plain)


def test_operator_that_needs_more_than_the_budget() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.one * self.other)

    torch._dynamo.reset()
    model = Products()
    optimizer = ZenFlowAdamW(model.parameters(), policy="zero_offload", min_offload_size=1, offload_weights=WEIGHT)
    with pytest.raises(Exception, match=rf"offload_weights={WEIGHT} bytes must be at least {2 * WEIGHT}"):
        torch.compile(model, **EAGER_BACKEND)(batch(0))
    optimizer.close()
