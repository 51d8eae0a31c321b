"""Hysteresis bounds the state that changes sides with the selection, as counted on a small GPT."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import zenflow_compile as zf
from examples.gpt import GPT, GPTConfig
from examples.stdlib_text import Text, load_text, training_batch
from tests.support.training import take_step

BOUND = 0.01  # model sizes per step, both directions
WARM_UP, MEASURED_FROM, STEPS = 16, 32, 160
CONTROL = {"select_interval": 16}


@cache
def text() -> Text:
    return load_text(3_000_000)


@cache
def moved(**options: Any) -> tuple[float, float]:
    """Return the moved state in model sizes per step, and re-selections per parameter, long after the warm-up."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=32, layers=2, width=64, heads=2)).to(torch.bfloat16)
    settings = {"lr": 2e-3, "device_share": 0.0, "full_warm_up_rounds": WARM_UP}
    with zf.ZenFlowAdamW(model.named_parameters(), **settings, **options) as optimizer:

        def train(first: int, last: int) -> None:
            for step in range(first, last):
                for group in optimizer.param_groups:
                    group["lr"] = 2e-3 * min(1.0, (step + 1) / WARM_UP)
                tokens, targets = training_batch(text(), seed=0, step=step, batch=8, context=32)
                take_step(model(tokens, targets), optimizer)

        train(0, MEASURED_FROM)
        before = optimizer.engine.uploads.selections
        with zf.profile(optimizer) as profile:
            train(MEASURED_FROM, STEPS)
        engine = optimizer.engine
        assert len(engine.offloaded) >= 8
        per_parameter = (engine.uploads.selections - before) / len(engine.offloaded)
        state_bytes = profile.summary()["state_bytes_per_step"]
        assert state_bytes is not None
        return state_bytes / engine.registry.model_bytes, per_parameter


def test_hysteresis_bounds_moved_state() -> None:
    """Moved state stays within the budget, while re-selections go on."""
    share, selections = moved()
    assert 0 < share <= BOUND
    assert selections > 1


def test_without_hysteresis_more_state_moves() -> None:
    """This is the control: without hysteresis every interval selects the current top slices."""
    share, selections = moved(**CONTROL)
    assert selections == pytest.approx((STEPS - MEASURED_FROM) / 16, abs=1.0)
    assert share > 1.3 * BOUND > moved()[0]
