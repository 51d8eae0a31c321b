"""The share of the squared gradient norm in the selected slices that a report shows."""

from __future__ import annotations

from typing import Any

import pytest

import zenflow_compile as zf
from tests.support.training import ENTRIES, ENTRY_IDS, Training


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_share_is_that_of_the_recorded_steps(entry: dict[str, Any] | None) -> None:
    training = Training(entry, {"topk_ratio": 0.25}).run(0, 3)
    selected = total = 0.0
    with zf.profile(training.optimizer) as profile:
        for step in range(3, 6):
            training.backward(step)
            for offloaded in training.optimizer.engine.offloaded.values():
                gradient = offloaded.param.grad.to_dense().reshape(offloaded.plan.shape[0], -1)
                squares = gradient.square().sum(1 - offloaded.plan.dim)
                selected += float(squares[offloaded.device.selection.mask].sum())
                total += float(squares.sum())
            training.optimizer.step()
            training.optimizer.zero_grad()
    assert profile.summary()["selected_norm_share"] == pytest.approx(selected / total, rel=1e-5)
