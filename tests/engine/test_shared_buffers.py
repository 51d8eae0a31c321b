"""Gradient buffers that share memory change bytes, and never numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.calls import calls_of
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, Training, assert_same
from zenflow_compile.planning import planners
from zenflow_compile.planning.plan import pools_of
from zenflow_compile.runtime.parameters.host_state import FlushedWindow
from zenflow_compile.runtime.step.upload_scheduler import UploadScheduler

pytestmark = pytest.mark.timeout(180)

WIDTHS = (16, 48, 24, 40, 32, 32, 64, 20, 10)
OPTIONS: dict[str, dict[str, Any]] = {
    "windows": {"topk_ratio": 0.25},
    "all deferred": {"topk_ratio": 0.0, "update_interval": 3},
    "late": {"topk_ratio": 0.25, "update_interval": 2, "staleness": 1},
    "late, longer": {"topk_ratio": 0.25, "staleness": 1, "select_interval": 4},
    "late every step": {"topk_ratio": 0.25, "update_interval": 1, "staleness": 1},
    "no overlap": {"topk_ratio": 0.25, "overlap_step": False},
    "warm-up": {"topk_ratio": 0.25, "full_warm_up_rounds": 6},
    "summed": {"topk_ratio": 0.25, "gradient_transfer": "mean", "full_warm_up_rounds": 2},
    "int8": {"topk_ratio": 0.25, "gradient_transfer": "int8"},
    "zero_offload": {"policy": "zero_offload", "device_share": 0.25},
    "twinflow": {"policy": "twinflow", "ratio": 0.5, "device_share": 0.25},
    "weights on the host": {"topk_ratio": 0.25, "offload_weights": 1.0},
}


def deep(dtype: torch.dtype) -> nn.Module:
    """Matrices of many sizes."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairwise(WIDTHS)]
    return nn.Sequential(*layers).to(dtype)


class Wild(Training):
    """Does in every step what a seeded draw says, besides training."""

    saved_state: bytes | None = None

    def run_wild(self, seed: int, begin: int, end: int) -> Wild:
        for step in range(begin, end):
            draw = random.Random(f"{seed} {step}")
            self.backward(step)
            action = draw.choice(("step", "step", "step", "missing", "skip", "flush", "write", "reload", "early flush"))
            if action == "missing":
                for param in draw.sample(list(self.model.parameters()), 6):
                    param.grad = None
            if action == "early flush":  # between the backward and its step
                self.optimizer.flush()
            if action != "skip":
                self.optimizer.step()
            self.optimizer.zero_grad()
            if action == "flush":
                self.optimizer.flush()
            if action == "write":
                self.optimizer.synchronize()
                with torch.no_grad():
                    draw.choice([param for param in self.model.parameters() if param.dim() > 1]).mul_(0.75)
            if action == "reload":
                self.load(self.saved())
        return self


@contextmanager
def own_buffers() -> Iterator[None]:
    """Buffers share no memory, as where gradients decide when windows are flushed."""
    with mock.patch.object(planners, "_with_shared_buffers", lambda plans, options: plans):
        yield


def wild(options: dict[str, Any], entry: Any, seed: int, end: int) -> tuple[Wild, Wild]:
    """Runs with buffers of their own, and with shared ones."""
    runs = []
    for sharing in (own_buffers(), nullcontext()):
        with sharing:
            runs.append(Wild(entry, {**options, "workers": 1}, torch.bfloat16, deep).run_wild(seed, 0, end))
    return runs[0], runs[1]


def test_fewer_bytes_and_the_same_bits() -> None:
    own, shared = wild(OPTIONS["windows"], None, 0, 12)
    assert_same(shared.weights(), own.weights())
    plan = shared.optimizer.engine.plan
    deferred = sum(param.deferred_numel for param in plan.params if param.offloaded)
    alignment = 64 * 3 * len(plan.params)
    assert plan.host_bytes <= shared.optimizer.host_bytes <= plan.host_bytes + alignment
    assert own.optimizer.host_bytes >= 22 * deferred
    assert plan.host_bytes < 18 * deferred


COMPILED = ("windows", "late")  # in every run; the others are compiled by the long tests


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "entry"),
    [
        pytest.param(name, entry, id=f"{name}-{kind}", marks=pytest.mark.long if entry and name not in COMPILED else ())
        for name in OPTIONS
        for kind, entry in zip(ENTRY_IDS, ENTRIES, strict=True)
    ],
)
def test_any_training_has_the_same_bits(name: str, entry: Any) -> None:
    seed = sorted(OPTIONS).index(name)
    own, shared = wild(OPTIONS[name], entry, seed, 24)
    assert not pools_of(own.optimizer.engine.plan.params)
    assert len(pools_of(shared.optimizer.engine.plan.params)) == 1
    assert_same(shared.weights(), own.weights())


class Branches(nn.Module):
    """Layers of which each forward uses some.

    Attributes:
        used: numbers of those that the next forward uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: tuple[int, ...] = ()
        self.first = nn.Linear(16, 32)
        self.branches = nn.ModuleList(nn.Linear(32, 10) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        total: torch.Tensor = sum(self.branches[number](hidden) for number in self.used)  # type: ignore[assignment]
        return total


def branches(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return Branches().to(dtype)


@pytest.mark.parametrize(
    "options", [{"update_interval": 2}, {"update_interval": 2, "gradient_transfer": "int8"}], ids=["in place", "int8"]
)
def test_update_of_an_unread_weight_is_kept(options: dict[str, Any]) -> None:
    """Its memory is needed for a gradient before any forward has read the weight."""
    weights = []
    # Else the update is on its way to the device at the end of the step.
    no_prefetch = mock.patch.object(UploadScheduler, "_prefetch", return_value=None)
    with no_prefetch, calls_of(FlushedWindow.leave_buffer) as moved:
        for sharing in (own_buffers(), nullcontext()):
            with sharing:
                training = Training(EAGER_BACKEND, {**options, "topk_ratio": 0.0}, torch.float32, branches)
                for step in range(16):
                    training.model.used = (0, 1) if step % 4 < 2 else (2, 3)
                    training.step(step)
            weights.append(training.weights())
    assert bool(moved) == (options.get("gradient_transfer") != "int8")
    assert_same(weights[1], weights[0])
