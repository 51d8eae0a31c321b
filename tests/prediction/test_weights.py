"""Predictions with ``offload_weights``: bytes against formulas of the design, times against what a link allows."""

from __future__ import annotations

import io
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import zenflow_compile as zf
from tests.support.machines import layers, llama, machine
from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import Hardware, hardware
from zenflow_compile.performance.model_shape import ModelShape
from zenflow_compile.performance.models import model as named_model
from zenflow_compile.performance.traffic import traffic_of
from zenflow_compile.planning.dtypes import BFLOAT16
from zenflow_compile.planning.model_blocks import block_ranges
from zenflow_compile.planning.planners import ParamSpec
from zenflow_compile.prediction.forecast import explain, forecast, node_plan, resolve_stride
from zenflow_compile.prediction.predict import scenario_of
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.report import print_report
from zenflow_compile.profiling.summary import summarize

WIDTH, BLOCKS, WORDS = 512, 4, 4000
MATRICES = {"q": WIDTH**2, "k": WIDTH**2 // 4, "v": WIDTH**2 // 4, "o": WIDTH**2} | dict.fromkeys(
    ("up", "gate", "down"), 3 * WIDTH**2
)
BLOCK = 2 * sum(MATRICES.values())  # bytes in bf16
END = 2 * WORDS * WIDTH  # of embedding and head
ALL = BLOCKS * BLOCK + 2 * END
NORMS = 2 * WIDTH * (2 * BLOCKS + 1)
RING = 2 * BLOCK
ROOMY = {"device_flops": 1e13, "device_bandwidth": 1e12}
FAST = {"link_to_device": 1e10, "link_to_host": 1e10, "adam_per_core": 1e10}


def predicted(model: ModelShape | None = None, hardware: Hardware | None = None, **given: Any) -> dict[str, Any]:
    """The forecast of one policy."""
    chosen = {"policy": "zenflow", "device_share": 0.0, "tokens": 64} | given
    (found,) = zf.plan(model or llama(), hardware or machine(**ROOMY, **FAST), **chosen)["policies"]
    return dict(found)


def deferred(rows: int, columns: int, ratio: float) -> int:
    """Bytes of the deferred slices of a bf16 matrix: slices are along the longer side."""
    slices, length = max(rows, columns), min(rows, columns)
    return 2 * length * (slices - round(ratio * slices))


def deferred_bytes(ratio: float) -> int:
    """Of all matrices of the model."""
    sides = [(WIDTH, WIDTH)] * 2 + [(WIDTH // 4, WIDTH)] * 2 + [(3 * WIDTH, WIDTH)] * 3
    block = sum(deferred(rows, columns, ratio) for rows, columns in sides)
    return BLOCKS * block + 2 * deferred(WORDS, WIDTH, ratio)


# Bytes.


@pytest.mark.parametrize("micro_batches", [None, 1, 3])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.37])
def test_deferred_slices_cross_twice(ratio: float, micro_batches: int | None) -> None:
    """2 G (1 - k) W per step, and nothing for updates of the host: the next load reads them."""
    found = predicted(topk_ratio=ratio, offload_weights=1.0, gradient_accumulation_steps=micro_batches)
    weights, times = found["weights"], micro_batches or 1
    assert weights["micro_batches"] == times
    assert weights["micro_batch_bytes"] == 2 * deferred_bytes(ratio)
    assert weights["to_device"] == 2 * times * deferred_bytes(ratio)
    assert weights["to_host"] == 0
    assert found["traffic"] * (ALL + NORMS) == pytest.approx(deferred_bytes(ratio))  # gradients alone
    assert found["loads"] * (ALL + NORMS) == pytest.approx(weights["to_device"])


def test_whole_weights_cross_under_zero_offload() -> None:
    found = predicted(policy="zero_offload", offload_weights=1.0)
    assert found["weights"]["to_device"] == 2 * ALL
    assert found["traffic"] * (ALL + NORMS) == pytest.approx(ALL)


