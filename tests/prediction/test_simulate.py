"""Tests simulated timelines of cases that can be done by hand, and invariants of all timelines."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from tests.support.machines import ELEMENTS, layers, llama, machine
from zenflow_compile.options.options import Options
from zenflow_compile.performance import models
from zenflow_compile.performance.model_shape import flops_per_token
from zenflow_compile.performance.traffic import traffic_of
from zenflow_compile.planning.plan import Plan
from zenflow_compile.planning.planners import make_plan
from zenflow_compile.prediction.lanes import Clock, Span
from zenflow_compile.prediction.simulate import simulate, steady_step
from zenflow_compile.profiling.chrome_trace import chrome_trace
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.report import print_report
from zenflow_compile.profiling.summary import summarize
from zenflow_compile.timeline import Event

S = 1_000_000_000  # a second
SMALL_WINDOW = 40_000_000  # of files: less than half of their state

POLICIES: list[dict[str, Any]] = [
    {"policy": "resident"},
    {"policy": "zero_offload"},
    {"policy": "twinflow", "ratio": 0.37},
    {"policy": "deep_optimizer_states", "update_stride": 2},
    {"policy": "zero_infinity", "nvme_path": "scratch", "host_window_bytes": SMALL_WINDOW},
    {"policy": "zenflow"},
    {"policy": "zenflow", "update_interval": 3, "device_share": 0.0, "staleness": 1},
    {"policy": "zenflow", "overlap_step": False},
    {"policy": "zenflow", "gradient_transfer": "mean"},
    {"policy": "zenflow", "gradient_transfer": "int8"},
    {"policy": "zenflow", "update_stride": 3},
    {"policy": "zenflow", "offload_device": "nvme", "nvme_path": "scratch", "host_window_bytes": SMALL_WINDOW},
]


def plan_of(model: Any, **options: Any) -> Plan:
    return make_plan(model.params, Options(**options))


def spans(recording: Recording, lane: str, kind: str, step: int) -> list[tuple[str, float, float]]:
    """Name, begin and end in seconds from the start of ``step``, which is a recorded one."""
    (start,) = (e.start_ns for e in recording.events if e.lane == "step" and e.step == step)
    return [
        (event.param, (event.start_ns - start) / S, (event.end_ns - start) / S)
        for event in recording.events
        if (event.lane, event.kind, event.step) == (lane, kind, step)
    ]


def step_times(recording: Recording) -> dict[int, float]:
    return {event.step: event.duration_ns / S for event in recording.events if event.lane == "step"}


# By hand. Forwards of 1 s, backwards of 2 s.


def test_resident_computes_and_updates() -> None:
    model = layers(2)
    recording = simulate(plan_of(model, policy="resident"), machine(device_bandwidth=28e6), model, tokens=1, steps=2)
    assert step_times(recording) == {1: 8.0, 2: 8.0}
    assert spans(recording, "compute", "forward", 1) == [("layer0", 0.0, 1.0), ("layer1", 1.0, 2.0)]
    assert spans(recording, "compute", "backward", 1) == [("layer1", 2.0, 4.0), ("layer0", 4.0, 6.0)]
    assert spans(recording, "compute", "update", 1) == [("", 6.0, 8.0)]
    assert {event.lane for event in recording.events} == {"compute", "step"}


def test_host_updates_block_at_the_step() -> None:
    model = layers(2)
    plan = plan_of(model, policy="zero_offload")
    recording = simulate(plan, machine(link_to_host=1e6), model, tokens=1, steps=2)
    assert spans(recording, "D2H", "copy", 2) == [("layer1", 4.0, 6.0), ("layer0", 6.0, 8.0)]
    assert spans(recording, "worker 0", "host_update", 2) == [("layer1", 6.0, 7.0), ("layer0", 8.0, 9.0)]
    # Uploads keep the forward's order, though the second layer's weights were done first.
    assert spans(recording, "H2D", "copy", 2) == [("layer0", 9.0, 10.0), ("layer1", 10.0, 11.0)]
    assert spans(recording, "compute", "wait", 2) == [("layer0", 6.0, 10.0), ("layer1", 10.0, 11.0)]
    assert step_times(recording) == {1: 11.0, 2: 11.0}
    assert recording.blocking


def test_clipped_updates_start_after_the_backward() -> None:
    model = layers(2)
    plan = plan_of(model, policy="zero_offload")
    recording = simulate(plan, machine(link_to_host=4e6), model, tokens=1, steps=1, final_at_step=True)
    assert spans(recording, "D2H", "copy", 1) == [("layer1", 4.0, 4.5), ("layer0", 6.0, 6.5)]
    # The later layer's gradient is there first; the earlier layer takes the workers from it, for it is needed earlier.
    expected = [("layer1", 6.0, 6.5), ("layer0", 6.5, 7.5), ("layer1", 7.5, 8.0)]
    assert spans(recording, "worker 0", "host_update", 1) == expected
    assert step_times(recording) == {1: 9.5}


def test_windows_are_flushed_by_phase() -> None:
    """Layer 0 is flushed at even steps without slack; layer 1 at odd ones, and is done before it is needed."""
    model = layers(2)
    plan = plan_of(model, topk_ratio=0.0, device_share=0.0, update_interval=2)
    assert [param.phase for param in plan.params] == [0, 1]
    hardware = machine(adam_per_core=30e6 / 28)  # windows of two gradients take 30 bytes per element
    recording = simulate(plan, hardware, model, tokens=1, steps=4)
    assert step_times(recording) == {2: 6.0, 3: 9.0, 4: 6.0, 5: 9.0}
    assert spans(recording, "worker 0", "host_update", 2) == [("layer0", 7.0, 8.0)]
    assert spans(recording, "H2D", "copy", 2) == [("layer0", 8.0, 9.0)]
    assert spans(recording, "compute", "wait", 3) == [("layer0", 0.0, 3.0)]
    assert spans(recording, "worker 0", "host_update", 3) == [("layer1", 8.0, 9.0)]
    assert spans(recording, "H2D", "copy", 3) == [("layer1", 9.0, 10.0)]
    assert spans(recording, "compute", "wait", 4) == []
    assert spans(recording, "slack", "slack", 2) == [("layer0", 6.0, 6.0)]
    assert spans(recording, "slack", "slack", 3) == [("layer1", 7.0, 10.0)]
    flushed = [(event.step, event.param) for event in recording.events if event.kind == "flush"]
    assert flushed == [(2, "layer0"), (3, "layer1"), (4, "layer0"), (5, "layer1")]
    clipped = simulate(plan, hardware, model, tokens=1, steps=4, final_at_step=True)
    assert step_times(clipped) == {2: 7.0, 3: 9.0, 4: 7.0, 5: 9.0}


def test_staleness_adds_a_whole_step() -> None:
    model = layers(2)
    plan = plan_of(model, topk_ratio=0.0, device_share=0.0, update_interval=2, staleness=1)
    recording = simulate(plan, machine(), model, tokens=1, steps=4)
    assert set(step_times(recording).values()) == {6.0}


def test_gradient_ring_holds_two_buffers() -> None:
    model = layers(3)
    plan = plan_of(model, policy="zero_offload")
    recording = simulate(plan, machine(link_to_host=4e5), model, tokens=1, steps=1)
    assert spans(recording, "D2H", "copy", 1) == [("layer2", 5.0, 10.0), ("layer1", 10.0, 15.0), ("layer0", 15.0, 20.0)]
    assert spans(recording, "compute", "wait", 1)[0] == ("layer0", 7.0, 10.0)
    assert spans(recording, "compute", "backward", 1)[-1] == ("layer0", 10.0, 12.0)


def test_residents_are_updated_while_the_host_works() -> None:
    model = layers(2)
    plan = plan_of(model, policy="twinflow", ratio=0.5)
    recording = simulate(plan, machine(device_bandwidth=28e6), model, tokens=1, steps=1)
    seventh = 4 / 28  # a gradient read and written to split it, weights read and written to merge them
    end = 6 + seventh
    expected = {("D2H", "copy"): ("layer0", 0, 1), ("compute", "update"): ("", 0, 1)}
    expected |= {("worker 0", "host_update"): ("layer0", 1, 2), ("compute", "wait"): ("layer0", 1, 3)}
    for (lane, kind), (name, begin, until) in expected.items():
        found = (name, pytest.approx(end + begin), pytest.approx(end + until))
        assert spans(recording, lane, kind, 1) == [found]
    assert step_times(recording) == {1: pytest.approx(end + 3 + seventh)}


@pytest.mark.parametrize(
    ("count", "step", "stalls"),
    [(1, 4.0, []), (3, 12.0, []), (5, 20.0, [])],
)
def test_streamed_copies_overlap(count: int, step: float, stalls: list[Any]) -> None:
    """Three buffers: the fourth subgroup comes in when the first one's state is back, not when the second one's is."""
    model = layers(count)
    options = {"policy": "deep_optimizer_states", "update_stride": 1}
    hardware = machine(link_to_host=12e6, link_to_device=12e6, device_bandwidth=28e6)
    recording = simulate(plan_of(model, **options), hardware, model, tokens=1, steps=2)
    assert step_times(recording) == {1: step, 2: step}
    end = 3.0 * count
    into = [(f"subgroup {i}", count + i, count + i + 1) for i in range(min(count, 3))]
    into += [(f"subgroup {i}", end + i - 1, end + i) for i in range(3, count)]
    assert spans(recording, "H2D", "state", 1) == into
    assert spans(recording, "D2H", "state", 1)[:2] == [
        (f"subgroup {i}", end + i + 1, end + i + 2) for i in range(min(count, 2))
    ]
    assert spans(recording, "compute", "wait", 1) == stalls


def test_host_updates_overlap_streamed_subgroups() -> None:
    model = layers(2)
    options = {"policy": "deep_optimizer_states", "update_stride": 2}
    recording = simulate(plan_of(model, **options), machine(link_to_device=12e6), model, tokens=1, steps=1)
    # The link down is the slow one: state is not read again before it is back.
    back = 13 - (8 + 1 / 6)
    assert spans(recording, "H2D", "state", 1) == [("subgroup 1", pytest.approx(back), pytest.approx(back + 1))]
    assert spans(recording, "D2H", "copy", 1) == [("layer0", 6.0, 7.0)]
    assert spans(recording, "worker 0", "host_update", 1) == [("layer0", 7.0, 8.0)]
    assert spans(recording, "D2H", "state", 1) == [("subgroup 1", 7.0, 13.0)]
    assert step_times(recording) == {1: pytest.approx(8 + 1 / 6)}


def test_file_state_is_read_ahead_and_written_back() -> None:
    """The cache has space for one chunk: the one that is used first, until it is written. The next waits for that."""
    model = layers(2)
    plan = plan_of(model, policy="zero_infinity", nvme_path="scratch", host_window_bytes=12_000_000)
    recording = simulate(plan, machine(), model, tokens=1, steps=1, final_at_step=True)
    assert spans(recording, "disk", "read", 1) == [("layer0", 0.0, 1.0), ("layer1", 9.0, 10.0)]
    assert spans(recording, "worker 0", "host_update", 1) == [("layer0", 7.0, 8.0), ("layer1", 10.0, 11.0)]
    assert spans(recording, "disk", "write", 1) == [("layer0", 8.0, 9.0), ("layer1", 11.0, 12.0)]
    assert step_times(recording) == {1: 12.0}


def test_state_in_files_takes_turns_in_memory() -> None:
    """Three chunks, two places. Gradients come in the order 2, 1, 0; places are given in the order 0, 1, 2.

    Chunk 2 waits for the place of chunk 0, though chunk 1 is written first. Its write ends in the next step, and only
    then chunk 1, which is next, gets its place; chunk 0 has got that of chunk 1 before.
    """
    model = layers(3)
    plan = plan_of(model, policy="zero_infinity", nvme_path="scratch", host_window_bytes=24_000_000)
    recording = simulate(plan, machine(disk_write=2e6), model, tokens=1, steps=2, final_at_step=True)
    assert step_times(recording) == {1: 25.0, 2: 25.0}
    reads = [("layer1", 5.0, 6.0), ("layer2", 22.0, 23.0), ("layer0", 23.0, 24.0)]
    assert spans(recording, "disk", "read", 2) == reads
    updates = [("layer1", 9.0, 10.0), ("layer0", 10.0, 11.0), ("layer2", 23.0, 24.0)]
    assert spans(recording, "worker 0", "host_update", 2) == updates
    writes = [("layer1", 10.0, 16.0), ("layer0", 16.0, 22.0), ("layer2", 24.0, 30.0)]
    assert spans(recording, "disk", "write", 2) == writes


def test_turns_follow_the_backward() -> None:
    """As soon as a gradient is produced, its update is queued: the last layer's state is needed first."""
    model = layers(2)
    plan = plan_of(model, policy="zero_infinity", nvme_path="scratch", host_window_bytes=12_000_000)
    recording = simulate(plan, machine(), model, tokens=1, steps=1)
    # The read of layer 1 begins in the step before, when layer 0 is written.
    assert spans(recording, "worker 0", "host_update", 1) == [("layer1", 5.0, 6.0), ("layer0", 8.0, 9.0)]
    assert spans(recording, "disk", "write", 1) == [("layer1", 6.0, 7.0), ("layer0", 9.0, 10.0)]
    assert spans(recording, "disk", "read", 1) == [("layer0", 7.0, 8.0), ("layer1", 10.0, 11.0)]
    assert step_times(recording) == {1: 11.0}


