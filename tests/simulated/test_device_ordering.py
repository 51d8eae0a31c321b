"""Streams run in any order that waits allow, and in no other."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from tests.simulated.accelerator import SimulatedStreams
from tests.simulated.process import in_simulator
from tests.simulated.simulator import Delays, Event, Simulator, Stream
from zenflow_compile.runtime.parameters.transport import StreamOrder

LATE = Delays(by_order={1: 0.98})


def _sum_of_two_streams(simulator: Simulator, *, wait: bool) -> bool:
    """Whether a reader in the default stream finds what a late stream writes."""
    side = Stream()
    source = torch.ones(64, device=simulator.device)
    side.wait_stream(Stream(handle=0))
    with side:
        written = source + 1
    if wait:
        Stream(handle=0).wait_stream(side)
    return bool((written * 2).cpu().eq(4).all())


@pytest.mark.parametrize("wait", [True, False])
@in_simulator
def test_missing_wait_is_found(simulator: Simulator, wait: bool) -> None:
    for late in (0.98, 1.0) if wait else (1.0,):
        simulator.configure(delays=Delays(by_order={1: late}))
        assert _sum_of_two_streams(simulator, wait=wait) == wait


@in_simulator
def test_last_stream_runs_for_waits_alone(simulator: Simulator) -> None:
    """Item by item: those that no wait needs are left."""
    values, side = torch.zeros(1, device=simulator.device), Stream()
    simulator.delay(side, 1.0)
    events = []
    for _ in range(3):
        with side:
            values.add_(1)
            events.append(side.record_event())
    simulator.run_others()
    assert not events[0].query()
    assert simulator.run_last()
    assert not events[0].query(), "the operator, and not yet what follows it"
    events[1].synchronize()
    assert [event.query() for event in events] == [True, True, False]
    assert simulator.run_last()
    assert simulator.run_last()
    assert not simulator.run_last()
    assert events[2].query()


@in_simulator
def test_generic_streams_and_events_are_ordered(simulator: Simulator) -> None:
    """``torch.Stream`` and ``torch.Event``, which PyTorch's own code uses."""
    for seed in range(3):
        simulator.configure(seed=seed, delays=LATE)
        side, event = torch.Stream(device="sim"), torch.Event(device="sim")
        source = torch.ones(64, device=simulator.device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            written = source + 1
            event.record(side)
        event.wait(torch.accelerator.current_stream())
        assert (written * 2).cpu().eq(4).all()
        assert event.query()


@pytest.mark.parametrize("late", ["step", "forward"])
@in_simulator
def test_reader_of_shards_follows_the_step_alone(simulator: Simulator, late: str) -> None:
    """FSDP2 reads shards in a stream of its own, ahead of what the forward has queued."""
    flag, source = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.ones(64, device=simulator.device)
    torch.accelerator.synchronize()
    order, side, compute = StreamOrder(SimulatedStreams()), Stream(), Stream(handle=0)
    order.follow()
    if late == "step":
        simulator.wait_value(compute, flag.data_ptr(), 1)
    updated = source + 1
    order.end_step()
    if late == "forward":
        simulator.wait_value(compute, flag.data_ptr(), 1)
    with side:
        order.follow_step()
        read = updated * 2
        ended = Event()
        ended.record(side)
    if late == "forward":
        ended.synchronize()  # the forward is still under way
    else:
        assert not ended.query()
    flag[0] = 1
    order.follow()  # of the compute stream: behind the reader
    assert bool((read + 1).cpu().eq(5).all())


@in_simulator
def test_shards_follow_work_behind_the_step(simulator: Simulator) -> None:
    """A reader in a third stream waits for the second one, which may have used engine memory since the step."""
    flag, source = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.ones(64, device=simulator.device)
    torch.accelerator.synchronize()
    order, second, third = StreamOrder(SimulatedStreams()), Stream(), Stream()
    order.end_step()
    with second:
        order.follow_step()
        simulator.wait_value(second, flag.data_ptr(), 1)
        written = source + 1
    with third:
        order.follow_step()
        read = written * 2
        ended = Event()
        ended.record(third)
    assert not ended.query()
    flag[0] = 1
    ended.synchronize()
    order.follow()
    assert bool(read.cpu().eq(4).all())


@in_simulator
def test_event_stands_for_its_last_recording(simulator: Simulator) -> None:
    simulator.configure(delays=Delays(default=0.5))
    event = Event()
    event.wait(Stream())  # never recorded: no wait
    assert event.query()
    blocked, flag = Stream(), torch.zeros(1, dtype=torch.int32, pin_memory=True)
    event.record(Stream())
    simulator.wait_value(blocked, flag.data_ptr(), 1)
    event.record(blocked)
    assert not event.query()
    assert not blocked.query()
    flag[0] = 1
    event.synchronize()
    assert event.query()
    assert blocked.query()


@in_simulator
def test_elapsed_time_grows(simulator: Simulator) -> None:
    begin, end = Event(enable_timing=True), Event(enable_timing=True)
    begin.record()
    values = torch.randn(256, 256, device=simulator.device)
    for _ in range(10):
        values = values @ values
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    with pytest.raises(RuntimeError, match="enable_timing"):
        begin.elapsed_time(Event())


@in_simulator
def test_current_stream_is_per_thread(simulator: Simulator) -> None:
    found = []
    with Stream() as side:
        assert torch.accelerator.current_stream().stream_id == side.handle
        with Stream() as inner:
            assert torch.sim.current_stream() == inner
        assert torch.sim.current_stream() == side
        thread = threading.Thread(target=lambda: found.append(torch.sim.current_stream().handle))
        thread.start()
        thread.join()
    assert found == [0]
    assert torch.sim.current_stream().handle == 0


@in_simulator
def test_stream_writes_value_after_its_work(simulator: Simulator) -> None:
    for seed in range(3):
        simulator.configure(seed=seed, delays=LATE)
        side = Stream()
        flag, host = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.zeros(8, pin_memory=True)
        with side:
            host.copy_(torch.full((8,), 3.0, device=simulator.device), non_blocking=True)
        simulator.write_value(side, flag.data_ptr(), 7)
        while ctypes.c_int32.from_address(flag.data_ptr()).value != 7:
            pass
        assert host.eq(3).all()


@in_simulator
def test_waited_value_is_compared_modulo_2_32(simulator: Simulator) -> None:
    flag, stream = torch.full((1,), -2, dtype=torch.int32).pin_memory(), Stream()
    simulator.wait_value(stream, flag.data_ptr(), -3)
    stream.synchronize()
    simulator.wait_value(stream, flag.data_ptr(), 1)
    assert not stream.query()
    flag[0] = 1
    stream.synchronize()


@in_simulator
def test_value_must_be_in_reachable_memory(simulator: Simulator) -> None:
    flag = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="pinned or registered"):
        simulator.write_value(Stream(), flag.data_ptr(), 1)
    simulator.register(flag.data_ptr(), flag.nbytes)
    simulator.write_value(Stream(), flag.data_ptr(), 1)
    simulator.configure(stream_values=False)
    with pytest.raises(RuntimeError, match="not supported"):
        simulator.write_value(Stream(), flag.data_ptr(), 1)


@in_simulator
def test_random_numbers_do_not_depend_on_delays(simulator: Simulator) -> None:
    drawn = []
    for delays in ("none", "random", "compute late"):
        simulator.configure(delays=delays)
        torch.manual_seed(5)
        numbers = torch.randn(32, device=simulator.device)
        dropped = torch.nn.functional.dropout(torch.ones(64, device=simulator.device), 0.5)
        own = torch.rand(4, device=simulator.device, generator=torch.Generator(device="sim").manual_seed(3))
        drawn.append(torch.cat([numbers, dropped, own]).cpu())
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    state = torch.sim.get_rng_state()
    first = torch.rand(4, device=simulator.device).cpu()
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=simulator.device).cpu(), first)
