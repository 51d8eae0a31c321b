"""The lane of the CPU copies in order and without the GIL."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.support.calls import Call, at_calls
from tests.support.copies import Copies
from zenflow_compile.runtime.device.copy_lanes import CopyError
from zenflow_compile.runtime.device.thread_lane import ThreadLane, ThreadTicket, copy_without_gil
from zenflow_compile.runtime.recorder import Recorder

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    made = ThreadLane("D2H", Recorder())
    assert isinstance(made, ThreadLane)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (0, 4)])
def test_copies_are_exact(lane: ThreadLane, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    source = torch.randn(shape).mul(100).to(dtype)
    target = torch.zeros(shape, dtype=dtype)
    ticket = lane.submit(target, source, step=0, param="w")
    ticket.wait()
    assert ticket.done()
    assert ticket.error is None
    assert torch.equal(target, source)


def test_nan_bits_survive() -> None:
    source = torch.tensor([0x7FC01234, -0x3FEDCC], dtype=torch.int32).view(torch.float32)
    target = torch.zeros(2)
    copy_without_gil(target, source)
    assert torch.equal(target.view(torch.int32), source.view(torch.int32))


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)),
        (torch.zeros(4, 4).t()[:2], torch.zeros(2, 4)),
        (torch.zeros(2, 4), torch.zeros(4, 4).t()[:2]),
        (torch.zeros(4, device="meta"), torch.zeros(4)),
    ],
)
def test_unequal_or_strided_tensors_raise(target: torch.Tensor, source: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cannot copy"):
        copy_without_gil(target, source)


def test_copying_lets_other_threads_run() -> None:
    """While 256 MB are copied, a spinning thread goes on: the longest gap is far below the copy's time."""
    source, target = torch.ones(64 << 20), torch.zeros(64 << 20)
    copy_without_gil(target, source)  # pages are there from here on
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        done = threading.Event()
        begin = time.perf_counter()
        thread = threading.Thread(target=lambda: (copy_without_gil(target, source), done.set()))
        thread.start()
        spins = 0
        while not done.is_set():
            spins += 1
        elapsed = time.perf_counter() - begin
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert spins > 1000 * elapsed


def test_copies_run_in_order_of_submission(lane: ThreadLane) -> None:
    target = torch.zeros(1)
    tickets = [lane.submit(target, torch.full((1,), float(i)), step=i, param="w") for i in range(50)]
    tickets[-1].wait()
    assert all(ticket.done() for ticket in tickets)
    assert target.item() == 49.0


def test_close_finishes_submitted_copies(lane: ThreadLane, copies: Copies) -> None:
    # Slow, so that most are still queued at ``close()``.
    copies.make = lambda *ends: (time.sleep(0.01), copy_without_gil(*ends))
    targets = [torch.zeros(2) for _ in range(5)]
    for target in targets:
        lane.submit(target, torch.ones(2), step=0, param="w")
    lane.close()
    assert all(torch.equal(target, torch.ones(2)) for target in targets)
    assert thread_of(lane) is None
    lane.close()


def test_lane_goes_on_after_a_failed_copy(lane: ThreadLane) -> None:
    bad = lane.submit(torch.zeros(3), torch.zeros(4), step=0, param="w")
    good = lane.submit(torch.zeros(4), torch.ones(4), step=0, param="w")
    good.wait()
    bad.settle()
    assert not bad.done()
    assert isinstance(bad.error, ValueError)
    for wait in (bad.wait, bad.wait_on_device):
        with pytest.raises(CopyError) as caught:
            wait()
        assert caught.value.__cause__ is bad.error
    assert bad.error.__traceback__ is not None


def test_lane_knows_its_thread(lane: ThreadLane) -> None:
    assert not lane.runs(threading.current_thread())
    lane.submit(torch.zeros(1), torch.zeros(1), step=0, param="w").wait()
    thread = thread_of(lane)
    assert thread is not None
    assert thread.name == "zenflow-D2H"


def thread_of(lane: ThreadLane) -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if lane.runs(thread)), None)


