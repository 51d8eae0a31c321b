"""Native threads: the order of jobs, what they wait for, and how they end."""

from __future__ import annotations

import _thread
import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.late_words import LateWord
from zenflow_compile.native import library as native
from zenflow_compile.runtime.device.copy_lanes import Gate
from zenflow_compile.runtime.device.stream_flags import Flag
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.host.workers import Job, Workers, bounds_of
from zenflow_compile.runtime.parameters.state_exchange import ExchangeWork
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import Timeline

pytestmark = pytest.mark.timeout(60)

ROWS = 8


class Word:
    """A flag of a job, in plain memory."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1, dtype=torch.int32)
        self.fence = threading.Lock()

    def address(self, counter: int) -> int:
        return self._memory.data_ptr()

    @property
    def value(self) -> int:
        return int(self._memory.item())


class Swap(Job):
    """Swaps ones with twos."""

    def __init__(self, pool: Workers, *inputs: Any, after: Sequence[Any] = (), tasks: int = 2, **place: Any) -> None:
        self.host = [torch.ones(ROWS, 4) for _ in range(3)]
        self.blocks = [torch.full((ROWS, 4), 2.0) for _ in range(3)]
        size = -(-ROWS // tasks)
        parts = [slice(first, min(first + size, ROWS)) for first in range(0, ROWS, size)]
        place = {"deadline": 0, "step": 0, "param": "w", **place}
        work = ExchangeWork(self.host, torch.arange(ROWS, dtype=torch.int32), self.blocks, bounds_of(parts))
        super().__init__(work, inputs, after, pool.handle, **place)

    @property
    def swapped(self) -> bool:
        return all(bool((each == 2).all()) for each in self.host)


def ended(error: BaseException | None = None) -> ThreadTicket:
    return ThreadTicket.ended(error)


@pytest.fixture
def pool() -> Iterator[Workers]:
    made = Workers(2, Recorder())
    yield made
    for job in made._in_flight:  # of a test that has failed: its gates may never open
        job.abort(RuntimeError("the test is over"))
    made.close()


def order_of(jobs: Sequence[Swap]) -> list[int]:
    """The jobs' numbers, by when they ran."""
    return sorted(range(len(jobs)), key=lambda number: jobs[number].records[0].begin_ns)


def test_jobs_run_by_step_and_then_by_deadline() -> None:
    pool, gate = Workers(1, Recorder()), ThreadTicket()
    places = [(1, 0), (0, 5), (0, 2), (1, 1), (0, 2)]
    jobs = [Swap(pool, gate, step=step, deadline=deadline) for step, deadline in places]
    pool.submit(*jobs[:3])
    pool.submit(*jobs[3:])
    gate.set()
    for job in jobs:
        job.wait()
    pool.close()
    assert order_of(jobs) == [2, 4, 1, 0, 3]
    assert all(job.swapped for job in jobs)


def test_arrived_job_overtakes_one_that_waits(pool: Workers) -> None:
    gate = ThreadTicket()
    late, early = Swap(pool, gate), Swap(pool, step=7)
    pool.submit(late, early)
    early.wait()
    assert not late.is_set
    gate.set()
    late.wait()


def test_all_workers_share_a_job() -> None:
    """One worker alone would run all tasks; here the tasks are long enough for the others to wake up."""
    pool = Workers(3, Recorder())
    host = [torch.ones(6, 1 << 20) for _ in range(3)]
    blocks = [each.clone() for each in host]
    for _ in range(20):
        tasks = bounds_of([slice(n, n + 1) for n in range(6)])
        work = ExchangeWork(host, torch.arange(6, dtype=torch.int32), blocks, tasks)
        job = Job(work, (), (), pool.handle, deadline=0, step=0, param="w")
        pool.submit(job)
        job.settle()
        if len({record.worker for record in job.records}) == 3:
            break
    else:
        raise AssertionError("no job was shared by all workers")
    pool.close()


def test_job_waits_for_the_one_before(pool: Workers) -> None:
    gate = ThreadTicket()
    first = Swap(pool, gate)
    second = Swap(pool, after=(first,))
    pool.submit(first, second)
    time.sleep(0.02)
    assert not second.is_set
    gate.set()
    second.wait()
    assert second.records[0].begin_ns >= first.records[0].end_ns


def test_failed_input_fails_the_job_and_its_followers(pool: Workers) -> None:
    gate, word = ThreadTicket(), Word()
    first = Swap(pool, ended(), gate, param="first", flag=Flag(word, 0, 1))
    second = Swap(pool, after=(first,), param="second")
    pool.submit(first, second)
    gate.set(ValueError("on purpose"))
    with pytest.raises(RuntimeError, match="the host update of second at step 0 failed") as raised:
        second.wait()
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert isinstance(raised.value.__cause__.__cause__, ValueError)
    assert word.value == 1, "a stream may wait for it"
    assert not first.swapped
    pool.land()
    assert pool.failed
    assert isinstance(first.error.__cause__, ValueError), "the error stays when its inputs are released"


