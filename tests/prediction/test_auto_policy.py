"""Options that the performance model chooses."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from tests.support.machines import SLOW_HOST, layers, llama, machine, scenario
from zenflow_compile.options.options import Options
from zenflow_compile.performance import performance_model
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.hardware_catalog import hardware as named_hardware
from zenflow_compile.performance.memory import activation_bytes, needs_of
from zenflow_compile.performance.model_catalog import model as named_model
from zenflow_compile.performance.step_settings import StepSettings
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT32
from zenflow_compile.planning.planners import ParamSpec, make_plan, stride_weight_bytes
from zenflow_compile.prediction import auto_policy
from zenflow_compile.prediction.forecast import forecast, node_plan

MODEL = llama()
POLICIES = {"resident", "twinflow", "zero_offload", "deep_optimizer_states", "zenflow"}


def chosen(hardware: Hardware, **options: Any) -> Options:
    return auto_policy.choose(scenario(Options(**options), hardware, MODEL, tokens=64))


def bytes_of(hardware: Hardware, **options: Any) -> int:
    plan = make_plan(MODEL.params, auto_policy.resolve_stride(Options(**options), hardware, MODEL.params))
    return sum(needs_of(plan, MODEL, devices=1, tokens=64, recompute=False).device.values())


def test_state_stays_on_the_device_if_it_fits() -> None:
    assert chosen(SLOW_HOST).policy == "resident"


def test_fastest_policy_that_fits_is_chosen() -> None:
    resident, offloaded = (bytes_of(SLOW_HOST, policy=policy) for policy in ("resident", "zero_offload"))
    tight = replace(SLOW_HOST, device_bytes=resident - 1)
    best = chosen(tight)
    assert best.policy != "resident"
    assert not forecast(best, scenario(best, tight, MODEL, tokens=64)).shortages
    assert chosen(replace(SLOW_HOST, device_bytes=offloaded)).policy == "zero_offload"


def test_given_memory_limits_the_choice() -> None:
    resident = bytes_of(SLOW_HOST, policy="resident")
    assert chosen(SLOW_HOST).policy == "resident"
    assert chosen(replace(SLOW_HOST, device_bytes=resident - 1)).policy != "resident"
    in_files = Options(nvme_path="scratch")
    needed = {}
    for policy in ("zero_offload", "zero_infinity"):
        plan = make_plan(MODEL.params, replace(in_files, policy=policy))
        needed[policy] = sum(needs_of(plan, MODEL, devices=1, tokens=64, recompute=False).host.values())
    assert needed["zero_infinity"] < needed["zero_offload"]
    device_bytes = bytes_of(SLOW_HOST, policy="zero_offload")
    tight = replace(SLOW_HOST, device_bytes=device_bytes, host_bytes=needed["zero_offload"] - 1)
    assert auto_policy.choose(scenario(in_files, tight, MODEL, tokens=64)).in_files


def test_error_if_nothing_fits() -> None:
    with pytest.raises(ValueError, match=r"no policy fits 'round': \w+ comes nearest and lacks .* GB of device memory"):
        chosen(replace(SLOW_HOST, device_bytes=1.0))


def test_fastest_fitting_candidate_is_chosen() -> None:
    """No other candidate that fits is faster by more than the margin that justifies a change."""
    tight = replace(SLOW_HOST, device_bytes=bytes_of(SLOW_HOST, policy="resident") - 1)
    found = auto_policy.compare(scenario(Options(), tight, MODEL, tokens=64))
    best = auto_policy.recommended(found)
    assert best is not None
    assert {each.policy for each in found} == POLICIES
    assert best.step_s * (1 - auto_policy.WORTH_IT) <= min(each.step_s for each in found if each.fits)


def test_convergence_options_are_kept() -> None:
    tight = replace(SLOW_HOST, device_bytes=bytes_of(SLOW_HOST, policy="resident") - 1)
    best = chosen(tight, topk_ratio=0.2, update_interval=2, max_grad_norm=1.0)
    assert (best.topk_ratio, best.update_interval, best.max_grad_norm) == (0.2, 2, 1.0)


def test_same_inputs_give_the_same_options() -> None:
    tight = replace(SLOW_HOST, device_bytes=bytes_of(SLOW_HOST, policy="resident") - 1)
    assert chosen(tight) == chosen(tight)


def test_stride_comes_from_the_equation() -> None:
    """Of three cores one works, as in the simulation."""
    hardware = machine(device_bandwidth=28e9, link_to_host=4e9, link_to_device=4e9, adam_per_core=1.5e9)
    ratio = performance_model.update_stride(cpu_update=1.5e9, gpu_update=1e9, link=1e9, cpu_downscale=inf)
    resolved = auto_policy.resolve_stride(Options(policy="deep_optimizer_states"), hardware, MODEL.params)
    assert resolved.update_stride == performance_model.stride_of(ratio)
    mixture = Options(policy="zenflow", update_stride="auto", update_interval=1)
    mixed = auto_policy.resolve_stride(mixture, hardware, MODEL.params)
    assert mixed.update_stride == resolved.update_stride
    given = Options(policy="deep_optimizer_states", update_stride=5)
    assert auto_policy.resolve_stride(given, hardware, MODEL.params) is given


def test_window_pass_counts_for_each_step() -> None:
    hardware = machine(device_bandwidth=28e9, link_to_host=4e9, link_to_device=4e9, adam_per_core=1e8)
    resolved = auto_policy.resolve_stride(Options(update_stride="auto", update_interval=8), hardware, MODEL.params)
    cpu_update = 8 * 1e8 * 28 / (28 + 7 * 2)
    ratio = performance_model.update_stride(cpu_update=cpu_update, gpu_update=1e9, link=1e9, cpu_downscale=inf)
    assert resolved.update_stride == performance_model.stride_of(ratio)
    every_step = auto_policy.resolve_stride(Options(update_stride="auto", update_interval=1), hardware, MODEL.params)
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
    options = auto_policy.resolve_stride(Options(policy="deep_optimizer_states"), node, model.params)
    compared = auto_policy.compare(scenario(Options(ratio=0.5), node, model, tokens=64))
    (tried,) = (each for each in compared if "deep" in each.label)
    assert options.update_stride == tried.options["update_stride"] == performance_model.stride_of(expected)
    settings = StepSettings.of(options, make_plan(model.params, options))
    equation, *_ = performance_model.explain(settings, node, flops=1e9)
    assert equation.startswith("stride_ratio")
    assert equation.endswith(f"= {expected:.4g}")


def test_stride_weight_is_the_largest_offloadable() -> None:
    assert stride_weight_bytes([]) == 0
    assert stride_weight_bytes([ParamSpec("", (9,), torch.float64), ParamSpec("", (2,), torch.float16)]) == 2
    assert stride_weight_bytes([ParamSpec("", (9,), torch.float64)]) == 8


def test_shape_from_parameters_only() -> None:
    shape = auto_policy.shape_of(MODEL.params)
    assert (shape.layers, shape.hidden, shape.context) == (4, 512, 0)
    assert auto_policy.choose(scenario(Options(), SLOW_HOST, shape, tokens=64)).policy == "resident"


def test_model_that_begins_with_a_scalar() -> None:
    shape = auto_policy.shape_of([ParamSpec("scale", (), BFLOAT16), *MODEL.params])
    assert auto_policy.choose(scenario(Options(), SLOW_HOST, shape, tokens=64)).policy == "resident"


def test_optimizer_object_updates_after_backward() -> None:
    """A host that needs two thirds of a step has it in the optimizer-in-backward form, the forward in the other."""
    hardware = machine(adam_per_core=0.4e6)
    steps = {}
    for implicit in (False, True):
        found = auto_policy.compare(
            scenario(Options(update_interval=1), hardware, layers(12), tokens=1, in_backward=implicit)
        )
        steps[implicit] = next(each.step_s for each in found if each.label == "zenflow")
    assert steps[False] > 1.05 * steps[True]
    with_clipping = auto_policy.compare(
        scenario(Options(update_interval=1, max_grad_norm=1.0), hardware, layers(12), tokens=1, in_backward=True)
    )
    assert next(each.step_s for each in with_clipping if each.label == "zenflow") == steps[False]


def test_given_stride_keeps_unstreamed_zenflow() -> None:
    options = Options(update_stride=4, sub_group_size=1, update_interval=1)
    found = {each.label: each for each in auto_policy.compare(scenario(options, SLOW_HOST, MODEL, tokens=64))}
    assert found["zenflow"].state == found["zenflow, more residents"].state == 0.0
    assert "update_stride" not in found["zenflow"].options
    for label in ("zenflow, streamed", "deep_optimizer_states"):
        assert found[label].options["update_stride"] == 4
    assert found["zenflow, streamed"].state > 0.0


def test_fewest_residents_without_a_stall() -> None:
    """Of eight layers, in blocks of two: as by hand in test_frontier.py, two blocks are enough."""
    options = Options(topk_ratio=0.0, device_share=0.0, update_interval=1)
    model, state = layers(8), 12 * 1_000_000
    found = {each.label: each for each in auto_policy.compare(scenario(options, machine(), model))}
    assert [found[label].step_s for label in ("zenflow", "zenflow, more residents")] == pytest.approx([30.0, 24.0])
    assert found["zenflow, more residents"].options["spare_device_bytes"] == 4 * state
    filled = {
        each.label: each for each in auto_policy.compare(scenario(replace(options, fill_device=True), machine(), model))
    }
    assert "zenflow" not in filled
    assert filled["zenflow, device filled"].options["spare_device_bytes"] == 8 * state
    assert filled["zenflow, device filled"].step_s == pytest.approx(24.0)


def test_twinflow_keeps_no_more_than_it_needs() -> None:
    """A host that is never waited for needs no resident parameters."""
    fast = machine(adam_per_core=1e12, link_to_host=1e12, link_to_device=1e12)
    found = {each.label: each for each in auto_policy.compare(scenario(Options(), fast, layers(8)))}
    assert found["twinflow"].options["ratio"] == max(auto_policy.RATIOS)
    assert "ratio" not in found["deep_optimizer_states"].options


def test_device_is_filled_up_to_its_memory() -> None:
    """Each parameter that stays also keeps a pending gradient: filling the memory with state alone would overflow."""
    hardware = replace(named_hardware("h200"), device_bytes=70e9)
    model = named_model("llama2-7b")
    plain = forecast(Options(topk_ratio=0.0), scenario(Options(), hardware, model, tokens=2048))
    found = auto_policy.compare(scenario(Options(topk_ratio=0.0, fill_device=True), hardware, model, tokens=2048))
    (filled,) = (each for each in found if each.label == "zenflow, device filled")
    assert filled.fits
    assert plain.device_bytes + 0.85 * (70e9 - plain.device_bytes) < filled.device_bytes
    assert filled.device_bytes <= plain.device_bytes + 0.9 * (70e9 - plain.device_bytes)


def test_spare_bytes_count_per_device() -> None:
    hardware = machine(devices=2, peer_bandwidth=1e12)
    model = layers(8)
    options = Options(spare_device_bytes=12 * 1_000_000, device_share=0.0)  # the state of a layer; of two, in halves
    placements = [param.placement for param in node_plan(options, scenario(options, hardware, model)).params]
    assert placements == ["device"] * 2 + ["split_columns"] * 6
    node = named_hardware("4xa100-40g-pcie4")
    asked = scenario(Options(fill_device=True), node, named_model("llama2-7b"), tokens=1024)
    (filled,) = (each for each in auto_policy.compare(asked) if each.label == "zenflow, device filled")
    assert filled.options["spare_device_bytes"] < node.device_bytes
    assert filled.fits
    assert filled.needs.device["optimizer state"] > filled.options["spare_device_bytes"]


def test_activations_by_hand() -> None:
    model = llama(blocks=2, width=8, vocabulary=10)
    assert activation_bytes(model, tokens=3, recompute=False) == 3 * (34 * 8 * 2 + 6 * 10)
    assert activation_bytes(model, tokens=3, recompute=True) == 3 * (2 * 8 * 2 + 34 * 8 + 6 * 10)


def test_memory_by_hand() -> None:
    model = layers(2)
    plan = make_plan(model.params, Options(policy="zero_offload"))
    needs = needs_of(plan, model, devices=1, tokens=1, recompute=False)
    million = 1_000_000
    assert needs.device["weights"] == 4 * million
    assert needs.device["gradients"] == 2 * million  # one at a time
    assert needs.device["optimizer state"] == 0
    assert needs.device["rings and buffers"] == (2 + 3) * 2 * million
    assert needs.host == {
        "optimizer state": 24 * million,
        "gradients and uploads": 8 * million,
        "weights": 0,
        "buffers of exchanges": 0,
        "window of files": 0,
    }
    assert needs.device["selection"] == 16 * 2 * 1000
    for staging, buffers in ((3 * million, 1), (9 * million, 2)):  # a remainder takes no buffer; two uploads can exist
        staged = needs_of(plan, model, devices=1, tokens=1, recompute=False, staging_bytes=staging)
        assert staged.device["rings and buffers"] == (2 + buffers) * 2 * million
    files = make_plan(model.params, Options(policy="zero_infinity", nvme_path="scratch"))
    needs = needs_of(files, model, devices=1, tokens=1, recompute=False)
    assert needs.host["window of files"] == needs.disk["optimizer state"] == 24 * million
    plan = make_plan(model.params, Options(policy="resident"))
    resident = needs_of(plan, model, devices=2, tokens=1, recompute=False)
    assert resident.device["optimizer state"] == 12 * million  # half of it on each device
    short = needs.shortages(machine(host_bytes=32 * million - 1, disk_bytes=None))
    assert short == {"host": 1, "disk": 24 * million}


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "twinflow", "zenflow"])
def test_equations_equal_simulation_without_contention(policy: str) -> None:
    """Where nothing is scarce but one thing, a simulated step is as long as the published model has it."""
    model = layers(40)
    hardware = machine(link_to_device=1e9, link_to_host=1e9, adam_per_core=2e6, cores=3)
    options = Options(policy=policy, ratio=0.5 if policy == "twinflow" else 1.0, max_grad_norm=1.0)
    predicted = forecast(options, scenario(options, hardware, model, tokens=1))
    flops = 6.0 * model.numel
    settings = StepSettings.of(options, make_plan(model.params, options), final_at_step=True)
    said = performance_model.step_time(settings, hardware, flops=flops)
    assert predicted.step_s == pytest.approx(said.seconds, rel=0.03)