def test_small_copies_run_inline(lane: ThreadLane) -> None:
    """No thread is started for them; the ticket keeps an error, as for copies of the thread."""
    lane.inline_bytes = 16
    target = torch.zeros(4)
    ticket = lane.submit(target, torch.arange(4.0), step=0, param="w")
    assert ticket.done()
    assert torch.equal(target, torch.arange(4.0))
    failed = lane.submit(torch.zeros(3), torch.zeros(4), step=0, param="w")
    assert not failed.done()
    assert isinstance(failed.error, ValueError)
    with pytest.raises(CopyError):
        failed.wait_on_device()
    failed.settle()
    assert thread_of(lane) is None
    lane.submit(torch.zeros(5), torch.ones(5), step=0, param="w").wait()
    assert thread_of(lane) is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_of_a_copy_made_at_once_is_raised(
    error: type[BaseException], lane: ThreadLane, copies: Copies
) -> None:
    """It is no CopyError, which ``except RuntimeError`` would catch; one in the lane's thread is."""

    def interrupted(*ends: torch.Tensor) -> None:
        raise error

    copies.make = interrupted
    lane.inline_bytes = 16
    with pytest.raises(error):
        lane.submit(torch.zeros(4), torch.zeros(4), step=0, param="w")
    lane.inline_bytes = 0
    ticket = lane.submit(torch.zeros(4), torch.zeros(4), step=0, param="w")
    with pytest.raises(CopyError):
        ticket.wait()


def test_settle_waits_for_all_copies(lane: ThreadLane) -> None:
    """``settle()`` also waits for a copy behind one that failed."""
    lane.settle()
    gate = ThreadTicket()
    lane.submit(torch.zeros(4), torch.ones(4), step=0, param="w", behind=gate)
    target = torch.zeros(4)
    late = lane.submit(target, torch.ones(4), step=0, param="w")
    assert not late.done()
    threading.Timer(0.02, gate.set, [ValueError("on purpose")]).start()
    lane.settle()
    assert late.done()
    assert target.all()


def test_interrupted_start_leaves_no_second_thread(lane: ThreadLane) -> None:
    started: list[threading.Thread] = []

    def interrupt(call: Call) -> None:
        started.append(call.arguments["self"])
        raise KeyboardInterrupt

    with at_calls(interrupt, threading.Thread.start, returned=True), pytest.raises(KeyboardInterrupt):
        lane.submit(torch.zeros(4), torch.ones(4), step=0, param="w")
    started[0].join(20)
    assert not started[0].is_alive()
    lane.submit(torch.zeros(4), torch.ones(4), step=0, param="w").wait()


def test_lost_thread_fails_queued_copies(lane: ThreadLane) -> None:
    """The next copy starts another thread."""
    gate = threading.Event()
    broken: list[ThreadTicket] = []

    def breaks(call: Call) -> None:
        if not broken and lane.runs(threading.current_thread()):
            broken.append(call.arguments["self"])
            gate.wait(20)
            raise MemoryError

    with at_calls(breaks, ThreadTicket.set, new_threads=True):
        tickets = [lane.submit(torch.zeros(4), torch.ones(4), step=0, param="w") for _ in range(4)]
        gate.set()
        for ticket in tickets:
            ticket.settle()
            assert isinstance(ticket.error, MemoryError)
    assert lane.failed
    lane.submit(torch.zeros(4), torch.ones(4), step=0, param="w").wait()
    lane.settle()
    lane.close()


def test_copy_queued_behind_a_lost_thread_fails(lane: ThreadLane) -> None:
    lane.submit(torch.zeros(4), torch.ones(4), step=0, param="w").wait()
    thread, items = lane._thread, lane._queue
    assert thread is not None
    items.put(None)
    thread.join()

    class Losing(type(items)):  # type: ignore[misc]
        def put(self, item: object) -> None:
            lane._thread = None
            super().put(item)

    lane._queue = Losing()
    ticket = lane.submit(torch.zeros(4), torch.ones(4), step=0, param="w")
    with pytest.raises(CopyError):
        ticket.wait()