def test_resident_state_is_not_moved() -> None:
    model = layers(2)
    plan = plan_of(model, policy="zero_infinity", nvme_path="scratch")
    recording = simulate(plan, machine(), model, tokens=1, steps=1, final_at_step=True)
    assert not [event for event in recording.events if event.lane == "disk"]
    assert step_times(recording) == {1: 10.0}, "as long as with state in memory"


def test_resident_state_does_not_wait_for_files() -> None:
    """Memory for seven of eight layers' state keeps that of the first three. Blocks have two layers each."""
    model = layers(8)
    plan = plan_of(model, policy="zero_infinity", nvme_path="scratch", host_window_bytes=7 * 12_000_000)
    recording = simulate(plan, machine(disk_read=1e5), model, tokens=1, steps=1)
    moved = {event.param: event.bytes for event in recording.events if event.lane == "disk"}
    assert moved == {"layers.1": 12_000_000, "layers.2": 24_000_000, "layers.3": 24_000_000}
    copied = {param: end for param, _, end in spans(recording, "D2H", "copy", 1)}
    waited = {param: begin - copied[param] for param, begin, _ in spans(recording, "worker 0", "host_update", 1)}
    assert waited["layers.0"] == 0.0
    assert min(waited[name] for name in moved) > 100.0


def test_two_devices_own_half_each() -> None:
    model = layers(2)
    plan = plan_of(model, policy="zero_offload")
    hardware = machine(devices=2, cores=6, peer_bandwidth=1e6)
    recording = simulate(plan, hardware, model, tokens=1, steps=1)
    # Half of a gradient goes to the other rank, 1 s; half of it goes down, half of the weights come up, half come over.
    exchanged = spans(recording, "peers", "copy", 1)
    assert exchanged == [("layer1", 4.0, 5.0), ("layer0", 6.0, 7.0), ("layer0", 8.5, 9.5), ("layer1", 9.5, 10.5)]
    assert spans(recording, "D2H", "copy", 1) == [("layer1", 5.0, 5.5), ("layer0", 7.0, 7.5)]
    assert spans(recording, "worker 0", "host_update", 1) == [("layer1", 5.5, 6.0), ("layer0", 7.5, 8.0)]
    assert spans(recording, "H2D", "copy", 1) == [("layer0", 8.0, 8.5), ("layer1", 8.5, 9.0)]
    assert step_times(recording) == {1: 10.5}
    assert recording.model_bytes == 2 * ELEMENTS


