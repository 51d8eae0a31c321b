"""Every policy assigns placements; the zenflow policy also assigns phases and selections."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from zenflow_compile.options.options import Options
from zenflow_compile.planning.model_blocks import block_ranges, parts_without_slack, repeated_blocks
from zenflow_compile.planning.plan import Placement, Plan
from zenflow_compile.planning.planners import ParamSpec, ShardedBy, extend_plan, make_plan

Shapes = list[tuple[int, ...]]


def specs(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[ParamSpec]:
    return [ParamSpec(f"p{index}", shape, dtype) for index, shape in enumerate(shapes)]


def plan_of(shapes: Shapes, **options: Any) -> Plan:
    return make_plan(specs(shapes), Options(**options))


def gpt(layers: int, width: int = 64, vocabulary: int = 300) -> Shapes:
    block: Shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (128, width), *block * layers, (width,), (width,), (vocabulary, width)]


def llama(layers: int, width: int = 64, vocabulary: int = 300) -> Shapes:
    block: Shapes = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    block += [(3 * width, width), (3 * width, width), (width, 3 * width), (width,), (width,)]
    return [(vocabulary, width), *block * layers, (width,), (vocabulary, width)]


# Repeated blocks.


@pytest.mark.parametrize("layers", [2, 3, 12])
def test_blocks_of_a_gpt(layers: int) -> None:
    assert repeated_blocks(gpt(layers)) == (2, 12, 2 + 12 * layers)


@pytest.mark.parametrize("layers", [2, 3, 12])
def test_blocks_of_a_llama(layers: int) -> None:
    assert repeated_blocks(llama(layers)) == (1, 9, 1 + 9 * layers)


@pytest.mark.parametrize("layers", [2, 5])
def test_blocks_of_an_mlp(layers: int) -> None:
    """Where a block could begin at several places, the earliest is taken: here with the bias before it."""
    shapes: Shapes = [(64, 16), (64,), *[(64, 64), (64,)] * layers, (10, 64), (10,)]
    assert repeated_blocks(shapes) == (1, 2, 1 + 2 * layers)


@pytest.mark.parametrize("shapes", [[], [(4, 4)], [(4, 4), (4, 4)], [(4, 4), (4,), (5, 5), (5,)]])
def test_no_blocks(shapes: Shapes) -> None:
    assert repeated_blocks(shapes) is None


def test_random_shapes_find_a_repetition() -> None:
    """The result is a repetition, at least as long as the one inserted into random shapes."""
    rng = random.Random(0)
    for _ in range(100):
        sizes = [(rng.randint(1, 3), rng.randint(1, 3)) for _ in range(rng.randint(2, 6))]
        layers = rng.randint(2, 5)
        before = [(9, index) for index in range(rng.randint(0, 3))]
        after = [(8, index) for index in range(rng.randint(0, 3))]
        shapes: Shapes = [*before, *sizes * layers, *after]
        found = repeated_blocks(shapes)
        assert found is not None
        start, period, stop = found
        assert stop - start >= len(sizes) * layers
        assert (stop - start) % period == 0
        assert (stop - start) // period >= 2
        assert all(shapes[i] == shapes[i + period] for i in range(start, stop - period))
        assert 0 <= start < stop <= len(shapes)


def by_counting(shapes: Shapes) -> tuple[int, int, int] | None:
    """Find by definition the longest repetition, of these the shortest period, of these the earliest."""
    best = None
    for period in range(2, len(shapes) // 2 + 1):
        run = 0
        for index in range(len(shapes) - period):
            run = run + 1 if shapes[index] == shapes[index + period] else 0
            length = (1 + run // period) * period
            if length > period and (best is None or length > best[2] - best[0]):
                best = (index + 1 - run, period, index + 1 - run + length)
    return best


def test_longest_repetition_is_found() -> None:
    rng = random.Random(4)
    for _ in range(2000):
        kinds = rng.randint(1, 4)
        shapes: Shapes = [(rng.randint(1, kinds),) for _ in range(rng.randint(0, 30))]
        if rng.random() < 0.5:
            shapes = [*shapes[:3], *shapes[3:9] * rng.randint(1, 5), *shapes[9:]]
        assert repeated_blocks(shapes) == by_counting(shapes), shapes


def test_blocks_of_many_experts() -> None:
    block: Shapes = [*[(64, 64)] * 4, *[(768, 64), (768, 64), (64, 768)] * 128, (64,), (64,)]
    assert repeated_blocks([(300, 64), *block * 48, (64,), (300, 64)]) == (1, 390, 1 + 390 * 48)


@pytest.mark.parametrize("between", [[], [(7, 7)]], ids=["adjacent", "apart"])
def test_two_kinds_of_layers(between: list[tuple[int, ...]]) -> None:
    """As in diffusion Transformers, and in encoders with decoders."""
    double, single = [(64, 64), (64,), (256, 64)], [(64, 64), (64, 320)]
    embedder, head = [(64, 16), (64,)], [(16, 64), (16,)]
    shapes = [*embedder * 2, *double * 6, *between, *single * 5, *head]
    found = [shapes[part.start : part.stop] for part in block_ranges(shapes)]
    assert found == [embedder * 2, *[double] * 6, *([between] if between else []), *[single] * 5, head]
    first, before, after = parts_without_slack(shapes)
    assert (shapes[first.start : first.stop], before, shapes[after.start :]) == (double, range(4), head)


# Policies.


def test_resident_keeps_all_on_the_device() -> None:
    assert {param.placement for param in plan_of(gpt(2), policy="resident").params} == {Placement.DEVICE}


def test_zero_offload_placement() -> None:
    plan = plan_of(gpt(2), policy="zero_offload", device_share=1.0)
    for param in plan.params:
        if len(param.shape) == 2 and param.numel >= 4096:
            expected = (Placement.HOST, 0, 1, 0, True)
            assert (param.placement, param.k, param.interval, param.staleness, param.blocking) == expected
        else:
            assert param.placement is Placement.DEVICE


def test_unknown_policy_is_refused() -> None:
    class Other:
        policy = "fifo"
        host_window_bytes = None
        adaptive = False

    with pytest.raises(ValueError, match="policy='fifo' must be one of resident, zero_offload, twinflow"):
        make_plan([], Other())  # type: ignore[arg-type]


def test_zenflow_splits_large_parameters() -> None:
    options = {"device_share": 0.0, "min_offload_size": 100}
    shapes: Shapes = [(10, 10), (9, 11), (100,), (2, 5, 10), (1, 1000), ()]
    placed = [param.placement is Placement.SPLIT_COLUMNS for param in plan_of(shapes, **options).params]
    assert placed == [True, False, False, True, True, False]


@pytest.mark.parametrize(
    ("spec", "offloaded"),
    [
        (ParamSpec("w", (64, 64), torch.bfloat16), True),
        (ParamSpec("w", (64, 64), torch.float16), True),
        (ParamSpec("w", (64, 64), torch.float64), False),
        (ParamSpec("w", (64, 64), torch.float32, splittable=False), False),
        (ParamSpec("w", (0, 64), torch.float32), False),
    ],
)
@pytest.mark.parametrize("policy", ["zenflow", "zero_offload"])
def test_unsupported_parameters_are_resident(spec: ParamSpec, offloaded: bool, policy: str) -> None:
    plan = make_plan([spec], Options(policy=policy, device_share=0.0, min_offload_size=0))
    assert plan.params[0].offloaded is offloaded


@pytest.mark.parametrize(
    ("shape", "dim", "slices", "length"),
    [((64, 32), 0, 64, 32), ((32, 64), 1, 64, 32), ((64, 64), 0, 64, 64), ((8, 4, 3, 3), 1, 36, 8)],
)
def test_slices_run_along_the_longer_dim(shape: tuple[int, ...], dim: int, slices: int, length: int) -> None:
    param = plan_of([shape], device_share=0.0, min_offload_size=1).params[0]
    assert (param.dim, param.slices, param.length) == (dim, slices, length)


@pytest.mark.parametrize(
    ("ratio", "slices", "k"),
    [(0.0, 100, 0), (1.0, 100, 100), (0.1, 100, 10), (0.1, 104, 10), (0.1, 106, 11), (0.001, 99, 1), (0.999, 99, 99)],
)
def test_selection_size_rounding(ratio: float, slices: int, k: int) -> None:
    assert plan_of([(10, slices)], device_share=0.0, min_offload_size=1, topk_ratio=ratio).params[0].k == k


def test_options_reach_the_plan() -> None:
    common = {"device_share": 0.0, "min_offload_size": 1}
    for interval, summed in ((4, True), ("auto", True), (1, False)):  # one step has nothing to sum
        options = {"update_interval": interval, "gradient_transfer": "mean"}
        assert plan_of([(8, 8)], **common, **options).params[0].summed == summed
    assert not plan_of([(8, 8)], **common, policy="zero_offload", gradient_transfer="mean").params[0].summed
    for policy, compressed in (("zenflow", True), ("zero_offload", False)):
        params = plan_of([(8, 8)], **common, policy=policy, gradient_transfer="int8").params
        assert params[0].compressed == compressed
    param = plan_of([(8, 8)], **common, update_interval=3, staleness=1, overlap_step=False).params[0]
    assert (param.interval, param.staleness, param.blocking) == (3, 1, True)
    param = plan_of([(8, 8)], **common, update_interval="auto").params[0]
    assert (param.interval, param.staleness, param.blocking) == (4, 0, False)
    files = {"policy": "zero_infinity", "nvme_path": ".", "host_window_bytes": 1 << 20}
    assert plan_of([(8, 8)], min_offload_size=1, **files).host_window_bytes == 1 << 20


# TwinFlow and Deep Optimizer States.


def resident_elements(plan: Plan) -> int:
    """Count the elements whose state always stays on the device."""
    whole = sum(param.numel for param in plan.params if param.placement is Placement.DEVICE)
    return whole + sum(param.k * param.length for param in plan.params)


@pytest.mark.parametrize("policy", ["twinflow", "deep_optimizer_states"])
def test_twinflow_share_is_exact_to_a_slice(policy: str) -> None:
    """This holds for any ratio; the share comes last in the order of updates and splits at most one parameter."""
    rng = random.Random(3)
    cut = 0
    for _ in range(60):
        shapes: Shapes = [(rng.randint(1, 40), rng.randint(1, 40)) for _ in range(rng.randint(1, 12))]
        shapes.insert(0, (rng.randint(1, 50),))  # stays on the device, and counts
        sizes = [spec.numel for spec in specs(shapes)]
        ratio = rng.random()
        stride = {"update_stride": 1000} if policy != "twinflow" else {}
        plan = plan_of(shapes, policy=policy, ratio=ratio, min_offload_size=1, **stride)
        missing = max(round((1 - ratio) * sum(sizes)), sizes[0]) - resident_elements(plan)
        places = list(plan.params[1:])
        first = next((i for i, param in enumerate(places) if param.placement is Placement.DEVICE), len(places))
        assert all(param.placement is Placement.DEVICE for param in places[first:])
        split = [param for param in places if param.fixed]
        assert all(param is places[first - 1] and 0 < param.k < param.slices and param.blocking for param in split)
        assert 0 <= missing < (places[first - 1].length if first else 1)
        cut += len(split)
    assert cut > 20


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, [0, 0, 0, 0]), (0.5, [0, 0, 64, 64]), (0.0, [64] * 4)])
def test_twinflow_limits_are_zero_offload_and_resident(ratio: float, expected: list[int]) -> None:
    plan = plan_of([(64, 64)] * 4, policy="twinflow", ratio=ratio)
    assert [64 if param.placement is Placement.DEVICE else param.k for param in plan.params] == expected
    assert plan.host_bytes == plan_of([(64, 64)] * 4, policy="zero_offload").host_bytes * ratio


def test_fixed_share_selects_nothing() -> None:
    cut = plan_of([(64, 64)] * 2, policy="twinflow", ratio=0.75).params[1]
    assert (cut.k, cut.deferred, cut.selects, cut.interval) == (32, 32, False, 1)


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_every_kth_subgroup_is_streamed(stride: int) -> None:
    plan = plan_of(gpt(3), policy="deep_optimizer_states", update_stride=stride)
    host = [param for param in plan.params if param.placement is not Placement.DEVICE]
    size = sum(param.numel for param in host) // (4 * stride)
    numbers = [param.subgroup for param in host]
    assert all(number is not None for number in numbers)
    assert numbers == sorted(numbers, key=lambda number: number or 0)
    assert set(numbers) == set(range(len(set(numbers))))
    elements = {number: [param.numel for param in host if param.subgroup == number] for number in numbers}
    for number, sizes in elements.items():
        assert sum(sizes) <= size or len(sizes) == 1  # only a parameter that is larger by itself exceeds it
        following = elements.get((number or 0) + 1)
        assert following is None or sum(sizes) + following[0] > size  # and none is smaller than it need be
    for param in host:
        assert param.subgroup is not None
        streamed = param.subgroup % stride == stride - 1
        assert param.placement is (Placement.HOST_STREAMED if streamed else Placement.HOST)
        assert (param.streamed, param.offloaded, param.blocking) == (streamed, not streamed, not streamed)


@pytest.mark.parametrize(("stride", "together"), [(1, 10), (2, 5), (3, 3), (5, 2), (7, 1), (1000, 1)])
def test_small_model_has_four_strides_of_subgroups(stride: int, together: int) -> None:
    """40 equal parameters on the host: 40 / (4 x stride) of them are a subgroup, rounded down, one at least."""
    shapes: Shapes = [(64,), *[(64, 64)] * 40]
    plan = plan_of(shapes, policy="deep_optimizer_states", update_stride=stride)
    assert [param.subgroup for param in plan.params] == [None, *(index // together for index in range(40))]
    streamed = sum(param.streamed for param in plan.params)
    assert streamed == sum(index // together % stride == stride - 1 for index in range(40))


def test_large_model_has_100m_element_subgroups() -> None:
    shapes: Shapes = [(3000, 10_000)] * 100  # three are 90 million
    plan = plan_of(shapes, policy="deep_optimizer_states", update_stride=2)
    assert [param.subgroup for param in plan.params] == [index // 3 for index in range(100)]
    half = plan_of(shapes, policy="deep_optimizer_states", update_stride=2, ratio=0.2)  # 600 million are the host's
    assert [param.subgroup for param in half.params[:20]] == [index // 2 for index in range(20)]


def test_added_parameters_continue_subgroups() -> None:
    options = Options(policy="deep_optimizer_states", update_stride=2)
    both = extend_plan(make_plan(specs([(64, 64)] * 3), options), specs([(64, 64)] * 3), options)
    assert [param.subgroup for param in both.params] == list(range(6))
    assert [param.streamed for param in both.params] == [False, True] * 3


def test_zenflow_deferred_state_placements() -> None:
    common: dict[str, Any] = {"update_stride": 2, "device_share": 0.0}
    plan = plan_of([(64, 64)] * 6, **common)
    assert [param.streamed for param in plan.params] == [False, True] * 3
    assert [param.k > 0 for param in plan.params] == [True, False] * 3
    assert {param.interval for param in plan.params if param.offloaded} == {4}
    filed = plan_of([(64, 64)] * 6, **common, offload_device="nvme", nvme_path="/tmp")
    assert [param.in_file for param in filed.params] == [True, False] * 3
    kept = plan_of([(64, 64)] * 6, **(common | {"device_share": 2 * 2 * 4 * 64 * 64}))
    assert [param.placement is Placement.DEVICE for param in kept.params] == [True] * 2 + [False] * 4
    assert [param.subgroup for param in kept.params] == [None, None, 0, 1, 2, 3]


def test_streamed_state_is_in_host_memory() -> None:
    for dtype, per_element in ((torch.float32, 8), (torch.bfloat16, 12)):
        options = Options(policy="deep_optimizer_states", update_stride=1)
        param = make_plan(specs([(64, 64)], dtype), options).params[0]
        assert (param.host_bytes, param.device_bytes) == (per_element * 64 * 64, 0)


def test_unresolved_stride_is_refused() -> None:
    for options in ({"policy": "deep_optimizer_states"}, {"update_stride": "auto"}):
        with pytest.raises(ValueError, match="has not been resolved"):
            plan_of([(64, 64)], **options)


# What has no slack.


def on_device(plan: Plan) -> set[int]:
    return {param.index for param in plan.params if not param.offloaded and param.numel >= 4096}


def test_device_share_order() -> None:
    shapes = llama(6, vocabulary=2000)  # each part larger than the one before
    sizes = [ParamSpec("", shape, torch.float32).numel for shape in shapes]
    total = sum(sizes)
    first_block, embedding, head = set(range(1, 10)), {0}, {len(shapes) - 2, len(shapes) - 1}
    large = {index for index, shape in enumerate(shapes) if len(shape) == 2 and sizes[index] >= 4096}
    used = 0
    kept: set[int] = set()
    for part in (first_block, embedding, head):
        used += sum(sizes[index] for index in part)
        assert on_device(plan_of(shapes, device_share=(used - 0.5) / total)) == kept & large
        kept |= part
        assert on_device(plan_of(shapes, device_share=(used + 0.5) / total)) == kept & large
    assert on_device(plan_of(shapes, device_share=0.0)) == set()


def test_embedding_is_resident_if_first_block_is_large() -> None:
    shapes: Shapes = [(64, 64), *[(512, 64), (64, 512)] * 4, (64, 64)]
    assert on_device(plan_of(shapes, device_share=0.05)) == {0, 9}


def test_bytes_keep_what_lacks_slack_first() -> None:
    """First block, embeddings and head, and then the others in forward order, up to the first that does not fit."""
    shapes: Shapes = [(70, 64), *[(64, 80), (80, 64)] * 3, (90, 64)]
    order = [1, 2, 0, 7, 3, 4, 5, 6]
    states = [2 * 4 * math.prod(shapes[index]) for index in order]  # two fp32 moments; weights are their own masters
    for count in range(len(order) + 1):
        taken = sum(states[:count])
        for size in (max(2, taken), taken + (states[count] if count < len(order) else 2) - 1):
            assert on_device(plan_of(shapes, device_share=size)) == set(order[:count])
    masters = make_plan([ParamSpec("", (64, 64), torch.bfloat16)] * 3, Options(device_share=3 * 64 * 64 * 4))
    assert on_device(masters) == {0}


def test_models_without_blocks_have_no_residents() -> None:
    assert on_device(plan_of([(64, 64), (64, 100), (100, 70)], device_share=1.0)) == set()


# Phases.


def load_of(plan: Plan) -> list[int]:
    interval = max((param.interval for param in plan.params if param.offloaded), default=1)
    load = [0] * interval
    for param in plan.params:
        if param.offloaded:
            assert 0 <= param.phase < param.interval
            load[param.phase] += param.deferred * param.length
    return load


def test_phases_are_balanced_by_bytes() -> None:
    """No two phases differ by more than the largest parameter: true of every greedy assignment, and of no other."""
    rng = random.Random(1)
    for _ in range(50):
        shapes: Shapes = [(rng.randint(2, 60), rng.randint(2, 60)) for _ in range(rng.randint(1, 40))]
        interval = rng.randint(1, 6)
        plan = plan_of(shapes, device_share=0.0, min_offload_size=1, update_interval=interval)
        load = load_of(plan)
        largest = max(param.deferred * param.length for param in plan.params)
        assert max(load) - min(load) <= largest
    plan = plan_of(gpt(12), device_share=0.0)
    assert max(load_of(plan)) < 1.1 * sum(load_of(plan)) / 4


def test_extended_plan_keeps_planned_parameters() -> None:
    options = Options(device_share=0.2, min_offload_size=1)
    rng = random.Random(2)
    for _ in range(20):
        first = make_plan(specs([(rng.randint(2, 60), rng.randint(2, 60)) for _ in range(rng.randint(1, 20))]), options)
        new = specs([(rng.randint(2, 60), rng.randint(2, 60)) for _ in range(rng.randint(1, 20))])
        both = extend_plan(first, new, options)
        assert both.params[: len(first.params)] == first.params
        assert [param.index for param in both.params] == list(range(len(both.params)))
        assert all(param.offloaded for param in both.params[len(first.params) :])  # slack was judged at the beginning
        largest = max((param.deferred * param.length for param in both.params), default=0)
        assert max(load_of(both)) - min(load_of(both)) <= max(largest, max(load_of(first)) - min(load_of(first)))


def test_plan_depends_on_shapes_and_options_only() -> None:
    """A compiled, an eager and a resumed run get the same one."""
    assert plan_of(gpt(3)) == plan_of(gpt(3))
    renamed = [ParamSpec("x" + spec.name, spec.shape, spec.dtype) for spec in specs(gpt(3))]
    other = make_plan(renamed, Options())
    assert [param.phase for param in other.params] == [param.phase for param in plan_of(gpt(3)).params]


# Views of parameters with three or more dimensions.


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((8, 28672, 4096), 8 * 28672),  # Mixtral 8x7B: experts, out, in
        ((128, 1536, 2048), 128 * 1536),  # Qwen3-30B-A3B
        ((32, 2880, 5760), 32 * 2880),  # gpt-oss-20b: experts, in, out
        ((512, 1024, 512), 512 * 1024),
        ((64, 3, 7, 7), 64),  # Conv2d
        ((1280, 3, 2, 14, 14), 1280),  # Conv3d of patches
        ((768, 48, 128), 768),  # Conv1d with 128 taps, wav2vec2's positions
        ((256, 128, 41), 256),  # Conv1d, grouped
        ((512, 256, 16), 512),  # ConvTranspose1d
        ((1, 512, 64), 1),  # one output channel; position embeddings
        ((4, 64, 31), 4),
        ((64, 40, 48), 64),  # more matrices than rows
    ],
)
def test_stacks_of_matrices_are_told_from_kernels(shape: tuple[int, ...], rows: int) -> None:
    (param,) = plan_of([shape], policy="zero_offload", min_offload_size=1).params
    assert param.matrix_shape == (rows, math.prod(shape) // rows)
    assert (param.slices, param.length) == (max(param.matrix_shape), min(param.matrix_shape))


def test_row_dims_choose_the_view() -> None:
    """The first pattern that matches counts; matrices have one view."""
    named = [ParamSpec(name, (64, 40, 48), torch.float32) for name in ("a.experts", "b.experts", "conv")]
    named.append(ParamSpec("a.experts.bias", (64, 48), torch.float32))
    options = Options(policy="zero_offload", min_offload_size=1, row_dims={"a.*": 2, "*": 1})
    assert [param.row_dims for param in make_plan(named, options).params] == [2, 1, 1, 1]
    assert Options(row_dims=options.row_dims).row_dims == options.row_dims
    assert Options(row_dims=("a.*=2", "*=1")).row_dims == options.row_dims  # as a command line has it
    (of_all,) = make_plan(named[:1], options).params  # a later pattern that matches, too, is no error
    assert of_all.row_dims == 2


@pytest.mark.parametrize(
    ("row_dims", "sharded", "error"),
    [
        ({"experts": 3}, None, r"does not fit experts of shape \[8, 40, 48\]: rows combine 1 to 2"),
        ({"expert": 2}, None, "has the pattern 'expert', which matches no parameter .*these are 'experts'"),
        ({"experts": 2}, ShardedBy(dim=1, rank=0, ranks=2), "shard along dimension 0 or 2 alone, evenly"),
        ({"experts": 2}, ShardedBy(dim=0, rank=0, ranks=3), "shard along dimension 0 or 2 alone, evenly"),
        ({"experts": 2}, ShardedBy(dim=0, rank=0, ranks=2, pieces=2), "shard along dimension 0 or 2 alone"),
    ],
)
def test_view_that_does_not_fit(row_dims: dict[str, int], sharded: ShardedBy | None, error: str) -> None:
    spec = ParamSpec("experts", (8, 40, 48), torch.float32, sharded=sharded)
    with pytest.raises(ValueError, match=error):
        make_plan([spec], Options(row_dims=row_dims))


@pytest.mark.parametrize(
    ("dim", "offloaded", "shape"),
    [(0, True, (4, 40, 48)), (2, True, (8, 40, 24)), (1, True, (8, 20, 48))],
)
def test_shards_of_a_stack(dim: int, offloaded: bool, shape: tuple[int, ...]) -> None:
    """A rank has consecutive rows or columns of the view; sharded in between, the view is another one."""
    spec = ParamSpec("experts", (8, 40, 48), torch.float32, sharded=ShardedBy(dim=dim, rank=0, ranks=2))
    (param,) = make_plan([spec], Options(policy="zero_offload", min_offload_size=1)).params
    assert (param.offloaded, param.shape, param.row_dims) == (offloaded, shape, 1 if dim == 1 else 2)
    assert param.slices * param.length == math.prod(shape)


def test_uneven_stack_keeps_its_rows() -> None:
    """Three experts on two ranks: a DTensor of all rows would divide them by half."""
    spec = ParamSpec("experts", (3, 40, 48), torch.float32, sharded=ShardedBy(dim=0, rank=0, ranks=2))
    (param,) = make_plan([spec], Options(policy="zero_offload", min_offload_size=1)).params
    assert param.row_dims == 1
