"""Tests the forecast of a policy against numbers worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from tests.support.machines import layers, llama, machine, scenario
from zenflow_compile.options.options import Options
from zenflow_compile.performance.equations import NEVER, stride_of, update_stride
from zenflow_compile.performance.hardware import hardware as named_hardware
from zenflow_compile.performance.models import model as named_model
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT32
from zenflow_compile.planning.planners import ParamSpec, make_plan, stride_param
from zenflow_compile.prediction.estimate import Estimator
from zenflow_compile.prediction.forecast import (
    Forecast,
    explain,
    forecast,
    needs,
    node_plan,
    resolve_stride,
    stride_rates,
)
from zenflow_compile.prediction.predict import Prediction, predict, scenario_of
from zenflow_compile.prediction.simulate import simulate
from zenflow_compile.profiling.summary import summarize


def of(layer_count: int = 2, *, implicit: bool = False, **options: Any) -> Forecast:
    hardware = machine(adam_per_core=30e6 / 28)
    return forecast(
        Options(**options),
        scenario(Options(**options), hardware, layers(layer_count), tokens=1, in_backward=implicit),
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
    ("options", "title"),
    [
        ({"policy": "twinflow"}, "twinflow"),
        ({"policy": "twinflow", "ratio": 0.5, "update_stride": 3}, "twinflow 0.5"),
        ({"policy": "zero_offload", "ratio": 0.5}, "zero_offload"),
        ({"policy": "deep_optimizer_states", "ratio": 0.75, "update_stride": 2}, "deep_optimizer_states 0.75, 2"),
        (
            {"policy": "deep_optimizer_states", "update_stride": NEVER},
            "deep_optimizer_states none",
        ),
        ({"update_stride": 2, "device_share": 0.0}, "zenflow 2"),
        ({"device_share": 2_345_000_000}, "zenflow 2.35 GB"),
        ({"update_interval": 2}, "zenflow"),
    ],
)
def test_title_has_the_settings_that_differ(options: dict[str, Any], title: str) -> None:
    assert of(8, **options).title == title


def test_nearest_policy_lacks_the_smallest_share() -> None:
    """The one that lacks 7 GB of 100 GB is nearer than the one that lacks 5 GB of 10 GB."""
    hardware = machine(device_bytes=10e9, host_bytes=100e9)
    fits = of()
    device, host = (
        replace(fits, needs=replace(fits.needs, device={"weights": size}, host={"state": other}), shortages={name: 1})
        for name, size, other in (("device", 15 * 10**9, 1), ("host", 1, 107 * 10**9))
    )
    assert device.needs.lack(hardware) == pytest.approx(0.5)
    assert host.needs.lack(hardware) == pytest.approx(0.07)
    asked = scenario_of(layers(2), hardware, tokens=1)
    assert Prediction(asked, (device, host), None).shown is host
    assert Prediction(asked, (device, host, fits), fits).shown is fits


# The update stride.

MODEL = llama()


def test_stride_comes_from_the_equation() -> None:
    """Of three cores one works, as in the simulation."""
    hardware = machine(device_bandwidth=28e9, link_to_host=4e9, link_to_device=4e9, adam_per_core=1.5e9)
    ratio = update_stride(cpu_update=1.5e9, gpu_update=1e9, link=1e9, cpu_downscale=inf)
    resolved = resolve_stride(Options(policy="deep_optimizer_states"), hardware, MODEL.params)
    assert resolved.update_stride == stride_of(ratio)
    mixture = Options(policy="zenflow", update_stride="auto", update_interval=1)
    mixed = resolve_stride(mixture, hardware, MODEL.params)
    assert mixed.update_stride == resolved.update_stride
    given = Options(policy="deep_optimizer_states", update_stride=5)
    assert resolve_stride(given, hardware, MODEL.params) is given


def test_window_pass_counts_for_each_step() -> None:
    hardware = machine(device_bandwidth=28e9, link_to_host=4e9, link_to_device=4e9, adam_per_core=1e8)
    resolved = resolve_stride(Options(update_stride="auto", update_interval=8), hardware, MODEL.params)
    cpu_update = 8 * 1e8 * 28 / (28 + 7 * 2)
    ratio = update_stride(cpu_update=cpu_update, gpu_update=1e9, link=1e9, cpu_downscale=inf)
    assert resolved.update_stride == stride_of(ratio)
    every_step = resolve_stride(Options(update_stride="auto", update_interval=1), hardware, MODEL.params)
    assert resolved.stride > every_step.stride


@pytest.mark.parametrize(("dtypes", "weight_bytes"), [((BFLOAT16,), 2), ((FLOAT32,), 4), ((FLOAT32, BFLOAT16), 4)])
def test_explained_stride_is_the_chosen_one(dtypes: tuple[Any, ...], weight_bytes: int) -> None:
    """The first parameter is the largest. A pass takes 24 bytes of state both ways, a gradient and a weight."""
    first, *others = MODEL.params
    params = tuple(replace(spec, dtype=dtypes[-1]) for spec in others)
    model = replace(MODEL, params=(replace(first, dtype=dtypes[0]), *params))
    node = machine(device_bandwidth=28e9, link_to_host=8e9, link_to_device=8e9, host_bandwidth=5.2e9, adam_per_core=1e9)
    cpu_update = 5.2e9 / (24 + 2 * weight_bytes)
    expected = (3 / 2e9 + 1 / 1e9) / (1 / cpu_update - 1 / 4e9)
    options = resolve_stride(Options(policy="deep_optimizer_states"), node, model.params)
    asked = scenario(Options(ratio=0.5), node, model, tokens=64)
    (tried,) = (each for each in predict(asked).forecasts if "deep" in each.label)
    assert options.update_stride == tried.options["update_stride"] == stride_of(expected)
    equation, *_ = explain(tried, asked)["explained"]
    assert equation.startswith("stride_ratio")
    assert f"= {expected:.4g} (" in equation


def test_stride_is_chosen_for_the_largest_offloadable() -> None:
    large, small = ParamSpec("", (9,), torch.float64), ParamSpec("", (2,), torch.float16)
    assert stride_param([]) is None
    assert stride_param([large, small]) is small
    assert stride_param([large]) is large


def test_optimizer_object_updates_after_backward() -> None:
    """A host that needs two thirds of a step has it in the optimizer-in-backward form, the forward in the other."""
    hardware = machine(adam_per_core=0.4e6)

    def step(*, implicit: bool, **given: Any) -> float:
        options = Options(**given)
        return forecast(options, scenario(options, hardware, layers(12), tokens=1, in_backward=implicit)).step_s

    steps = {}
    for implicit in (False, True):
        steps[implicit] = step(update_interval=1, implicit=implicit)
    assert steps[False] > 1.05 * steps[True]
    assert step(update_interval=1, max_grad_norm=1.0, implicit=True) == steps[False]


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("implicit", [False, True])
def test_smallest_interval_is_the_first_without_stall(implicit: bool, in_files: bool) -> None:
    """Of all windows that may be as long as ``select_interval``; the backward hides updates only if implicit."""
    rng = random.Random(1)
    found = set()
    for _ in range(12):
        hardware = machine(
            device_bandwidth=1e9,
            host_bandwidth=1e9,
            link_to_host=10 ** rng.uniform(6.5, 8),
            link_to_device=10 ** rng.uniform(6.5, 8),
            adam_per_core=10 ** rng.uniform(5, 5.8),
            disk_read=10 ** rng.uniform(7.3, 9),
            disk_write=1e9,
        )
        options = Options(nvme_path="scratch", offload_device="nvme" if in_files else "cpu", select_interval=10)
        asked = scenario(options, hardware, layers(64), in_backward=implicit)
        each = [forecast(replace(options, update_interval=steps), asked) for steps in range(1, 11)]
        waits = [step.stall_s > 0.01 * step.step_s for step in each]
        interval = explain(each[3], asked)["smallest_interval"]
        assert interval == (waits.index(False) + 1 if False in waits else None)
        found.add(interval)
    assert None in found
    assert len(found) > 3


def test_share_of_all_devices_is_bounded() -> None:
    options = Options(device_share=2**62)
    plan = node_plan(options, scenario(options, machine(devices=4), layers(2)))
    assert not any(param.offloaded for param in plan.params)


def test_spare_bytes_count_per_device() -> None:
    hardware = machine(devices=2, peer_bandwidth=1e12)
    model = layers(8)
    options = Options(device_share=12 * 1_000_000)  # the state of a layer, which each device has
    placements = [param.placement for param in node_plan(options, scenario(options, hardware, model)).params]
    assert placements == ["device"] + ["split_columns"] * 7
    node = named_hardware("4xa100-40g-pcie4")
    asked = scenario(
        Options(policy="auto", tokens_per_step=1, device_share="fill"), node, named_model("llama2-7b"), tokens=1024
    )
    (filled,) = (each for each in predict(asked).forecasts if each.label == "zenflow")
    assert filled.options["device_share"] < node.device_bytes
    assert filled.fits
    assert filled.needs.device["optimizer state"] > filled.options["device_share"]


def test_window_of_files_counts_per_device() -> None:
    options = Options(policy="zero_infinity", nvme_path="scratch", host_window_bytes=12 * 1_000_000)
    asked = scenario(options, machine(devices=2, peer_bandwidth=1e12, cores=6), layers(8))
    for found in (needs(options, asked), Estimator(asked).needs(options, recompute=False)):
        assert found.host["window of files"] == 2 * 12 * 1_000_000


@pytest.mark.parametrize(
    ("policy", "step"), [("resident", 120), ("zero_offload", 140), ("twinflow", 130), ("zenflow", 120)]
)
def test_step_without_contention_by_hand(policy: str, step: float) -> None:
    """40 layers take 40 s forward and 80 s backward, their update 20 s, which a forward hides."""
    hardware = machine(link_to_device=1e9, link_to_host=1e9, adam_per_core=2e6, cores=3)
    options = Options(policy=policy, ratio=0.5 if policy == "twinflow" else 1.0, max_grad_norm=1.0)
    predicted = forecast(options, scenario(options, hardware, layers(40), tokens=1))
    assert predicted.step_s == pytest.approx(step, rel=0.03)


def test_machine_rates_are_a_devices_share() -> None:
    """Two workers update 10 parameters a second; 84 bytes/s of memory at 28 per parameter are 3, for two devices."""
    node = machine(
        devices=2, cores=8, adam_per_core=2.5, device_bandwidth=280.0, link_to_host=20.0, link_to_device=10.0
    )
    rates = stride_rates(node)
    assert rates == {"cpu_update": 5.0, "gpu_update": 10.0, "link": 2.5, "cpu_downscale": inf}
    assert stride_rates(replace(node, host_bandwidth=84.0))["cpu_update"] == pytest.approx(1.5)
