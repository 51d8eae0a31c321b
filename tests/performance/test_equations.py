"""The equations agree with the papers' numbers, with the bytes of plans, and with what is simulated."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.support.machines import SLOW_HOST, llama, scenario
from zenflow_compile.options.options import Options
from zenflow_compile.performance.equations import (
    ACTIVATIONS,
    NEVER,
    STRIDE_RATIO,
    roofline,
    stride_of,
    update_stride,
)
from zenflow_compile.performance.hardware import Hardware, hardware
from zenflow_compile.performance.memory import activation_bytes
from zenflow_compile.performance.models import model as named_model
from zenflow_compile.performance.traffic import Traffic, traffic_of
from zenflow_compile.planning.planners import make_plan
from zenflow_compile.prediction.forecast import Forecast, Scenario, explain, forecast
from zenflow_compile.prediction.predict import predict

V100 = {"cpu_update": 2e9, "gpu_update": 35e9, "link": 3e9, "cpu_downscale": 8.7e9}
H100 = {"cpu_update": 2e9, "gpu_update": 25e9, "link": 13.75e9, "cpu_downscale": 15.5e9}


# Deep Optimizer States, Equation 1.


def test_ratio_equals_the_papers_testbeds() -> None:
    assert round(update_stride(**V100), 2) == 2.29
    assert round(update_stride(**H100), 2) == 0.49


def test_both_sides_end_together_at_the_ratio() -> None:
    rng = random.Random(0)
    for _ in range(50):
        rates = {name: rng.uniform(1e9, 40e9) for name in V100}
        ratio = update_stride(**rates)
        if math.isfinite(ratio):
            gpu = 3 / rates["link"] + 1 / rates["gpu_update"] + ratio / (2 * rates["link"])
            cpu = ratio * (1 / rates["cpu_update"] + 1 / rates["cpu_downscale"])
            assert gpu == pytest.approx(cpu)


def test_slow_link_gives_infinite_stride() -> None:
    """0.5 seconds of link per parameter against 0.4 of CPU: however many the CPU updates, the link ends last."""
    rates = {"cpu_update": 5.0, "gpu_update": 100.0, "link": 1.0, "cpu_downscale": 5.0}
    assert update_stride(**rates) == math.inf
    assert math.isfinite(update_stride(**rates | {"link": 1.3}))
    assert stride_of(math.inf) == NEVER


def test_cast_within_the_update_is_free() -> None:
    assert update_stride(**V100 | {"cpu_downscale": math.inf}) == pytest.approx((1 + 1 / 35) / (1 / 2 - 1 / 6))


@pytest.mark.parametrize(("ratio", "stride"), [(2.29, 3), (0.49, 1), (0.51, 2), (0.0, 1), (2.0, 3), (1e12, NEVER)])
def test_stride_has_the_shares_of_the_ratio(ratio: float, stride: int) -> None:
    assert stride_of(ratio) == stride


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("name", list(V100))
def test_rates_of_zero_are_refused(name: str, rate: float) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*> 0 in parameters per second"):
        update_stride(**V100 | {name: rate})


@pytest.mark.parametrize("ratio", [-0.1, math.nan])
def test_invalid_ratio_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"cpu_to_gpu=.*>= 0"):
        stride_of(ratio)


# Memory and traffic.


def test_activations_by_hand() -> None:
    model = llama(blocks=2, width=8, vocabulary=10)
    assert activation_bytes(model, tokens=3, recompute=False) == 3 * (34 * 8 * 2 + 6 * 10)
    assert activation_bytes(model, tokens=3, recompute=True) == 3 * (2 * 8 * 2 + 34 * 8 + 6 * 10)


@pytest.mark.parametrize(
    ("topk_ratio", "interval", "sizes"), [(0.1, 4, 1.125), (0.05, 4, 1.1875), (0.0, 1, 2.0), (1.0, 4, 0.0)]
)
def test_plan_has_zenflows_published_traffic(topk_ratio: float, interval: int, sizes: float) -> None:
    """(1 - topk_ratio) * (1 + 1 / update_interval) model sizes (arXiv 2505.12242); 1.125 against 2 of ZeRO-Offload."""
    options = Options(topk_ratio=topk_ratio, update_interval=interval, device_share=0.0, min_offload_size=1)
    plan = make_plan(llama().params, options)
    moved = traffic_of(plan) or Traffic()
    assert (moved.to_host + moved.to_device) / plan.model_bytes == pytest.approx(sizes, rel=0.01)


# What is explained is what is forecast.

LANES = ("host_update", "copy_to_host", "copy_to_device", "disk")


def check_bound(found: Forecast, asked: Scenario) -> None:
    """The simulated step is at least the explained one and at most one without overlap; its traffic is the plan's."""
    values = {
        line.split(" ")[0]: float(line.split(" = ")[-1].split(" ")[0]) for line in explain(found, asked)["explained"]
    }
    assert values.get("traffic", 0.0) == pytest.approx(found.traffic, rel=0.01, abs=1e-9), found.label
    one_after_another = values["step"] - values.get("stall", 0.0) + sum(values.get(lane, 0.0) for lane in LANES)
    # The roofline hides nothing of a blocking update; the device's own update may.
    assert 0.99 * values["step"] <= found.step_s <= 1.01 * one_after_another, found.label


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("machine", ["4xa100-40g-pcie4", "h200"])
def test_forecast_is_at_least_the_roofline(machine: str, in_backward: bool) -> None:
    node, options = hardware(machine), Options(nvme_path="scratch", update_interval=2)
    model = named_model("llama2-7b")
    asked = scenario(options, node, model, tokens=2048, recompute=not in_backward, in_backward=in_backward)
    found = predict(asked).forecasts
    assert len(found) > 4
    for each in found:
        check_bound(each, asked)


