"""Planners: placements, selection sizes and phases, from shapes alone."""

from __future__ import annotations

import pytest
import torch

from zenflow_compile.options import Options
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.planning.policies import ParamSpec, extend_plan, make_plan, repeated_blocks

D = 64
GPT_BLOCK = [(D,), (D,), (3 * D, D), (D, D), (D,), (D,), (4 * D, D), (D, 4 * D)]
LLAMA_BLOCK = [(D, D), (32, D), (32, D), (D, D), (172, D), (172, D), (D, 172), (D,), (D,)]


def specs(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[ParamSpec]:
    return [ParamSpec(f"p{index}", shape, dtype) for index, shape in enumerate(shapes)]


def gpt(layers: int) -> list[tuple[int, ...]]:
    return [(256, D), (128, D), *GPT_BLOCK * layers, (D,), (D,), (256, D)]


@pytest.mark.parametrize("layers", [2, 3, 12])
@pytest.mark.parametrize(
    ("prefix", "block", "suffix"),
    [([(256, D), (128, D)], GPT_BLOCK, [(D,), (D,), (256, D)]), ([(500, D)], LLAMA_BLOCK, [(D,), (500, D)])],
    ids=["gpt", "llama"],
)
def test_repeated_blocks_are_found(prefix, block, suffix, layers):
    shapes = [*prefix, *block * layers, *suffix]
    start, period, stop = repeated_blocks(shapes)
    assert (start, period, stop) == (len(prefix), len(block), len(prefix) + layers * len(block))


def test_nothing_repeats():
    assert repeated_blocks([(2, 3), (3, 4), (4, 5), (5, 6)]) is None
    assert repeated_blocks([]) is None


def test_resident_keeps_everything_on_the_device():
    plan = make_plan(specs(gpt(2)), Options(policy="resident"))
    assert {param.placement for param in plan.params} == {Placement.DEVICE}
    assert plan.host_bytes == 0


def test_zero_offload_puts_every_large_matrix_on_the_host_whole():
    plan = make_plan(specs(gpt(2)), Options(policy="zero_offload"))
    for param in plan.params:
        assert param.offloaded == (len(param.shape) >= 2)
        if param.offloaded:
            assert (param.placement, param.k, param.interval, param.blocking) == (Placement.HOST, 0, 1, True)


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (0.0, set()),
        (0.10, {"block"}),
        (1.0, {"block", "embeddings", "head"}),
    ],
)
def test_what_has_no_slack_stays_on_the_device_up_to_its_share(share, kept):
    shapes = gpt(12)
    plan = make_plan(specs(shapes), Options(device_share=share))
    parts = {"embeddings": range(2), "block": range(2, 2 + len(GPT_BLOCK)), "head": range(len(shapes) - 1, len(shapes))}
    for name, indices in parts.items():
        for index in indices:
            if len(shapes[index]) == 2:
                assert plan.params[index].offloaded == (name not in kept), (name, index)
    assert all(param.offloaded for param in plan.params[2 + len(GPT_BLOCK) : -3] if len(param.shape) == 2)


@pytest.mark.parametrize(
    ("ratio", "lines", "k"), [(0.1, 100, 10), (0.1, 64, 6), (0.001, 64, 1), (0.0, 64, 0), (1.0, 64, 64), (0.5, 65, 32)]
)
def test_selection_size(ratio, lines, k):
    plan = make_plan(specs([(64, lines) if lines > 64 else (lines, 64)]), Options(topk_ratio=ratio, min_offload_size=1))
    assert plan.params[0].k == k
    assert plan.params[0].k + plan.params[0].rest == lines


@pytest.mark.parametrize(("shape", "dim"), [((64, 128), 1), ((128, 64), 0), ((64, 64), 1), ((8, 4, 3, 3), 1)])
def test_lines_run_along_the_longer_side(shape, dim):
    param = make_plan(specs([shape]), Options(min_offload_size=1)).params[0]
    sides = (shape[0], param.numel // shape[0])
    assert param.dim == dim
    assert (param.lines, param.length) == (max(sides), min(sides))


def closing_elements(params: tuple[ParamPlan, ...], interval: int) -> list[int]:
    load = [0] * interval
    for param in params:
        if param.offloaded:
            load[param.phase] += param.rest * param.length
    return load


@pytest.mark.parametrize("layers", [2, 5, 12])
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_phases_are_level(layers, interval):
    plan = make_plan(specs(gpt(layers)), Options(update_interval=interval, device_share=0.0))
    load = closing_elements(plan.params, interval)
    largest = max(param.rest * param.length for param in plan.params if param.offloaded)
    assert max(load) - min(load) <= largest
    assert min(load) > 0


def test_added_parameters_leave_the_others_alone_and_fill_the_emptiest_phases():
    options = Options(device_share=0.0)
    plan = make_plan(specs(gpt(2)), options)
    longer = extend_plan(plan, specs([(512, 64)] * 7), options)
    assert longer.params[: len(plan.params)] == plan.params
    assert [param.index for param in longer.params] == list(range(len(longer.params)))
    load = closing_elements(longer.params, 4)
    assert max(load) - min(load) <= max(param.rest * param.length for param in longer.params if param.offloaded)


@pytest.mark.parametrize("spec", [
    ParamSpec("vector", (100_000,), torch.float32),
    ParamSpec("small", (8, 8), torch.float32),
    ParamSpec("double", (128, 128), torch.float64),
    ParamSpec("frozen or not contiguous", (128, 128), torch.float32, splittable=False),
])  # fmt: skip
def test_what_cannot_or_should_not_be_split_stays_on_the_device(spec):
    for policy in ("zenflow", "zero_offload"):
        assert not make_plan([spec], Options(policy=policy)).params[0].offloaded


def test_unknown_policy():
    class Chosen:
        policy = "zenflo"

    with pytest.raises(ValueError, match="policy='zenflo' must be one of"):
        make_plan([], Chosen())


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_bytes(dtype, size):
    plan = make_plan(specs([(128, 1000)], dtype), Options(topk_ratio=0.1, update_interval=4))
    param = plan.params[0]
    assert (param.k, param.rest) == (100, 900)
    assert plan.host_bytes == 900 * 128 * (12 + (4 + 1) * size)
    assert plan.device_bytes == 100 * 128 * 12
    resident = make_plan(specs([(128, 1000)], dtype), Options(policy="resident")).params[0]
    assert resident.device_bytes == 128_000 * (8 if dtype == torch.float32 else 12)


def test_staleness_needs_one_more_slot_and_upload():
    fresh, stale = (make_plan(specs([(128, 1000)]), Options(staleness=staleness)).params[0] for staleness in (0, 1))
    assert (stale.slots, stale.uploads) == (fresh.slots + 1, fresh.uploads + 1)
