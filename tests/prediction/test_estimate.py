"""Estimates have the memory of forecasts, and nearly their time; a search that uses them finds what forecasts would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.machines import scenario
from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import hardware
from zenflow_compile.performance.models import model
from zenflow_compile.prediction import estimate
from zenflow_compile.prediction.answers import fit
from zenflow_compile.prediction.estimate import Estimator
from zenflow_compile.prediction.forecast import Scenario, forecast, micro_batches, needs

FILES: dict[str, Any] = {"nvme_path": "scratch"}
OPTIONS: list[dict[str, Any]] = [
    {"policy": "resident"},
    {"policy": "zero_offload"},
    {"policy": "zero_offload", "state_dtype": "fp8", "split_master": True, "offload_weights": 0.5},
    {"policy": "twinflow", "ratio": 0.4},
    {"policy": "deep_optimizer_states", "update_stride": 3},
    {"policy": "zero_infinity", "host_window_bytes": 10**10, **FILES},
    {"policy": "zenflow"},
    {"policy": "zenflow", "update_interval": 1, "device_share": 3 * 10**9},
    {"policy": "zenflow", "update_interval": 2, "device_share": 0.0, "offload_weights": 1.0, "split_master": True},
    {"policy": "zenflow", "gradient_transfer": "mean", "device_share": 0.0},
    {"policy": "zenflow", "gradient_transfer": "int8", "update_stride": 4},
    {"policy": "zenflow", "offload_device": "nvme", "gradient_accumulation_steps": 2, **FILES},
]
MODELS = ("qwen3-0.6b", "llama3-8b", "gemma2-2b")


def asked(name: str, options: dict[str, Any], machine: str = "rtx-4090", *, recompute: bool = False) -> Scenario:
    return scenario(Options(**options), hardware(machine), model(name), tokens=4096, recompute=recompute)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_memory_is_that_of_a_forecast(name: str, options: dict[str, Any]) -> None:
    """But for host memory that gradient buffers share: no packing needs less than is estimated."""
    run = asked(name, options)
    expected, found = needs(run.options, run), Estimator(run).needs(run.options, recompute=False)
    assert (found.device, found.disk) == (expected.device, expected.disk)
    shared = "gradients and uploads"
    assert {**found.host, shared: 0} == {**expected.host, shared: 0}
    assert 0.93 * expected.host[shared] <= found.host[shared] <= expected.host[shared]


@pytest.mark.parametrize("machine", ["rtx-4090", "h200"])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_step_is_nearly_that_of_a_forecast(options: dict[str, Any], machine: str) -> None:
    run = asked("llama3-8b", options, machine, recompute=True)
    estimator = Estimator(run)
    found = estimator.forecast(run.options, estimator.needs(run.options, recompute=True), recompute=True)
    assert found is not None
    expected = forecast(run.options, run)
    assert found.step_s == pytest.approx(expected.step_s, rel=0.06)
    assert (found.micro_batches, found.recompute) == (micro_batches(run.options), True)
    assert found.traffic == pytest.approx(expected.traffic, rel=0.01)


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_no_estimate_is_below_its_bound(options: dict[str, Any]) -> None:
    """A plan is left out of a search if its bytes and its work alone take too long."""
    run = asked("qwen3-0.6b", options)
    estimator = Estimator(run)
    needed = estimator.needs(run.options, recompute=False)
    found = estimator.forecast(run.options, needed, recompute=False)
    assert found is not None
    assert estimator.forecast(run.options, needed, recompute=False, within=1.001 * found.step_s) is not None
    assert estimator.forecast(run.options, needed, recompute=False, within=0.1 * found.step_s) is None


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama3.2-3b", "mistral-7b"])
def test_search_finds_what_forecasts_would(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(asked(name, FILES), policy="auto", recompute=None, divided=True)
    found = fit(run).best
    monkeypatch.setattr(estimate, "FEW_PARAMETERS", 10**9)
    expected = fit(run).best
    assert found is not None
    assert expected is not None
    assert found.step_s <= 1.02 * expected.step_s
