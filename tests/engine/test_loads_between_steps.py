"""A state that is loaded, or begins again, between a backward and a step leaves ``.grad`` as PyTorch does."""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_failures import BrokenError
from tests.support.calls import interrupted
from tests.support.training import ADAM, EAGER_BACKEND, Training, assert_same, mlp
from zenflow_compile.runtime.parameters.incoming_gradient import IncomingGradient

POLICIES: dict[str, dict[str, Any]] = {
    "resident": {"policy": "resident"},
    "zero_offload": {"policy": "zero_offload"},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 1},
    "zenflow": {"update_interval": 1},
    "declared": {"update_interval": 1, "gradient_accumulation_steps": 3},
    "files": {"policy": "zero_infinity"},
}


def by_pytorch(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAM)


def reset_in_mid_accumulation(training: Training) -> list[Tensor]:
    """The weights after two steps of three backwards, of which the second resets all moments between two of them."""
    for step in range(6):
        training.backward(step)
        if step == 4:
            state = copy.deepcopy(training.optimizer.state_dict())
            for entry in state["state"].values():
                entry["exp_avg"].zero_()
                entry["exp_avg_sq"].zero_()
            training.optimizer.load_state_dict(state)
        if step % 3 == 2:
            training.optimizer.step()
            training.optimizer.zero_grad()
    return [param.detach().clone() for param in training.model.parameters()]


GRAPHS = [pytest.param(name, EAGER_BACKEND, id=f"{name}-graph") for name in ("zero_offload", "zenflow", "declared")]


@pytest.mark.parametrize(("name", "entry"), [*((name, None) for name in POLICIES), *GRAPHS])
def test_unused_gradients_are_used_by_the_next_step(name: str, entry: Any, tmp_path: Path) -> None:
    options = POLICIES[name] | ({"nvme_path": str(tmp_path)} if name == "files" else {})
    training = Training(entry, options)
    expected = reset_in_mid_accumulation(Training(build=mlp, make=by_pytorch))
    reset_in_mid_accumulation(training)
    torch.testing.assert_close(training.weights(), expected, rtol=1e-5, atol=1e-6)
    training.optimizer.close()


@pytest.mark.parametrize("entry", [None, EAGER_BACKEND], ids=["hooks", "graph"])
def test_used_gradients_cannot_be_used_again(entry: Any) -> None:
    """PyTorch adds the next gradient to the one that is still in ``.grad``; its values are not kept here."""
    training = Training(entry, {"update_interval": 1})
    training.backward(0)
    training.optimizer.step()
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.backward(1)
    with pytest.raises(RuntimeError, match=r"a backward added to it after step\(\) had consumed it"):
        training.optimizer.step()
    training.optimizer.zero_grad()
    training.step(2)
    training.optimizer.close()


def test_gradients_of_a_failed_step_are_dropped() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 2)
    saved = training.saved()
    training.backward(2)
    with interrupted(IncomingGradient.commit, BrokenError(), after=1), pytest.raises(BrokenError):
        training.optimizer.step()
    training.load(saved)
    assert all(param.grad is None for param in training.model.parameters())
    training.optimizer.close()


@pytest.mark.parametrize(("name", "entry"), [*((name, None) for name in POLICIES), GRAPHS[1]])
def test_empty_state_begins_again(name: str, entry: Any, tmp_path: Path) -> None:
    """As in fastai's ``Learner.freeze()``, also between a backward and a step."""
    options = POLICIES[name] | ({"nvme_path": str(tmp_path)} if name == "files" else {})

    def train(training: Training) -> None:
        training.run(0, 3)
        training.backward(3)
        training.optimizer.state = defaultdict(dict)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.run(4, 6)

    reference, training = Training(build=mlp, make=by_pytorch), Training(entry, options)
    for each in (reference, training):
        train(each)
    torch.testing.assert_close(training.weights(), reference.weights_as_they_are(), rtol=1e-5, atol=1e-6)
    assert {float(entry["step"]) for entry in training.optimizer.state.values()} == {3.0}
    training.optimizer.close()


def test_windows_are_applied_before_a_new_beginning() -> None:
    training, flushed = (Training(EAGER_BACKEND, {"update_interval": 4}).run(0, 6) for _ in range(2))
    training.optimizer.state = defaultdict(dict)
    flushed.optimizer.flush()
    assert_same(training.weights(), flushed.weights())
    assert {float(entry["step"]) for entry in training.optimizer.state.values()} == {0.0}
    training.run(6, 9).optimizer.close()
    flushed.optimizer.close()
