"""Which ranks are said to be gone: by what they leave in the store, and by their processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, HashStore, Store

from zenflow_compile.runtime.ranks.attendance import Attendance, Member, RankError, making_groups, wait_for_all

SECONDS = timedelta(seconds=7)


class LostStore(Store):
    """One whose process is gone."""

    def set(self, key: str, value: str) -> None:
        raise DistNetworkError("Connection reset by peer")

    def check(self, keys: list[str]) -> bool:
        raise DistNetworkError("Connection reset by peer")

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise DistNetworkError("Connection reset by peer")


class SilentStore(Store):
    """One whose process hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.end.wait()


def ended() -> subprocess.Popen[bytes]:
    """A process that has ended, and that its parent has not waited for yet."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


def test_ended_processes_are_seen() -> None:
    own = Member.own()
    assert not own.has_ended()
    process = ended()
    of_it = own._replace(pid=process.pid)
    assert of_it.has_ended()
    process.wait()
    assert of_it.has_ended()


@pytest.mark.parametrize("place", ["host", "pids"])
def test_ended_processes_elsewhere_are_not_known(place: str) -> None:
    process = ended()
    assert not Member.own()._replace(pid=process.pid, **{place: "another"}).has_ended()
    process.wait()


def test_ended_rank_is_named_where_groups_are_made() -> None:
    own, process = Member.own(), ended()
    with (
        pytest.raises(RankError, match=r"rank 2 is gone, while ranks create .*Rank 0 made .*: closed by peer"),
        making_groups(0, [own, own, own._replace(pid=process.pid)]),
    ):
        raise RuntimeError("closed by peer")
    process.wait()


def attendance(store: Store, dead: int | None, size: int = 4) -> Attendance:
    """Of rank 1 of ``size``, whose processes live but for ``dead``."""
    own = Member.own()
    members = [own] * size
    if dead is not None:
        process = ended()
        process.wait()
        members[dead] = own._replace(pid=process.pid)
    return Attendance(store, 1, size, 0, members, SECONDS)


def test_ended_rank_is_named_at_once() -> None:
    """Rank 3 has not come either, since it waits for another one."""
    assert attendance(HashStore(), 2).absent("waits") == "rank 2 is gone: its process has ended"


def test_ranks_that_wait_are_there() -> None:
    store = HashStore()
    waiting = [Attendance(store, rank, 4, 0, (), SECONDS) for rank in (0, 1, 3)]
    with ThreadPoolExecutor() as threads:
        texts = list(threads.map(lambda each: each.absent("waits"), waiting))
    assert texts == ["rank 2 is gone, or not there within 7 s"] * 3


def test_ranks_that_wait_for_each_other_say_what_for() -> None:
    store = HashStore()
    waiting = {rank: Attendance(store, rank, 2, 0, (), SECONDS) for rank in range(2)}
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(lambda rank: waiting[rank].absent(f"waits for {rank}"), waiting)
    assert first.startswith("all ranks wait, in different collectives: rank 1 waits for 1. A rank is done with its")
    assert "rank 0 waits for 0" in second


KEEPER = "rank 0 is gone, or not there within 7 s, if it has the store of the run, which does not answer"


def test_rank_with_the_store_is_named_when_that_is_gone() -> None:
    assert attendance(LostStore(), None).absent("waits") == KEEPER
    assert attendance(LostStore(), 0).absent("waits") == "rank 0 is gone: its process has ended"
    elsewhere = Attendance(LostStore(), 1, 4, None, (), SECONDS)
    assert elsewhere.absent("waits").startswith(
        "a rank is gone: the store of the run does not answer, which rank 0 has unless"
    )


def test_others_may_have_ended_since() -> None:
    process = ended()
    process.wait()
    dead = Member.own()._replace(pid=process.pid)
    lost = Attendance(LostStore(), 1, 3, 0, [dead, Member.own(), dead], SECONDS)
    told = "ranks 0, 2 have ended, one of them before the others, and with rank 0 the run's store"
    assert lost.absent("waits") == told


def test_store_that_hangs_is_not_awaited() -> None:
    store = SilentStore()
    seen = Attendance(store, 1, 4, 0, (), SECONDS, answer_seconds=0.01)
    begin = time.monotonic()
    seen.announce("an error of its own")
    seen.raise_failure_of_others(0)
    seen.raise_if_missed()
    assert seen.absent("waits") == KEEPER
    assert time.monotonic() - begin < 60  # and not forever
    store.end.set()


def test_meeting_tells_who_is_missing() -> None:
    store = HashStore()
    store.set("1", "")
    with pytest.raises(RankError, match=r"ranks 0, 2 have not created an optimizer within 0\.1 s"):
        wait_for_all(store, 1, ["0", "1", "2"], timedelta(seconds=0.1))
    with pytest.raises(
        RankError, match=r"the store of the run does not answer, .* while ranks create their optimizers"
    ):
        wait_for_all(LostStore(), 1, ["0", "1"], SECONDS)
