"""Training whose re-selections move state through lanes and workers, as on a device with streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch

import zenflow_compile as zf
from tests.engine.test_delays import delay
from tests.engine.test_failures import BrokenError, failing_after, root_of
from tests.engine.test_interrupts import every_point
from tests.support.calls import calls_of, interrupted
from tests.support.gated_jobs import STATE, UPDATES, gated
from tests.support.settings import settings
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, LARGEST_STATE, Training, assert_same
from zenflow_compile.planning import plan as plans
from zenflow_compile.runtime.device.thread_lane import ThreadLane, ThreadTicket
from zenflow_compile.runtime.host.arena import require_host_memory
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.parameters.allocation import EngineMemory
from zenflow_compile.runtime.parameters.state_exchange import ExchangeWork, StateExchange

pytestmark = pytest.mark.timeout(120)

EVERY_STEP: dict[str, Any] = {"update_interval": 1, "select_interval": 1}
SETTINGS = {
    "every_step": {**EVERY_STEP, "topk_ratio": 0.3},
    "half": {**EVERY_STEP, "topk_ratio": 0.5},
    **settings("reselecting auto stale_every_step summed_stale_warm_up compressed_reselecting zero_infinity"),
}
DTYPES = [torch.float32, torch.bfloat16]


@contextmanager
def exchanged_by_lanes(buffer_bytes: int) -> Iterator[None]:
    """Let engines that the block makes exchange state as on a device with streams, in chunks of so much."""
    make = EngineMemory.__init__

    def made(self: EngineMemory, options: Any, device: torch.device, recorder: Any) -> None:
        make(self, options, device, recorder)
        shared = self.transport
        shared.exchange = StateExchange(shared.to_host, shared.to_device, shared.workers, recorder, self._device)

    small = mock.patch.object(plans, "EXCHANGE_BYTES", buffer_bytes)
    with small, mock.patch.object(EngineMemory, "__init__", made):
        yield


@pytest.fixture
def through_lanes() -> Iterator[None]:
    """Chunks of two slices or more."""
    with exchanged_by_lanes(1 << 10):
        yield


@pytest.fixture
def through_lanes_at_once() -> Iterator[None]:
    """One chunk of one parameter."""
    with exchanged_by_lanes(1 << 20):
        yield


def outcome(training: Training) -> list[torch.Tensor]:
    """Weights, and all state by slice."""
    state = training.optimizer.state_dict()["state"]
    tensors = [value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return training.weights() + [each.clone() for each in tensors]


def rows(training: Training) -> list[torch.Tensor]:
    return [
        each
        for offloaded in training.optimizer.engine.offloaded.values()
        for each in offloaded.device.selection.tensors()
    ]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_training_equals_a_direct_exchange(
    name: str, entry: dict[str, Any] | None, dtype: torch.dtype, request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    options = {**SETTINGS[name], "workers": 1.0}
    if name == "zero_infinity":
        options = {**EVERY_STEP, "offload_device": "nvme", "nvme_path": tmp_path, "host_window_bytes": LARGEST_STATE}
    direct = Training(entry, options, dtype).run(0, 12)
    expected, selections = [outcome(direct), rows(direct)], direct.optimizer.engine.uploads.selections
    direct.optimizer.close()
    assert selections > 2
    request.getfixturevalue("through_lanes")
    for seed in (0, 1):
        with delay(seed, 2.0):
            other = Training(entry, options, dtype).run(0, 12)
            for actual, each in zip([outcome(other), rows(other)], expected, strict=True):
                assert_same(actual, each)
            assert other.optimizer.engine.uploads.selections == selections
            other.optimizer.close()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_saved_state_continues_in_mid_exchange(entry: dict[str, Any] | None, through_lanes: None) -> None:
    with delay(0, 2.0):
        expected = Training(entry, EVERY_STEP).run(0, 8).weights()
        training = Training(entry, EVERY_STEP).run(0, 5)
        training.loss(5)
        saved = training.saved()
        assert_same(Training(entry, EVERY_STEP).load(saved).run(5, 8).weights(), expected)
        assert_same(training.run(5, 8).weights(), expected)
        training.loss(9)
        assert_same(training.load(saved).run(5, 8).weights(), expected)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_external_write_in_mid_exchange(entry: dict[str, Any] | None, request: pytest.FixtureRequest) -> None:
    """Masters of both sides are re-seeded behind the exchange."""

    def trained() -> list[torch.Tensor]:
        training = Training(entry, EVERY_STEP).run(0, 4)
        training.loss(4)
        for param in training.model.parameters():
            with torch.no_grad():
                param.mul_(0.5)
        return outcome(training.run(5, 8))

    expected = trained()
    request.getfixturevalue("through_lanes")
    with delay(0, 2.0):
        assert_same(trained(), expected)


def test_optimizer_in_backward_exchanges_in_time(request: pytest.FixtureRequest) -> None:
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
        options = {"inner": "eager", "min_offload_size": 100, "device_share": 0.0, **EVERY_STEP}
        call = torch.compile(model, backend="zenflow", options=options)
        for step in range(8):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            call(inputs).square().mean().backward()
        optimizer = zf.optimizer_of(call)
        optimizer.synchronize()
        assert optimizer.engine.uploads.selections > 4
        weights = [param.detach().clone() for param in model.parameters()]
        optimizer.close()
        return weights

    expected = trained()
    request.getfixturevalue("through_lanes")
    with delay(0, 2.0):
        assert_same(trained(), expected)


def test_forward_waits_for_no_exchange(through_lanes_at_once: None) -> None:
    """While every exchange is held up, a forward with free buffers goes on, and so does the backward."""
    training = Training(EAGER_BACKEND, {"update_interval": 2}).run(0, 1)
    training.step(1)
    held = ThreadTicket()
    with gated(lambda: held, STATE):
        training.backward(2)
    exchange = training.optimizer.engine.registry.transport.exchange
    assert isinstance(exchange, StateExchange)
    assert len(exchange._in_flight) > 1
    held.set()
    training.optimizer.step()
    assert exchange._in_flight == ()
    assert_same(training.weights(), Training(EAGER_BACKEND, {"update_interval": 2}).run(0, 3).weights())


def test_buffers_count_as_memory_of_the_engine(through_lanes: None) -> None:
    with calls_of(require_host_memory) as needed:
        training = Training()
        registry = training.optimizer.engine.registry
    plan, transport = registry.plan, registry.transport
    assert transport.exchange.nbytes == plan.exchange_bytes > 0
    assert needed[-1].arguments["needed_bytes"] == plan.host_bytes + plan.exchange_bytes
    arenas = sum(arena.total_bytes for arena in registry.memory._arenas)
    assert registry.host_bytes == arenas + plan.exchange_bytes
    assert registry.memory.staging_bytes == transport.down_ring.nbytes + transport.up_ring.nbytes + plan.exchange_bytes
    training.optimizer.close()


def test_interrupted_exchange_recovers_from_a_state(through_lanes_at_once: None) -> None:
    """The interrupt comes in the forward that starts exchanges or in the step that ends them."""
    training = Training(EAGER_BACKEND, {**EVERY_STEP, "workers": 1, "min_offload_size": 600}).run(0, 3)
    saved = training.saved()
    expected = training.run(3, 6).weights()
    training.load(saved)
    lost = []

    def recover() -> None:
        training.optimizer.zero_grad()
        try:
            training.run(4, 5).optimizer.synchronize()
        except RuntimeError as error:
            lost.append(str(error))
        assert_same(training.load(saved).run(3, 6).weights(), expected)
        training.load(saved)

    assert every_point(lambda: training.run(3, 5), {"_reselect", "_send", "_finish_oldest"}, recover) > 18
    assert len(lost) > 8
    assert all("half-way" in message for message in lost)
    training.optimizer.close()


@pytest.mark.parametrize("calls", [0, 2])
def test_failed_exchange_stops_training(calls: int, through_lanes: None) -> None:
    training = Training(EAGER_BACKEND, EVERY_STEP).run(0, 3)
    saved = training.saved()
    expected = training.run(3, 6).weights()
    training.load(saved)
    error = MemoryError("on purpose")
    with gated(failing_after(calls, lambda: None, error), STATE), pytest.raises(RuntimeError) as caught:
        training.run(3, 6)
    assert root_of(caught.value) is error
    for call in (lambda: training.step(9), training.optimizer.synchronize, training.optimizer.flush):
        with pytest.raises(RuntimeError):
            call()
        training.optimizer.zero_grad()
    assert_same(training.load(saved).run(3, 6).weights(), expected)
    training.optimizer.close()


@contextmanager
def copied_after_failures() -> Iterator[threading.Event]:
    """Let lanes copy although the job before has failed: so does a stream, whose flag that job raises.

    Yields:
        Set when a lane waits for a job.
    """
    make, waits = ThreadLane._make, threading.Event()

    def goes_on(lane: ThreadLane, copy: Any) -> None:
        for work in copy.first:
            waits.set()
            with suppress(RuntimeError):
                work.wait()
        make(lane, copy._replace(first=()))

    with mock.patch.object(ThreadLane, "_make", goes_on):
        yield waits


@pytest.mark.parametrize("call", ["step", "synchronize", "flush", "state_dict"])
def test_merge_of_a_failed_job_stops_training(call: str) -> None:
    """The device has merged what the job left in its upload buffer: only loading a state continues."""
    training = Training(EAGER_BACKEND, {"update_interval": 1, "workers": 1}).run(0, 3)
    saved = training.saved()
    expected = training.run(3, 6).weights()
    training.load(saved)
    with copied_after_failures() as waits:
        tickets: list[ThreadTicket] = []

        def held() -> ThreadTicket:
            tickets.append(ThreadTicket())
            return tickets[-1]

        def fail_first() -> None:
            failed.append(waits.wait(30))
            for job, ticket in zip(jobs, tickets, strict=True):
                ticket.set(BrokenError("on purpose") if job.param == "0.weight" else None)

        failed: list[bool] = []
        with gated(held, UPDATES) as jobs:
            training.step(3)
            thread = threading.Thread(target=fail_first)
            thread.start()
            training.loss(4)  # the forward applies the failed update, and no wait raises its error
            thread.join()
        for offloaded in training.optimizer.engine.offloaded.values():
            for job in offloaded.host.jobs:
                job.settle()
        assert failed == [True]
    optimizer = training.optimizer
    calls = {
        "step": lambda: training.step(5),
        "synchronize": optimizer.synchronize,
        "flush": optimizer.flush,
        "state_dict": optimizer.state_dict,
    }
    with pytest.raises(RuntimeError, match="half-way") as caught:
        calls[call]()
    assert isinstance(root_of(caught.value), BrokenError)
    for again in calls.values():
        with pytest.raises(RuntimeError):
            again()
        optimizer.zero_grad()
    assert_same(training.load(saved).run(3, 6).weights(), expected)
    optimizer.close()


def test_close_ends_after_an_unqueued_exchange(through_lanes: None) -> None:
    """An interrupt came before the job was queued, so no worker will run it: ``close()`` must not wait for it."""
    training = Training(EAGER_BACKEND, EVERY_STEP).run(0, 3)

    def is_exchange(passed: dict[str, Any]) -> bool:
        return isinstance(passed["jobs"][0].work, ExchangeWork)

    with interrupted(Workers.submit, when=is_exchange), pytest.raises(KeyboardInterrupt):
        training.loss(3)
    with pytest.raises(RuntimeError, match="half-way"):
        training.optimizer.close()
