"""A workload has each piece of a model's work exactly once; a coarse one keeps the totals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import llama, machine
from zenflow_compile.options.options import Options
from zenflow_compile.performance import models
from zenflow_compile.performance.hardware import hardware
from zenflow_compile.performance.model_shape import ModelShape, flops_per_token, shape_of
from zenflow_compile.performance.traffic import Sharing, rank_traffic
from zenflow_compile.planning.dtypes import BFLOAT16
from zenflow_compile.planning.plan import Plan, device_update_bytes
from zenflow_compile.planning.planners import ParamSpec, divide, make_plan
from zenflow_compile.prediction.simulate import SteadyStep, simulate, steady_step, steady_step_of
from zenflow_compile.prediction.workload import workload_of

Shapes = list[tuple[int, ...]]

DIVIDING: list[dict[str, Any]] = [
    {"policy": "resident"},
    {"policy": "zero_offload"},
    {"policy": "deep_optimizer_states", "update_stride": 2},
    {"topk_ratio": 0.1},
    {"topk_ratio": 0.1, "device_share": 0.0},
]


def shaped(*shapes: tuple[int, ...]) -> ModelShape:
    return shape_of([ParamSpec(f"p{index}", shape, BFLOAT16) for index, shape in enumerate(shapes)])


def resident(model: ModelShape) -> Plan:
    return make_plan(model.params, Options(policy="resident"))


def computed(model: ModelShape, flops: float, tokens: int, *, recompute: bool = False) -> float:
    """Return the seconds of forward and backward of a resident step, whose device reaches half of ``flops``."""
    recording = simulate(
        resident(model), machine(device_flops=flops), model, tokens=tokens, steps=1, recompute=recompute
    )
    return sum(event.duration_ns for event in recording.events if event.kind in ("forward", "backward")) / 1e9


ENCODER: Shapes = [(768, 256), (256, 256), (256,), (1024, 256), (256, 1024), (256,)]
SHAPES: dict[str, ModelShape] = {
    "mlp": shaped(*[(1024, 1024), (1024,)] * 8),
    "mlp without biases": shaped(*[(1024, 1024)] * 8),
    "no repetition": shaped((512, 64), (512,), (64, 512), (10, 64)),
    "encoder": shaped(*ENCODER * 6),
    "stem and encoder": shaped((256, 3, 16, 16), (256,), *ENCODER * 6),
    "stem, encoder and classifier": shaped((256, 3, 16, 16), (256,), *ENCODER * 6, (1000, 256), (1000,)),
    "nothing looked up": llama(),
    **{name: models.model(name) for name in models.MODELS},
    "of a size": models.of_size(10**9),
}


@pytest.mark.parametrize("name", SHAPES)
def test_step_flops_follow_its_tokens(name: str) -> None:
    model = SHAPES[name]
    expected = flops_per_token(model) * 10_000 / 5e12
    assert computed(model, 1e13, 10_000) == pytest.approx(expected, rel=1e-5)
    assert computed(model, 1e13, 10_000, recompute=True) == pytest.approx(expected * 4 / 3, rel=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_computes_its_head_and_no_lookup(tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 5000}
    path.write_text(json.dumps({"model_type": "gpt2", "tie_word_embeddings": tied, **sizes}))
    work = 6 * (4 * 12 * 256 * 256 + 5000 * 256) + 12 * 4 * 256 * 128
    assert computed(models.from_config(path), 1e13, 100) == pytest.approx(work * 100 / 5e12, rel=1e-5)


def test_mlp_has_six_flops_per_weight_and_no_head() -> None:
    model = SHAPES["mlp"]
    assert computed(model, 2e12, 1000) == pytest.approx(6 * 8 * 1024 * 1024 * 1000 / 1e12, rel=1e-5)
    recording = simulate(resident(model), machine(device_flops=2e12), model, tokens=1000, steps=1)
    assert "" not in {event.param for event in recording.events if event.kind == "forward"}


# Coarse workloads.


MANY_LAYERS = "qwen2.5-32b"
"""So many that a coarse cycle has 24 steps of 60."""


def both(plan: Plan, model: ModelShape, name: str) -> tuple[SteadyStep, SteadyStep]:
    """A step of the coarse workload, and of the whole."""
    node = hardware(name)
    coarse, whole = (
        workload_of(plan, node, model, tokens=2048, recompute=False, coarse=coarse) for coarse in (True, False)
    )
    assert (coarse.cycle, len(coarse.blocks)) != (whole.cycle, len(whole.blocks))
    return steady_step_of(coarse, node), steady_step_of(whole, node)


@pytest.mark.parametrize("name", ["h200", "4xa100-40g-pcie4"])
@pytest.mark.parametrize(
    "options",
    [{}, {"device_share": 0.0, "max_grad_norm": 1.0}, {"offload_device": "nvme", "nvme_path": "scratch"}],
    ids=["memory", "nothing kept", "files"],
)
def test_some_steps_represent_a_long_cycle(name: str, options: dict[str, object]) -> None:
    model = models.model(MANY_LAYERS)
    plan = make_plan(model.params, Options.from_keywords(update_interval=60, **options))
    coarse, whole = both(plan, model, name)
    assert coarse.seconds == pytest.approx(whole.seconds, rel=0.02)
    largest = max(param.deferred * param.length for param in plan.params)
    share = largest / sum(param.deferred * param.length for param in plan.params)
    assert coarse.host_update == pytest.approx(whole.host_update, rel=2 * share)
    assert coarse.to_host + coarse.to_device == pytest.approx(whole.to_host + whole.to_device, rel=0.01)
    assert coarse.disk == pytest.approx(whole.disk, rel=0.02)


def test_some_steps_represent_few_files_in_turn() -> None:
    model = models.model(MANY_LAYERS)
    options = Options(update_interval=60, offload_device="nvme", nvme_path="scratch", host_window_bytes=290 * 10**9)
    plan = make_plan(model.params, options)
    coarse, whole = both(plan, model, "h200")
    assert coarse.seconds == pytest.approx(whole.seconds, rel=0.02)
    largest = max(param.file_bytes for param in plan.params_in_turn)
    assert coarse.disk == pytest.approx(whole.disk, rel=2 * largest / plan.bytes_in_turn)


@pytest.mark.parametrize(
    "options",
    [{"policy": "zero_offload"}, {"policy": "zenflow"}, {"policy": "zero_infinity", "nvme_path": "scratch"}],
    ids=lambda options: options["policy"],
)
def test_layers_of_a_deep_model_are_grouped(options: dict[str, str]) -> None:
    block: Shapes = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096), (1024,)]
    model = shaped((32000, 1024), *block * 300, (32000, 1024))
    plan = make_plan(model.params, Options.from_keywords(**options))
    coarse, whole = both(plan, model, "h200")
    assert coarse.seconds == pytest.approx(whole.seconds, rel=0.03)
    assert coarse.to_host == pytest.approx(whole.to_host, rel=1e-6)
    assert coarse.to_device == pytest.approx(whole.to_device, rel=1e-6)
    assert coarse.disk == pytest.approx(whole.disk, rel=0.01)


def test_small_workloads_are_not_coarse() -> None:
    model = llama()
    plan = make_plan(model.params, Options(update_interval=16, device_share=0.0))
    recording = simulate(plan, machine(), model, tokens=1, steps=16)
    steps = [event.duration_ns for event in recording.events if event.lane == "step"]
    assert steady_step(plan, machine(), model, tokens=1).seconds == pytest.approx(sum(steps) / 16 / 1e9, rel=1e-6)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("options", DIVIDING, ids=str)
def test_devices_send_what_ranks_do(options: dict[str, Any], nodes: int) -> None:
    """Within a node and beyond it, as the shares of ranks: what one device receives in a gather counts as sent."""
    model = llama(vocabulary=4096)
    plan = make_plan(model.params, Options(min_offload_size=10_000, **options))
    four = machine(devices=4, cores=12, peer_bandwidth=1e9, network_bandwidth=1e9).across(nodes)
    found = workload_of(plan, four, model, tokens=1, recompute=False)
    ranks = rank_traffic(plan, 4, Sharing.CHANGED_SLICES, nodes=nodes)
    flushes = [flush for block in found.blocks for part in block.parts for flush in part.flushes if flush is not None]
    sent = sum(block.gradient + block.gathered for block in found.blocks)
    sent += 3 * sum(flush.upload for flush in flushes) / found.cycle
    if nodes == 1:
        assert sent == pytest.approx(ranks.sent, rel=0.01)
    assert 4 * sum(block.across for block in found.blocks) == pytest.approx(ranks.leaving, rel=0.01)


@pytest.mark.parametrize("options", DIVIDING, ids=str)
def test_device_updates_what_a_rank_does(options: dict[str, Any]) -> None:
    model = llama()
    plan = make_plan(model.params, Options(min_offload_size=10_000, **options))
    four = machine(devices=4, cores=12, peer_bandwidth=1e9, device_bandwidth=1e9)
    found = workload_of(plan, four, model, tokens=1, recompute=False)
    share = divide(replace(plan, rank=0, ranks=4))
    own = sum(param.k * param.length if param.offloaded else param.numel for param in share.params)
    seconds = found.update + sum(group.update for group in found.subgroups)
    assert seconds == pytest.approx(own * device_update_bytes(12) / 1e9, rel=0.02)  # ranks select whole slices each
