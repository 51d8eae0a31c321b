"""The steps that count are those of a steady state, also where the cache of files fills over many steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.machines import layers, machine
from zenflow_compile.options.options import Options
from zenflow_compile.performance import model_catalog
from zenflow_compile.performance.hardware_catalog import hardware
from zenflow_compile.planning.plan import Plan
from zenflow_compile.planning.planners import make_plan
from zenflow_compile.simulator.simulate import simulate, steady_step

FILES: dict[str, dict[str, Any]] = {
    "zero_infinity": {"policy": "zero_infinity"},
    "zenflow": {"policy": "zenflow", "offload_device": "nvme"},
}


def plan_of(name: str, window: float | None) -> Plan:
    size = None if window is None else int(window)
    options = Options(**FILES[name], nvme_path="scratch", host_window_bytes=size)
    return make_plan(model_catalog.model("llama2-7b").params, options)


@pytest.mark.parametrize("policy", FILES)
@pytest.mark.parametrize("window", [None, 5e9, 20e9, 40e9, 70e9])
def test_file_traffic_of_a_steady_step(policy: str, window: float | None) -> None:
    """Bytes that the cache kept from before the first cycle, or has not written yet, would be missing."""
    model, node, plan = model_catalog.model("llama2-7b"), hardware("h200"), plan_of(policy, window)
    step = steady_step(plan, node, model, tokens=2048)
    closing = sum(param.file_bytes / param.interval for param in plan.params)
    cycle = max(param.interval for param in plan.params)
    assert 2 * closing - plan.file_window_bytes / cycle <= step.disk * 1.01
    assert step.disk <= 2 * closing * 1.01


@pytest.mark.parametrize("policy", FILES)
@pytest.mark.parametrize("window", [None, 40e9])
def test_plan_and_trace_have_equal_steps(policy: str, window: float | None) -> None:
    model, node, plan = model_catalog.model("llama2-7b"), hardware("h200"), plan_of(policy, window)
    recording = simulate(plan, node, model, tokens=2048)
    steps = [event.duration_ns / 1e9 for event in recording.events if event.lane == "step"]
    step = steady_step(plan, node, model, tokens=2048)
    assert step.seconds == pytest.approx(sum(steps) / len(steps), rel=1e-4)
    later = simulate(plan, node, model, tokens=2048, steps=40)
    steps = [event.duration_ns / 1e9 for event in later.events if event.lane == "step"]
    assert step.seconds == pytest.approx(sum(steps) / len(steps), rel=2e-3)


def test_alternating_steps_are_averaged() -> None:
    """Two of three chunks fit. The last update ends after 19 s, and its upload 1 s later.

    In every second step it is the second chunk's: the third one's upload comes after it.
    """
    model = layers(3)
    options = Options(policy="zero_infinity", nvme_path="scratch", host_window_bytes=24_000_000)
    plan = make_plan(model.params, options)
    node = machine(disk_write=2e6)
    assert steady_step(plan, node, model, tokens=1, final_at_step=True).seconds == 20.5
    recording = simulate(plan, node, model, tokens=1, final_at_step=True)
    steps = [event.duration_ns / 1e9 for event in recording.events if event.lane == "step"]
    assert steps == [21.0, 20.0, 21.0, 20.0]
    assert [event.step for event in recording.events if event.lane == "step"] == [1, 2, 3, 4]
