"""``offload_weights="auto"`` keeps the weights that fit besides the measured peak of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zenflow_compile as zf
from tests.support.calls import interrupted
from tests.support.training import Recorded, take_step
from zenflow_compile.planning.weight_memory import divide_budget
from zenflow_compile.runtime.device import devices
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.devices import CpuDevice
from zenflow_compile.runtime.parameters import host_weights
from zenflow_compile.runtime.parameters.host_weight import HostWeight

WIDTH, BLOCKS, STEPS = 32, 6, 8
WEIGHT = 4 * WIDTH * WIDTH
LIMIT = 40 * WEIGHT
RESERVED = LIMIT // 20
ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "topk_ratio": 0.25, "device_share": 0.0, "min_offload_size": 1}


class Counting(CpuDevice):
    """Says that it counts memory. The peak is what a test says."""

    peak = 0
    free: int | None = None
    resets = 0

    def peak_bytes(self) -> int | None:
        return Counting.peak

    def reset_peak(self) -> None:
        Counting.resets += 1

    def free_bytes(self) -> int | None:
        return LIMIT - Counting.peak if Counting.free is None else Counting.free


@contextmanager
def cpu_served_by(implementation: type[Device]) -> Iterator[None]:
    before = devices.implementation_of("cpu")
    devices.register_device("cpu", implementation)
    try:
        yield
    finally:
        devices.register_device("cpu", before)


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    Counting.peak, Counting.free, Counting.resets = 0, None, 0
    with mock.patch.object(host_weights, "SMALLEST_WEIGHT_BYTES", WEIGHT), cpu_served_by(Counting):
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Run(Recorded):
    def __init__(self, **options: Any) -> None:
        super().__init__(Net(), **{**ADAM, **options})

    @property
    def kept(self) -> set[int]:
        return {p for p, reason in self.weights.kept.items() if reason == host_weights.WITHIN_BUDGET}

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(len(self.losses)))
            loss = self.call(x).square().mean()
            take_step(loss, self.optimizer)
            self.losses.append(loss.detach())


def peak_that_leaves(spare: int) -> int:
    return LIMIT - RESERVED - spare


def as_divided(run: Run, spare: int) -> set[int]:
    plan = run.optimizer.engine.registry.plan
    sizes = {each.index: each.weight_bytes for each in plan.params if len(each.shape) == 2}
    shapes = [each.shape for each in plan.params]
    streamed, _ = divide_budget(WEIGHT + spare, shapes, sizes, ring_bytes=WEIGHT)
    return set(sizes) - streamed


@pytest.mark.parametrize(
    "options",
    [
        {"update_interval": 1},
        {"update_interval": 2, "staleness": 1},
        {"update_interval": 3, "select_interval": 3},
        {"policy": "resident", "device_share": 0.25, "topk_ratio": 0.1, "min_offload_size": 4096},
        {"policy": "zero_offload", "device_share": 0.25, "topk_ratio": 0.1},
    ],
    ids=["each step", "stale", "windows", "resident", "zero_offload"],
)
@pytest.mark.parametrize("spare", [3 * WEIGHT, 100 * WEIGHT], ids=["some fit", "all fit"])
def test_weights_that_fit_are_kept(options: dict[str, Any], spare: int) -> None:
    Counting.peak = peak_that_leaves(spare)
    run = Run(offload_weights="auto", **options)
    run.train(2)
    assert run.kept == set()
    assert run.weights.ring_bytes == WEIGHT
    run.train(1)
    assert run.kept == as_divided(run, spare)
    assert len(run.kept) == min(spare // WEIGHT, BLOCKS)
    assert run.weights.ring_bytes == WEIGHT, "graphs that are compiled have no use for a larger one"
    run.train(STEPS - 3)
    resets = Counting.resets
    run.train(1)
    assert Counting.resets == resets  # measured one time
    other = Run(offload_weights=1.0, **options)
    other.train(STEPS + 1)
    assert run.equals(other)


@pytest.mark.parametrize("spare", [0, -5 * WEIGHT])
def test_nothing_is_kept_without_spare_memory(spare: int) -> None:
    Counting.peak = peak_that_leaves(spare)
    run = Run(offload_weights="auto")
    run.train(STEPS)
    assert run.kept == set()
    assert run.weights.ring_bytes == WEIGHT
    run.optimizer.close()


def test_held_weights_delay_the_measurement() -> None:
    Counting.peak = peak_that_leaves(3 * WEIGHT)
    run = Run(offload_weights="auto")
    run.train(2)
    run.optimizer.synchronize()
    run.train(1)
    assert run.kept == set()
    run.train(1)
    assert run.kept == as_divided(run, 3 * WEIGHT)
    run.optimizer.close()


def test_added_weights_are_measured_again() -> None:
    Counting.peak = peak_that_leaves(3 * WEIGHT)
    run = Run(offload_weights="auto")
    run.train(3)
    kept = run.kept
    with run.optimizer.loaded_weights():
        run.optimizer.add_param_group({"params": [("added", nn.Parameter(torch.zeros(WIDTH, WIDTH)))]})
    assert (run.kept, run.weights.ring_bytes) == (kept, WEIGHT)
    run.train(2)
    assert run.kept == kept
    run.train(1)
    assert run.kept > kept
    run.optimizer.close()


def test_profile_begins_when_all_weights_are_kept() -> None:
    """Then the engine has no weights in host memory any longer, and its moments change without them."""
    Counting.peak = peak_that_leaves(100 * WEIGHT)
    run = Run(offload_weights="auto")
    run.train(3)
    assert not run.weights.weights
    for _ in range(2):
        with zf.profile(run.optimizer):
            run.train(1)
        run.train(1)
    other = Run(offload_weights=1.0)
    other.train(7)
    assert run.equals(other)


def test_limit_is_what_is_free_and_allocated() -> None:
    Counting.free, Counting.peak = 7 * WEIGHT, 2 * WEIGHT
    run = Run(offload_weights="auto")
    assert run.weights.room is not None
    assert run.weights.room.limit_bytes == 9 * WEIGHT
    run.optimizer.close()


def test_weight_without_memory_stays_in_host_memory() -> None:
    """Memory may be in pieces, or taken by another process."""
    Counting.peak = peak_that_leaves(100 * WEIGHT)
    run = Run(offload_weights="auto")
    run.train(2)
    error = torch.OutOfMemoryError("none left")
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
    loss = run.call(x).square().mean()
    loss.backward()
    with interrupted(HostWeight._allocate, error, when=lambda passed: passed["self"].plan.index >= 4):
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.losses.append(loss.detach())
    assert run.kept == {0, 2}
    run.train(STEPS - 3)
    other = Run(offload_weights=1.0)
    other.train(STEPS)
    assert run.equals(other)


def test_device_must_count_memory() -> None:
    with (
        cpu_served_by(CpuDevice),
        pytest.raises(ValueError, match=r"counts its own memory, which cpu does not; .* such as 0\.5"),
    ):
        Run(offload_weights="auto")


def test_auto_cannot_be_predicted() -> None:
    with pytest.raises(ValueError, match="cannot be predicted; pass the bytes"):
        zf.plan("llama2-7b", "h200", tokens=64, offload_weights="auto")
