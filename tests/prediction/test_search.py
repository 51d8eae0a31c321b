"""Less memory never makes a step faster, no plan beats a frontier, and every question gets the same answer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import zenflow_compile as zf
from tests.support.machines import SLOW_HOST, layers, llama, machine, scenario
from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.hardware import hardware as named_hardware
from zenflow_compile.performance.memory import needs_of
from zenflow_compile.performance.model_shape import ModelShape, shape_of
from zenflow_compile.performance.models import model as named_model
from zenflow_compile.planning.dtypes import BFLOAT16
from zenflow_compile.planning.planners import ParamSpec, make_plan
from zenflow_compile.prediction.answers import Fit, Frontier, fit, frontier
from zenflow_compile.prediction.auto_policy import choose, kept_by_auto
from zenflow_compile.prediction.dimensions import Dimension, dimensions
from zenflow_compile.prediction.estimate import Estimator
from zenflow_compile.prediction.forecast import (
    WORTH_IT,
    Forecast,
    Scenario,
    changed,
    forecast,
    needs,
    resolve_stride,
)
from zenflow_compile.prediction.predict import predict, scenario_of
from zenflow_compile.prediction.search import ALIKE, Memory, Search, SearchSpace, chain, device_first, host_first

LAYER_STATE = 12 * 1_000_000
FILLED: dict[str, Any] = {"policy": "auto", "tokens_per_step": 1, "device_share": "fill"}
MEMORIES = (device_first, host_first)
# A host with a fifth of the rate that a step without a stall needs.
SLOW = machine(adam_per_core=0.2e6, device_bandwidth=1e9, host_bandwidth=1e9)
TIGHT = replace(SLOW, device_bytes=80e6, host_bytes=110e6)  # too little memory for all state on one side
FEWER_BYTES = ("state_dtype", "split_master")
UNSEARCHED = ("ratio", "update_stride", "topk_ratio", "gradient_transfer", "host_window_bytes", *FEWER_BYTES)


def asked(hardware: Hardware = SLOW, policy: str = "auto", count: int = 8, **options: Any) -> Scenario:
    return scenario(Options(nvme_path="scratch", **options), hardware, layers(count), policy=policy)


@cache
def whole(*, tight: bool = False) -> Frontier:
    """The frontier with nothing given."""
    return frontier(asked(TIGHT if tight else SLOW))


def only_residents(hardware: Hardware | None = None) -> Frontier:
    """Eight layers of which only the number of resident ones is searched."""
    given = {"topk_ratio": 0.0, "update_interval": 1, "offload_weights": False}
    fixed = (*given, "gradient_transfer", "update_stride", "offload_device", *FEWER_BYTES)
    return frontier(asked(hardware or machine(), "zenflow", device_share=0.0, **given), fixed)


def residents(scenario: Scenario, *given: str) -> Dimension:
    """Return what is searched for ``device_share``."""
    return dimensions(scenario, given, Estimator(scenario))[1]


def all_forecasts(search: Search) -> list[Forecast]:
    """Every combination that fits."""
    choices = itertools.product(*(range(len(found)) for found in search.space.dimensions))
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
    kept = [each.options["device_share"] // LAYER_STATE for each in found.device]
    assert kept == [4, 3, 2, 1, 0]
    (host,) = found.host
    assert host.options["device_share"] == 7 * LAYER_STATE
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
    search = Search(SearchSpace(asked(TIGHT if tight else SLOW), UNSEARCHED))
    plans = chain(search.explore(), memory)
    margin = ALIKE * memory(plans[0])[0]
    others = all_forecasts(Search(SearchSpace(asked(TIGHT if tight else SLOW), UNSEARCHED)))
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


def test_given_share_is_the_least_resident_one() -> None:
    for given, least in ((("device_share",), [0.5]), ((), [0.0, 0.5])):
        found = [each["device_share"] for each in residents(asked(device_share=0.5), *given)]
        assert [each for each in found if isinstance(each, float)] == least
        assert all(each > 0.5 * 8 * LAYER_STATE for each in found if isinstance(each, int))
    (given_bytes,) = residents(asked(device_share=7), "device_share")
    assert given_bytes == {"device_share": 7}


def test_stride_that_streams_nothing_is_no_plan() -> None:
    """A host that is far faster than the link updates everything itself."""
    space = SearchSpace(scenario(Options(), machine(adam_per_core=1e9), layers(8), policy="zenflow"))
    simplest = [0] * len(space.dimensions)
    assert space.candidate(tuple(simplest)) is not None
    simplest[next(number for number, each in enumerate(space.dimensions) if {"update_stride": "auto"} in each)] = 1
    assert space.candidate(tuple(simplest)) is None


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


RESIDENT = Options(policy="resident")
DIVIDED: dict[str, Any] = {"tokens": 1024, "recompute": None, "divided": True}


def resident_bytes(count: int, *, recompute: bool) -> int:
    """Device memory of a resident run whose steps have so many micro-batches."""
    options = replace(RESIDENT, gradient_accumulation_steps=count)
    run = scenario(options, SLOW_HOST, llama(), tokens=1024, recompute=recompute)
    return needs(options, run).sums()["device"]


def divided(device_bytes: int, **options: Any) -> Forecast:
    (found,) = predict(
        scenario(
            replace(RESIDENT, **options),
            replace(SLOW_HOST, device_bytes=device_bytes),
            llama(),
            policy="resident",
            **DIVIDED,
        )
    ).forecasts
    return found


def test_fewest_micro_batches_that_fit() -> None:
    """Each has a sequence of 128 tokens at least; the device is as fast with few tokens as with many."""
    for count in (1, 2, 8):
        found = divided(resident_bytes(count, recompute=False))
        assert (found.fits, found.micro_batches, found.recompute) == (True, count, False)
        assert found.micro_batch_tokens == 1024 // count


def test_a_step_of_six_sequences_is_divided_by_six() -> None:
    options = replace(RESIDENT, gradient_accumulation_steps=6)
    run = scenario(RESIDENT, SLOW_HOST, llama(), policy="resident", tokens=768, recompute=False, divided=True)
    least = needs(options, run).sums()["device"]
    (found,) = predict(replace(run, hardware=replace(SLOW_HOST, device_bytes=least))).forecasts
    assert (found.fits, found.micro_batches) == (True, 6)
    assert found.options["gradient_accumulation_steps"] == 6


def test_recomputation_where_nothing_else_fits() -> None:
    least = resident_bytes(8, recompute=False)
    found = divided(least - 1)
    assert (found.fits, found.recompute) == (True, True)
    assert found.step_s > divided(least).step_s
    assert not divided(resident_bytes(8, recompute=True) - 1).fits


def test_search_goes_on_while_it_recomputes() -> None:
    """Plans that recompute wait for nothing; another one, in micro-batches, is faster."""
    run = scenario(Options(), named_hardware("rtx-4090"), replace(named_model("llama3.2-1b"), context=2048))
    best = fit(replace(run, tokens=8192, recompute=None, divided=True)).best
    assert best is not None
    assert (best.micro_batches, best.recompute) == (2, False)


def test_given_division_is_kept() -> None:
    roomy = resident_bytes(1, recompute=False)
    run = scenario(replace(RESIDENT, gradient_accumulation_steps=4), replace(SLOW_HOST, device_bytes=roomy), llama())
    found = fit(replace(run, tokens=1024, recompute=True), ("gradient_accumulation_steps",)).best
    assert found is not None
    assert (found.micro_batches, found.recompute) == (4, True)


def test_run_keeps_its_own_accumulation() -> None:
    """``policy="auto"`` of an optimizer does not ask its program for other micro-batches, or for recomputation."""
    tight = replace(SLOW_HOST, device_bytes=resident_bytes(1, recompute=True))
    best = choose(scenario(Options(), tight, llama(), tokens=1024))
    assert best.policy != "resident"
    assert best.gradient_accumulation_steps is None


def test_remedy_is_the_least_that_fits() -> None:
    small = replace(SLOW_HOST, device_bytes=bytes_of(SLOW_HOST, policy="zero_offload"), host_bytes=1e6)

    def found(**changes: Any) -> Fit:
        return fit(scenario(Options(), replace(small, **changes), MODEL, tokens=64), kept_by_auto(Options()))

    remedies = found().remedies
    assert {"host", "device"} <= remedies.keys()
    for memory in ("host", "device"):
        assert found(**{f"{memory}_bytes": remedies[memory]}).best is not None
        assert found(**{f"{memory}_bytes": remedies[memory] - 1}).best is None


def card(model: str, **memory: float) -> Scenario:
    """A named model on a card with other memory."""
    return scenario_of(model, "rtx-4090", policy="auto", recompute=None, **memory)


@pytest.mark.parametrize(
    ("model", "device_bytes"), [("gemma2-27b", 107.1e9), ("gemma2-27b", 120e9), ("qwen3-32b", 150e9)]
)
def test_more_memory_never_stops_a_model_from_fitting(model: str, device_bytes: float) -> None:
    """They fit with 107.04 GB and 124.1 GB. The ways there lead through plans that lack more in sum."""
    found = SearchSpace(card(model, device_bytes=device_bytes)).fitting()
    assert found is not None
    assert not found.shortages


@pytest.mark.parametrize("model", ["gemma2-27b", "llama3-70b"])
def test_remedies_of_a_large_model_hold(model: str) -> None:
    found = fit(card(model))
    assert found.remedies.keys() == {"device"}
    both = {f"{memory}_bytes": found.nearest.needs.sums()[memory] for memory in found.nearest.shortages}
    for more in ({"device_bytes": found.remedies["device"]}, both):
        assert SearchSpace(card(model, **more)).fitting() is not None


def test_state_in_files_is_a_remedy_without_a_disk() -> None:
    asked = scenario(Options(), replace(SLOW_HOST, device_bytes=bytes_of(SLOW_HOST, policy="zero_offload")), MODEL)
    diskless = {"disk_read": None, "disk_write": None, "disk_bytes": None, "host_bytes": 100e6}
    found = fit(replace(asked, hardware=replace(asked.hardware, **diskless)), ("state_dtype", "split_master"))
    assert found.best is None
    assert found.remedies["files"] > 0


def test_fewer_tokens_are_a_remedy() -> None:
    half = replace(SLOW_HOST, device_bytes=resident_bytes(2, recompute=True))
    run = scenario(RESIDENT, half, llama(), policy="resident", tokens=1024, recompute=True)
    given = ("state_dtype", "offload_weights")
    assert fit(run, given).remedies["tokens"] == 512
    assert fit(replace(run, tokens=512), given).best is not None


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


# What policy="auto" asks.

MODEL = llama()


def chosen(hardware: Hardware, **options: Any) -> Options:
    return choose(scenario(Options(**options), hardware, MODEL, tokens=64))


def bytes_of(hardware: Hardware, **options: Any) -> int:
    plan = make_plan(MODEL.params, resolve_stride(Options(**options), hardware, MODEL.params))
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
    assert choose(scenario(in_files, tight, MODEL, tokens=64)).in_files


def test_error_if_nothing_fits() -> None:
    with pytest.raises(ValueError, match=r"no policy fits 'round': \w+ comes nearest and lacks .* GB of device memory"):
        chosen(replace(SLOW_HOST, device_bytes=1.0))


def test_convergence_options_are_kept() -> None:
    tight = replace(SLOW_HOST, device_bytes=bytes_of(SLOW_HOST, policy="resident") - 1)
    best = chosen(tight, topk_ratio=0.2, update_interval=2, max_grad_norm=1.0)
    assert (best.topk_ratio, best.update_interval, best.max_grad_norm) == (0.2, 2, 1.0)


def test_same_inputs_give_the_same_options() -> None:
    tight = replace(SLOW_HOST, device_bytes=bytes_of(SLOW_HOST, policy="resident") - 1)
    assert chosen(tight) == chosen(tight)


def test_shape_from_parameters_only() -> None:
    shape = shape_of(MODEL.params)
    assert (shape.layers, shape.hidden, shape.context) == (4, 512, 0)
    assert choose(scenario(Options(), SLOW_HOST, shape, tokens=64)).policy == "resident"


def test_model_that_begins_with_a_scalar() -> None:
    shape = shape_of([ParamSpec("scale", (), BFLOAT16), *MODEL.params])
    assert choose(scenario(Options(), SLOW_HOST, shape, tokens=64)).policy == "resident"


def test_device_is_filled_up_to_its_memory() -> None:
    """Each parameter that stays also keeps a pending gradient: filling the memory with state alone would overflow."""
    hardware = replace(named_hardware("h200"), device_bytes=70e9)
    model = named_model("llama2-7b")
    plain = forecast(Options(topk_ratio=0.0), scenario(Options(), hardware, model, tokens=2048))
    filled = row("zenflow", scenario(Options(topk_ratio=0.0, **FILLED), hardware, model, tokens=2048))
    assert filled.fits
    assert plain.device_bytes + 0.85 * (70e9 - plain.device_bytes) < filled.device_bytes
    assert filled.device_bytes <= plain.device_bytes + 0.9 * (70e9 - plain.device_bytes)


def row(label: str, asked: Scenario) -> Forecast:
    """The row of the table of ``plan``."""
    (found,) = (each for each in predict(asked).forecasts if each.label == label)
    return found


TRIED: list[tuple[Hardware, ModelShape, dict[str, Any]]] = [
    (machine(), layers(8), {"topk_ratio": 0.0, "device_share": 0.0, "update_interval": 1}),
    (TIGHT, layers(8), {}),
    (TIGHT, layers(8), {"nvme_path": "scratch"}),
    (SLOW_HOST, llama(), {"update_stride": 4}),
    (named_hardware("h200"), named_model("llama2-13b"), {}),
    (named_hardware("4xa100-40g-pcie4"), named_model("llama2-7b"), {**FILLED, "nvme_path": "scratch"}),
]


@pytest.mark.parametrize("case", TRIED, ids=range(len(TRIED)))
def test_every_question_has_the_same_answer(case: tuple[Hardware, ModelShape, dict[str, Any]]) -> None:
    """The optimizer's choice, the recommendation of ``plan``, and the best plan of ``--models`` with the same given."""
    hardware, model, given = case
    asked = scenario(Options(**given), hardware, model, tokens=64)
    predicted = predict(asked)
    best = predicted.recommended
    assert best is not None
    assert changed(choose(asked)) == best.options
    assert fit(asked, kept_by_auto(asked.options)).best == best
    fitting = [each.step_s for each in predicted.forecasts if each.fits]
    assert best.step_s * (1 - WORTH_IT) <= min(fitting)