def test_resident_weights_are_loaded_for_their_update() -> None:
    """Two times in forward and backward, and once more in ``step()``, from which they come back."""
    found = predicted(policy="resident", offload_weights=1.0, gradient_accumulation_steps=2)
    assert found["weights"]["micro_batch_bytes"] == 2 * ALL
    assert found["weights"]["to_device"] == (2 * 2 + 1) * ALL
    assert found["weights"]["to_host"] == ALL
    assert found["traffic"] == 0
    assert found["needs"]["host"] == dict.fromkeys(found["needs"]["host"], 0) | {"weights": ALL}


def test_resident_parameters_of_zenflow_come_back() -> None:
    """A quarter of the elements has its state on the device: one block and both ends, which a small model keeps."""
    found = predicted(topk_ratio=0.0, device_share=1.0, offload_weights=1.0)
    kept = BLOCK + 2 * END
    assert found["weights"]["to_host"] == kept
    assert found["weights"]["to_device"] == 2 * ALL + kept
    assert found["needs"]["host"]["weights"] == kept


@pytest.mark.parametrize("recompute", [False, True])
def test_ring_smaller_than_what_does_not_repeat(recompute: bool) -> None:
    """Matrices before the layers are loaded once more for their recomputation, as a block that does not fit."""
    matrix = 2 * 1000 * 1000
    stem = [ParamSpec(f"stem.{index}", (1000 + index, 1000), BFLOAT16) for index in range(6)]
    model = layers(4)
    model = replace(model, params=(*stem, *model.params))
    found = predicted(model, topk_ratio=0.0, offload_weights=3 * matrix + 100_000, recompute=recompute)
    stem_bytes = sum(2 * spec.numel for spec in stem)
    assert found["weights"]["ring_bytes"] < stem_bytes
    assert found["weights"]["to_device"] == 2 * found["weights"]["offloaded_bytes"] + (stem_bytes if recompute else 0)


@pytest.mark.parametrize("name", ["flux.1-dev", "sd3.5-large"])
def test_two_kinds_of_layers_load_by_layer(name: str) -> None:
    """The ring is two layers, and not two of all layers that are not the most."""
    model = named_model(name)
    found = predicted(model, hardware("rtx-4090"), offload_weights=1.0, recompute=True, tokens=model.context)
    blocks = block_ranges([spec.shape for spec in model.params])
    largest = max(sum(2 * model.params[index].numel for index in block) for block in blocks)
    assert found["weights"]["ring_bytes"] <= 2 * largest < 2 * model.numel / 10
    assert found["weights"]["to_device"] >= 2 * found["weights"]["offloaded_bytes"]


def test_kept_weights_are_uploaded_as_before() -> None:
    """The ring, and space for the first block and the embedding."""
    found = predicted(policy="zero_offload", offload_weights=RING + BLOCK + END)
    offloaded = ALL - BLOCK - END
    assert found["weights"]["offloaded_bytes"] == offloaded
    assert found["weights"]["ring_bytes"] == RING
    assert found["weights"]["offloaded"] == (BLOCKS - 1) * 7 + 1
    assert found["weights"]["kept"] == 7 + 1 + 2 * BLOCKS + 1
    assert found["weights"]["to_device"] == 2 * offloaded
    assert found["traffic"] * (ALL + NORMS) == pytest.approx(ALL + BLOCK + END)


def test_recomputed_block_crosses_again_if_too_large() -> None:
    """The ring of two weights has no space for a block, which is loaded for its forward, that again, and its backward.

    A matrix is the largest weight, for there are few words.
    """
    few = llama(vocabulary=500)
    ends = 2 * 2 * 500 * WIDTH
    small = 2 * 2 * 3 * WIDTH**2
    assert small < BLOCK
    whole = predicted(few, policy="zero_offload", offload_weights=small, recompute=False)["weights"]
    again = predicted(few, policy="zero_offload", offload_weights=small, recompute=True)["weights"]
    roomy = predicted(few, policy="zero_offload", offload_weights=RING, recompute=True)["weights"]
    assert whole["to_device"] == roomy["to_device"] == 2 * (BLOCKS * BLOCK + ends)
    assert again["to_device"] == 3 * BLOCKS * BLOCK + 2 * ends


# Memory.


