"""Counts the bytes that cross between device and host at the copies themselves."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zenflow_compile as zf
from tests.support.copies import copied_by
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, Training, assert_same, take_step
from zenflow_compile.profiling import summary
from zenflow_compile.runtime.device.thread_lane import copy_without_gil

INTERVAL = 4
RATIO = 0.1
WINDOWS = 3
FP32_STATE = 3 * 4  # bytes per element of a slice that changes sides: master and two moments


def matrices(dtype: torch.dtype) -> nn.Module:
    """Nothing but matrices whose numbers of slices, 80, 160, 160 and 40, are multiples of ten."""
    torch.manual_seed(1)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise((16, 80, 160, 40, 10))]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to(dtype)


class Counted:
    """Model sizes per step, over whole windows after the start.

    Attributes:
        traffic: gradients and uploads, by copies. state: of re-selections, by slices that changed sides.
        summary: what the profiler says of the same steps.
    """

    def __init__(self, options: dict[str, Any], entry: Any = None, dtype: Any = torch.float32) -> None:
        settings = {"topk_ratio": RATIO, "update_interval": INTERVAL, **options}
        training = Training(entry, settings, dtype, matrices).run(0, 2 * INTERVAL)
        training.optimizer.synchronize()  # no earlier update is applied while bytes are counted
        offloaded = training.optimizer.engine.offloaded.values()
        assert len(offloaded) == 4, "everything is offloaded"
        copied: Counter[str] = Counter()

        def counting(target: Tensor, source: Tensor) -> None:
            copied["bytes"] += source.nbytes
            copy_without_gil(target, source)

        steps = WINDOWS * INTERVAL
        moved = 0
        with copied_by(counting), zf.profile(training.optimizer) as profile:
            for step in range(2 * INTERVAL, 2 * INTERVAL + steps):
                before = [set(each.device.selection.selected.tolist()) for each in offloaded]
                training.step(step)
                training.optimizer.synchronize()
                for each, old in zip(offloaded, before, strict=True):
                    joined = set(each.device.selection.selected.tolist()) - old
                    moved += 2 * len(joined) * each.plan.length * FP32_STATE  # as many slices leave
        model_bytes = sum(param.nbytes for param in training.model.parameters())
        self.traffic = copied["bytes"] / model_bytes / steps
        self.state = moved / model_bytes / steps
        self.summary = profile.summary()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_traffic_is_deferred_columns_only(entry: Any, dtype: torch.dtype) -> None:
    """Deferred columns go down at every step, and up once in a window."""
    counted = Counted({}, entry, dtype)
    assert 0.99 * (1 - RATIO) * (1 + 1 / INTERVAL) < counted.traffic <= (1 - RATIO) * (1 + 1 / INTERVAL) * 1.01


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_summed_window_moves_once(entry: Any, dtype: torch.dtype, staleness: int) -> None:
    counted = Counted({"gradient_transfer": "mean", "staleness": staleness}, entry, dtype)
    assert 0.44 < counted.traffic <= 0.46


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_compressed_gradients_take_a_byte_each(entry: Any, dtype: torch.dtype) -> None:
    """A slice also needs four bytes for its scale, a visible share here: slices have 10, 16, 40 and 80 elements."""
    counted = Counted({"gradient_transfer": "int8"}, entry, dtype)
    elements = {16: 80, 80: 160, 160: 40, 40: 10}
    scales = sum(4 * max(pair) for pair in elements.items()) / sum(a * b for a, b in elements.items())
    down = (1 + scales) / dtype.itemsize
    assert counted.traffic == pytest.approx((1 - RATIO) * (down + 1 / INTERVAL))


@pytest.mark.parametrize(
    "options", [{}, {"gradient_transfer": "mean"}, {"gradient_transfer": "int8"}, {"policy": "zero_offload"}]
)
@mock.patch.object(summary, "_WARM_UP_FACTOR", math.inf)  # every step counts, however slow the first one was
def test_profiler_counts_moved_bytes(options: dict[str, Any]) -> None:
    """Gradients and uploads are one number, the state that re-selections move is another."""
    often = {"select_interval": INTERVAL, **options}
    counted = Counted(often)
    assert (counted.state > 0) == ("policy" not in options)
    assert counted.summary["traffic_model_sizes_per_step"] == pytest.approx(counted.traffic)
    assert counted.summary["state_model_sizes_per_step"] == pytest.approx(counted.state)


PENDING = pytest.mark.parametrize(
    "pending", [{"gradient_transfer": "mean"}, {"gradient_transfer": "int8"}], ids=["summed", "int8"]
)


@PENDING
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("declared", [None, 1])
def test_discarded_gradient_leaves_nothing(pending: dict[str, Any], entry: Any, declared: int | None) -> None:
    options = {**pending, "gradient_accumulation_steps": declared}
    expected = Training(entry, options).run(0, 9).weights()
    training = Training(entry, options)
    for step in range(9):
        training.backward(100 + step)
        training.optimizer.zero_grad()
        training.step(step)
    assert_same(training.weights(), expected)


@PENDING
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("declared", [None, 2])
@pytest.mark.parametrize("overlap_step", [True, False])
def test_split_backwards_sum_bitwise(
    pending: dict[str, Any], entry: Any, declared: int | None, overlap_step: bool
) -> None:
    """Half a gradient twice is the gradient, bit for bit."""
    expected = Training(entry, pending).run(0, 9).weights()
    training = Training(entry, {**pending, "gradient_accumulation_steps": declared, "overlap_step": overlap_step})
    for step in range(9):
        for _ in range(2):
            (training.loss(step) / 2).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert_same(training.weights(), expected)


def test_residuals_follow_their_slices() -> None:
    """A slice that moves to the device drops its residual, and so does the place of one that moves to the host."""
    options = {"gradient_transfer": "int8", "update_interval": 2, "topk_ratio": 0.3}
    settings = {**options, "select_interval": 2}
    training = Training(EAGER_BACKEND, settings, build=matrices)  # flushed updates are applied after step()
    changed = 0
    engine = training.optimizer.engine
    for step in range(8):
        residuals = [each.parts.residual for each in engine.offloaded.values() if each.parts.residual]
        before = [
            (each.device.selection.deferred, residual.lost.clone())
            for each, residual in zip(engine.offloaded.values(), residuals, strict=True)
        ]
        engine.access.synchronize()
        for each, residual, (slices, lost) in zip(engine.offloaded.values(), residuals, before, strict=True):
            stays = each.device.selection.deferred == slices
            changed += int((~stays).sum())
            assert torch.equal(residual.lost[stays], lost[stays])
            assert not residual.lost[~stays].any()
        training.step(step)
    assert changed > 10


def learn(training: Training, teacher: nn.Module, steps: int, seed: int) -> float:
    """Train on the teacher's answers for some steps, and return the loss on other data."""

    def loss(number: int, examples: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + number)
        inputs = torch.randn(examples, 16, generator=generator)
        with torch.no_grad():
            answers = teacher(inputs)
        return F.mse_loss(training.model(inputs), answers)

    for step in range(steps):
        take_step(loss(step, 32), training.optimizer)
    training.optimizer.synchronize()
    with torch.no_grad():
        return float(loss(999, 512))


@pytest.mark.parametrize("seed", [0, 1])
def test_compressed_training_stays_close(seed: int) -> None:
    """Runs with and without compression learn a teacher's labels equally well from the same weights and data."""
    teacher = matrices(torch.float32)
    with torch.no_grad():
        for param in teacher.parameters():
            param.mul_(3.0)  # as the students begin, but saturated
    losses = {}
    for transfer in ("each", "int8"):
        training = Training(None, {"gradient_transfer": transfer, "update_interval": 2}, build=matrices)
        start = learn(training, teacher, 0, seed)
        losses[transfer] = learn(training, teacher, 150, seed)
        assert losses[transfer] < 0.7 * start
    assert losses["int8"] == pytest.approx(losses["each"], rel=0.01)
