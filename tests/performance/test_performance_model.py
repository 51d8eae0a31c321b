"""The equations agree with the papers' numbers, with the bytes of plans, and with each other."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.machines import SLOW_HOST, layers, llama, scenario
from zenflow_compile.options.options import LONGEST_UPDATE_INTERVAL, Options
from zenflow_compile.performance import equations
from zenflow_compile.performance.equations import PLAN_TRAFFIC, STRIDE_RATIO, TRAFFIC
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.hardware_catalog import hardware
from zenflow_compile.performance.model_catalog import model as named_model
from zenflow_compile.performance.model_shapes import flops_per_token
from zenflow_compile.performance.performance_model import (
    NEVER,
    bindings,
    explain,
    formulas,
    smallest_interval,
    step_formula,
    step_time,
    stride_of,
    stride_rates,
    traffic,
    update_stride,
)
from zenflow_compile.performance.step_settings import StepSettings
from zenflow_compile.planning.dtypes import BFLOAT16
from zenflow_compile.planning.plan import STATE_BYTES
from zenflow_compile.planning.planners import ParamSpec, make_plan
from zenflow_compile.prediction import auto_policy
from zenflow_compile.prediction.forecast import forecast, node_plan

V100 = {"cpu_update": 2e9, "gpu_update": 35e9, "link": 3e9, "cpu_downscale": 8.7e9}
H100 = {"cpu_update": 2e9, "gpu_update": 25e9, "link": 13.75e9, "cpu_downscale": 15.5e9}

# Round numbers: a parameter a second on the device's link, and so on.
MACHINE = Hardware(
    name="round",
    device_flops=1.0,
    utilization=1.0,
    device_bytes=1e3,
    device_bandwidth=280.0,
    link_to_host=20.0,
    link_to_device=10.0,
    host_bytes=1e3,
    host_bandwidth=300.0,
    cores=4,  # two of them work
    adam_per_core=5.0,
    disk_read=24.0,
    disk_write=12.0,
    sources={},
)


POLICIES = ("resident", "zero_offload", "twinflow", "deep_optimizer_states", "zenflow", "zero_infinity")


def large(policy: str, *, final_at_step: bool = False, recompute: bool = False, **given: Any) -> StepSettings:
    """A plan of 100 bf16 parameters with the shares of a large model: rings, buffers and caches hold nothing of it."""
    specs = [ParamSpec(f"w{index}", (10, 1), BFLOAT16) for index in range(10)]
    small: dict[str, Any] = {"device_share": 0.0, "min_offload_size": 1, "sub_group_size": 1, "nvme_path": "files"}
    if policy == "deep_optimizer_states":
        small["update_stride"] = NEVER
    if policy == "zero_infinity" or "offload_device" in given:
        small["host_window_bytes"] = 10 * STATE_BYTES  # a parameter's state
    options = Options(policy=policy, **{**small, **given})
    plan = make_plan(specs, options)
    found = StepSettings.of(options, plan, final_at_step=final_at_step, recompute=recompute)
    return replace(found, copied_first=1.0, prefetched=0.0)


def step(settings: StepSettings, hardware: Hardware = MACHINE, *, flops: float = 12.0) -> Any:
    time = step_time(settings, hardware, flops=flops)
    values = bindings(settings, hardware, flops=flops)
    update = equations.DEVICE_UPDATE if settings.overlapped else equations.BLOCKING_UPDATE
    return SimpleNamespace(
        seconds=time.seconds,
        device=time.device,
        stall=time.stall,
        update=update.evaluate(values),
        lanes={str(lane.symbol): values[lane.symbol] for lane in equations.LANES},
    )


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


def test_machine_rates_are_a_devices_share() -> None:
    """Two workers update 10 parameters a second; 84 bytes/s of memory at 28 per parameter are 3, for two devices."""
    node = replace(MACHINE, devices=2)
    rates = stride_rates(node)
    assert rates == {"cpu_update": 5.0, "gpu_update": 10.0, "link": 2.5, "cpu_downscale": math.inf}
    assert stride_rates(replace(node, host_bandwidth=84.0))["cpu_update"] == pytest.approx(1.5)
    assert stride_rates(MACHINE)["cpu_update"] == pytest.approx(10.0)


def test_explanation_has_the_stride_if_finite() -> None:
    settings = large("deep_optimizer_states", update_stride=2)
    slow_host = replace(MACHINE, adam_per_core=0.5)
    assert explain(settings, slow_host, flops=12.0)[0].startswith("stride_ratio = ")
    fast_host = replace(MACHINE, adam_per_core=50.0)
    assert not explain(settings, fast_host, flops=12.0)[0].startswith("stride_ratio")


# Traffic.


@pytest.mark.parametrize(
    ("topk_ratio", "interval", "sizes"), [(0.1, 4, 1.125), (0.05, 4, 1.1875), (0.0, 1, 2.0), (1.0, 4, 0.0)]
)
def test_traffic(topk_ratio: float, interval: int, sizes: float) -> None:
    assert traffic(topk_ratio, interval) == pytest.approx(sizes)


@pytest.mark.parametrize(("topk_ratio", "interval"), [(-0.1, 4), (1.1, 4), (math.nan, 4), (0.1, 0), (0.1, math.nan)])
def test_traffic_has_ranges(topk_ratio: float, interval: float) -> None:
    with pytest.raises(ValueError, match=r"must be a number"):
        traffic(topk_ratio, interval)


def test_link_lanes_carry_the_traffic() -> None:
    times = step(large("zenflow", topk_ratio=0.1, update_interval=4)).lanes
    carried = times["gradients"] * MACHINE.link_to_host + times["uploads"] * MACHINE.link_to_device
    assert carried / (100.0 * 2) == pytest.approx(traffic(0.1, 4))


# Steps, by hand. 100 parameters: 4 s forward, 8 s backward; 200 bytes over the link are 10 s out and 20 s in.


def test_resident_step_updates_on_the_device() -> None:
    times = step(large("resident"))
    assert (times.seconds, times.device, times.update, times.stall) == pytest.approx((22.0, 22.0, 10.0, 0.0))


def test_zero_offload_waits_for_gradients_and_uploads() -> None:
    """Backward 8 s behind 10 s of gradients; then uploads 20 s, cores 10 s, memory 100 x 30 / 300 = 10 s."""
    times = step(large("zero_offload"))
    assert times.seconds == pytest.approx(4 + 10 + 20)
    assert step(large("zero_offload", final_at_step=True)).seconds == pytest.approx(4 + 10 + 20)
    assert times.stall == pytest.approx(34 - 12)
    assert times.lanes["cores"] == pytest.approx(10.0)
    assert times.lanes["host_memory"] == pytest.approx(10.0)


def test_updates_and_copies_share_host_bandwidth() -> None:
    """100 parameters of 28 bytes for the update and 2 for its upload: 3000 bytes at 50 bytes/s."""
    times = step(large("zero_offload"), replace(MACHINE, host_bandwidth=50.0))
    assert times.update == pytest.approx(60.0)


def test_share_on_the_device_shortens_the_update() -> None:
    times = step(large("twinflow", ratio=0.5))
    assert times.seconds == pytest.approx(4 + 8 + 10)
    assert times.lanes["device_update"] == pytest.approx(5.0)


def test_streamed_state_crosses_the_link_both_ways() -> None:
    """Half of 100 parameters: 600 bytes in next to 100 bytes of weights, 600 out."""
    times = step(large("deep_optimizer_states", update_stride=2))
    assert times.lanes["uploads"] == pytest.approx(70.0)
    assert times.lanes["flushes"] == pytest.approx(30.0)
    assert times.lanes["cores"] == pytest.approx(5.0)
    assert times.seconds == pytest.approx(4 + 8 + 70)


def test_files_are_read_and_written_back() -> None:
    times = step(large("zero_infinity"))
    assert times.lanes["disk"] == pytest.approx(1200 / 24 + 1200 / 12)
    assert times.seconds == pytest.approx(150)  # read ahead, and written behind, all the time


def test_windows_hide_work_that_fits_into_the_step() -> None:
    """Device: 12 s and a tenth of the update, 1 s. Gradients 9 s; uploads a quarter of 18 s; cores 9 * 34 / 28 / 4."""
    times = step(large("zenflow"))
    assert times.seconds == pytest.approx(13.0)
    assert times.lanes["cores"] == pytest.approx(9 * 34 / 28 / 4)
    assert times.stall == 0.0


def test_clipping_hides_updates_in_the_forward_only() -> None:
    """At S = 2 uploads need 9 s: hidden in a step of 13 s, not in a forward of 4 s."""
    settings = large("zenflow", update_interval=2)
    assert step(settings).stall == 0.0
    clipped = step(replace(settings, final_at_step=True))
    assert clipped.seconds == pytest.approx(9 + 9)  # longer than the device's own update and the forward
    assert step(replace(settings, final_at_step=True, staleness=1)).seconds == step(settings).seconds


def test_devices_share_the_host_and_communicate() -> None:
    node = replace(MACHINE, devices=2, peer_bandwidth=20.0, host_bandwidth=100.0)
    times = step(large("zero_offload"), node)
    assert times.lanes["gradients"] == pytest.approx(5.0)
    assert times.lanes["host_memory"] == pytest.approx(30.0)
    assert times.device == pytest.approx(5 + 8)  # 200 bytes, half of them sent, at 20 bytes/s: more than the forward
    alone = step(large("zero_offload"), replace(node, devices=1))
    assert alone.lanes["gradients"] == pytest.approx(10.0)


def test_missing_hardware_number_is_named() -> None:
    with pytest.raises(ValueError, match=r"peer_bandwidth=None of hardware 'round' .* devices=2"):
        step(large("resident"), replace(MACHINE, devices=2))
    with pytest.raises(ValueError, match="disk_write=None of hardware 'round' must be bytes"):
        step(large("zero_infinity"), replace(MACHINE, disk_write=None))


# The smallest interval without a stall.


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("final_at_step", [False, True])
def test_smallest_interval_is_the_first_without_stall(final_at_step: bool, in_files: bool) -> None:
    rng = random.Random(1)
    found = set()
    for _ in range(40):
        machine = replace(
            MACHINE,
            link_to_device=rng.uniform(5, 50),
            host_bandwidth=rng.uniform(100, 600),
            adam_per_core=rng.uniform(0.5, 20),
            disk_read=rng.uniform(50, 300),
        )
        settings = large("zenflow", final_at_step=final_at_step, offload_device="nvme" if in_files else "cpu")
        flops = rng.uniform(5, 60)
        interval = smallest_interval(settings, machine, flops=flops)
        stalls = [
            step(replace(settings, update_interval=each), machine, flops=flops).stall > 1e-9 for each in range(1, 100)
        ]
        expected = stalls.index(False) + 1 if False in stalls else None
        if interval is None or interval < 100:
            assert interval == expected
        found.add(interval)
    assert None in found
    assert len(found) > 3


def test_work_of_every_step_has_no_interval() -> None:
    slow = replace(MACHINE, link_to_host=1.0)
    assert smallest_interval(large("zenflow"), slow, flops=12.0) is None


@pytest.mark.parametrize("settings", [large("zenflow", overlap_step=False), large("zero_offload")])
def test_blocking_step_has_no_smallest_interval(settings: StepSettings) -> None:
    with pytest.raises(
        ValueError, match=rf"policy='{settings.policy}' with overlap={settings.overlap} must be 'zenflow'"
    ):
        smallest_interval(settings, MACHINE, flops=12.0)


@pytest.mark.parametrize("final_at_step", [False, True])
@pytest.mark.parametrize("given", [{"accumulate_on_device": True}, {"gradient_compression": "int8"}, {}], ids=str)
@pytest.mark.parametrize("link", [1e8, 8e9])
def test_smallest_interval_ignores_plan_interval(link: float, given: dict[str, Any], final_at_step: bool) -> None:
    """It is the first whose own plan has no stall. Over the slow link a sum, which crosses once per window, decides."""
    model = llama()
    node = replace(SLOW_HOST, link_to_host=link, link_to_device=8e9, host_bandwidth=1e10, adam_per_core=2e8)
    flops = 6.0 * model.numel * 2

    def of(interval: int) -> StepSettings:
        options = Options(update_interval=interval, **given)
        return StepSettings.of(options, make_plan(model.params, options), final_at_step=final_at_step)

    found = {smallest_interval(of(each), node, flops=flops) for each in (2, 3, 8)}
    intervals = range(2, LONGEST_UPDATE_INTERVAL + 1)
    times = (step_time(of(each), node, flops=flops) for each in intervals)
    expected = next((each for each, time in enumerate(times, 2) if time.stall <= 1e-9), None)
    assert found == {expected}


# A plan's own shares: what is explained is what is forecast.

LOWER_BOUND = 2.0
"""How much longer than the equations' a simulated step may be: rings that are full, blocks that are waited for."""


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("machine", ["4xa100-40g-pcie4", "h200"])
def test_forecast_equals_the_equations(machine: str, in_backward: bool) -> None:
    node, model, tokens = hardware(machine), named_model("llama2-7b"), 2048
    recompute = not in_backward
    flops = flops_per_token(model, model.context) * tokens
    options = Options(nvme_path="scratch", update_interval=2)
    for each in auto_policy.compare(
        scenario(options, node, model, tokens=tokens, recompute=recompute, in_backward=in_backward)
    ):
        chosen = Options.from_keywords(**each.options)
        plan = node_plan(chosen, scenario(chosen, node, model))
        settings = StepSettings.of(chosen, plan, final_at_step=not in_backward, recompute=recompute)
        values = bindings(settings, node, flops=flops)
        assert PLAN_TRAFFIC.evaluate(values) == pytest.approx(each.traffic, rel=0.01), each.label
        bound = step_time(settings, node, flops=flops).seconds
        assert (1 - 1e-6) * bound <= each.step_s <= LOWER_BOUND * bound, each.label


