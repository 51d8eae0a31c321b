import math
import threading
import time

import pytest
import torch

from zenflow_compile import timeline as timeline_module
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.timeline import NormSums, Timeline, worker_lane


class FakeDeviceEvent:
    """An event of a device whose clock, in ms, has nothing to do with the host's."""

    def __init__(self, at_ms, *, done=True):
        self.at_ms = at_ms
        self.done = done

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True

    def elapsed_time(self, other):
        assert self.done
        assert other.done
        return other.at_ms - self.at_ms


class FakeClock:
    """A clock whose device time 1000 ms is host time 5 s."""

    def reference(self):
        return FakeDeviceEvent(1000.0), 5_000_000_000


CLOCK = FakeClock()


def test_events_are_sorted_by_start():
    timeline = Timeline()
    timeline.add("H2D", "copy", 30, 40, step=2, param="w", bytes=7)
    timeline.add("compute", "wait", 10, 20, step=1)
    first, second = timeline.events()
    assert (first.lane, first.kind, first.start_ns, first.end_ns, first.step) == ("compute", "wait", 10, 20, 1)
    assert (first.param, first.bytes, first.duration_ns) == ("", 0, 10)
    assert (second.lane, second.param, second.bytes) == ("H2D", "w", 7)
    assert timeline.events() == [first, second]  # reading consumes nothing


def test_worker_lanes_are_recognized():
    timeline = Timeline()
    timeline.add(worker_lane(3), "host_update", 0, 1, step=0)
    timeline.add("compute", "forward", 0, 1, step=0)
    assert {event.lane: event.is_worker for event in timeline.events()} == {"worker 3": True, "compute": False}


def test_keeps_the_newest_events():
    timeline = Timeline(max_events=3)
    for step in range(10):
        timeline.add("step", "step", step, step + 1, step=step)
    assert [event.step for event in timeline.events()] == [7, 8, 9]
    assert timeline.older_dropped


def test_nothing_is_left_out_that_is_kept():
    timeline = Timeline(max_events=3)
    for step in range(3):
        timeline.add("step", "step", step, step + 1, step=step)
    assert [event.step for event in timeline.events()] == [0, 1, 2]
    assert not timeline.older_dropped


def test_concurrent_recording_loses_nothing():
    timeline = Timeline()
    stop = threading.Event()

    def read():
        while not stop.is_set():
            timeline.events()

    def write(worker):
        for i in range(3000):
            timeline.add(worker_lane(worker), "host_update", i, i + 1, step=i)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
    reader.start()
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    events = timeline.events()
    for worker in range(4):
        assert [event.step for event in events if event.lane == worker_lane(worker)] == list(range(3000))


def test_device_events_are_on_the_host_clock():
    timeline = Timeline()
    timeline.add("compute", "forward", 4_995_000_000, 4_996_000_000, step=0)
    timeline.add_device(
        CLOCK, "D2H", "copy", FakeDeviceEvent(990.0), FakeDeviceEvent(992.5), step=0, param="w", bytes=9
    )
    copy, forward = timeline.events()
    assert (copy.start_ns, copy.end_ns) == (4_990_000_000, 4_992_500_000)
    assert (copy.param, copy.bytes, copy.lane) == ("w", 9, "D2H")
    assert forward.lane == "compute"
    assert len(timeline.events()) == 2  # resolved once


def test_reading_waits_for_device_events():
    timeline = Timeline()
    unfinished = FakeDeviceEvent(999.0, done=False)
    timeline.add_device(CLOCK, "H2D", "copy", FakeDeviceEvent(998.0), unfinished, step=0)
    (copy,) = timeline.events()
    assert unfinished.done
    assert copy.duration_ns == 1_000_000


def test_pending_device_events_stay_bounded():
    timeline = Timeline()
    for i in range(3 * timeline_module.DRAIN_ABOVE):
        timeline.add_device(CLOCK, "D2H", "copy", FakeDeviceEvent(float(i)), FakeDeviceEvent(i + 0.5), step=i)
        assert len(timeline._device_rows) <= timeline_module.DRAIN_ABOVE + 1
    blocked = FakeDeviceEvent(0.5, done=False)
    slow = Timeline()
    for _ in range(timeline_module.DRAIN_ABOVE + 10):
        slow.add_device(CLOCK, "D2H", "copy", FakeDeviceEvent(0.0), blocked, step=0)
    assert not blocked.done  # recording never waits for the device
    assert len(timeline.events()) == 3 * timeline_module.DRAIN_ABOVE