def test_nodes_average_shares_over_the_network() -> None:
    model = layers(2)
    plan = plan_of(model, policy="zero_offload")
    one = machine(devices=2, cores=6, peer_bandwidth=1e6, network_bandwidth=0.5e6)
    recording = simulate(plan, one.across(2), model, tokens=1, steps=1)
    # Of its half, 1 MB, a device sends all to the other node: half of it reduced, half gathered.
    assert spans(recording, "network", "copy", 1) == [("layer1", 5.0, 7.0), ("layer0", 7.0, 9.0)]
    assert spans(recording, "D2H", "copy", 1) == [("layer1", 7.0, 7.5), ("layer0", 9.0, 9.5)]
    assert step_times(recording) == {1: 12.5}
    assert recording.model_bytes == 2 * ELEMENTS


def test_recomputation_costs_another_forward() -> None:
    model = layers(2)
    plan = plan_of(model, policy="resident")
    recording = simulate(plan, machine(), model, tokens=1, steps=1, recompute=True)
    assert step_times(recording) == {1: 8.0}


@pytest.mark.parametrize("name", ["llama2-7b", "qwen2.5-1.5b", "dos-20b"])
def test_forward_and_backward_do_all_flops(name: str) -> None:
    """Tied heads count; embeddings that are only looked up do not."""
    model = models.model(name)
    recording = simulate(plan_of(model, policy="resident"), machine(device_flops=1e15), model, tokens=100, steps=1)
    computed = sum(event.duration_ns for event in recording.events if event.kind in ("forward", "backward")) / S
    assert computed == pytest.approx(flops_per_token(model, model.context) * 100 / 5e14, rel=1e-3)


