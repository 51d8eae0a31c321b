"""Tests the forecast of a policy against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.machines import layers, machine, scenario
from zenflow_compile.options.options import Options
from zenflow_compile.planning.planners import make_plan
from zenflow_compile.prediction import auto_policy
from zenflow_compile.prediction.forecast import Forecast, forecast
from zenflow_compile.prediction.predict import Prediction
from zenflow_compile.prediction.scenario import scenario_of
from zenflow_compile.profiling.summary import summarize
from zenflow_compile.simulator.simulate import simulate

NEVER = 2**31 - 1


def of(layer_count: int = 2, *, implicit: bool = False, label: str | None = None, **options: Any) -> Forecast:
    hardware = machine(adam_per_core=30e6 / 28)
    return forecast(
        Options(**options),
        scenario(Options(**options), hardware, layers(layer_count), tokens=1, in_backward=implicit),
        label=label,
    )


@pytest.mark.parametrize(
    ("implicit", "clip", "step", "stall"),
    [(True, None, 7.5, 1.5), (False, None, 8.0, 2.0), (True, 1.0, 8.0, 2.0), (False, 1.0, 8.0, 2.0)],
)
def test_gradients_are_final_at_step(implicit: bool, clip: float | None, step: float, stall: float) -> None:
    """Forwards of 1 s, backwards of 2 s, every other step one layer's copy, update and upload of 1 s each.

    Layer 0 is last in the backward and first in the forward: its 3 s are waited for in any case. Layer 1 has layer 0's
    backward and forward for its own; where it may start only after the backward, it lacks 1 s.
    """
    found = of(topk_ratio=0.0, device_share=0.0, update_interval=2, max_grad_norm=clip, implicit=implicit)
    assert (found.step_s, found.stall_s) == (pytest.approx(step), pytest.approx(stall))


def test_host_time_counts_once_for_all_workers() -> None:
    """Three workers update two layers in a third of a second each, and are busy for two seconds together."""
    model, hardware, options = layers(2), machine(cores=5), Options(policy="zero_offload")
    assert hardware.workers == 3
    assert forecast(options, scenario(options, hardware, model, tokens=1)).host_update_s == pytest.approx(2 / 3)
    recording = simulate(make_plan(model.params, options), hardware, model, tokens=1)
    assert summarize(recording)["host_update_ms_per_step"] == pytest.approx(2000.0)


@pytest.mark.parametrize(
    ("options", "label", "title"),
    [
        ({"policy": "twinflow"}, None, "twinflow"),
        ({"policy": "twinflow", "ratio": 0.5, "update_stride": 3}, None, "twinflow 0.5"),
        ({"policy": "zero_offload", "ratio": 0.5}, None, "zero_offload"),
        ({"policy": "deep_optimizer_states", "ratio": 0.75, "update_stride": 2}, None, "deep_optimizer_states 0.75, 2"),
        (
            {"policy": "deep_optimizer_states", "update_stride": NEVER},
            None,
            "deep_optimizer_states none",
        ),
        ({"update_stride": 2, "device_share": 0.0}, "zenflow, streamed", "zenflow, streamed 2"),
        ({"spare_device_bytes": 2_345_000_000}, "zenflow, device filled", "zenflow, device filled 2.35 GB"),
        ({"update_interval": 2}, None, "zenflow"),
    ],
)
def test_title_has_the_settings_that_differ(options: dict[str, Any], label: str | None, title: str) -> None:
    assert of(8, label=label, sub_group_size=1_000_000, **options).title == title


def test_nearest_policy_lacks_the_fewest_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that lacks 7 GB of one memory is nearer than the one that lacks 5 GB of two."""
    fits = of()
    two = replace(fits, label="two", shortages={"device": 5 * 10**9, "host": 5 * 10**9})
    one = replace(fits, label="one", shortages={"device": 7 * 10**9})
    assert (fits.missing_bytes, two.missing_bytes, one.missing_bytes) == (0, 10**10, 7 * 10**9)
    asked = scenario_of(layers(2), machine(), tokens=1)
    assert Prediction(asked, (two, one), None).shown is one
    assert Prediction(asked, (two, one, fits), fits).shown is fits
    monkeypatch.setattr(auto_policy, "compare", lambda *_, **__: [two, one])
    with pytest.raises(ValueError, match=r"one comes nearest and lacks 7 GB of device memory; use"):
        auto_policy.choose(asked)
    monkeypatch.setattr(auto_policy, "compare", lambda *_, **__: [two])
    with pytest.raises(ValueError, match=r"two comes nearest and lacks 5 GB of device memory and 5 GB of host memory"):
        auto_policy.choose(asked)
