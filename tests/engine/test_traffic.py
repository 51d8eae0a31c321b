"""Bytes that really cross between device and host, counted at the copies themselves."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow_compile as zf
from tests.engine.training import ENTRIES, ENTRY_IDS, Training, assert_same
from zenflow_compile.profiling import summary
from zenflow_compile.runtime import copies

INTERVAL = 4
RATIO = 0.1
WINDOWS = 3
FP32_STATE = 3 * 4  # bytes per element of a line that changes sides: master and two moments


def matrices(dtype: torch.dtype) -> nn.Module:
    """Nothing but matrices whose numbers of lines, 80, 160, 160 and 40, are multiples of ten."""
    torch.manual_seed(1)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise((16, 80, 160, 40, 10))]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to(dtype)


class Counted:
    """Model sizes per step, over whole windows after the start.

    Attributes:
        traffic: gradients and uploads, by copies. state: of re-selections, by lines that changed sides.
        summary: what the profiler says of the same steps.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], entry: Any = None, dtype: Any = torch.float32
    ) -> None:
        settings = {"topk_ratio": RATIO, "update_interval": INTERVAL, **options}
        training = Training(entry, settings, dtype, matrices).run(0, 2 * INTERVAL)
        training.optimizer.synchronize()  # nothing from before lands among what is counted
        offloaded = training.optimizer.engine.offloaded.values()
        assert len(offloaded) == 4, "everything is offloaded"
        copied: Counter[str] = Counter()
        copy = copies.copy_without_gil

        def counting(target: Tensor, source: Tensor) -> None:
            copied["bytes"] += source.nbytes
            copy(target, source)

        monkeypatch.setattr(copies, "copy_without_gil", counting)
        steps = WINDOWS * INTERVAL
        moved = 0
        with zf.profile(training.optimizer) as profile:
            for step in range(2 * INTERVAL, 2 * INTERVAL + steps):
                before = [set(each.device.selection.selected.tolist()) for each in offloaded]
                training.step(step)
                training.optimizer.synchronize()
                for each, old in zip(offloaded, before, strict=True):
                    joined = set(each.device.selection.selected.tolist()) - old
                    moved += 2 * len(joined) * each.plan.length * FP32_STATE  # as many lines leave
        model_bytes = sum(param.nbytes for param in training.model.parameters())
        self.traffic = copied["bytes"] / model_bytes / steps
        self.state = moved / model_bytes / steps
        self.summary = profile.summary()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_only_what_must_move_moves(monkeypatch: pytest.MonkeyPatch, entry: Any, dtype: torch.dtype) -> None:
    """Down go the remaining columns of every step, up those of every window."""
    counted = Counted(monkeypatch, {}, entry, dtype)
    assert 0.99 * (1 - RATIO) * (1 + 1 / INTERVAL) < counted.traffic <= (1 - RATIO) * (1 + 1 / INTERVAL) * 1.01


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_window_that_is_summed_moves_once(
    monkeypatch: pytest.MonkeyPatch, entry: Any, dtype: torch.dtype, staleness: int
) -> None:
    counted = Counted(monkeypatch, {"accumulate_on_device": True, "staleness": staleness}, entry, dtype)
    assert 0.44 < counted.traffic <= 0.46


@pytest.mark.parametrize("options", [{}, {"accumulate_on_device": True}, {"policy": "zero_offload"}])
def test_the_profiler_counts_what_moves(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Gradients and uploads in one number, the state that re-selections move in another."""
    monkeypatch.setattr(summary, "_WARM_UP_FACTOR", math.inf)  # every step counts, however slow the first one was
    often = {"select_strategy": "step", "select_interval": INTERVAL, **options}
    counted = Counted(monkeypatch, often)
    assert (counted.state > 0) == ("policy" not in options)
    assert counted.summary["traffic_model_sizes_per_step"] == pytest.approx(counted.traffic)
    assert counted.summary["state_model_sizes_per_step"] == pytest.approx(counted.state)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("declared", [None, 1])
def test_a_discarded_gradient_is_in_no_sum(entry: Any, declared: int | None) -> None:
    options = {"accumulate_on_device": True, "gradient_accumulation_steps": declared}
    expected = Training(entry, options).run(0, 9).weights()
    training = Training(entry, options)
    for step in range(9):
        training.backward(100 + step)
        training.optimizer.zero_grad()
        training.step(step)
    assert_same(training.weights(), expected)
