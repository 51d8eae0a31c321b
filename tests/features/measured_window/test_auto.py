"""``"auto"`` intervals on a real engine: reproducible, resumed bit for bit, measured no more often than promised."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.copies import Copies
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, Delays, Training, assert_same
from zenflow_compile.options import options as options_module
from zenflow_compile.runtime.checkpoint.format import NONE, SCHEDULE
from zenflow_compile.runtime.features import measured_window
from zenflow_compile.runtime.step import schedule
from zenflow_compile.timeline import AdaptiveWindows

SLOW_HOST, FAST_HOST = 1.0, 1e18  # bytes per second


@pytest.fixture
def rates() -> Iterator[list[float]]:
    """Replaces the host's measurements by a list of rates, in order; no other measurement is made."""
    given: list[float] = []
    with mock.patch.object(measured_window, "host_rate", side_effect=lambda *_: given.pop(0)):
        yield given


AUTO: dict[str, Any] = {"update_interval": (None, 5), "auto_ratio": 0.0}


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_time_bounds_windows_from_the_third_step(entry: dict[str, Any] | None, rates: list[float]) -> None:
    rates += [SLOW_HOST, FAST_HOST]
    slow, fast = Training(entry, AUTO), Training(entry, AUTO)
    count = len(slow.optimizer.engine.offloaded)
    for training, bound, first, flushed in ((slow, 5, 0, 4), (fast, 1, 1, 6)):
        engine = training.optimizer.engine
        training.run(0, 2)
        assert engine.schedule.adaptive_windows.shortest is None
        training.run(2, 3)
        assert engine.schedule.adaptive_windows.shortest == bound
        assert engine.steps.windows_flushed == first * count  # values of step 0 decide at step 2
        training.run(3, 20)
        # Windows of 5 steps, or of 3: the first values of a window decide in its third step.
        assert engine.steps.windows_flushed == flushed * count
    assert rates == []


@pytest.mark.parametrize("option", [1, 3, 5])
def test_given_bound_measures_nothing(option: int, rates: list[float]) -> None:
    training = Training(EAGER_BACKEND, {**AUTO, "update_interval": (option, 5)}).run(0, 12)
    assert training.optimizer.engine.schedule.adaptive_windows == AdaptiveWindows(option, 5, measured=False)
    again = Training(EAGER_BACKEND, {**AUTO, "update_interval": (option, 5)}).run(0, 12)
    assert_same(again.weights(), training.weights())


@pytest.mark.parametrize("options", [{"update_interval": 3}, {"policy": "zero_offload"}, {"policy": "resident"}])
def test_fixed_windows_measure_nothing(options: dict[str, Any], rates: list[float]) -> None:
    training = Training(EAGER_BACKEND, options).run(0, 4)
    assert training.optimizer.engine.schedule.adaptive_windows is None


@pytest.mark.parametrize("position", [1, 2, 3, 6])
def test_measured_bound_is_saved_in_the_state(position: int, rates: list[float]) -> None:
    """Resumed where it is known, the bound is not measured again; before that, it is."""
    rates += [SLOW_HOST]
    whole = Training(EAGER_BACKEND, AUTO).run(0, 16)
    rates += [SLOW_HOST]
    saved = Training(EAGER_BACKEND, AUTO).run(0, position).saved()
    known = position >= 3
    rates += [] if known else [SLOW_HOST]
    resumed = Training(EAGER_BACKEND, AUTO).load(saved)
    assert resumed.optimizer.engine.schedule.adaptive_windows.shortest == (5 if known else None)
    resumed.run(position, 16)
    assert resumed.optimizer.engine.schedule.adaptive_windows.shortest == 5
    assert rates == []
    if known:
        assert_same(resumed.weights(), whole.weights())


def test_trained_optimizer_takes_a_loaded_state(rates: list[float]) -> None:
    rates += [SLOW_HOST, FAST_HOST]
    slow, fast = Training(EAGER_BACKEND, AUTO).run(0, 6), Training(EAGER_BACKEND, AUTO).run(0, 9)
    saved = slow.saved()
    expected = slow.run(6, 14).weights()
    assert_same(fast.load(saved).run(6, 14).weights(), expected)


def test_option_overrides_the_state(rates: list[float]) -> None:
    rates += [SLOW_HOST]
    saved = Training(EAGER_BACKEND, AUTO).run(0, 6).saved()
    resumed = Training(EAGER_BACKEND, {**AUTO, "update_interval": (2, 5)}).load(saved)
    assert resumed.optimizer.engine.schedule.adaptive_windows == AdaptiveWindows(2, 5, measured=False)


# Re-selection by drift.


@pytest.fixture
def often() -> Iterator[None]:
    """Allow re-selections after 3 steps, at the slightest drift and at any cost."""
    soon = mock.patch.object(options_module, "AUTO_SELECT_INTERVAL", 3)
    with soon, mock.patch.multiple(schedule, RESELECT_BELOW=1.0, ENTRY_MARGIN=0.05, STATE_BUDGET=1.0):
        yield


DRIFTING: dict[str, dict[str, Any]] = {
    "windows": {"update_interval": 2, "topk_ratio": 0.3},
    "every step": {"update_interval": 1, "topk_ratio": 0.3},
    "auto": {"update_interval": (1, 4), "auto_ratio": 0.6, "topk_ratio": 0.3},
}


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("options", DRIFTING.values(), ids=DRIFTING)
def test_drifting_selections_resume_bitwise(entry: dict[str, Any] | None, options: dict[str, Any]) -> None:
    whole = Training(entry, options).run(0, 14)
    expected = whole.weights()
    for position in (5, 6, 9):
        saved = Training(entry, options).run(0, position).saved()
        resumed = Training(entry, options).load(saved).run(position, 14)
        assert_same(resumed.weights(), expected)
        assert resumed.optimizer.engine.uploads.selections > 0, "a test of nothing"


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("options", DRIFTING.values(), ids=DRIFTING)
def test_delays_leave_selections_unchanged(options: dict[str, Any], copies: Copies) -> None:
    expected = Training(EAGER_BACKEND, options).run(0, 12)
    delays = Delays(0, 4.0)
    copies.make = delays.before(copies.make)
    training = Training(EAGER_BACKEND, options).run(0, 12)
    assert_same(training.weights(), expected.weights())
    assert training.optimizer.engine.uploads.selections == expected.optimizer.engine.uploads.selections > 2
    assert delays.calls > 20


@pytest.mark.usefixtures("often")
def test_unused_drift_is_saved_in_the_state() -> None:
    """A drift that was read back but not used decides the next flush: a run resumed without it would differ."""
    options = DRIFTING["windows"]
    position = 4  # flushes at 3 and 4 have read the drift, those at 5 and 6 decide
    saved = torch.load(io.BytesIO(Training(None, options).run(0, position).saved()), weights_only=True)
    leaving = SCHEDULE.index("leaving")
    entries = [entry["schedule"] for entry in saved["optimizer"]["state"].values() if "schedule" in entry]
    assert any(entry[leaving] > 0.0 for entry in entries)
    expected = Training(None, options).run(0, 12).weights()
    for entry in entries:
        entry[leaving] = NONE
    file = io.BytesIO()
    torch.save(saved, file)
    forgetful = Training(None, options).load(file.getvalue()).run(position, 12).weights()
    assert any(not torch.equal(a, b) for a, b in zip(forgetful, expected, strict=True))
