"""``flush()`` applies the gradients in open update windows, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gated_jobs import UPDATES, failed_jobs
from tests.support.settings import settings
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, IN_FLIGHT, LARGEST_STATE, Training, assert_same
from zenflow_compile.runtime.checkpoint.format import SCHEDULE

pytestmark = pytest.mark.timeout(60)

SETTINGS = {
    **settings("windows stale_windows bounded_auto summed_windows compressed tightly_clipped"),
    "files": {"offload_device": "nvme", "host_window_bytes": LARGEST_STATE},
}


def options_of(name: str, folder: Path) -> dict[str, Any]:
    options = {"update_interval": 4, **SETTINGS[name]}
    return {**options, "nvme_path": folder} if name == "files" else options


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_flush_and_close_leave_equal_weights(name: str, entry: dict[str, Any] | None, tmp_path: Path) -> None:
    for steps in (3, 6):
        (folders := (tmp_path / f"a{steps}", tmp_path / f"b{steps}"))[0].mkdir()
        folders[1].mkdir()
        flushed, closed = (Training(entry, options_of(name, folder)).run(0, steps) for folder in folders)
        before = flushed.weights()
        flushed.optimizer.flush()
        weights = flushed.weights_as_they_are()
        closed.optimizer.close()
        assert_same(weights, closed.weights_as_they_are())
        assert any(not torch.equal(a, b) for a, b in zip(before, weights, strict=True)), "something waited"
        flushed.optimizer.flush()
        assert_same(flushed.weights(), weights)
        schedule = flushed.optimizer.engine.schedule
        for each in flushed.optimizer.engine.offloaded.values():
            adaptive = dict(zip(SCHEDULE, schedule.state(each.plan.index), strict=True))
            assert (adaptive["attempted"], adaptive["seen"]) == (0, 0)
            assert (adaptive["latest_selected"], adaptive["next_selected"]) == (None, None)
            assert not each.host.open
            assert not each.host.flushed
            assert each.parts.window_sum is None or not each.parts.window_sum.coefficients
        flushed.optimizer.close()
        assert_same(flushed.weights_as_they_are(), weights)


@pytest.mark.parametrize("name", ["windows", "stale_windows", "bounded_auto", "summed_windows", "compressed"])
def test_training_resumes_after_a_flush(name: str, tmp_path: Path) -> None:
    """A run that resumes from a state saved after a flush equals the run that was flushed."""
    training = Training(EAGER_BACKEND, options_of(name, tmp_path)).run(0, 6)
    training.optimizer.flush()
    saved = training.saved()
    expected = training.run(6, 15).weights()
    assert_same(Training(EAGER_BACKEND, options_of(name, tmp_path)).load(saved).run(6, 15).weights(), expected)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("name", ["windows", "summed_windows", "compressed"])
def test_flush_keeps_gradients_before_a_step(name: str, entry: dict[str, Any] | None, tmp_path: Path) -> None:
    training = Training(entry, options_of(name, tmp_path)).run(0, 6)
    training.backward(6)
    before = [param.grad.clone() for param in training.model.parameters()]
    training.optimizer.flush()
    weights = training.weights()
    for grad, param in zip(before, training.model.parameters(), strict=True):
        assert torch.equal(param.grad.clone(), grad)
    twin = Training(entry, options_of(name, tmp_path)).run(0, 6)
    twin.optimizer.flush()
    assert_same(twin.weights(), weights)
    for param, grad in zip(twin.model.parameters(), before, strict=True):
        param.grad = grad
    for each in (training, twin):
        each.optimizer.step()
        each.optimizer.flush()
    assert_same(twin.weights(), training.weights())


@pytest.mark.parametrize("name", ["windows", "summed_windows", "compressed"])
def test_flush_keeps_loaded_weights(name: str, tmp_path: Path) -> None:
    """``flush()``, like ``close()``, keeps the best checkpoint that was loaded at the end of training.

    A state that is saved then continues as this run does.
    """
    training = Training(EAGER_BACKEND, options_of(name, tmp_path)).run(0, 6)
    best = {name: torch.randn_like(value) for name, value in training.model.state_dict().items()}
    training.step(6)
    training.model.load_state_dict(best)
    with pytest.warns(UserWarning, match=r"windows of \d parameters \(0.weight, .*synchronize\(\) after") as seen:
        training.optimizer.flush()
    assert [warning.filename for warning in seen] == [__file__]
    assert_same(training.weights_as_they_are(), list(best.values()))
    for each in training.optimizer.engine.offloaded.values():
        assert not each.host.open
        assert each.parts.window_sum is None or not each.parts.window_sum.coefficients
    saved = training.saved()
    expected = training.run(7, 15).weights()
    assert_same(Training(EAGER_BACKEND, options_of(name, tmp_path)).load(saved).run(7, 15).weights(), expected)


def test_flush_warns_of_summed_gradients() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 4, "gradient_transfer": "mean"}).run(0, 6)
    training.optimizer.synchronize()
    training.model.load_state_dict({name: value + 1 for name, value in training.model.state_dict().items()})
    with pytest.warns(UserWarning, match=r"windows of \d parameters.*were dropped.*synchronize\(\) after"):
        training.optimizer.flush()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_write_then_synchronize_keeps_gradients(entry: dict[str, Any] | None) -> None:
    """The update of an open window goes on top of weights that were written by hand."""
    flushed, closed = (Training(entry, {"update_interval": 4}).run(0, 6) for _ in range(2))
    for training in (flushed, closed):
        training.optimizer.synchronize()
        with torch.no_grad():
            for param in training.model.parameters():
                param.clamp_(-0.05, 0.05)
        training.optimizer.synchronize()
    clamped = flushed.weights_as_they_are()
    assert any(each.host.open for each in flushed.optimizer.engine.offloaded.values())
    flushed.optimizer.flush()
    closed.optimizer.close()
    weights = flushed.weights_as_they_are()
    assert_same(closed.weights_as_they_are(), weights)
    assert any(not torch.equal(a, b) for a, b in zip(weights, clamped, strict=True))


def test_flush_over_a_lost_update_raises() -> None:
    """Every window is empty afterwards, and training may go on."""
    training = Training(EAGER_BACKEND, {"update_interval": (1, 4)}).run(0, 7)
    due = [each for each in training.optimizer.engine.offloaded.values() if each.host.flushed]
    assert due
    with torch.no_grad(), pytest.raises(RuntimeError, match=IN_FLIGHT):
        due[0].param.add_(1.0)
    due[0].param.data = torch.ones_like(due[0].param)
    with pytest.raises(RuntimeError, match="which is lost now"):
        training.optimizer.flush()
    assert not any(each.host.open or each.host.flushed for each in training.optimizer.engine.offloaded.values())
    training.run(7, 17)


def test_flush_after_a_failed_step_is_refused() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 4}).run(0, 3)
    saved = training.saved()
    with failed_jobs(MemoryError("no memory for this update"), UPDATES), pytest.raises(RuntimeError):
        training.optimizer.flush()
    with pytest.raises(RuntimeError, match="failed half-way"):
        training.optimizer.flush()
    training.load(saved)
    training.optimizer.flush()
    training.optimizer.close()
    with pytest.raises(RuntimeError, match="is closed"):
        training.optimizer.flush()


def test_flush_uses_the_numbers_of_its_steps() -> None:
    """Values that a program or a scheduler has changed since, even to impossible ones, count from the next step on."""
    training = Training(EAGER_BACKEND, {"update_interval": 4}).run(0, 6)
    twin = Training(EAGER_BACKEND, {"update_interval": 4}).run(0, 6)
    training.optimizer.param_groups[0].update({"eps": float("nan"), "lr": -1e-19})
    training.optimizer.flush()
    twin.optimizer.flush()
    assert_same(training.weights(), twin.weights())
    training.optimizer.param_groups[0].update({"eps": None, "lr": None})
    training.optimizer.close()
