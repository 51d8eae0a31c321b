"""Which gradient buffers share memory, checked against a replay of the steps."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from zenflow_compile.options.options import Options
from zenflow_compile.performance.models import model
from zenflow_compile.planning.plan import ParamPlan, Plan, host_bytes_of, pool_packing, pools_of
from zenflow_compile.planning.planners import ParamSpec, empty_plan, extend_plan, make_plan
from zenflow_compile.planning.shared_buffers import ALIGNMENT_BYTES, Lifetime, overlaps, pack
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.parameters.allocation import allocate_pools, pools_arena_bytes

SHAPES = [(64, 96), (64, 64), (200, 64), (64, 200), (128, 64), (96, 64), (64, 32), (72, 64), (64, 64)]
SPECS = [ParamSpec(f"w{i}", shape, torch.bfloat16) for i, shape in enumerate(SHAPES)]


def shared(*, specs: list[ParamSpec] = SPECS, **options: object) -> Plan:
    keywords = {"device_share": 0.0, "min_offload_size": 1, **options}
    return make_plan(specs, Options.from_keywords(**keywords))


def random_lifetimes(seed: int) -> tuple[tuple[Lifetime, ...], int]:
    draw = random.Random(seed)
    period = draw.choice([1, 2, 3, 4, 8, 70])
    return tuple(
        Lifetime.of(draw.choice([0, 1, 64, 100, 1000, 5000]), draw.randrange(period), draw.randint(1, period))
        for _ in range(draw.randint(0, 60))
    ), period


def steps_of(each: Lifetime, period: int) -> set[int]:
    return {(each.first + later) % period for later in range(each.steps)}


@pytest.mark.parametrize("seed", range(40))
def test_buffers_of_one_step_do_not_overlap(seed: int) -> None:
    buffers, period = random_lifetimes(seed)
    packing = pack(buffers, period)
    places = [range(begin, begin + each.nbytes) for begin, each in zip(packing.offsets, buffers, strict=True)]
    expected: list[list[int]] = [[] for _ in buffers]
    for one, other in itertools.combinations(range(len(buffers)), 2):
        if max(places[one].start, places[other].start) < min(places[one].stop, places[other].stop):
            assert steps_of(buffers[one], period).isdisjoint(steps_of(buffers[other], period))
            expected[one].append(other)
            expected[other].append(one)
    assert [sorted(each) for each in overlaps(buffers, packing)] == expected
    assert all(begin % ALIGNMENT_BYTES == 0 for begin in packing.offsets)
    assert max((place.stop for place in places), default=0) == packing.nbytes
    in_use = [sum(each.nbytes for each in buffers if step in steps_of(each, period)) for step in range(period)]
    assert packing.least == max(in_use) <= packing.nbytes


@pytest.mark.parametrize("warm_up", [0, 7])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("interval", [1, 2, 3, 4, 5])
def test_no_gradient_is_overwritten(interval: int, staleness: int, warm_up: int) -> None:
    """Each buffer is marked with its step, and read until the forward that applies its update."""
    plan = shared(update_interval=interval, staleness=staleness)
    pool = pool_of(plan)
    arena = HostArena(pools_arena_bytes(pool))
    buffers = allocate_pools(pool, arena)
    waiting: dict[int, list[tuple[int, torch.Tensor]]] = {param.index: [] for param in pool}
    read: list[tuple[int, int, torch.Tensor]] = []  # until this step begins, the mark of a buffer
    for step in range(1, 4 * interval + 6):
        read = [each for each in read if each[0] > step]
        for param in pool:
            buffer = buffers[param.index][param.gradient_buffers.index(step)]
            buffer.fill_(step)
            waiting[param.index].append((step, buffer))
        in_use = [(mark, buffer) for _, mark, buffer in read] + list(itertools.chain(*waiting.values()))
        for mark, buffer in in_use:
            assert bool((buffer == mark).all())
        for param in pool:
            if step < warm_up or step % param.interval == param.phase:
                until = step + 1 + (0 if step < warm_up else staleness)
                read += [(until, mark, buffer) for mark, buffer in waiting[param.index]]
                waiting[param.index] = []


def pool_of(plan: Plan) -> list[ParamPlan]:
    (pool,) = pools_of(plan.params)
    return pool


@pytest.mark.parametrize(
    ("options", "together"),
    [
        ({}, 17),
        ({"update_interval": 8}, 21),
        ({"update_interval": 2}, 15),
        ({"staleness": 1}, 19),
        ({"update_interval": 1}, 14),
        ({"policy": "zero_offload"}, 14),
        ({"gradient_transfer": "mean"}, 14),
        ({"gradient_transfer": "int8"}, 16.5),
        ({"offload_weights": 1.0}, 19),
        ({"offload_device": "nvme", "nvme_path": "/"}, 5),
    ],
)
def test_bytes_of_a_model_of_8b(options: dict[str, object], together: float) -> None:
    """Bytes of host memory per deferred element; no packing can be smaller than what is in use in one step."""
    specs = list(model("llama3-8b").params)
    plan = shared(specs=specs, **options)
    deferred = sum(param.deferred_numel for param in plan.params if param.offloaded)
    assert plan.host_bytes / deferred == pytest.approx(together, rel=1e-2)
    packing = pool_packing(pool_of(plan))
    assert packing.nbytes <= 1.02 * packing.least


@pytest.mark.parametrize(("window", "own"), [("auto", 22), ((None, 8), 30), ((2, 2), 18)])
def test_adaptive_windows_have_their_own_buffers(window: object, own: float) -> None:
    """Gradients decide in which steps one of them is in use."""
    plan = shared(specs=list(model("llama3-8b").params), update_interval=window)
    assert all(param.pool is None and not param.in_place for param in plan.params)
    deferred = sum(param.deferred_numel for param in plan.params if param.offloaded)
    assert plan.host_bytes / deferred == pytest.approx(own, rel=2e-3)


def test_later_parameters_have_their_own_pool() -> None:
    options = Options(device_share=0.0, min_offload_size=1)
    plan = extend_plan(extend_plan(empty_plan(options), SPECS[:5], options), SPECS[5:], options)
    first, second = pools_of(plan.params)
    assert [param.index for param in second] == [5, 6, 7, 8]
    assert plan.host_bytes == host_bytes_of(first) + host_bytes_of(second)
    assert plan.pool_bytes == sum(pool_packing(pool).nbytes for pool in (first, second))


def test_only_offloaded_parameters_share() -> None:
    plan = shared(device_share=0.3, update_stride=2)
    assert {param.offloaded for param in plan.params} == {True, False}
    for param in plan.params:
        assert (param.pool is not None) == param.in_place == param.offloaded
