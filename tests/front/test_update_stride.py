"""``update_stride`` from a measured machine: chosen once, before planning, and named where a state does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.calls import calls_of
from tests.support.machines import machine, measured_as, scenario
from tests.support.training import Training, assert_same
from zenflow_compile.measure.this_machine import measured_hardware
from zenflow_compile.performance.equations import NEVER, stride_of, update_stride
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shape import shape_of
from zenflow_compile.prediction.forecast import WORTH_IT, forecast
from zenflow_compile.prediction.strides import fastest_stride
from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.runtime.checkpoint.format import chosen
from zenflow_compile.runtime.parameters.capacity import specs_of

STATES = {"policy": "deep_optimizer_states"}
MEASURED: list[dict[str, Any]] = [STATES, {**STATES, "update_stride": "auto"}, {"update_stride": "auto"}]
# Deep Optimizer States, section 5.1: 2, 35 and 3 billion parameters a second; of three cores one works.
V100 = machine(device_bandwidth=28 * 35e9, link_to_host=12e9, link_to_device=12e9, adam_per_core=2e9)


@pytest.fixture
def machines() -> Iterator[list[Hardware]]:
    """What this machine is: the first of the list."""
    with measured_as(V100) as left:
        yield left


@pytest.mark.parametrize("options", MEASURED)
def test_stride_is_the_fastest_simulated(options: dict[str, Any], machines: list[Hardware]) -> None:
    """Of those around Equation 1's, which stays unless another one saves a hundredth of the step."""
    training = Training(None, options)
    window = 1 if "policy" in options else 4
    # A pass over the window counts for each of its steps; weights and gradients are fp32.
    cpu_update = window * 2e9 * 32 / (32 + 4 * (window - 1))
    equation = stride_of(update_stride(cpu_update=cpu_update, gpu_update=35e9, link=3e9, cpu_downscale=math.inf))
    assert equation == (4 if window == 1 else 198)
    chosen_options = training.optimizer.options
    assert training.optimizer.engine.options is chosen_options
    stride = chosen_options.update_stride
    assert chosen(training.optimizer.state_dict()["state"][0]["chosen"])["update_stride"] == stride
    model = shape_of(specs_of([list(training.model.named_parameters())], [ADAMW]))
    asked = scenario(chosen_options, replace(V100, device_flops=math.inf), model)
    steps = {
        each: forecast(replace(chosen_options, update_stride=each), asked).step_s for each in (equation, 1, 2, 3, NEVER)
    }
    assert stride == equation or steps[stride] < (1 - WORTH_IT) * steps[equation]
    assert all(steps.get(stride, 0.0) * (1 - WORTH_IT) <= each for each in steps.values())
    training.optimizer.close()


def test_planner_and_optimizer_agree_on_the_stride(machines: list[Hardware]) -> None:
    options = {**STATES, "tokens_per_step": 8}
    training = Training(None, options)
    resolved = training.optimizer.options
    model = shape_of(specs_of([list(training.model.named_parameters())], [ADAMW]))
    asked = scenario(resolved, V100, model, tokens=8)
    assert resolved == fastest_stride(replace(resolved, update_stride=None), asked)
    training.optimizer.close()


def test_given_stride_is_not_measured() -> None:
    with calls_of(measured_hardware) as measured:
        for options in ({**STATES, "update_stride": 3}, {"policy": "zero_offload", "update_stride": "auto"}, {}):
            Training(None, options).optimizer.close()
    assert measured == []


@pytest.mark.parametrize("slow", ["link_to_host", "link_to_device"])
def test_slow_link_streams_nothing(slow: str, machines: list[Hardware]) -> None:
    machines[0] = replace(V100, **{slow: 4e6})
    training = Training(None, STATES).run(0, 2)
    assert training.optimizer.options.update_stride == NEVER
    assert not training.optimizer.engine.registry.streamed.params
    training.optimizer.close()


def test_state_of_another_stride_converts(machines: list[Hardware]) -> None:
    machines[0] = replace(V100, device_bandwidth=math.inf, link_to_host=4e12, link_to_device=4e12)
    saving = Training(None, STATES).run(0, 3)
    assert saving.optimizer.options.update_stride == 1
    saved = saving.saved()
    expected = saving.run(3, 6).weights()
    machines[0] = replace(V100, link_to_host=4e6)  # measured on another machine, or on a busier day
    with pytest.warns(UserWarning, match="saved with other options"):
        resumed = Training(None, STATES).load(saved)
    assert resumed.optimizer.options.update_stride != 1
    for ours, theirs in zip(resumed.run(3, 6).weights(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert_same(Training(None, {**STATES, "update_stride": 1}).load(saved).run(3, 6).weights(), expected)
