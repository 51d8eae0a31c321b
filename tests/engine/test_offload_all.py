"""``offload_all()`` gives the device's memory back, and every use that follows finds the same bits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.calls import interrupted
from tests.support.copies import Copies
from tests.support.host import host_memory
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, Training, batch, mlp, take_step
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.device.thread_lane import ThreadLane, copy_without_gil
from zenflow_compile.runtime.parameters import given_back_memory
from zenflow_compile.runtime.parameters.given_back_memory import DeviceMemory

STEPS = 6
WINDOWS: dict[str, Any] = {"topk_ratio": 0.25, "update_interval": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"topk_ratio": 0.25, "update_interval": 1},
    "windows": WINDOWS,
    "stale": {**WINDOWS, "update_interval": 1, "staleness": 1},
    "reselecting": {**WINDOWS, "update_interval": 2, "select_interval": 2},
    "summed": {**WINDOWS, "gradient_transfer": "mean"},
    "int8": {**WINDOWS, "gradient_transfer": "int8"},
    "auto": {"topk_ratio": 0.25, "update_interval": (1, 4)},
    "resident": {"policy": "resident"},
    "zero_offload": {"policy": "zero_offload"},
    "twinflow": {"policy": "twinflow", "ratio": 0.5},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2},
    "zenflow streamed": {**WINDOWS, "update_stride": 2},
}


def training(name: str, entry: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> Training:
    return Training(entry, OPTIONS[name], dtype)


def device_tensors(optimizer: ZenFlowAdamW) -> list[Tensor]:
    """State tensors on the device, found without the list that ``offload_all`` makes."""
    engine = optimizer.engine
    found = [tensor for state in engine.registry.device_updated.resident.states.values() for tensor in state.tensors()]
    for offloaded in engine.offloaded.values():
        device = offloaded.device
        found += [*device.rows.stored, device.score, device.norms, device.gradient, *device.selection.tensors()]
    transport = engine.registry.transport
    found += [buffer.memory for ring in (transport.down_ring, transport.up_ring) for buffer in ring.buffers]
    return [tensor for tensor in found if tensor.numel()]


def assert_equal_runs(one: Training, other: Training) -> None:
    assert all(map(torch.equal, one.weights(), other.weights()))
    saved, expected = one.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    for index, entry in expected.items():
        for key, value in entry.items():
            assert torch.equal(saved[index][key], value), (index, key)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_runs_are_equal(name: str, entry: dict[str, Any] | None) -> None:
    """Also in the middle of update windows, between micro-batches, and between backward and step."""
    dtype = torch.bfloat16 if entry else torch.float32
    plain, moved = training(name, entry, dtype), training(name, entry, dtype)
    for step in range(STEPS):
        for each in (plain, moved):
            each.backward(step)
            if each is moved and step == 2:
                each.optimizer.offload_all()
            each.backward(step + 10)
            if each is moved and step in (3, 4):
                each.optimizer.offload_all()
            torch.nn.utils.clip_grad_norm_(each.model.parameters(), 0.5)
            if each is moved and step == 4:
                each.optimizer.offload_all()
            each.optimizer.step()
            each.optimizer.zero_grad()
            if each is moved and step in (1, 5):
                each.optimizer.offload_all()
    assert moved.optimizer.device_bytes == 0
    assert_equal_runs(moved, plain)
    for each in (plain, moved):
        each.optimizer.close()
    assert all(map(torch.equal, moved.model.parameters(), plain.model.parameters()))


def test_memory_is_given_back_and_comes_back() -> None:
    trained = training("windows").run(0, 4)
    optimizer = trained.optimizer
    before, tensors = optimizer.device_bytes, device_tensors(optimizer)
    assert before > 10_000
    optimizer.offload_all()
    assert optimizer.device_bytes == 0
    for tensor in tensors:
        with pytest.raises(RuntimeError, match="offload_all"):
            tensor.add(1)
    optimizer.reload_all()
    assert optimizer.device_bytes == before
    assert all(tensor.data_ptr() for tensor in tensors)


def test_second_call_keeps_what_the_first_moved() -> None:
    plain, moved = training("windows").run(0, 4), training("windows").run(0, 4)
    moved.optimizer.offload_all()
    host_bytes = moved.optimizer.host_bytes
    moved.optimizer.offload_all()
    moved.optimizer.reload_all()
    moved.optimizer.reload_all()
    moved.optimizer.offload_all()
    assert moved.optimizer.host_bytes == host_bytes > plain.optimizer.host_bytes
    assert_equal_runs(moved.run(4, 6), plain.run(4, 6))


def test_nothing_to_move_before_the_first_use() -> None:
    optimizer = ZenFlowAdamW(mlp().parameters())
    optimizer.offload_all()
    optimizer.reload_all()
    optimizer.close()


def _weights_read(trained: Training) -> None:
    trained.model(batch(0)[0])


USES: dict[str, tuple[Callable[[Training], object], bool]] = {
    "state_dict": (lambda trained: trained.optimizer.state_dict(), True),
    "state": (lambda trained: trained.optimizer.state, True),
    "synchronize": (lambda trained: trained.optimizer.synchronize(), True),
    "model.state_dict": (lambda trained: trained.model.state_dict(), True),
    "forward": (_weights_read, True),
    "zero_grad": (lambda trained: trained.optimizer.zero_grad(), True),
    "backward": (lambda trained: trained.backward(9), False),
    "flush": (lambda trained: trained.optimizer.flush(), False),
    "reload_all": (lambda trained: trained.optimizer.reload_all(), False),
}


@pytest.mark.parametrize("use", USES)
def test_only_uses_of_the_device_bring_back(use: str) -> None:
    trained = training("stale").run(0, 3)
    trained.optimizer.offload_all()
    action, stays = USES[use]
    action(trained)
    assert bool(trained.optimizer.engine.device_memory.given_back) is stays


def test_norm_of_a_gradient_brings_back() -> None:
    trained = training("windows").run(0, 3)
    trained.backward(3)
    weight = trained.model[0].weight  # type: ignore[index]
    expected = weight.grad.clone()
    trained.optimizer.offload_all()
    torch.testing.assert_close(weight.grad.norm(), expected.norm())
    assert not trained.optimizer.engine.device_memory.given_back
    trained.optimizer.offload_all()
    assert torch.equal(weight.grad.clone(), expected)


def test_external_write_brings_back() -> None:
    plain, moved = training("windows").run(0, 4), training("windows").run(0, 4)
    moved.optimizer.offload_all()
    plain.optimizer.synchronize()
    for each in (plain, moved):
        with torch.no_grad():
            each.model[0].weight.mul_(1.5)  # type: ignore[index]
        each.optimizer.synchronize()
    assert_equal_runs(moved.run(4, 7), plain.run(4, 7))


@pytest.mark.parametrize("name", ["windows", "summed", "streamed"])
def test_state_saved_on_the_host_loads_there(name: str) -> None:
    """A state is saved and loaded while the memory is given back; the loaded run goes on as the saved one."""
    saved, plain = training(name).run(0, 4), training(name).run(0, 4)
    saved.optimizer.offload_all()
    state, weights = saved.optimizer.state_dict(), saved.model.state_dict()
    loaded = training(name).run(0, 1)
    loaded.optimizer.offload_all()
    loaded.model.load_state_dict(weights)
    loaded.optimizer.load_state_dict(state)
    loaded.optimizer.offload_all()
    fresh = training(name)
    fresh.model.load_state_dict(weights)
    fresh.optimizer.load_state_dict(state)
    assert_equal_runs(fresh, plain)
    assert_equal_runs(loaded.run(4, 7), plain.run(4, 7))


def test_group_is_added_to_given_back_memory() -> None:
    plain, moved = training("windows").run(0, 2), training("windows").run(0, 2)
    moved.optimizer.offload_all()
    layers = []
    for each in (plain, moved):
        torch.manual_seed(3)
        layer = nn.Linear(10, 40)
        each.optimizer.add_param_group({"params": list(layer.named_parameters(prefix="added"))})
        layers.append(layer)
    for step in range(2, 6):
        for each, layer in zip((plain, moved), layers, strict=True):
            take_step(layer(each.call(batch(step)[0])).square().mean(), each.optimizer)
        moved.optimizer.offload_all()  # more than the first time
    assert_equal_runs(moved, plain)
    assert all(map(torch.equal, layers[0].parameters(), layers[1].parameters()))


def test_skipped_step_keeps_the_memory_on_the_host() -> None:
    """As ``GradScaler`` does after an overflow: the gradients are dropped, and no step runs."""
    plain, moved = training("windows").run(0, 2), training("windows").run(0, 2)
    for each in (plain, moved):
        each.backward(7)
        if each is moved:
            each.optimizer.offload_all()
        each.optimizer.zero_grad()
    assert moved.optimizer.device_bytes == 0
    assert_equal_runs(moved.run(2, 5), plain.run(2, 5))


@pytest.mark.usefixtures("small_weights")
@pytest.mark.parametrize("name", ["windows", "resident"])
def test_weights_in_host_memory_stay_there(name: str) -> None:
    options = {**OPTIONS[name], "offload_weights": 1.0}
    plain, moved = Training(EAGER_BACKEND, options).run(0, 3), Training(EAGER_BACKEND, options).run(0, 3)
    moved.optimizer.synchronize()  # loads them
    moved.optimizer.offload_all()
    weights = moved.optimizer.engine.weights.weights.values()
    assert not any(weight.loaded for weight in weights)
    saved, expected = moved.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(saved[key], expected[key]) for key in expected)
    assert moved.optimizer.device_bytes == 0  # they were read on the host
    with torch.inference_mode():
        moved.call(batch(3)[0])
    assert moved.optimizer.device_bytes  # a load needs masters and rings
    moved.optimizer.offload_all()
    moved.run(3, 6)
    moved.optimizer.offload_all()  # copies of the next forward's weights are under way
    moved.run(6, 7)
    plain.run(3, 7)
    moved.optimizer.offload_all()
    moved.optimizer.close()
    plain.optimizer.close()
    assert all(map(torch.equal, moved.model.parameters(), plain.model.parameters()))


# Calls at the wrong time.


def test_call_in_a_backward_is_refused() -> None:
    trained = training("windows").run(0, 1)
    trained.model[2].weight.register_hook(lambda grad: trained.optimizer.offload_all())  # type: ignore[index]
    with pytest.raises(RuntimeError, match="while a backward or an optimizer step runs"):
        trained.backward(1)
    with pytest.raises(RuntimeError, match="zero_grad"):
        trained.optimizer.offload_all()
    trained.optimizer.zero_grad()
    trained.optimizer.offload_all()


def test_other_thread_in_a_backward_is_refused() -> None:
    trained = training("windows").run(0, 1)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            trained.optimizer.offload_all()
        except RuntimeError as error:
            raised.append(error)

    def in_thread(grad: Tensor) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    handle = trained.model[2].bias.register_hook(in_thread)  # type: ignore[index]
    trained.backward(1)
    handle.remove()
    assert "while a backward" in str(raised[0])
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(raised) == 1
    assert trained.optimizer.device_bytes == 0
    assert_equal_runs(trained.run(2, 4), training("windows").run(0, 4))


def test_call_in_a_step_is_refused() -> None:
    trained = training("windows").run(0, 1)
    engine = trained.optimizer.engine
    end_update = engine.steps.end_update
    engine.steps.end_update = lambda: (trained.optimizer.offload_all(), end_update())  # type: ignore[method-assign, return-value]
    with pytest.raises(RuntimeError, match="optimizer step runs"):
        trained.step(1)


@pytest.mark.parametrize("method", ["offload_all", "reload_all"])
def test_closed_optimizer_is_refused(method: str) -> None:
    trained = training("windows").run(0, 1)
    trained.optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        getattr(trained.optimizer, method)()


# Failures.


def test_host_without_room_is_refused() -> None:
    plain, moved = training("windows").run(0, 3), training("windows").run(0, 3)
    with (
        host_memory(100, read_by=given_back_memory),
        pytest.raises(MemoryError, match=r"needs .* MB of host memory, and only 0.0 MB are available"),
    ):
        moved.optimizer.offload_all()
    assert moved.optimizer.device_bytes == plain.optimizer.device_bytes
    assert_equal_runs(moved.run(3, 6), plain.run(3, 6))


def without_room(after: int) -> AbstractContextManager[None]:
    """Let the device have no room for a storage, after ``after`` of them."""
    return interrupted(given_back_memory._Block.allocate, torch.OutOfMemoryError("no room"), after=after)


@pytest.mark.parametrize("after", [0, 5])
def test_device_without_room_keeps_values(after: int) -> None:
    plain, moved = training("windows").run(0, 3), training("windows").run(0, 3)
    moved.optimizer.offload_all()
    with without_room(after), pytest.raises(torch.OutOfMemoryError, match="still are; free device memory"):
        moved.optimizer.reload_all()
    with without_room(after), pytest.raises(torch.OutOfMemoryError):
        moved.backward(3)
    moved.optimizer.zero_grad()
    assert moved.optimizer.device_bytes == 0
    assert_equal_runs(moved.run(3, 6), plain.run(3, 6))


def test_close_without_room_may_be_repeated() -> None:
    plain, moved = training("windows").run(0, 4), training("windows").run(0, 4)
    moved.optimizer.offload_all()
    with without_room(5), pytest.raises(torch.OutOfMemoryError):
        moved.optimizer.close()
    for each in (plain, moved):
        each.optimizer.close()
    assert all(map(torch.equal, moved.model.parameters(), plain.model.parameters()))


def test_slow_copy_of_a_gradient_is_awaited(copies: Copies) -> None:
    plain, moved = training("exact").run(0, 2), training("exact").run(0, 2)

    def slow_copy(target: Tensor, source: Tensor) -> None:
        if target.dim() == 2:  # of a gradient
            time.sleep(0.05)
        copy_without_gil(target, source)

    copies.make = slow_copy
    for each in (plain, moved):
        each.backward(2)
        if each is moved:
            lane = each.optimizer.engine.registry.transport.to_host
            assert isinstance(lane, ThreadLane)
            asynchronous, lane.inline_bytes = lane.inline_bytes, 1 << 30  # no copy of the state waits behind that one
            each.optimizer.offload_all()
            lane.inline_bytes = asynchronous
        each.optimizer.step()
        each.optimizer.zero_grad()
    assert_equal_runs(moved, plain)


def test_interrupted_move_is_made_good() -> None:
    plain, moved = training("windows").run(0, 3), training("windows").run(0, 3)
    with interrupted(given_back_memory._Block.empty, after=4), pytest.raises(KeyboardInterrupt):
        moved.optimizer.offload_all()
    assert_equal_runs(moved.run(3, 6), plain.run(3, 6))


def test_close_without_a_flush_applies_updates() -> None:
    """As a collected optimizer does: updates that are flushed and not due yet become visible."""
    plain, moved = training("stale").run(0, 4), training("stale").run(0, 4)
    moved.optimizer.offload_all()
    before = moved.weights()
    for each in (plain, moved):
        each.optimizer._lazy_engine.close(flush=False)
    assert all(map(torch.equal, moved.model.parameters(), plain.model.parameters()))
    assert not all(map(torch.equal, moved.model.parameters(), before))


def test_close_frees_the_memory_on_the_host() -> None:
    trained = training("windows").run(0, 4)
    memory: DeviceMemory = trained.optimizer.engine.device_memory
    trained.optimizer.offload_all()
    with pytest.raises(ZeroDivisionError), trained.optimizer:
        raise ZeroDivisionError  # close() without a flush
    assert memory.host_bytes == 0
