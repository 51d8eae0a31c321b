"""``update_stride`` from a measured machine: chosen once, before planning, and named where a state does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.support.machines import machine
from tests.support.training import Training, assert_same
from zenflow_compile import lazy_engine
from zenflow_compile.performance.equations import NEVER, stride_of, update_stride
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.prediction.forecast import resolve_stride
from zenflow_compile.runtime.checkpoint.format import chosen
from zenflow_compile.runtime.parameters.capacity import specs_of

STATES = {"policy": "deep_optimizer_states"}
MEASURED: list[dict[str, Any]] = [STATES, {**STATES, "update_stride": "auto"}, {"update_stride": "auto"}]
# Deep Optimizer States, section 5.1: 2, 35 and 3 billion parameters a second; of three cores one works.
V100 = machine(device_bandwidth=28 * 35e9, link_to_host=12e9, link_to_device=12e9, adam_per_core=2e9)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> list[Hardware]:
    """Replaces the measurement of this machine, whose result is the first of the list."""
    left = [V100]
    monkeypatch.setattr(lazy_engine, "measured_hardware", lambda *args: left[0])
    return left


@pytest.mark.parametrize("options", MEASURED)
def test_stride_is_that_of_the_equation(options: dict[str, Any], machines: list[Hardware]) -> None:
    training = Training(None, options)
    window = 1 if "policy" in options else 4
    # A pass over the window counts for each of its steps; weights and gradients are fp32.
    cpu_update = window * 2e9 * 32 / (32 + 4 * (window - 1))
    ratio = update_stride(cpu_update=cpu_update, gpu_update=35e9, link=3e9, cpu_downscale=math.inf)
    expected = stride_of(ratio)
    assert expected == (4 if window == 1 else 198)
    assert training.optimizer.options.update_stride == expected
    assert training.optimizer.engine.options is training.optimizer.options
    assert chosen(training.optimizer.state_dict()["state"][0]["chosen"])["update_stride"] == expected
    training.optimizer.close()


def test_planner_and_optimizer_agree_on_the_stride(machines: list[Hardware]) -> None:
    training = Training(None, STATES)
    options = training.optimizer.options
    specs = specs_of(list(training.model.named_parameters()))
    assert options == resolve_stride(replace(options, update_stride=None), V100, specs)
    training.optimizer.close()


def test_given_stride_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Hardware:
        raise AssertionError("measured")

    monkeypatch.setattr(lazy_engine, "measured_hardware", never)
    for options in ({**STATES, "update_stride": 3}, {"policy": "zero_offload", "update_stride": "auto"}, {}):
        Training(None, options).optimizer.close()


@pytest.mark.parametrize("slow", ["link_to_host", "link_to_device"])
def test_slow_link_streams_nothing(slow: str, machines: list[Hardware]) -> None:
    machines[0] = replace(V100, **{slow: 4e6})
    training = Training(None, STATES).run(0, 2)
    assert training.optimizer.options.update_stride == NEVER
    assert not training.optimizer.engine.registry.streamed.params
    training.optimizer.close()


def test_state_of_another_stride_names_the_option(machines: list[Hardware]) -> None:
    machines[0] = replace(V100, device_bandwidth=math.inf, link_to_host=4e12, link_to_device=4e12)
    saving = Training(None, STATES).run(0, 3)
    assert saving.optimizer.options.update_stride == 1
    saved = saving.saved()
    expected = saving.run(3, 6).weights()
    machines[0] = V100  # measured on another machine, or on a busier day
    remedy = r"pass policy='deep_optimizer_states', update_stride=1$"
    with pytest.raises(ValueError, match=rf"placement='host_streamed'.*'host'.*{remedy}"):
        Training(None, STATES).load(saved)
    assert_same(Training(None, {**STATES, "update_stride": 1}).load(saved).run(3, 6).weights(), expected)