# Host memory is shared.


def test_transfers_share_host_memory() -> None:
    """10 and 30 bytes/s on 20: half speed, until the first is done. Compute keeps its own pace."""
    clock = Clock(20.0)
    ends: dict[str, float] = {}

    def span(lane: str, seconds: float, rate: float) -> None:
        clock.start(lane, Span(seconds, rate, lambda: ends.setdefault(lane, clock.now)))

    span("copy", 2.0, 10.0)
    span("worker", 3.0, 30.0)
    span("compute", 3.0, 0.0)
    while clock.advance():
        pass
    # After 4 s the copy is done, and the worker has 1 s to go, at two thirds.
    assert ends == {"copy": 4.0, "worker": 5.5, "compute": 3.0}


def test_contention_slows_copies_and_updates() -> None:
    """Updates alone want twice the bandwidth; while a gradient is copied, both want 30 of 14 MB/s."""
    model = layers(2)
    plan = plan_of(model, policy="zero_offload")
    recording = simulate(plan, machine(host_bandwidth=14e6), model, tokens=1, steps=1)
    first = 6 + 0.5 * 30 / 14  # half of the later layer's update is done when the earlier layer's gradient comes
    (later, earlier) = spans(recording, "worker 0", "host_update", 1)
    assert later == ("layer1", 5.0, pytest.approx(first))
    copied = first + 1 - (first - 6) * 14 / 30
    assert spans(recording, "D2H", "copy", 1)[1] == ("layer0", 6.0, pytest.approx(copied))
    assert earlier == ("layer0", pytest.approx(copied), pytest.approx(copied + 2))
    assert step_times(recording) == {1: pytest.approx(copied + 4)}