@pytest.mark.parametrize(
    "given",
    [
        {"gradient_compression": "int8"},
        {"accumulate_on_device": True},
        {"staleness": 1, "topk_ratio": 0.25},
        {"spare_device_bytes": 10_000_000, "device_share": 0.3},
        {"overlap_step": False},
    ],
    ids=str,
)
def test_options_besides_the_policy_count(given: dict[str, Any]) -> None:
    options = Options(**given)
    model, node = replace(llama(), embeddings=("embed.weight",)), SLOW_HOST
    plan = make_plan(model.params, options)
    settings = StepSettings.of(options, plan, final_at_step=True)
    said = forecast(options, scenario(options, node, model, tokens=64))
    flops = flops_per_token(model, model.context) * 64
    values = bindings(settings, node, flops=flops)
    assert PLAN_TRAFFIC.evaluate(values) == pytest.approx(said.traffic, rel=0.01)
    bound = step_time(settings, node, flops=flops).seconds
    assert (1 - 1e-6) * bound <= said.step_s <= LOWER_BOUND * bound


def test_recomputing_backward_takes_three_forwards() -> None:
    again = bindings(large("resident", recompute=True), MACHINE, flops=12.0)
    assert (again[equations.forward], again[equations.backward]) == pytest.approx((4.0, 12.0))
    assert step(large("resident", recompute=True)).seconds == pytest.approx(4 + 12 + 10)