def test_flag_is_raised_at_the_end(pool: Workers) -> None:
    gate, word = ThreadTicket(), Word()
    job = Swap(pool, gate, flag=Flag(word, 0, 5))
    pool.submit(job)
    time.sleep(0.02)
    assert word.value == 0
    gate.set()
    job.wait()
    assert word.value == 5


def test_abort_fails_a_queued_job(pool: Workers) -> None:
    word = Word()
    job = Swap(pool, ThreadTicket(), flag=Flag(word, 0, 1))
    pool.submit(job)
    job.abort(KeyError("lost"))
    job.settle()
    with pytest.raises(RuntimeError) as raised:
        job.wait()
    assert isinstance(raised.value.__cause__, KeyError)
    assert word.value == 1
    assert not job.swapped


def test_withdrawn_jobs_are_those_never_queued(pool: Workers) -> None:
    gate = ThreadTicket()
    queued, lost = Swap(pool, gate), Swap(pool)
    pool.submit(queued)
    interrupt = KeyboardInterrupt()
    pool.withdraw([queued, lost], interrupt)
    assert lost.is_settled
    assert lost.error is not None
    assert "interrupted" in str(lost.error)
    assert lost.error.__cause__ is interrupt
    gate.set()
    queued.wait()
    assert queued.swapped


def test_withdrawn_job_needs_no_pool() -> None:
    pool = Workers(1, Recorder())
    job = Swap(pool)
    pool.withdraw([job])
    job.settle()
    assert pool.failed
    pool.close()


def test_counter_gates_wrap_around(pool: Workers) -> None:
    class Counter:
        error = None
        word = ctypes.c_uint32(0xFFFFFFFE)

        def gate(self) -> Gate:
            return Gate(ctypes.addressof(self.word), 1, native.COUNTER, self.word)

        def done(self) -> bool:
            return False

    job = Swap(pool, Counter())
    pool.submit(job)
    time.sleep(0.02)
    assert not job.is_set
    Counter.word.value = 2
    job.wait()


def test_inputs_that_never_arrive_fail_the_job(pool: Workers) -> None:
    """A device that has died raises when its tickets are asked; that is all a queued job hears of it."""

    class Dead:
        error = None
        word = ctypes.c_uint32(0)

        def gate(self) -> Gate:
            return Gate(ctypes.addressof(self.word), 1, native.COUNTER, self.word)

        def done(self) -> bool:
            raise RuntimeError("the device has died")

    first = Swap(pool, Dead())
    second = Swap(pool, after=(first,))
    pool.submit(first, second)
    with pytest.raises(RuntimeError):
        second.wait()
    first.settle()
    assert "died" in str(first.error)


def test_jobs_end_while_a_thread_keeps_the_gil(pool: Workers) -> None:
    """A job of 0.4 s beside a C call that holds the GIL for 3 s."""
    keep = ctypes.PyDLL(None).usleep
    job = Swap(pool, late := LateWord(0.4))
    begin = time.perf_counter_ns()
    pool.submit(job)
    keep(3_000_000)
    assert time.perf_counter_ns() - begin > 2.9e9
    assert job.is_set
    assert job.records[1].end_ns - begin < 2e9
    late.wait()


def test_interrupt_ends_a_wait(pool: Workers) -> None:
    job = Swap(pool, gate := ThreadTicket())
    pool.submit(job)
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    gate.set()
    job.wait()


def test_workers_block_all_signals(pool: Workers) -> None:
    job = Swap(pool)
    pool.submit(job)
    job.wait()
    masks = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as file:
            lines = dict(line.split(":\t") for line in file.read().splitlines())
        if lines["Name"].startswith("zenflow-") and lines["Name"][8:].isdigit():
            masks.append(int(lines["SigBlk"], 16))
    assert masks
    assert all(mask & 1 << signal.SIGINT - 1 and mask & 1 << signal.SIGTERM - 1 for mask in masks)


def test_ended_jobs_are_recorded_and_released() -> None:
    recorder = Recorder()
    recorder.attach(timeline := Timeline())
    pool = Workers(2, recorder)
    first = Swap(pool, ended(), param="w", step=3)
    pool.submit(first)
    first.settle()
    pool.land()
    assert first.owners is None
    assert pool._owners == []
    events = timeline.events()
    assert [(event.kind, event.step, event.param) for event in events] == [("state", 3, "w")] * 2
    assert sum(event.bytes for event in events) == 4 * 3 * ROWS * 4 * 4
    pool.land()
    assert len(timeline.events()) == 2
    pool.close()


def test_close_finishes_queued_jobs_idempotently() -> None:
    pool, gate = Workers(2, Recorder()), ThreadTicket()
    jobs = [Swap(pool, gate) for _ in range(5)]
    pool.submit(*jobs)
    threading.Timer(0.05, gate.set).start()
    pool.close()
    pool.close()
    assert all(job.swapped for job in jobs)
    again = Swap(pool)
    pool.submit(again)
    again.wait()
    pool.close()