@pytest.mark.parametrize(
    "given",
    [
        {"gradient_transfer": "int8"},
        {"gradient_transfer": "mean"},
        {"staleness": 1, "topk_ratio": 0.25},
        {"device_share": 10_000_000},
        {"overlap_step": False},
    ],
    ids=str,
)
def test_options_besides_the_policy_count(given: dict[str, Any]) -> None:
    options = Options(**given)
    asked = scenario(options, SLOW_HOST, llama(), tokens=64)
    check_bound(forecast(options, asked), asked)


# Reading them.


def test_line_has_numbers_and_source() -> None:
    numbers = {"tokens": 3, "layers": 2, "hidden": 8, "vocabulary": 10}
    assert ACTIVATIONS.line(numbers) == (
        "activations [bytes] = tokens*(34*hidden*layers + 6*vocabulary) = 3*(6*10 + 34*2*8) = 1812 "
        "(an estimate: Korthikanti et al. 2022, equation 1)"
    )
    line = STRIDE_RATIO.line(V100)
    assert line.startswith("stride_ratio = (3/link + 1/gpu_update)/(-1/(2*link) + 1/cpu_update + 1/cpu_downscale) = ")
    assert "= 2.295 (" in line


def test_equation_without_a_number_raises() -> None:
    with pytest.raises(KeyError, match="hidden"):
        ACTIVATIONS.of({"tokens": 3})


@pytest.mark.parametrize("blocking", [False, True])
def test_every_symbol_has_a_number_or_an_equation(blocking: bool) -> None:
    """Each equation reads what a plan and a machine give, and results of those before it."""
    known = {"host", "to_host", "to_device", "state", "loads", "rewritten", "files", "device"}
    known |= {"host_bandwidth", "link_to_host", "link_to_device", "disk_bandwidth"}
    for equation in roofline(blocking):
        assert {symbol.name for symbol in equation.value.free_symbols} <= known
        assert equation.source
        known.add(equation.name)


def explained(machine: Hardware, **options: Any) -> list[str]:
    given = Options(**options)
    asked = scenario(given, machine, llama(), tokens=64)
    found = forecast(given, asked)
    lines: list[str] = explain(found, asked)["explained"]
    return lines


def test_explanation_has_the_stride_if_finite() -> None:
    streaming: dict[str, Any] = {"policy": "deep_optimizer_states", "update_stride": 2}
    assert explained(SLOW_HOST, **streaming)[0].startswith("stride_ratio = ")
    slow_link = replace(SLOW_HOST, link_to_device=1e6, link_to_host=1e6)
    assert not explained(slow_link, **streaming)[0].startswith("stride_ratio")


def test_explanation_leaves_out_what_does_not_move() -> None:
    names = [line.split(" ")[0] for line in explained(SLOW_HOST)]
    assert names[0] == "activations"
    assert {"traffic", "host_update", "copy_to_host", "copy_to_device", "step"} <= set(names)
    assert "disk" not in names
    assert [line.split(" ")[0] for line in explained(SLOW_HOST, policy="resident")] == ["activations", "step"]