# What holds for every plan.


def busy(bandwidth: float) -> Any:
    """A machine with three workers on which everything competes for host memory."""
    links = {"link_to_host": 1.5e7, "link_to_device": 1.5e7}
    return machine(device_flops=1e10, device_bandwidth=1e9, host_bandwidth=bandwidth, cores=5, **links)


@pytest.fixture(params=POLICIES, ids=lambda options: "-".join(map(str, options.values())))
def case(request: pytest.FixtureRequest) -> tuple[Plan, Recording, float]:
    model = llama()
    plan = plan_of(model, **request.param)
    bandwidth = 3e7
    return plan, simulate(plan, busy(bandwidth), model, tokens=64), bandwidth


def test_moved_bytes_match_the_plan(case: tuple[Plan, Recording, float]) -> None:
    plan, recording, _ = case
    steps = len(step_times(recording))
    moved: dict[str, int] = defaultdict(int)
    for event in recording.events:
        key = "host" if event.is_worker else f"{event.lane} {event.kind}"
        moved[key] += event.bytes
    traffic = traffic_of(plan)
    if traffic is not None:
        assert moved["host"] == pytest.approx(steps * traffic.host, abs=steps)
        assert moved["D2H copy"] == pytest.approx(steps * traffic.to_host, abs=steps)
        assert moved["H2D copy"] == pytest.approx(steps * traffic.to_device, abs=steps)
    streamed = steps * sum(param.whole_state_bytes for param in plan.params if param.streamed)
    assert moved["H2D state"] == moved["D2H state"] == streamed == steps * (traffic.state if traffic else 0)
    assert moved["disk read"] == moved["disk write"] == pytest.approx(steps * (traffic.files if traffic else 0.0))


def test_every_flush_is_updated_and_uploaded(case: tuple[Plan, Recording, float]) -> None:
    plan, recording, _ = case
    names = {param.name: param for param in plan.params}
    flushed = [event for event in recording.events if event.kind == "flush"]
    steps = step_times(recording)
    for param in plan.params:
        own = sorted(event.step for event in flushed if event.param == param.name)
        due = [step for step in steps if param.offloaded and param.deferred and step % param.interval == param.phase]
        assert own == due, param.name
    weights: dict[int, int] = defaultdict(int)
    for event in flushed:
        param = names[event.param]
        weights[event.step] += param.deferred * param.length * param.dtype.itemsize
    uploaded: dict[int, int] = defaultdict(int)
    for event in recording.events:
        if event.lane == "H2D" and event.kind == "copy":
            uploaded[event.step] += event.bytes
    assert uploaded == weights


