"""Less memory never makes a step faster, no plan beats a frontier, and pasted options give the same numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import zenflow_compile as zf
from tests.support.machines import layers, machine, scenario
from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.prediction.auto_policy import WORTH_IT
from zenflow_compile.prediction.forecast import Forecast, forecast
from zenflow_compile.prediction.frontier import Fit, Frontier, fit, frontier
from zenflow_compile.prediction.scenario import Scenario
from zenflow_compile.prediction.search import (
    ALIKE,
    Memory,
    Search,
    chain,
    device_first,
    dimensions,
    host_first,
)

LAYER_STATE = 12 * 1_000_000
MEMORIES = (device_first, host_first)
# A host with a fifth of the rate that a step without a stall needs.
SLOW = machine(adam_per_core=0.2e6, device_bandwidth=1e9, host_bandwidth=1e9)
TIGHT = replace(SLOW, device_bytes=80e6, host_bytes=110e6)  # too little memory for all state on one side
FEWER_BYTES = ("state_dtype", "split_master", "shared_buffers")
UNSEARCHED = ("ratio", "update_stride", "topk_ratio", "gradient_compression", "host_window_bytes", *FEWER_BYTES)


def asked(hardware: Hardware = SLOW, policy: str = "auto", count: int = 8, **options: Any) -> Scenario:
    return scenario(Options(nvme_path="scratch", **options), hardware, layers(count), policy=policy)


@cache
def whole(*, tight: bool = False) -> Frontier:
    """The frontier with nothing given."""
    return frontier(asked(TIGHT if tight else SLOW))


def only_residents(hardware: Hardware | None = None) -> Frontier:
    """Eight layers of which only the number of resident ones is searched."""
    given = {"topk_ratio": 0.0, "device_share": 0.0, "update_interval": 1, "offload_weights": False}
    fixed = (*given, "gradient_compression", "update_stride", "offload_device", *FEWER_BYTES)
    return frontier(asked(hardware or machine(), "zenflow", **given), fixed)


def all_forecasts(search: Search) -> list[Forecast]:
    """Every combination that fits."""
    choices = itertools.product(*(range(len(found)) for found in search.dimensions))
    return [found for choice in choices if (found := search.simulate(choice)) is not None]


def test_least_memory_by_hand() -> None:
    """Eight layers are four blocks of two: a block's update takes 2 s, its copy 2 s, its forward 2 s; a step 24 s.

    With two resident blocks the third one's weights are uploaded after 4 s, when they are read. With a layer less, its
    update delays them by a second; with one block, its own weights come 2 s late. The first block's gradient is copied
    after the backward: its layers come 3 and 6 s late.
    """
    found = only_residents()
    assert found.fastest is not None
    assert found.fastest.step_s == pytest.approx(24.0)
    assert [each.step_s for each in found.device] == pytest.approx([24.0, 25.0, 26.0, 27.0, 30.0])
    kept = [each.options.get("spare_device_bytes", 0) // LAYER_STATE for each in found.device]
    assert kept == [4, 3, 2, 1, 0]
    (host,) = found.host
    assert host.options["spare_device_bytes"] == 7 * LAYER_STATE
    assert found.points == [*found.device, host]


def test_reference_is_the_fastest_that_fits() -> None:
    """Without memory for four resident layers a step of 25 s is the reference, so nothing is slower than it."""
    four, three, *_ = only_residents().device
    tight = only_residents(machine(device_bytes=four.device_bytes - 1))
    assert tight.fastest is not None
    assert tight.fastest.step_s == pytest.approx(25.0)
    assert tight.device[0].options == three.options


@pytest.mark.parametrize("memory", MEMORIES, ids=["device", "host"])
def test_less_memory_never_makes_a_step_faster(memory: Memory) -> None:
    found = whole(tight=True)
    plans = found.device if memory is device_first else found.host
    assert len(plans) > 2
    for before, after in itertools.pairwise(plans):
        assert memory(after)[0] < memory(before)[0]
        assert after.step_s > before.step_s


@pytest.mark.parametrize("memory", MEMORIES, ids=["device", "host"])
@pytest.mark.parametrize("tight", [False, True])
def test_no_plan_beats_the_frontier(memory: Memory, tight: bool) -> None:
    """Of all combinations of four options, none needs less memory than a plan of the frontier without being slower."""
    search = Search(asked(TIGHT if tight else SLOW), UNSEARCHED)
    plans = chain(search.explore(), memory)
    margin = ALIKE * memory(plans[0])[0]
    others = all_forecasts(Search(asked(TIGHT if tight else SLOW), UNSEARCHED))
    assert len(others) > 20
    for other in others:
        assert any(
            memory(plan)[0] <= memory(other)[0] + margin and plan.step_s <= other.step_s * (1 + WORTH_IT)
            for plan in plans
        ), other.options


def test_pasted_options_give_the_same_numbers() -> None:
    assert len(whole(tight=True).points) > 3
    for each in whole(tight=True).points:
        (again,) = zf.plan(layers(8), TIGHT, tokens=1, **each.options)["policies"]
        assert (again["step_s"], again["needs"]["host"]) == (each.step_s, each.needs.host)
        assert again["needs"]["device"] == each.needs.device


def test_given_options_are_not_searched() -> None:
    found = frontier(asked(update_interval=2, topk_ratio=0.3), ("update_interval", "topk_ratio"))
    read = [each for each in found.points if each.policy == "zenflow"]
    assert read
    for each in read:
        assert (each.options["update_interval"], each.options["topk_ratio"]) == (2, 0.3)
    alone = frontier(asked(policy="twinflow", ratio=0.5), ("ratio",))
    assert {(each.policy, each.options["ratio"]) for each in alone.points} == {("twinflow", 0.5)}


def test_given_residents_are_not_searched() -> None:
    both = dimensions(asked(device_share=0.5, spare_device_bytes=7), ("device_share", "spare_device_bytes"))
    assert [each for found in both for each in found if "device_share" in each] == [{"device_share": 0.5}]


def test_stride_that_streams_nothing_is_no_plan() -> None:
    """A host that is far faster than the link updates everything itself."""
    search = Search(scenario(Options(), machine(adam_per_core=1e9), layers(8), policy="zenflow"))
    simplest = [0] * len(search.dimensions)
    assert search.candidate(tuple(simplest)) is not None
    simplest[next(number for number, each in enumerate(search.dimensions) if {"update_stride": "auto"} in each)] = 1
    assert search.candidate(tuple(simplest)) is None


def test_chain_begins_with_the_least_memory() -> None:
    """Hardly slower plans count as equally fast; of what needs hardly less memory, only the last one is shown."""

    def plan(size: int, step: float) -> Forecast:
        return replace(some, needs=replace(some.needs, device={"weights": size}), step_s=step)

    some = only_residents().device[0]
    plans = [plan(500, 100.0), plan(300, 100.9), plan(200, 102.0), plan(195, 103.0), plan(250, 104.0), plan(189, 110.0)]
    sizes = [each.device_bytes for each in chain(plans, device_first)]
    assert sizes == [300, 200, 189]


def test_exact_plans_give_adamw() -> None:
    found = frontier(asked(), exact=True)
    assert found.points
    assert all(each.exact for each in found.points)
    assert not all(each.exact for each in whole().points)


def test_fit_is_the_fastest_plan() -> None:
    best = fit(asked(TIGHT), FEWER_BYTES).best
    assert best is not None
    fastest = frontier(asked(TIGHT), FEWER_BYTES).fastest
    assert fastest is not None
    assert best.step_s <= fastest.step_s * (1 + WORTH_IT)


def test_fit_names_what_is_missing() -> None:
    """Of all plans, the one that lacks the fewest bytes: the least device memory, if only that is short."""
    least = whole().device[-1]
    short: Fit = fit(asked(replace(SLOW, device_bytes=least.device_bytes - 10)))
    assert short.best is None
    assert short.as_dict()["shortages"] == {"device": 10}
    none = frontier(asked(replace(SLOW, device_bytes=least.device_bytes - 10)))
    assert (none.fastest, none.points) == (None, [])
    assert none.as_dict()["shortages"] == {"device": 10}


def test_fewer_bytes_fit_where_fp32_does_not() -> None:
    """On a host with memory for half of the state in fp32."""
    small = replace(SLOW, host_bytes=80e6)
    assert fit(asked(small, "zero_offload"), FEWER_BYTES).best is None
    best = fit(asked(small, "zero_offload")).best
    assert best is not None
    assert best.options["state_dtype"] in ("bf16", "fp8")
    assert "with rounded moments" in best.departures
    assert best.host_bytes <= 80e6


def test_converting_takes_time_on_a_few_fast_cores() -> None:
    """Moments in fewer bytes make an update faster where memory is slow, and slower where a core has much of it."""
    fast = machine(adam_per_core=2e9, device_bandwidth=1e15, host_bandwidth=1e15, cores=1)
    slow = machine(adam_per_core=2e9, device_bandwidth=1e15, host_bandwidth=1e9, cores=1)

    def update_s(hardware: Hardware, dtype: str) -> float:
        options = Options(policy="zero_offload", state_dtype=dtype)
        return forecast(options, scenario(options, hardware, layers(8), policy="zero_offload")).host_update_s

    assert update_s(fast, "fp32") < update_s(fast, "bf16") < update_s(fast, "fp8")
    assert update_s(slow, "fp32") > update_s(slow, "bf16") > update_s(slow, "fp8")


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other in every plan"):
        frontier(asked(policy="deep_optimizer_states", offload_weights=1.0), ("offload_weights",))
