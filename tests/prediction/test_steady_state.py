"""The steps that count are those of a steady state, also where the disk takes many steps to settle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.machines import layers, machine
from zenflow_compile.options.options import Options
from zenflow_compile.performance import models
from zenflow_compile.performance.hardware import hardware
from zenflow_compile.planning.plan import Plan
from zenflow_compile.planning.planners import make_plan
from zenflow_compile.prediction.simulate import simulate, steady_step

FILES: dict[str, dict[str, Any]] = {
    "zero_infinity": {"policy": "zero_infinity"},
    "zenflow": {"policy": "zenflow", "offload_device": "nvme"},
}


def plan_of(name: str, window: float | None) -> Plan:
    size = None if window is None else int(window)
    options = Options(**FILES[name], nvme_path="scratch", host_window_bytes=size)
    return make_plan(models.model("llama2-7b").params, options)


@pytest.mark.parametrize("policy", FILES)
@pytest.mark.parametrize("window", [None, 5e9, 20e9, 40e9, 70e9])
def test_file_traffic_of_a_steady_step(policy: str, window: float | None) -> None:
    """Bytes that were read before the first cycle, or are not written yet, would be missing."""
    model, node, plan = models.model("llama2-7b"), hardware("h200"), plan_of(policy, window)
    step = steady_step(plan, node, model, tokens=2048)
    assert step.disk == pytest.approx(2 * sum(param.file_bytes / param.interval for param in plan.params_in_turn))


@pytest.mark.parametrize("policy", FILES)
@pytest.mark.parametrize("window", [None, 40e9])
def test_plan_and_trace_have_equal_steps(policy: str, window: float | None) -> None:
    model, node, plan = models.model("llama2-7b"), hardware("h200"), plan_of(policy, window)
    recording = simulate(plan, node, model, tokens=2048)
    steps = [event.duration_ns / 1e9 for event in recording.events if event.lane == "step"]
    step = steady_step(plan, node, model, tokens=2048)
    assert step.seconds == pytest.approx(sum(steps) / len(steps), rel=1e-4)
    later = simulate(plan, node, model, tokens=2048, steps=40)
    steps = [event.duration_ns / 1e9 for event in later.events if event.lane == "step"]
    assert step.seconds == pytest.approx(sum(steps) / len(steps), rel=2e-3)


@pytest.mark.parametrize("final_at_step", [False, True])
@pytest.mark.parametrize("options", [FILES["zero_infinity"], FILES["zenflow"], FILES["zenflow"] | {"staleness": 1}])
@pytest.mark.parametrize("rate", [1e5, 1e6, 1e7])
def test_ring_of_one_state_blocks_nothing(rate: float, options: dict[str, Any], final_at_step: bool) -> None:
    """A block of the model, of two layers, does not even fit."""
    model = layers(8)
    device_share = {} if options["policy"] == "zero_infinity" else {"device_share": 0.0}
    plan = make_plan(
        model.params, Options(**options, **device_share, nvme_path="scratch", host_window_bytes=12_000_000)
    )
    assert plan.file_ring_bytes < 2 * min(param.file_bytes for param in plan.params_in_turn)
    step = steady_step(plan, machine(disk_read=rate, disk_write=rate), model, tokens=1, final_at_step=final_at_step)
    assert step.disk == pytest.approx(2 * plan.bytes_in_turn / plan.params[0].interval)
    assert step.seconds >= step.disk / rate * (1 - 1e-6)