def test_lanes_do_one_thing_at_a_time(case: tuple[Plan, Recording, float]) -> None:
    _, recording, _ = case
    lanes: dict[str, list[Event]] = defaultdict(list)
    for event in recording.events:
        if event.lane not in ("windows", "slack"):
            lanes[event.lane].append(event)
    for lane, events in lanes.items():
        for before, after in pairwise(events):
            assert before.end_ns <= after.start_ns, lane


def test_host_bandwidth_is_never_exceeded(case: tuple[Plan, Recording, float]) -> None:
    """In no stretch of time do the transfers that lie in it touch more bytes than the bandwidth allows."""
    _, recording, bandwidth = case
    touching = [event for event in recording.events if event.bytes and event.lane != "peers"]
    starts = sorted({event.start_ns for event in touching})
    for start in starts[:: max(1, len(starts) // 40)]:
        inside = sorted((event for event in touching if event.start_ns >= start), key=lambda event: event.end_ns)
        touched = 0
        for event in inside:
            touched += event.bytes
            assert touched <= bandwidth * (event.end_ns - start + len(inside)) / S + len(inside)


def test_report_and_trace_take_a_simulation(case: tuple[Plan, Recording, float]) -> None:
    plan, recording, _ = case
    output = io.StringIO()
    print_report([recording], Console(width=100, file=output))
    text = output.getvalue()
    assert "predicted: small-llama on round" in text
    assert "step time" in text
    assert json.dumps(chrome_trace([recording]))
    summary = summarize(recording)
    assert summary["policy"] == plan.policy
    assert summary["steps"] == len(step_times(recording))


def test_simulation_is_deterministic(case: tuple[Plan, Recording, float]) -> None:
    plan, recording, bandwidth = case
    hardware = busy(bandwidth)
    assert simulate(plan, hardware, llama(), tokens=64) == recording
    times = list(step_times(recording).values())
    steady = steady_step(plan, hardware, llama(), tokens=64)
    assert steady.seconds == pytest.approx(sum(times) / len(times), rel=0.02)


@pytest.mark.parametrize("options", POLICIES, ids=lambda options: "-".join(map(str, options.values())))
def test_overlap_never_costs_time(options: dict[str, Any]) -> None:
    model = llama()
    hardware = machine(device_flops=1e10, device_bandwidth=1e9, link_to_host=1.5e7, link_to_device=1.5e7)
    free = steady_step(plan_of(model, **options), hardware, model, tokens=64)
    waiting = steady_step(plan_of(model, **options | {"overlap_step": False}), hardware, model, tokens=64)
    assert free.seconds <= waiting.seconds * (1 + 1e-9)


# Refused.


def test_bad_input_is_refused() -> None:
    model = layers(2)
    plan = plan_of(model, policy="zero_infinity", nvme_path="scratch", host_window_bytes=12_000_000)
    with pytest.raises(ValueError, match="tokens=0 must be an integer >= 1"):
        simulate(plan, machine(), model, tokens=0)
    with pytest.raises(TypeError, match="final_at_step=1 must be True or False"):
        simulate(plan, machine(), model, tokens=1, final_at_step=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"workers=4 must be an integer in \[1, 3\]"):
        simulate(plan, machine(), model, tokens=1, workers=4)
    node = machine(devices=4, cores=32, peer_bandwidth=1e6)
    with pytest.raises(ValueError, match=r"workers=32 must be an integer in \[1, 8\]: the cores of 'round' for"):
        steady_step(plan, node, model, tokens=1, workers=32)
    with pytest.raises(ValueError, match="the plan is not one of layers"):
        simulate(plan, machine(), layers(3), tokens=1)
    with pytest.raises(ValueError, match=r"disk_read=None and disk_write=12000000\.0 of hardware 'round' must be"):
        simulate(plan, machine(disk_read=None), model, tokens=1)
    with pytest.raises(ValueError, match="peer_bandwidth=None of hardware 'round' must be bytes per second"):
        simulate(plan, replace(machine(), devices=2), model, tokens=1)
