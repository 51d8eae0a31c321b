"""A full launch queue blocks, and a dead device raises in every thread."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.simulated.process import SimulatedHang, SimulatedProcess, in_simulator
from tests.simulated.simulator import Simulator, Stream, load_simulator


class Flag:
    """A number in pinned memory, for which streams wait until the host raises it."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._memory = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def hold(self, stream: Stream) -> None:
        self._simulator.wait_value(stream, self._memory.data_ptr(), 1)

    def rise(self) -> None:
        # Without PyTorch: an operator of the host would need no launch queue, but this shows that none is used.
        ctypes.c_int32.from_address(self._memory.data_ptr()).value = 1


def _in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | None]]:
    """Start a thread that runs ``function``; the list has its error, or None, as soon as it has ended."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            function()
            ended.append(None)
        except RuntimeError as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ended


def _wait_for(simulator: Simulator, state: str) -> None:
    """Wait until other threads have brought the device's queues into a state."""
    while state not in simulator.dump():
        time.sleep(0.001)


def _launch_many(values: Tensor) -> None:
    for _ in range(40):
        values.add_(1)


@in_simulator
def test_full_queue_blocks_until_there_is_room(simulator: Simulator) -> None:
    simulator.configure(limit=16)
    values, stream, flag = torch.zeros(8, device=simulator.device), Stream(), Flag(simulator)
    flag.hold(stream)

    def launch() -> None:
        with stream:
            _launch_many(values)

    thread, ended = _in_thread(launch)
    _wait_for(simulator, "16 queued entries of 16, 1 blocked")
    assert not ended
    flag.rise()
    thread.join()
    assert ended == [None]
    stream.synchronize()
    assert values.cpu().eq(40).all()


def _fill_queue(hold_gil: bool) -> bool:
    """Launch more than fits into the queue, while a thread of Python would make room."""
    simulator = load_simulator()
    simulator.configure(limit=8)
    flag = Flag(simulator)
    stream = Stream()
    flag.hold(stream)
    _in_thread(lambda: (_wait_for(simulator, "8 queued entries of 8"), flag.rise()))
    for _ in range(20):
        simulator.launch_noop(stream, hold_gil=hold_gil)
    stream.synchronize()
    return True


def test_launch_without_gil_lets_others_run(simulated: SimulatedProcess) -> None:
    assert simulated.call(_fill_queue, False)


def test_launch_with_gil_hangs_the_process(simulated: SimulatedProcess) -> None:
    with pytest.raises(SimulatedHang) as hang:
        simulated.call(_fill_queue, True, stuck="8 queued entries of 8, 1 blocked")
    text = str(hang.value)
    assert "launch_noop" in text
    assert "8 queued entries of 8" in text
    assert "waits for 1, found 0" in text
    assert simulated.call(_fill_queue, False)  # in a new child


def _launch_in(stream: Stream, values: Tensor) -> None:
    with stream:
        _launch_many(values)


@in_simulator
def test_death_wakes_all_waiters(simulator: Simulator) -> None:
    simulator.configure(limit=16)
    values, stream, flag = torch.zeros(8, device=simulator.device), Stream(), Flag(simulator)
    torch.sim.synchronize()
    flag.hold(stream)
    event = stream.record_event()
    waits = [
        _in_thread(wait)
        for wait in (
            stream.synchronize,
            event.synchronize,
            torch.sim.synchronize,
            lambda: _launch_in(stream, values),
        )
    ]
    _wait_for(simulator, "4 blocked")
    assert not any(ended for _, ended in waits)
    simulator.die("ECC error")
    for thread, ended in waits:
        thread.join()
        assert "simulated device error: ECC error" in str(ended[0])
    flag.rise()
    for use in (stream.query, event.query, values.cpu, lambda: values + 1, lambda: torch.zeros(1, device="sim")):
        with pytest.raises(RuntimeError, match="ECC error"):
            use()
    assert "dead (ECC error)" in simulator.dump()
    simulator.configure()
    assert torch.ones(1, device=simulator.device).cpu().eq(1)


@in_simulator
def test_dropped_items_write_nothing(simulator: Simulator) -> None:
    stream, flag = Stream(), Flag(simulator)
    host, word = torch.zeros(8, pin_memory=True), torch.zeros(1, dtype=torch.int32, pin_memory=True)
    values = torch.ones(8, device=simulator.device)
    flag.hold(stream)
    with stream:
        host.copy_(values, non_blocking=True)
    simulator.write_value(stream, word.data_ptr(), 1)
    simulator.die()
    flag.rise()
    simulator.configure()
    assert host.eq(0).all()
    assert word.item() == 0


@in_simulator
def test_device_dies_after_some_items(simulator: Simulator) -> None:
    host = torch.zeros(1, pin_memory=True)
    values = torch.zeros(1, device=simulator.device)
    torch.sim.synchronize()
    simulator.die_after(3)
    host.copy_(values.add_(1))
    with pytest.raises(RuntimeError, match="simulated device error"):
        host.copy_(values.add_(1))
    assert host.item() == 1


@in_simulator
def test_error_of_a_kernel_kills_the_device(simulator: Simulator) -> None:
    """As a device-side assertion does."""
    table = torch.zeros(4, 2, device=simulator.device)
    index = torch.tensor([7], device=simulator.device)
    table.index_select(0, index)
    with pytest.raises(RuntimeError, match="simulated device error: index_select: index out of range"):
        torch.sim.synchronize()


@in_simulator
def test_error_in_backward_is_raised(simulator: Simulator) -> None:
    weight = torch.ones(64, 64, device=simulator.device, requires_grad=True)
    loss = weight.matmul(weight).sum()
    simulator.configure(in_order=True)
    simulator.die_after(3)
    with pytest.raises(RuntimeError, match="simulated device error: died by request"):
        loss.backward()