def test_recording_does_not_wait_for_a_reader():
    timeline = Timeline()
    with timeline._reading:
        for _ in range(timeline_module.DRAIN_ABOVE + 2):
            timeline.add_device(CLOCK, "D2H", "copy", FakeDeviceEvent(0.0), FakeDeviceEvent(1.0), step=0)
    assert len(timeline.events()) == timeline_module.DRAIN_ABOVE + 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_spans_lie_between_host_times():
    timeline = Timeline()
    work = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    before = time.perf_counter_ns()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        work = work @ work / 2048
    end.record()
    timeline.add_device(device_of(torch.device("cuda", 0)).streams, "compute", "forward", start, end, step=0)
    torch.cuda.synchronize()
    after = time.perf_counter_ns()
    (span,) = timeline.events()
    slack = 1_000_000
    assert before - slack <= span.start_ns < span.end_ns <= after + slack


def test_norms_are_summed():
    timeline = Timeline()
    assert timeline.norm_sums() is None
    timeline.add_norms(torch.tensor(3.0), torch.tensor(4.0))
    timeline.add_norms(torch.tensor(1.0), torch.tensor([4.0]))
    assert timeline.norm_sums() == NormSums(selected=4.0, total=8.0)


def test_overflowed_norms_are_left_out():
    timeline = Timeline()
    timeline.add_norms(torch.tensor(math.inf), torch.tensor(math.inf))
    timeline.add_norms(torch.tensor(1.0), torch.tensor(math.nan))
    timeline.add_norms(torch.tensor(1.0), torch.tensor(2.0))
    assert timeline.norm_sums() == NormSums(selected=1.0, total=2.0)


def test_norms_stay_bounded():
    timeline = Timeline(max_norms=2)
    for step in range(5):
        timeline.add_norms(torch.tensor(float(step)), torch.tensor(10.0))
    assert timeline.norm_sums() == NormSums(selected=7.0, total=20.0)


def test_recording_is_cheap():
    """A step has some hundred events; at 20 microseconds each they would be 2% of a 100 ms step."""
    timeline = Timeline()
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter_ns()
        for i in range(2000):
            timeline.add("D2H", "copy", i, i + 1, step=i, param="weight", bytes=100)
        best = min(best, (time.perf_counter_ns() - begin) / 2000)
    assert best < 20_000


def test_last_events_are_those_of_the_last_steps():
    timeline = Timeline()
    for step in range(6):
        begin = 10 * step
        timeline.add("compute", "forward", begin, begin + 4, step=step)
        timeline.add(worker_lane(0), "host_update", begin - 2, begin + 1, step=step)  # some of it in the step before
        timeline.add("step", "step", begin, begin + 10, step=step)
    found = timeline.last_events(2)
    assert [event.step for event in found if event.lane == "step"] == [4, 5]
    assert [event.step for event in found if event.kind == "forward"] == [4, 5]
    assert [event.step for event in found if event.kind == "host_update"] == [4, 5]
    assert timeline.last_events(100) == timeline.events()
    assert Timeline().last_events(4) == []


def test_last_events_wait_for_nothing():
    timeline = Timeline()
    timeline.add("step", "step", 0, 10, step=0)
    done = FakeDeviceEvent(1001.0)
    for number in range(3 * 256):  # more than are read at a time during the run
        timeline.add_device(CLOCK, "compute", "forward", FakeDeviceEvent(1000.0), done, step=number)
    unfinished = FakeDeviceEvent(1002.0, done=False)
    timeline.add_device(CLOCK, "compute", "backward", done, unfinished, step=1)
    kinds = [event.kind for event in timeline.last_events(1)]
    assert kinds.count("forward") == 3 * 256
    assert "backward" not in kinds
    assert not unfinished.done
