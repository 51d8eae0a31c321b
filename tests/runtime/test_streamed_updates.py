"""Streamed state equals resident state bit for bit, moves both ways at the same time, and has bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.test_failures import failing_after
from tests.support.calls import calls_of, interrupted
from tests.support.copies import Copies, copied_by
from tests.support.training import ADAM, EAGER_BACKEND, ENTRIES, ENTRY_IDS, OFFLOAD_ALL, Training, assert_same
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.planning.plan import STREAM_BUFFERS
from zenflow_compile.runtime.device.copy_lanes import CopyError
from zenflow_compile.runtime.device.thread_lane import copy_without_gil
from zenflow_compile.runtime.device_updates.resident_updates import ResidentState, ResidentUpdates
from zenflow_compile.runtime.device_updates.streamed_updates import StreamBuffer, StreamedUpdates
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.timeline import D2H, H2D, Event, Timeline

pytestmark = pytest.mark.timeout(120)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
RESIDENT = {"policy": "resident"}
ALL = {"policy": "deep_optimizer_states", "update_stride": 1}
SECOND = {**ALL, "update_stride": 2}


def chain(dtype: torch.dtype, layers: int = 8) -> nn.Module:
    """The same weights at every call: the first layer reads the data, all others are equal."""
    torch.manual_seed(1)
    hidden = [nn.Linear(32, 32, bias=False) for _ in range(layers - 1)]
    return nn.Sequential(nn.Linear(16, 32, bias=False), *hidden, nn.Linear(32, 10, bias=False)).to(dtype)


def recorded(training: Training, begin: int, end: int) -> list[Event]:
    """Return the copies of state in these steps, the write-backs of the last one included."""
    training.optimizer.synchronize()  # or the last write-back of the step before is recorded, too
    training.optimizer.engine.timeline = timeline = Timeline()
    training.run(begin, end)
    training.optimizer.synchronize()
    training.optimizer.engine.timeline = None
    return sorted((event for event in timeline.events() if event.kind == "state"), key=lambda event: event.start_ns)


def on(lane: str, events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.lane == lane]


# Numbers.


@DTYPES
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_streamed_equals_resident_bit_for_bit(dtype: torch.dtype, entry: dict[str, Any] | None) -> None:
    expected = Training(entry, RESIDENT, dtype).run(0, 8)
    streamed = Training(entry, ALL, dtype).run(0, 8)
    assert len(streamed.optimizer.engine.registry.streamed.params) == 3
    assert_same(streamed.weights(), expected.weights())
    states = streamed.optimizer.state_dict()["state"], expected.optimizer.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for index, entry_state in states[0].items():
        assert entry_state.keys() == states[1][index].keys()
        for name, value in entry_state.items():
            assert torch.equal(value, states[1][index][name]) or name in ("plan", "chosen")


def test_missing_gradient_keeps_the_state() -> None:
    runs = []
    for options in (RESIDENT, ALL):  # two parameters in the first subgroup
        training = Training(None, options, build=chain)
        for step in range(9):
            training.backward(step)
            if step % 3:
                training.model[0].weight.grad = None
            training.optimizer.step()
            training.optimizer.zero_grad()
        runs.append(training)
    assert_same(runs[1].weights(), runs[0].weights())
    assert [runs[1].optimizer.state_dict()["state"][index]["step"] for index in (0, 2)] == [3.0, 9.0]


def test_returning_subgroups_displace_prefetched_ones() -> None:
    runs = []
    for options in (RESIDENT, ALL):  # more subgroups than buffers
        training = Training(None, options, build=chain)
        for step in range(6):
            training.backward(step)
            if step % 2:
                training.model[0].weight.grad = training.model[1].weight.grad = None
            training.optimizer.step()
            training.optimizer.zero_grad()
        runs.append(training)
    assert_same(runs[1].weights(), runs[0].weights())


def test_param_groups_share_a_subgroup() -> None:
    weights = []
    for options in (RESIDENT, ALL):
        params = [nn.Parameter(torch.full((16, 16), float(value))) for value in range(1, 13)]
        groups = [{"params": params[:1], "lr": 0.5}, {"params": params[1:]}]
        optimizer = ZenFlowAdamW(groups, **{**ADAM, **OFFLOAD_ALL, **options})
        assert {param.subgroup for param in optimizer.engine.plan.params[:3]} == {None if options is RESIDENT else 0}
        for step in range(5):
            optimizer.param_groups[1]["lr"] = 1e-2 / (1 + step)
            for param in params:
                param.grad = param.detach().cos() + step
            optimizer.step()
            optimizer.zero_grad()
        weights.append([param.detach().clone() for param in params])
        optimizer.close()
    assert_same(weights[1], weights[0])


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_clipping_and_skipped_steps_equal_resident(entry: dict[str, Any] | None) -> None:
    weights = []
    for options in (RESIDENT, ALL, {**ALL, "max_grad_norm": 0.05}, {**RESIDENT, "max_grad_norm": 0.05}):
        training = Training(entry, options)
        optimizer = training.optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
        for step in range(8):
            scaler.scale(training.loss(step) * (torch.inf if step in (2, 3) else 1.0)).backward()
            scaler.unscale_(optimizer)
            if "max_grad_norm" not in options:
                assert not float(torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)) <= 0.05
            before = training.weights_as_they_are()
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, training.weights(), before)) == (step in (2, 3))
            optimizer.zero_grad()
        assert optimizer.state_dict()["state"][0]["step"] == 6.0
        weights.append(training.weights())
    assert_same(weights[1], weights[0])
    assert_same(weights[2], weights[3])
    assert not torch.equal(weights[0][0], weights[2][0])


@DTYPES
def test_external_writes_count(dtype: torch.dtype) -> None:
    weights = []
    for options in (RESIDENT, ALL):
        training = Training(EAGER_BACKEND, options, dtype).run(0, 3)
        with torch.no_grad():
            training.model[2].weight.fill_(0.5)
        weights.append(training.run(3, 6).weights())
    assert_same(weights[1], weights[0])


def test_added_parameters_get_new_subgroups() -> None:
    weights = []
    for options in (RESIDENT, ALL):
        training = Training(None, options).run(0, 3)
        training.backward(3)  # what is prefetched by now is of the old buffers
        late = nn.Parameter(torch.linspace(-1, 1, 64 * 64).view(64, 64))  # larger than all before it
        training.optimizer.add_param_group({"params": [("late", late)]})
        for step in range(4, 8):
            late.grad = late.detach().cos()
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.backward(step)
        weights.append([*training.weights(), late.detach().clone()])
        subgroups = [param.subgroup for param in training.optimizer.engine.plan.params if param.streamed]
        assert len(set(subgroups)) == len(subgroups)
        training.optimizer.close()
    assert subgroups == [0, 1, 2, 3]
    assert_same(weights[1], weights[0])


# Traffic, memory and order.


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize(("stride", "streamed"), [(1, 7), (2, 4), (3, 3)])
def test_state_is_copied_one_time_each_way(entry: dict[str, Any] | None, stride: int, streamed: int) -> None:
    training = Training(entry, {**ALL, "update_stride": stride}, torch.bfloat16, chain).run(0, 2)
    state = sum(param.whole_state_bytes for param in training.optimizer.engine.plan.params if param.streamed)
    ahead = len(training.optimizer.engine.registry.streamed.loaded)
    events = recorded(training, 2, 6)
    ahead_after = len(training.optimizer.engine.registry.streamed.loaded)
    assert ahead == ahead_after  # what was there before the first of these steps is there again after the last
    for lane in (D2H, H2D):
        assert len(on(lane, events)) == 4 * streamed
        assert sum(event.bytes for event in on(lane, events)) == 4 * state
    names = [event.param for event in on(D2H, events)]
    assert names == sorted(names)[::4] * 4  # subgroup by subgroup, in their order
    assert set(names) == {f"subgroup {number}" for number in range(stride - 1, 9 if stride > 1 else 7, stride)}
    training.optimizer.close()


def test_device_memory_is_three_buffers() -> None:
    for layers in (4, 12):
        training = Training(None, ALL, build=lambda dtype, layers=layers: chain(dtype, layers)).run(0, 2)
        subgroups = training.optimizer.engine.plan.streamed_subgroups.values()
        largest = max(sum(param.whole_state_bytes for param in group) for group in subgroups)
        assert training.optimizer.device_bytes == STREAM_BUFFERS * largest
        assert training.optimizer.host_bytes == training.optimizer.engine.plan.host_bytes
    one = Training(None, ALL, build=lambda dtype: nn.Sequential(nn.Linear(16, 10, dtype=dtype))).run(0, 1)
    assert len(one.optimizer.engine.registry.streamed.buffers) == 1


def test_buffer_has_one_copy_at_a_time(copies: Copies) -> None:
    """State is not read from the host before its write-back has ended, either."""
    busy: list[tuple[int, int]] = []
    lock = threading.Lock()
    together = 0

    def watched(target: Tensor, source: Tensor) -> None:
        nonlocal together
        spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in (target, source)]
        with lock:
            assert not any(a < d and c < b for a, b in spans for c, d in busy), "two copies of one memory at once"
            busy.extend(spans)
            together = max(together, len(busy) // 2)
        threading.Event().wait(0.002)
        copy_without_gil(target, source)
        with lock:
            for span in spans:
                busy.remove(span)

    expected = Training(None, RESIDENT, build=chain).run(0, 5).weights()
    copies.make = watched
    assert_same(Training(None, ALL, build=chain).run(0, 5).weights(), expected)
    assert together == 2


def test_write_back_overlaps_the_next_copy_in(copies: Copies) -> None:
    """Neither copy ends before the other begins, so a runtime that serialized them would wait forever."""
    training = Training(None, ALL, build=chain).run(0, 2)
    training.optimizer.synchronize()
    began = {"zenflow-D2H": 0, "zenflow-H2D": 0}
    changed = threading.Condition()

    def meeting(target: Tensor, source: Tensor) -> None:
        lane = threading.current_thread().name
        with changed:
            began[lane] += 1
            changed.notify_all()
            # The second write-back overlaps the copy behind the first one: into the first buffer that came free.
            if lane == "zenflow-D2H" and began[lane] == 2:
                assert changed.wait_for(lambda: began["zenflow-H2D"] >= 1, timeout=30), "not in full duplex"
            if lane == "zenflow-H2D" and began[lane] == 1:
                assert changed.wait_for(lambda: began["zenflow-D2H"] >= 2, timeout=30), "not in full duplex"
        copy_without_gil(target, source)

    copies.make = meeting
    assert len(training.optimizer.engine.registry.streamed.loaded) == STREAM_BUFFERS  # prefetched before that
    training.step(2)
    training.optimizer.synchronize()
    assert began["zenflow-D2H"] == 7
    training.optimizer.close()


def test_step_does_not_wait_for_last_write_backs(copies: Copies) -> None:
    """The next forward does not wait, either: the write-backs are stopped until its loss is computed."""
    training = Training(None, ALL, build=chain).run(0, 2)
    training.optimizer.synchronize()
    count, passed = [0], threading.Event()

    def stopped(target: Tensor, source: Tensor) -> None:
        if threading.current_thread().name == "zenflow-D2H":
            count[0] += 1
            if count[0] > 7 - STREAM_BUFFERS:
                assert passed.wait(30), "the step waits for a write-back"
        copy_without_gil(target, source)

    copies.make = stopped
    training.step(2)
    training.loss(3)
    passed.set()
    training.optimizer.synchronize()
    assert_same(training.weights(), Training(None, RESIDENT, build=chain).run(0, 3).weights())
    training.optimizer.close()


def test_masters_are_compared_after_external_writes() -> None:
    with calls_of(ResidentState.reseed_master) as calls:
        training = Training(None, ALL, torch.bfloat16).run(0, 4)
        assert len(calls) == 3  # once each, for the masters' first values
        with torch.no_grad():
            training.model[2].weight.fill_(0.5)
        training.run(4, 6)
        assert len(calls) == 4


@pytest.mark.parametrize(("options", "entry"), [(ALL, None), (ALL, EAGER_BACKEND), (SECOND, EAGER_BACKEND)])
def test_first_subgroups_are_prefetched(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    training = Training(entry, options, build=chain).run(0, 2)
    streamed = training.optimizer.engine.registry.streamed
    seen: list[int] = []
    loss = training.loss(2)
    for each in streamed.params.values():
        each.param.register_hook(lambda grad: seen.append(len(streamed.loaded)))
    loss.backward()
    assert seen
    assert set(seen) == {STREAM_BUFFERS}
    training.optimizer.close()


def test_host_starts_first_and_resident_is_last() -> None:
    training = Training(EAGER_BACKEND, {**SECOND, "ratio": 0.8}, build=chain).run(0, 2)
    updates = [Workers.submit, StreamedUpdates._update, ResidentUpdates.update]
    with calls_of(*updates) as calls:
        training.step(2)
    order = [update.__qualname__ for update in updates]
    names = [call.name for call in calls]
    assert list(dict.fromkeys(names)) == order
    assert names == sorted(names, key=order.index)
    training.optimizer.close()


def test_subgroup_without_gradients_is_not_copied() -> None:
    training = Training(None, ALL, build=chain)
    unused = nn.Parameter(torch.ones(64, 64))
    training.optimizer.add_param_group({"params": [("unused", unused)]})
    training.run(0, 2)
    events = recorded(training, 2, 5)
    assert {event.param for event in events} == {f"subgroup {number}" for number in range(7)}
    assert training.optimizer.state_dict()["state"][9]["step"] == 0.0
    assert torch.equal(unused, torch.ones(64, 64))


# Failures.


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("calls", range(0, 14, 2))
def test_saved_state_continues_after_a_failed_copy(entry: dict[str, Any] | None, calls: int) -> None:
    training = Training(entry, ALL, torch.bfloat16, chain).run(0, 3)
    saved = training.saved()
    expected = training.run(3, 6).weights()
    training.load(saved)
    copy = failing_after(calls, copy_without_gil, OSError("on purpose"))
    with copied_by(copy), pytest.raises(RuntimeError) as caught:  # noqa: PT012
        training.run(3, 6)
        training.optimizer.synchronize()
    error: BaseException = caught.value
    while error.__cause__ is not None:
        error = error.__cause__
    assert isinstance(error, OSError)
    with pytest.raises(RuntimeError):
        training.step(6)
    training.optimizer.zero_grad()
    assert_same(training.load(saved).run(3, 6).weights(), expected)
    training.optimizer.close()


def test_failed_write_back_is_raised_by_close(copies: Copies) -> None:
    training = Training(None, ALL).run(0, 2)
    training.optimizer.synchronize()

    def broken(target: Tensor, source: Tensor) -> None:
        if threading.current_thread().name == "zenflow-D2H":
            raise OSError("on purpose")

    copies.make = broken
    training.step(2)
    with pytest.raises(CopyError):
        training.optimizer.close()
    training.optimizer.close()


def test_failed_buffer_allocation_changes_nothing() -> None:
    training = Training(None, ALL).run(0, 2)
    twin = Training(None, ALL).run(0, 2)
    too_little_memory = interrupted(StreamBuffer.__init__, torch.OutOfMemoryError("on purpose"))
    with too_little_memory, pytest.raises(torch.OutOfMemoryError):
        training.optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(64, 64)))]})
    assert_same(training.run(2, 5).weights(), twin.run(2, 5).weights())