def test_every_place_has_a_row() -> None:
    asked = scenario(Options(nvme_path="scratch"), SLOW_HOST, MODEL, tokens=64)
    of_policies = ["resident", "zero_offload", "twinflow", "deep_optimizer_states", "zenflow"]
    in_files = ["zenflow, files", "zero_infinity"]
    assert [each.label for each in predict(asked).forecasts] == of_policies + in_files
    no_disk = replace(SLOW_HOST, disk_read=None, disk_write=None)
    assert [each.label for each in predict(replace(asked, hardware=no_disk)).forecasts] == of_policies


# On the first, one streams all subgroups over a fast link: a ratio of 0.75 is slower than 1.0, and 0.25 is fastest.
LOCAL_BEST = machine(link_to_host=8e6, link_to_device=8e6, adam_per_core=1e5, device_bandwidth=1e9)
SMALL = ((LOCAL_BEST, layers(8)), (replace(SLOW_HOST, device_bytes=1e9), llama(2)))


@pytest.mark.parametrize("case", SMALL, ids=range(len(SMALL)))
def test_rows_are_the_fastest_of_their_places(case: tuple[Hardware, ModelShape]) -> None:
    """Of all ratios and strides, the zenflow plans with the row's residents or the given ones."""
    hardware, model = case
    asked = scenario(Options(update_interval=1, nvme_path="scratch"), hardware, model, tokens=1)
    for found in predict(asked).forecasts:
        place = {"policy": found.policy, "offload_device": found.options.get("offload_device", "cpu")}
        for ratio, stride in itertools.product((1.0, 0.75, 0.5, 0.25), (None, "auto")):
            for share in {asked.options.device_share, found.options.get("device_share", 0.25)}:
                changes: dict[str, Any] = {"ratio": ratio, "update_stride": stride, "device_share": share, **place}
                options = resolve_stride(replace(asked.options, **changes), hardware, model.params)
                other = forecast(options, asked)
                assert not other.fits or found.step_s * (1 - WORTH_IT) <= other.step_s, (found.title, changes)


