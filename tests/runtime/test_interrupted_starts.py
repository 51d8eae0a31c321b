"""Threads whose start is interrupted: running ones are registered and joined; the next use starts those missing."""

from __future__ import annotations

import threading

import pytest

from tests.runtime.test_workers import job, pool_of
from zenflow_compile.runtime.host.python_pool import _Queued

pytestmark = pytest.mark.timeout(60)


def interrupted_start(patch: pytest.MonkeyPatch, number: int, *, runs: bool) -> list[threading.Thread]:
    """Ctrl-C in the start of thread ``number``, which runs then, or not yet; returns all started threads."""
    start, seen = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        seen.append(thread)
        if len(seen) != number + 1 or runs:
            start(thread)
        if len(seen) == number + 1:
            raise KeyboardInterrupt

    patch.setattr(threading.Thread, "start", interrupted)
    return seen


def test_interrupted_worker_ends_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(2)
    lost = job(lambda: 0)
    with monkeypatch.context() as patch:
        seen = interrupted_start(patch, 0, runs=True)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(lost)
    lost.settle()
    assert pool.runs(seen[0])
    pool.close()
    assert not seen[0].is_alive()


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_next_job_completes_an_interrupted_start(number: int, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(3)
    with monkeypatch.context() as patch:
        seen = interrupted_start(patch, number, runs=runs)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(job(lambda: 0))
    meeting = threading.Barrier(3, timeout=20)
    names: set[str] = set()
    three = job(*[lambda: names.add(threading.current_thread().name) or meeting.wait()] * 3)
    pool.submit(three)
    three.wait()
    assert names == {f"zenflow-worker-{index}" for index in range(3)}
    if not runs:
        seen[number].start()  # late: another thread has its place
        seen[number].join(20)
        assert not seen[number].is_alive()
    pool.close()
    assert not any(thread.is_alive() for thread in seen)


def test_worker_that_begins_after_close_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(2)
    with monkeypatch.context() as patch:
        seen = interrupted_start(patch, 1, runs=False)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(job(lambda: 0))
    pool.close()
    ran: list[str] = []
    pool._queue = [(0, 0, 0, _Queued(job(lambda: ran.append("task") or 0), 2))]
    seen[1].start()
    seen[1].join(20)
    assert not seen[1].is_alive()
    assert ran == []