def test_interrupted_close_is_completed_by_the_next() -> None:
    pool, gate = Workers(2, Recorder()), ThreadTicket()
    job = Swap(pool, gate)
    pool.submit(job)
    threading.Timer(0.1, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    gate.set()
    pool.close()
    assert job.swapped
    assert not pool.handle


def test_close_fails_a_job_that_was_not_queued() -> None:
    """An interrupt came between the list of jobs in flight and the queue."""
    pool = Workers(1, Recorder())
    queued, lost = Swap(pool), Swap(pool)
    pool.submit(queued)
    pool._in_flight.append(lost)
    pool.close()
    assert queued.swapped
    assert "interrupted" in str(lost.error)


def test_wait_for_a_job_that_was_never_queued_raises() -> None:
    pool = Workers(1, Recorder())
    with pytest.raises(RuntimeError) as raised:
        Swap(pool).wait()
    assert "not queued" in str(raised.value.__cause__)


def test_failed_job_keeps_no_frame_alive() -> None:
    """Its error has a traceback, whose frames refer to the engine: the threads must not outlive that."""

    class Engine:
        pass

    def run() -> weakref.ref[Engine]:
        engine = Engine()
        pool = Workers(1, Recorder())
        gate = ThreadTicket()
        job = Swap(pool, gate)
        pool.submit(job)
        gate.set(ValueError())
        with pytest.raises(RuntimeError):
            job.wait()
        engine.pool, engine.job = pool, job  # type: ignore[attr-defined]
        return weakref.ref(engine)

    engine = run()
    gc.collect()
    assert engine() is None


def test_collected_pool_ends_its_threads() -> None:
    pool = Workers(2, Recorder())
    job = Swap(pool, ThreadTicket())
    pool.submit(job)
    handle = pool.handle
    del pool
    gc.collect()
    assert not handle
    assert job.is_settled
    assert not job.swapped


def test_refused_threads_fail_the_jobs() -> None:
    class Refusing:
        def zenflow_open(self, *_: Any) -> int:
            return 11  # EAGAIN

    pool, job = Workers(2, Recorder()), None
    job = Swap(pool)
    native.library_with_gil()  # also if this is the first test of the process
    with mock.patch.object(native, "library", Refusing), pytest.raises(RuntimeError, match="ulimit -u"):
        pool.submit(job)
    assert job.is_settled
    assert pool.failed
    second = Swap(pool)
    pool.submit(second)
    second.wait()
    pool.close()


def test_denormals_ignore_the_starting_thread() -> None:
    """A thread inherits the mode of the one that starts it; results would depend on when the first job was."""
    from zenflow_compile.runtime.host.host_kernel import HostKernel, WindowUpdate
    from zenflow_compile.runtime.parameters.host_state import UpdateWork, WindowAddresses
    from zenflow_compile.runtime.update_rule import StepCoefficients

    def moments(*, flush: bool) -> torch.Tensor:
        kernel = HostKernel(torch.float32, torch.float32, 1)
        state = [torch.zeros(16), torch.full((16,), 1e-39), torch.zeros(16)]
        coefficients = [StepCoefficients.known(0.0, 0.5, 0.5, 0.0)]
        update = WindowUpdate(state, torch.zeros(16), [torch.zeros(16)], coefficients, 1)
        addresses = WindowAddresses(kernel.window(update), update)
        pool = Workers(1, Recorder())
        torch.set_flush_denormal(flush)
        try:
            work = UpdateWork(addresses, coefficients, 1, 1.0, bounds_of([slice(0, 16)]))
            job = Job(work, (), (), pool.handle, deadline=0, step=0, param="w")
            pool.submit(job)
            job.wait()
        finally:
            torch.set_flush_denormal(False)
        pool.close()
        return state[1]

    assert moments(flush=False)[0] > 0
    assert torch.equal(moments(flush=True), moments(flush=False))


SCRIPT = """
import os, sys, torch
from tests.runtime.test_workers import Swap
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import Timeline
pool = Workers(2, Recorder())
jobs = [Swap(pool, *([] if number % 2 else [ThreadTicket()])) for number in range(200)]
pool.submit(*jobs)
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "del pool, jobs",
        "raise SystemExit(0)",
        """
        child = os.fork()
        if not child:
            new = Workers(1, Recorder())
            job = Swap(new)
            new.submit(job)
            job.wait()
            new.close()
            lost = Swap(pool)
            try:
                pool.submit(lost)
            except RuntimeError:
                lost.settle()
            try:
                jobs[0].wait()
            except RuntimeError:
                sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """,
    ],
    ids=["end of the script", "dropped", "exit", "fork"],
)
def test_process_ends_with_jobs_in_flight(end: str) -> None:
    script = SCRIPT + textwrap.dedent(end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