def test_choice_keeps_options_that_are_not_read() -> None:
    best = chosen(SLOW_HOST, topk_ratio=0.3, staleness=1)
    assert (best.policy, best.topk_ratio, best.staleness) == ("resident", 0.3, 1)


def test_fewest_residents_without_a_stall() -> None:
    """As by hand above: two blocks of two layers are enough; ``"fill"`` keeps all."""
    options = Options(topk_ratio=0.0, device_share=0.0, update_interval=1, update_stride=None)
    small = machine(device_bytes=forecast(options, scenario(options, machine(), layers(8))).device_bytes + 80e6)
    found = row("zenflow", scenario(options, small, layers(8)))
    assert found.step_s == pytest.approx(24.0)
    assert found.options["device_share"] == 4 * LAYER_STATE
    filled = row("zenflow", scenario(replace(options, **FILLED), machine(), layers(8)))
    assert filled.options["device_share"] == 8 * LAYER_STATE


def test_twinflow_keeps_no_more_than_it_needs() -> None:
    """A host that is never waited for needs no resident parameters."""
    fast = machine(adam_per_core=1e12, link_to_host=1e12, link_to_device=1e12)
    asked = scenario(Options(), fast, layers(8))
    assert row("twinflow", asked).options["ratio"] == 0.75
    assert "ratio" not in row("deep_optimizer_states", asked).options
