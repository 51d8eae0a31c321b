"""Training under ``torch.set_default_device``: engine memory names its device. "meta" stands for an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, Training, batch

OPTION_SETS: dict[str, dict[str, Any]] = {
    "defaults": {"select_interval": 2, "update_interval": 2},
    "staleness": {"update_interval": 2, "staleness": 1},
    "adaptive": {"update_interval": (None, 3)},
    "int8": {"gradient_transfer": "int8"},
    "summed": {"update_interval": 2, "gradient_transfer": "mean"},
    "zero_offload": {"policy": "zero_offload"},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2},
}


@pytest.fixture
def other_default() -> Iterator[None]:
    yield
    torch.set_default_device(None)


def train(entry: dict[str, Any] | None, options: dict[str, Any], default: str | None, path: Path) -> list[Tensor]:
    """Train, save in mid-window, load into a second optimizer, and go on."""
    data = [batch(step) for step in range(6)]
    torch._dynamo.reset()
    first, second = Training(entry, options), Training(entry, options)
    torch.set_default_device(default)
    state: dict[str, Any] = {}
    for training, steps in ((first, range(3)), (second, range(3, 6))):
        if state:
            training.model.load_state_dict(state["model"])
            training.optimizer.load_state_dict(state["optimizer"])
        for step in steps:
            inputs, targets = data[step]
            F.cross_entropy(training.call(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
            training.optimizer.step()
            training.optimizer.zero_grad()
        state = {"optimizer": training.optimizer.state_dict(), "model": training.model.state_dict()}
        torch.save(state, path)
        state = torch.load(path)
    weights = second.weights()
    first.optimizer.close()
    second.optimizer.close()
    return [each.clone() for each in weights]


@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_default_device_changes_nothing(
    entry: dict[str, Any] | None, options: dict[str, Any], tmp_path: Path, other_default: None
) -> None:
    expected = train(entry, options, None, tmp_path / "expected")
    for one, other in zip(train(entry, options, "meta", tmp_path / "found"), expected, strict=True):
        assert torch.equal(one, other)


def test_first_use_under_another_default_device(other_default: None) -> None:
    torch.set_default_device("meta")
    with torch.device("cpu"):
        training = Training(EAGER_BACKEND, OPTION_SETS["defaults"])
        inputs, targets = batch(0)
    F.cross_entropy(training.call(inputs), targets).backward()
    training.optimizer.step()
    assert all(each.device.type == "cpu" for each in training.weights())
    training.optimizer.close()