def test_given_workers_count() -> None:
    assert step(large("zero_offload", workers=1)).lanes["cores"] == pytest.approx(20.0)


# Reading them.


@pytest.mark.parametrize("final_at_step", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_formula_is_complete(policy: str, final_at_step: bool) -> None:
    settings = large(policy, final_at_step=final_at_step, ratio=0.5)
    values = bindings(settings, MACHINE, flops=12.0)
    names = [formula.name for formula in formulas(settings)]
    assert len(set(names)) == len(names)
    for formula in formulas(settings):
        assert formula.meaning
        assert formula.source
        assert math.isfinite(formula.evaluate(values))


def test_formula_prints_with_its_numbers() -> None:
    line = TRAFFIC.explain({equations.topk_ratio: 0.1, equations.update_interval: 4})
    assert line == (
        "traffic [model sizes per step] = (1 - topk_ratio)*(1 + 1/update_interval) = (1 - 0.1)*(1 + 1/4) = 1.125"
    )
    assert STRIDE_RATIO.explain({getattr(equations, name): rate for name, rate in V100.items()}).endswith("= 2.295")
    assert STRIDE_RATIO.explain() == (
        "stride_ratio = (3/link + 1/gpu_update)/(-1/(2*link) + 1/cpu_update + 1/cpu_downscale)"
    )


def test_explanation_evaluates_the_step() -> None:
    settings = large("zenflow")
    lines = explain(settings, MACHINE, flops=12.0)
    (line,) = (line for line in lines if line.startswith(step_formula(settings).name))
    assert "lower bound" in lines[-1]
    assert line.endswith("= 13")
    assert not any(line.startswith("disk") for line in lines)
    assert lines[0].startswith("traffic")


def test_formula_with_an_unbound_symbol_raises() -> None:
    with pytest.raises(KeyError, match="update_interval"):
        TRAFFIC.evaluate({equations.topk_ratio: 0.1})


# Offloaded weights.


def loading(**given: Any) -> StepSettings:
    """A plan of three weights of 2e6 bytes, of which nothing is loaded ahead."""
    options = Options(**{"offload_weights": 1.0, "device_share": 0.0, "topk_ratio": 0.0, "update_interval": 1} | given)
    plan = node_plan(options, scenario(options, MACHINE, layers(3)))
    return replace(StepSettings.of(options, plan), copied_first=1.0, loaded_ahead=0)


def test_loads_bound_forward_backward_and_link() -> None:
    """Forward of 4 s, backward of 8 s; 6e6 bytes in each of them."""
    rates = {"device_bandwidth": 1e12, "host_bandwidth": 1e12, "adam_per_core": 1e12, "link_to_host": 1e12}
    for rate, seconds in ((1.5e6, 12.0), (1.2e6, 13.0), (7.5e5, 16.0), (1e5, 120.0)):
        found = step(loading(), replace(MACHINE, link_to_device=rate, **rates))
        assert found.seconds == pytest.approx(seconds, rel=1e-4)
        assert found.device == pytest.approx(12.0, rel=1e-4)
        assert found.lanes["uploads"] == pytest.approx(12e6 / rate)


def test_loads_that_never_fit_have_no_interval() -> None:
    rates = {"device_bandwidth": 1e12, "host_bandwidth": 1e12, "adam_per_core": 1e12, "link_to_host": 1e12}
    for rate, expected in ((1.6e6, 1), (1.4e6, None)):
        machine = replace(MACHINE, link_to_device=rate, **rates)
        assert smallest_interval(loading(), machine, flops=12.0) == expected


def test_rewritten_weights_cross_both_ways() -> None:
    settings = loading(policy="resident")
    assert settings.traffic.forward_loads == settings.traffic.backward_loads == settings.traffic.rewritten == 6_000_000
    found = step(
        settings, replace(MACHINE, link_to_device=1e6, link_to_host=2e6, device_bandwidth=1e12, host_bandwidth=1e12)
    )
    assert found.lanes["uploads"] == pytest.approx(18.0)
    assert found.lanes["flushes"] == pytest.approx(3.0)
    assert found.seconds == pytest.approx(6 + 8 + 6, rel=1e-4)
    assert any(line.startswith("rewrites") for line in explain(settings, MACHINE, flops=12.0))
