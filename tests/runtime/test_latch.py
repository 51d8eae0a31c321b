"""A latch releases the threads that wait, and those that wait later."""

from __future__ import annotations

import threading

import pytest

from zenflow_compile.runtime.device.latch import Latch

pytestmark = pytest.mark.timeout(60)


def test_set_releases_all_waiting_threads() -> None:
    latch = Latch()
    passed: list[int] = []
    threads = [threading.Thread(target=lambda i=i: (latch.wait(), passed.append(i))) for i in range(8)]
    for thread in threads:
        thread.start()
    assert not latch.is_set
    assert not passed
    for _ in range(2):  # idempotent
        latch.set()
    for thread in threads:
        thread.join(20)
    assert sorted(passed) == list(range(8))
    latch.wait()
    assert latch.is_set