def test_memory_of_offloaded_weights_by_hand() -> None:
    """Weights leave the device, and a ring and staging buffers that fit each load are there."""
    without, found = (predicted(policy="zero_offload", offload_weights=each)["needs"] for each in (False, 1.0))
    assert without["device"]["weights"] == ALL + NORMS
    assert without["device"]["loaded weights"] == 0
    assert found["device"]["weights"] == NORMS
    assert found["device"]["loaded weights"] == END  # the largest weight, less than two blocks
    assert found["device"]["rings and buffers"] == without["device"]["rings and buffers"] == (2 + 3) * END
    gradients = without["host"][
        "gradients and uploads"
    ]  # new weights take their place, and else stay in upload buffers
    assert found["host"] == {**without["host"], "gradients and uploads": 2 * gradients}
    staged = predicted(policy="resident", offload_weights=1.0)["needs"]["device"]["rings and buffers"]
    assert staged == 3 * END


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "zenflow"])
def test_device_memory_is_monotone_in_the_budget(policy: str) -> None:
    """All of it but the staging buffers of ``resident``: large weights that are kept need none."""
    budgets = range(END, ALL + 3_000_000, 3_000_000)
    undivided = {"policy": policy, "recompute": False, "gradient_accumulation_steps": 1}
    needs = [predicted(**undivided, offload_weights=each)["needs"]["device"] for each in budgets]
    if policy == "resident":
        needs = [each | {"rings and buffers": 0} for each in needs]
    needed = [sum(each.values()) for each in needs]
    assert all(before <= after for before, after in itertools.pairwise(needed))
    assert needed[0] < needed[-1]


def test_weights_in_files_are_refused() -> None:
    with pytest.raises(ValueError, match=r'offload_device="nvme_all" cannot be predicted in this version'):
        predicted(policy="zero_infinity", nvme_path="x", offload_weights=1.0, offload_device="nvme_all")


def test_weights_that_fit_cross_no_more() -> None:
    found = predicted(offload_weights=ALL)
    assert (found["weights"]["offloaded"], found["weights"]["ring_bytes"], found["loads"]) == (0, 0, 0)
    without = predicted()
    for each in (found, without):
        each |= {"weights": None, "options": None, "needs": each["needs"]["device"]}  # uploads have their own buffers
    assert found == without


def test_micro_batches_accumulate_whole_gradients() -> None:
    one, four = (predicted(gradient_accumulation_steps=each)["needs"]["device"] for each in (None, 4))
    assert four["gradients"] == ALL + NORMS + END
    assert four["activations"] == one["activations"] // 4
    assert four["gradients"] > one["gradients"]


# Times. Layers of 2 MB; a forward of 1 s, a backward of 2 s.


def timeline(count: int = 6, **given: Any) -> Recording:
    hardware = machine(**{"adam_per_core": 1e9, "link_to_host": 1e9} | given.pop("rates", {}))
    chosen: dict[str, Any] = {"policy": "zenflow", "device_share": 0.0, "topk_ratio": 0.0, "steps": 4}
    return zf.simulate(layers(count), hardware, **{"tokens": 1} | chosen | given)


def seconds(recording: Recording, name: str) -> float:
    value = summarize(recording)[name]  # type: ignore[literal-required]
    assert isinstance(value, float)
    return value / 1e3


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_link_with_time_never_stalls(micro_batches: int) -> None:
    """The first block is kept, and resident. A block crosses in 1/16 s; a micro-batch computes on it for 1/12 s."""
    model = llama(vocabulary=500)
    compute = 6 * 2 * 64 * sum(MATRICES.values())
    found = predicted(
        model,
        machine(device_flops=2 * compute, link_to_device=16 * BLOCK, link_to_host=1e12, adam_per_core=1e12),
        offload_weights=3 * BLOCK + 2 * 2 * 500 * WIDTH,
        device_share=0.5,
        implicit=True,
        update_interval=1,
        gradient_accumulation_steps=micro_batches,
    )
    assert found["weights"]["offloaded"] == (BLOCKS - 1) * 7
    assert found["stall_s"] == pytest.approx(0.0, abs=1e-3 * found["step_s"])


