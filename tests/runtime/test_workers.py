"""Workers run jobs by deadline, raise their errors, and finish queued jobs at ``close()``."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from zenflow_compile.runtime.device.copy_lanes import CopyError
from zenflow_compile.runtime.host.python_pool import PythonJob, PythonPool, _Queued, preferred_worker
from zenflow_compile.runtime.recorder import Recorder

pytestmark = pytest.mark.timeout(60)


def pool_of(workers: int) -> PythonPool:
    return PythonPool(workers, Recorder())


class GatedJob(PythonJob):
    """A job with inputs."""

    def __init__(
        self, tasks: Sequence[Callable[[], int]], ready: Callable[[], None], arrived: Callable[[], bool], **place: Any
    ) -> None:
        self._wait_for_inputs, self._have_inputs = ready, arrived
        super().__init__(tasks, **place)

    def ready(self) -> None:
        self._wait_for_inputs()

    def arrived(self) -> bool:
        return self._have_inputs()


def job(
    *tasks: Callable[[], int],
    deadline: int = 0,
    ready: Callable[[], None] = lambda: None,
    arrived: Callable[[], bool] = lambda: True,
    param: str = "w",
    step: int = 7,
) -> PythonJob:
    return GatedJob(tasks, ready, arrived, deadline=deadline, step=step, param=param)


def test_earliest_deadline_runs_first() -> None:
    pool = pool_of(1)
    gate = threading.Event()
    order: list[int] = []
    first = job(lambda: int(gate.wait(20)), deadline=99)
    pool.submit(first)
    jobs = [job(lambda d=deadline: order.append(d) or 0, deadline=deadline) for deadline in (5, 1, 3, 1, 4)]
    for each in jobs:
        pool.submit(each)
    gate.set()
    for each in jobs:
        each.wait()
    assert order == [1, 1, 3, 4, 5]
    pool.close()


def test_earlier_step_runs_first_at_any_deadline() -> None:
    """The inputs of a later step may wait for the earlier job, on a device that runs behind."""
    pool = pool_of(1)
    gate = threading.Event()
    order: list[tuple[int, int]] = []
    pool.submit(job(lambda: int(gate.wait(20)), step=0))
    keys = [(2, 0), (1, 5), (2, 1), (1, 9)]
    jobs = [job(lambda k=key: order.append(k) or 0, step=key[0], deadline=key[1]) for key in keys]
    for each in jobs:
        pool.submit(each)
    gate.set()
    for each in jobs:
        each.wait()
    assert order == sorted(keys)
    pool.close()


def test_job_with_inputs_runs_before_one_without() -> None:
    pool = pool_of(1)
    arrived = threading.Event()
    order: list[str] = []
    late = job(lambda: order.append("late") or 0, deadline=0, arrived=arrived.is_set)
    here = job(lambda: order.append("here") or 0, deadline=1)
    pool.submit(late)
    pool.submit(here)
    here.wait()
    assert not late.done()
    arrived.set()
    late.wait()
    assert order == ["here", "late"]
    pool.close()


def test_idle_workers_share_one_poll() -> None:
    """A worker that has waited does not ask all jobs again; one that has just ended a task does."""
    pool = pool_of(2)
    asked: list[int] = []
    late = job(lambda: 0, arrived=lambda: bool(asked.append(1)))
    pool._queue = [(0, 0, 0, _Queued(late, 2))]
    assert pool._first_arrived(idle=True) is None
    assert pool._first_arrived(idle=True) is None
    assert len(asked) == 1
    assert pool._first_arrived(idle=False) is None
    assert len(asked) == 2


def test_equal_deadlines_keep_their_order() -> None:
    pool = pool_of(1)
    order: list[int] = []
    gate = threading.Event()
    pool.submit(job(lambda: int(gate.wait(20)), deadline=-1))
    last = [job(lambda i=i: order.append(i) or 0) for i in range(20)]
    for each in last:
        pool.submit(each)
    gate.set()
    last[-1].wait()
    assert order == list(range(20))
    pool.close()


def test_tasks_of_a_job_run_in_parallel() -> None:
    pool = pool_of(3)
    meeting = threading.Barrier(3, timeout=20)
    three = job(*[lambda: meeting.wait()] * 3)
    pool.submit(three)
    three.wait()
    pool.close()


def test_job_is_done_with_its_last_task() -> None:
    pool = pool_of(2)
    gate = threading.Event()
    two = job(lambda: 0, lambda: int(gate.wait(20)))
    pool.submit(two)
    time.sleep(0.05)  # in which the first task ends
    assert not two.done()
    gate.set()
    two.wait()
    two.settle()
    assert two.done()
    pool.close()


def test_job_without_tasks_is_done() -> None:
    empty = job()
    assert empty.done()
    empty.wait()
    empty.settle()


def test_tasks_wait_for_their_inputs() -> None:
    pool = pool_of(1)
    arrived = threading.Event()
    seen: list[bool] = []
    waiting = job(lambda: seen.append(arrived.is_set()) or 0, ready=lambda: arrived.wait(20) and None)
    pool.submit(waiting)
    time.sleep(0.02)  # in which a worker that does not wait would run it
    arrived.set()
    waiting.wait()
    assert seen == [True]
    pool.close()


@pytest.mark.parametrize("where", ["task", "ready"])
def test_errors_keep_their_traceback(where: str) -> None:
    pool = pool_of(1)

    def breaks() -> int:
        raise ZeroDivisionError("on purpose")

    bad = job(breaks) if where == "task" else job(lambda: 0, ready=lambda: breaks() and None)
    pool.submit(bad)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the host update of w at step 7 failed") as caught:
            bad.wait()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    traceback = bad.error.__traceback__ if bad.error else None
    names = []
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "breaks" in names
    good = job(lambda: 0)  # the worker lives on
    pool.submit(good)
    good.wait()
    pool.close()


def test_failed_copy_is_chained_to_its_cause() -> None:
    pool = pool_of(1)

    def not_copied() -> None:
        raise CopyError("copy") from ValueError("on purpose")

    bad = job(lambda: 0, ready=not_copied)
    pool.submit(bad)
    with pytest.raises(RuntimeError) as caught:
        bad.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    pool.close()


def test_error_skips_the_other_tasks_and_settles() -> None:
    pool = pool_of(1)
    ran: list[int] = []

    def breaks() -> int:
        raise ValueError

    bad = job(lambda: ran.append(0) or 0, breaks, *[lambda: ran.append(1) or 0] * 5)
    pool.submit(bad)
    bad.settle()
    assert bad.done()
    assert ran == [0]
    pool.close()


def test_error_is_raised_while_other_tasks_run() -> None:
    """``wait`` raises at once; ``settle`` waits for the other tasks."""
    pool = pool_of(2)
    gate, held = threading.Event(), threading.Event()

    def holds() -> int:
        held.set()
        return int(gate.wait(20))

    def breaks() -> int:
        held.wait(20)
        raise ValueError

    bad = job(holds, breaks)
    pool.submit(bad)
    with pytest.raises(RuntimeError):
        bad.wait()
    settled = threading.Event()
    thread = threading.Thread(target=lambda: (bad.settle(), settled.set()))
    thread.start()
    assert not settled.wait(0.05)
    gate.set()
    assert settled.wait(20)
    pool.close()


def test_close_finishes_queued_jobs() -> None:
    pool = pool_of(2)
    count = [0]
    lock = threading.Lock()

    def task() -> int:
        time.sleep(0.002)  # so that most are still queued at close()
        with lock:
            count[0] += 1
        return 0

    for _ in range(10):
        pool.submit(job(task, task))
    assert any(pool.runs(thread) for thread in threading.enumerate())
    pool.close()
    assert count == [20]
    assert not any(pool.runs(thread) for thread in threading.enumerate())
    pool.close()


def test_threads_start_with_the_first_job() -> None:
    before = threading.active_count()
    pool = pool_of(3)
    assert threading.active_count() == before
    first = job(lambda: 0)
    pool.submit(first)
    first.wait()
    assert threading.active_count() == before + 3
    pool.close()
    assert threading.active_count() == before


def test_fewer_threads_serve_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(3)
    start = threading.Thread.start
    started: list[str] = []

    def one_only(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", one_only)
    jobs = [job(lambda: 0, lambda: 0) for _ in range(4)]
    for each in jobs:
        pool.submit(each)
        each.wait()
    assert started == ["zenflow-worker-0"]
    pool.close()


def test_job_without_any_thread_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = pool_of(2)
    lost = job(lambda: 0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.submit(lost)
    lost.settle()
    with pytest.raises(RuntimeError, match="failed"):
        lost.wait()
    found = job(lambda: 0)
    pool.submit(found)
    found.wait()
    pool.close()


def test_only_jobs_never_queued_are_withdrawn() -> None:
    pool = pool_of(1)
    gate, begun = threading.Event(), threading.Event()
    running = job(lambda: begun.set() or int(gate.wait(20)))
    waiting, never = job(lambda: 0), job(lambda: 0)
    pool.submit(running, waiting)
    assert begun.wait(20)
    interrupt = KeyboardInterrupt()
    pool.withdraw([running, waiting, never], interrupt)
    never.settle()
    with pytest.raises(RuntimeError, match="host update") as caught:
        never.wait()
    assert caught.value.__cause__ is not None
    assert "interrupted" in str(caught.value.__cause__)
    assert caught.value.__cause__.__cause__ is interrupt
    gate.set()
    for each in (running, waiting):
        each.wait()
    pool.withdraw([running, waiting, job()])
    assert (running.error, waiting.error) == (None, None)
    pool.close()


def test_workers_prefer_their_part_of_the_memory() -> None:
    """Each worker blocks in its first task until all have one, which shows that it takes one of its own first."""
    pool = pool_of(3)
    meeting = threading.Barrier(3, timeout=20)
    first_of: dict[str, int] = {}
    lock = threading.Lock()

    def task(number: int) -> Callable[[], int]:
        def run() -> int:
            with lock:
                first = threading.current_thread().name not in first_of
                first_of.setdefault(threading.current_thread().name, number)
            return meeting.wait() if first else 0

        return run

    nine = job(*[task(number) for number in range(9)])
    pool.submit(nine)
    nine.wait()
    assert first_of == {"zenflow-worker-0": 0, "zenflow-worker-1": 3, "zenflow-worker-2": 6}
    pool.close()


def test_idle_worker_takes_tasks_of_a_busy_one() -> None:
    pool = pool_of(2)
    gate = threading.Event()
    ran: list[int] = []
    stolen = threading.Event()

    def held() -> int:
        return int(gate.wait(20))

    def quick(number: int) -> Callable[[], int]:
        def run() -> int:
            ran.append(number)
            if len(ran) == 5:
                stolen.set()
            return 0

        return run

    six = job(held, *[quick(number) for number in range(1, 6)])
    pool.submit(six)
    assert stolen.wait(20)  # one worker is still blocked
    assert sorted(ran) == [1, 2, 3, 4, 5]
    gate.set()
    six.wait()
    pool.close()


def test_earlier_deadline_runs_before_an_own_task() -> None:
    pool = pool_of(1)
    gate = threading.Event()
    order: list[str] = []
    pool.submit(job(lambda: int(gate.wait(20)), deadline=-1))
    late = job(*[lambda: order.append("late") or 0] * 2, deadline=5)
    early = job(*[lambda: order.append("early") or 0] * 2, deadline=1)
    pool.submit(late)
    pool.submit(early)
    gate.set()
    late.wait()
    assert order == ["early", "early", "late", "late"]
    pool.close()


@pytest.mark.parametrize(("tasks", "workers"), [(1, 4), (3, 4), (4, 4), (9, 4), (12, 5)])
def test_preferred_workers_are_in_order_and_even(tasks: int, workers: int) -> None:
    chosen = [preferred_worker(number, tasks, workers) for number in range(tasks)]
    assert chosen == sorted(chosen)
    assert all(0 <= worker < workers for worker in chosen)
    counts = [chosen.count(worker) for worker in range(workers)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin threads")
def test_workers_run_on_their_cores() -> None:
    mine = os.sched_getaffinity(0)
    core = max(mine)
    pool = PythonPool(2, Recorder(), cores=[core, core])
    seen: list[set[int]] = []
    two = job(*[lambda: seen.append(os.sched_getaffinity(0)) or 0] * 2)
    pool.submit(two)
    two.wait()
    assert seen == [{core}, {core}]
    assert os.sched_getaffinity(0) == mine
    pool.close()


def test_job_whose_inputs_cannot_be_asked_fails() -> None:
    """As of a device that has died: the job fails, and the worker lives on."""
    pool = pool_of(1)

    def breaks() -> bool:
        raise ZeroDivisionError("on purpose")

    bad, good = job(lambda: 0, lambda: 0, arrived=breaks), job(lambda: 0)
    pool.submit(bad, good)
    good.wait()
    bad.settle()
    with pytest.raises(RuntimeError, match="failed") as caught:
        bad.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert pool.failed
    pool.close()


def test_event_that_cannot_be_recorded_fails_the_job() -> None:
    class FullTimeline:
        def add(self, *_: object, **__: object) -> None:
            raise MemoryError

    recorder = Recorder()
    recorder.timeline = FullTimeline()  # type: ignore[assignment]
    pool = PythonPool(1, recorder)
    bad = job(lambda: 0)
    pool.submit(bad)
    with pytest.raises(RuntimeError, match="failed"):
        bad.wait()
    bad.settle()
    recorder.timeline = None
    good = job(lambda: 0)
    pool.submit(good)
    good.wait()
    pool.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_lost_worker_fails_queued_jobs(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that another worker has begun are finished, and the next job starts the thread that is missing."""
    pool = pool_of(workers)
    gate, began, busy = threading.Event(), threading.Event(), set()
    running = job(lambda: int(busy.add(threading.current_thread()) or began.set() or gate.wait(20)))
    queued = [job(lambda: 0, arrived=lambda: False) for _ in range(3)]
    original = pool._first_arrived

    def first_arrived(idle: bool) -> int | None:
        if workers == 1 or threading.current_thread() not in busy:
            raise MemoryError
        return original(idle)

    pool.submit(running, *queued)
    assert began.wait(20)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_first_arrived", first_arrived)  # which idle workers call a thousand times a second
        if workers == 1:
            gate.set()
        for each in queued:
            each.settle()
            with pytest.raises(RuntimeError, match="failed") as caught:
                each.wait()
            assert isinstance(caught.value.__cause__, MemoryError)
    gate.set()
    running.wait()
    assert pool.failed
    good = job(lambda: 0)
    pool.submit(good)
    good.wait()
    assert sorted(thread.name for thread in pool._threads) == [f"zenflow-worker-{index}" for index in range(workers)]
    pool.close()


def test_denormals_ignore_the_starting_thread() -> None:
    found = []
    torch.set_flush_denormal(True)
    try:
        pool = pool_of(1)
        one = job(lambda: found.append((torch.tensor(1e-39) * 0.5).item()) or 0)
        pool.submit(one)
        one.wait()
    finally:
        torch.set_flush_denormal(False)
    pool.close()
    assert found[0] > 0
