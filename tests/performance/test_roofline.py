"""The roofline's arithmetic, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zenflow_compile.performance.equations import limit_of
from zenflow_compile.performance.hardware import Bandwidths
from zenflow_compile.performance.traffic import Traffic, traffic_of
from zenflow_compile.planning.plan import ParamPlan, Placement, Plan
from zenflow_compile.planning.weight_memory import WeightMemory

WEIGHT = ParamPlan(
    index=0,
    name="w",
    shape=(1000, 1000),
    dtype=torch.bfloat16,
    placement=Placement.SPLIT_COLUMNS,
    dim=1,
    slices=1000,
    length=1000,
    k=100,
    interval=4,
)
BIAS = ParamPlan(index=1, name="b", shape=(1000,), dtype=torch.bfloat16, placement=Placement.DEVICE)
PLAN = Plan(policy="zenflow", params=(WEIGHT, BIAS))
REST = 900_000
FAST = Bandwidths(host=1e12, to_host=1e12, to_device=1e12)


def traffic(plan: Plan = PLAN) -> Traffic:
    found = traffic_of(plan)
    assert found is not None
    return found


def test_step_moves_its_share_of_every_window() -> None:
    """24 bytes of state, 4 gradients and an upload of 2 bytes each, once in 4 steps: 34 bytes for 4 steps."""
    found = traffic()
    assert found.host == REST * (24 + 2 * (4 + 1)) / 4
    assert found.to_host == REST * 2
    assert found.to_device == REST * 2 / 4
    assert found.host_per_window / 4 + found.host_per_gradient == found.host
    assert not found.blocking


def test_windows_of_different_lengths_add_up() -> None:
    short = replace(WEIGHT, index=2, interval=1, dtype=torch.float32)
    both = traffic(replace(PLAN, params=(WEIGHT, BIAS, short)))
    alone = traffic(replace(PLAN, params=(short,)))
    assert alone.host == REST * (24 + 4 * (1 + 1))
    assert both.host == traffic().host + alone.host
    assert both.to_device == traffic().to_device + alone.to_device
    assert both.host_per_window == REST * (24 + 2) + REST * (24 + 4)


def test_streamed_state_crosses_both_ways() -> None:
    """fp32 master and moments of a bf16 weight, apart from its gradient, which stays; fp32 weights are their master."""
    streamed = replace(WEIGHT, index=2, placement=Placement.HOST_STREAMED, slices=0, length=0, k=0, interval=1)
    alone, both = traffic(replace(PLAN, params=(streamed,))), traffic(replace(PLAN, params=(WEIGHT, BIAS, streamed)))
    assert (alone.state, alone.to_host, alone.to_device, alone.host, alone.files) == (12_000_000, 0, 0, 0, 0)
    assert both == replace(traffic(), state=12_000_000)
    assert traffic(replace(PLAN, params=(replace(streamed, dtype=torch.float32),))).state == 8_000_000
    limit = limit_of(both, Bandwidths(host=1e12, to_host=2e9, to_device=3e9), device_ms=1.0)
    assert limit.to_host_ms == pytest.approx((REST * 2 + 12e6) / 2e6)
    assert limit.to_device_ms == pytest.approx((REST * 2 / 4 + 12e6) / 3e6)
    assert limit.stall_ms == pytest.approx(limit.to_host_ms - 1.0)


def test_files_are_moved_unless_they_stay_in_memory() -> None:
    """Of seven states, memory for six holds two, and the others take turns in memory for four."""
    weights = tuple(replace(WEIGHT, index=index, in_file=True) for index in range(7))
    filed = replace(PLAN, params=weights, host_window_bytes=6 * REST * 12)
    found = traffic(filed)
    assert found.files == 5 * REST * 12 / 4
    assert found.files_per_window == 5 * REST * 12
    in_memory = replace(filed, params=tuple(replace(weight, in_file=False) for weight in weights))
    assert replace(found, files=0.0, files_per_window=0) == traffic(in_memory)
    assert traffic(replace(filed, host_window_bytes=7 * REST * 12)) == traffic(in_memory)
    assert traffic(replace(filed, host_window_bytes=REST * 12)).files_per_window == 7 * REST * 12
    limit = limit_of(found, replace(FAST, disk=1e9), device_ms=1.0)
    assert limit.disk_ms == pytest.approx(2 * 5 * REST * 12 / 4 / 1e6)
    assert limit.stall_ms == pytest.approx(limit.disk_ms - 1.0)
    assert limit_of(found, FAST, device_ms=1.0).disk_ms is None, "its bandwidth is not known"
    assert limit_of(traffic(), FAST, device_ms=1.0).disk_ms == 0.0


def test_files_move_once_per_window_of_their_parameter() -> None:
    """The first state stays in memory for five of them; of the others, the last is flushed in every step."""
    weights = [replace(WEIGHT, index=index, in_file=True) for index in range(6)]
    plan = replace(PLAN, params=(*weights[:5], replace(weights[5], interval=1)), host_window_bytes=5 * REST * 12)
    assert traffic(plan).files == REST * 12 * (4 / 4 + 1)
    assert traffic(plan).files_per_window == 5 * REST * 12


def test_smallest_interval_with_streaming_and_files() -> None:
    """21.6 MB through the disk per window; of 20 ms on a link of 1 GB/s, 12 ms are taken by state."""
    found = replace(traffic(), state=12_000_000, files_per_window=REST * 12)
    link = replace(FAST, to_host=1e9, to_device=1e9)
    up = replace(FAST, to_device=1e9)
    for bandwidths, device_ms, smallest in (
        (replace(FAST, disk=1e9), 22.0, 1),
        (replace(FAST, disk=1e9), 10.0, 3),
        (link, 20.0, 1),
        (link, 13.7, None),  # 1.8 MB of gradients and the state go to the host in every step
        (up, 12.5, 4),  # 1.8 MB of weights into half a millisecond
        (up, 12.0, None),
        (replace(FAST, to_host=1e9), 11.9, None),
    ):
        assert limit_of(found, bandwidths, device_ms=device_ms).smallest_interval == smallest


def test_blocking_plan_may_hide_streaming_and_files() -> None:
    whole = replace(WEIGHT, k=0, interval=1, blocking=True, placement=Placement.FILE, in_file=True)
    plan = replace(PLAN, params=(whole, replace(whole, index=1)), host_window_bytes=12_000_000)
    found = replace(traffic(plan), state=5_000_000)
    bandwidths = Bandwidths(host=1e12, to_host=1e9, to_device=1e9, disk=2e9)
    upload = 2 * 1_000_000 * 2 / 1e6
    hidden = limit_of(found, bandwidths, device_ms=30.0)
    assert hidden.disk_ms == pytest.approx(2 * 2 * 12_000_000 / 2e6)
    assert hidden.stall_ms == pytest.approx(upload)
    assert limit_of(found, bandwidths, device_ms=18.0).stall_ms == pytest.approx(24.0 - 18.0)


def test_nothing_offloaded_moves_nothing() -> None:
    assert traffic_of(Plan(policy="resident", params=(BIAS,))) is None
    assert traffic_of(replace(PLAN, params=(replace(WEIGHT, k=1000),))) is None


def test_times_are_bytes_over_bandwidth() -> None:
    limit = limit_of(traffic(), Bandwidths(host=1e9, to_host=2e9, to_device=3e9), device_ms=50.0)
    assert limit.host_ms == pytest.approx(REST * 34 / 4 / 1e6)
    assert limit.to_host_ms == pytest.approx(REST * 2 / 2e6)
    assert limit.to_device_ms == pytest.approx(REST * 2 / 4 / 3e6)
    assert (limit.stall_ms, limit.step_ms) == (0.0, 50.0)


@pytest.mark.parametrize("slow", ["host", "to_host", "to_device"])
def test_longest_lane_gives_the_stall(slow: str) -> None:
    bandwidths = replace(FAST, **{slow: 1e6})
    limit = limit_of(traffic(), bandwidths, device_ms=10.0)
    longest = getattr(limit, f"{slow}_ms")
    assert longest > 400
    assert limit.stall_ms == pytest.approx(longest - 10.0)
    assert limit.step_ms == pytest.approx(longest)


def test_blocking_plan_hides_no_update_or_upload() -> None:
    plan = replace(PLAN, params=(replace(WEIGHT, k=0, interval=1, blocking=True, placement=Placement.HOST),))
    limit = limit_of(traffic(plan), Bandwidths(host=1e9, to_host=1e9, to_device=1e12), device_ms=50.0)
    assert limit.stall_ms == limit.host_ms == pytest.approx(1_000_000 * 28 / 1e6)
    assert limit.step_ms == 50.0 + limit.stall_ms
    assert limit.smallest_interval is None
    slow_link = limit_of(traffic(plan), Bandwidths(host=1e9, to_host=1e6, to_device=1e12), device_ms=50.0)
    assert slow_link.step_ms == slow_link.to_host_ms, "gradients of a step cannot take longer than a step"


@pytest.mark.parametrize(
    ("bandwidths", "device_ms", "smallest"),
    [
        (FAST, 50.0, 1),
        # 23.4 ms per window and 1.8 ms per gradient, at 1 GB/s.
        (replace(FAST, host=1e9), 25.3, 1),
        (replace(FAST, host=1e9), 25.1, 2),
        (replace(FAST, host=1e9), 7.7, 4),
        (replace(FAST, host=1e9), 7.6, 5),
        (replace(FAST, host=1e9), 1.8, None),
        (replace(FAST, host=1e9), 0.0, None),
        # An upload takes 18 ms at 0.1 GB/s.
        (replace(FAST, to_device=1e8), 18.1, 1),
        (replace(FAST, to_device=1e8), 6.1, 3),
    ],
)
def test_smallest_interval(bandwidths: Bandwidths, device_ms: float, smallest: int | None) -> None:
    assert limit_of(traffic(), bandwidths, device_ms=device_ms).smallest_interval == smallest
    if smallest is None:
        return
    at_least = replace(PLAN, params=(replace(WEIGHT, interval=smallest),))
    assert limit_of(traffic(at_least), bandwidths, device_ms=device_ms).stall_ms == 0.0
    if smallest > 1:
        shorter = replace(PLAN, params=(replace(WEIGHT, interval=smallest - 1),))
        assert limit_of(traffic(shorter), bandwidths, device_ms=device_ms).stall_ms > 0.0


def test_loads_of_weights_need_the_link() -> None:
    """Four loads of the deferred part for two micro-batches, and no upload."""
    weights = WeightMemory(offloaded=frozenset({0}), reloaded=frozenset(), ring_bytes=4_000_000)
    plan = replace(PLAN, weights=weights, micro_batches=2)
    found = traffic(plan)
    assert (found.forward_loads, found.backward_loads, found.rewritten) == (2 * 2 * REST, 2 * 2 * REST, 0)
    assert found.to_device == found.upload_per_window == 0
    assert found.host == traffic().host
    limit = limit_of(found, Bandwidths(host=1e12, to_host=1e12, to_device=1e9), device_ms=5.0)
    assert limit.to_device_ms == pytest.approx(4 * 2 * REST / 1e6)
    assert limit.stall_ms == pytest.approx(4 * 2 * REST / 1e6 - 5.0)
    assert limit.smallest_interval is None
    again = traffic(replace(plan, weights=replace(weights, reloaded=frozenset({0}))))
    assert again.backward_loads == 2 * found.backward_loads


def test_resident_weights_come_back() -> None:
    weights = WeightMemory(offloaded=frozenset({0}), reloaded=frozenset(), ring_bytes=4_000_000)
    resident = replace(WEIGHT, placement=Placement.DEVICE, slices=0, length=0, k=0, interval=1)
    found = traffic(Plan(policy="resident", params=(resident, BIAS), weights=weights))
    assert (found.forward_loads, found.backward_loads, found.rewritten) == (2_000_000,) * 3
    limit = limit_of(found, Bandwidths(host=1e12, to_host=1e9, to_device=1e9), device_ms=1.0)
    assert (limit.to_host_ms, limit.to_device_ms) == (pytest.approx(2.0), pytest.approx(6.0))