@pytest.mark.parametrize("policy", ["zenflow", "zero_offload", "resident"])
@pytest.mark.parametrize("rate", [1e6, 5e5, 2.5e5])
def test_stall_grows_to_what_the_link_allows(rate: float, policy: str) -> None:
    """12 loads of 2 MB, 18 under ``resident``. The link pauses at most while the last layer's gradient comes."""
    recording = timeline(policy=policy, offload_weights=1.0, rates={"link_to_device": rate})
    bound = (18 if policy == "resident" else 12) * 2e6 / rate
    step, stall = seconds(recording, "step_ms"), seconds(recording, "stall_ms_per_step")
    assert bound <= step * (1 + 1e-9)
    assert step <= bound + 2.0 + 0.1
    assert stall == pytest.approx(step - 18, abs=0.1)


def test_loads_keep_the_order_of_use() -> None:
    recording = timeline(3, policy="zero_offload", offload_weights=1.0, gradient_accumulation_steps=2, tokens=2)
    steps = sorted({event.step for event in recording.events})[1:-1]
    names = ["layer0", "layer1", "layer2"]
    for step in steps:
        loads = [event for event in recording.events if event.kind == "load" and event.step == step]
        assert [event.param for event in loads] == (names + names[::-1]) * 2
        assert {event.lane for event in loads} == {"H2D"}


def test_layer_waits_for_its_load() -> None:
    """The ring has two places: a weight is not there before its copy ends, nor loaded when both are taken."""
    recording = timeline(offload_weights=1.0, rates={"link_to_device": 1e6})
    named = [e for e in recording.events if (e.lane == "H2D") or e.kind in ("forward", "backward")]
    ends = sorted(e.end_ns for e in named if e.lane == "H2D")
    begins = sorted((e.start_ns, e.end_ns) for e in named if e.lane == "compute")
    assert len(begins) == len(ends) == 4 * 12
    for (begin, _), arrived in zip(begins, ends, strict=True):
        assert arrived <= begin
    starts = sorted(e.start_ns for e in named if e.lane == "H2D")
    held = 2 + 3  # places in the ring, and staging buffers
    for number in range(held, len(starts)):
        assert starts[number] >= begins[number - held][1]


def test_update_is_in_the_next_load() -> None:
    """A load of the next step begins when the host has updated the weight."""
    recording = timeline(3, policy="zero_offload", offload_weights=1.0, rates={"adam_per_core": 1e5})
    updated = {(e.step, e.param): e.end_ns for e in recording.events if e.kind == "host_update"}
    assert not [e for e in recording.events if e.lane == "H2D" and e.kind == "copy"]
    steps = sorted({step for step, _ in updated})
    for step in steps[1:]:
        first: dict[str, int] = {}
        for event in recording.events:
            if event.kind == "load" and event.step == step:
                first.setdefault(event.param, event.start_ns)
        for name, begin in first.items():
            assert begin >= updated[step - 1, name]


def test_uploads_of_kept_weights_do_not_block() -> None:
    """Kept weights in the middle take staging buffers, too. Nothing waits forever."""
    for budget, interval in itertools.product((END + RING, RING + 2 * BLOCK), (1, 2)):
        found = predicted(
            hardware=machine(**ROOMY, link_to_device=1e8, link_to_host=1e8, adam_per_core=1e7),
            offload_weights=budget,
            update_interval=interval,
            update_stride=3,
        )
        assert math.isfinite(found["step_s"])


@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize("given", [{}, {"policy": "zero_offload"}, {"policy": "resident"}], ids=str)
@pytest.mark.parametrize("link", [1e7, 1e8, 1e9])
def test_step_is_at_least_the_explained_one(link: float, given: dict[str, Any], implicit: bool) -> None:
    model = llama()
    hardware = machine(device_flops=1e11, device_bandwidth=1e11, link_to_device=link, link_to_host=1e9)
    options = Options(**{"offload_weights": 1.0, "device_share": 0.0} | given)
    asked = scenario_of(
        model,
        hardware,
        tokens=64,
        implicit=implicit,
        offload_weights=1.0,
        device_share=0.0,
        policy=given.get("policy", "zenflow"),
    )
    found = forecast(options, asked)
    bound = float(explain(found, asked)["explained"][-1].split(" = ")[-1].split(" ")[0])
    assert (1 - 1e-3) * bound <= found.step_s <= 2 * bound


@pytest.mark.parametrize("seed", range(12))
def test_any_options_move_the_plans_bytes(seed: int) -> None:
    """No combination of queues, rings and late updates waits forever, or loads more or less than the plan."""
    rng = random.Random(seed)
    policy = rng.choice(["zenflow", "zero_offload", "twinflow", "resident", "zero_infinity"])
    given: dict[str, Any] = {
        "policy": policy,
        "offload_weights": rng.choice([1.0, 0.7, 0.3, 2 * END, RING + END]),
        "gradient_accumulation_steps": rng.choice([None, 2, 3]),
        "max_grad_norm": rng.choice([None, 1.0]),
    }
    if policy == "twinflow":
        given["ratio"] = rng.random()
    if policy == "zenflow":
        given |= {"topk_ratio": rng.random() / 2, "device_share": rng.random(), "update_interval": rng.randint(1, 4)}
        given |= {"staleness": rng.randint(0, 1), "overlap_step": rng.random() < 0.7}
        given |= rng.choice([{}, {"update_stride": 3}, {"gradient_transfer": "int8"}])
    rates = {name: 10 ** rng.uniform(6, 10) for name in ("link_to_device", "link_to_host", "adam_per_core")}
    hardware = machine(device_flops=1e10, device_bandwidth=1e10, host_bandwidth=1e10, **rates)
    scenario = {"implicit": rng.random() < 0.5, "recompute": rng.random() < 0.5}
    asked = scenario_of(llama(), hardware, tokens=64, **scenario, **given)
    options = resolve_stride(asked.options, hardware, asked.model.params)
    moved = traffic_of(node_plan(options, asked))
    found = forecast(options, asked)
    assert moved is not None
    assert found.weights is not None
    assert found.weights.to_device == pytest.approx(moved.loads)
    assert found.weights.to_host == pytest.approx(moved.rewritten)
    assert found.traffic * (ALL + NORMS) == pytest.approx(moved.to_host + moved.to_device)


def test_report_counts_loaded_weights() -> None:
    recording = timeline(policy="resident", offload_weights=1.0, rates={"link_to_device": 1e6})
    summary = summarize(recording)
    assert summary["weight_bytes_per_step"] == (18 + 6) * 2e6
    assert summary["traffic_model_sizes_per_step"] == 0.0
    output = io.StringIO()
    print_report([recording], Console(width=100, file=output))
    assert "of it weights" in output.getvalue()
    assert "Loads of weights limit this run" in output.getvalue()


# Refused.


@pytest.mark.parametrize("given", [{"devices": 2}, {"nodes": 2}], ids=str)
def test_several_ranks_are_refused_alike(given: dict[str, int]) -> None:

    nodes = given.get("nodes", 1)
    hardware = machine(devices=3 - nodes, cores=8, peer_bandwidth=1e9, network_bandwidth=1e9)
    with pytest.raises(ValueError, match="with several ranks") as planned:
        zf.plan(llama(), hardware, tokens=1, offload_weights=0.5, **given)
    with pytest.raises(ValueError, match="with several ranks") as trained:
        Options(offload_weights=0.5).check_weights_of_ranks(several=True)
    assert str(planned.value).startswith(str(trained.value))


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"must be at least {END}, the size of embed.weight"):
        predicted(offload_weights=END - 1)
    assert predicted(offload_weights=END)["weights"]["ring_bytes"] == END


def test_policies_that_keep_weights_are_left_out() -> None:
    found = zf.plan(llama(), machine(**ROOMY), tokens=64, offload_weights=1.0)
    policies = {each["policy"] for each in found["policies"]}
    assert "deep_optimizer_states" not in policies
    assert {"resident", "zero_offload", "twinflow", "zenflow", "zero_infinity"} == policies
    with pytest.raises(ValueError, match="choose another policy"):
        zf.plan(llama(), machine(), tokens=64, policy="deep_optimizer_states", offload_weights=1.0)


def test_micro_batches_need_tokens() -> None:
    with pytest.raises(ValueError, match=r"tokens=3 must be .* gradient_accumulation_steps=4 backwards"):
        predicted(tokens=3, gradient_accumulation_steps=4)
