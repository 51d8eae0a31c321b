"""Which ranks are said to be gone: by what they leave in the store, and by their processes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, HashStore, Store

from zenflow_compile.runtime.ranks.attendance import Attendance, Member, RankError, wait_for_all

SECONDS = timedelta(seconds=7)


class LostStore(Store):
    """One whose process is gone."""

    def set(self, key: str, value: str) -> None:
        raise DistNetworkError("Connection reset by peer")

    def check(self, keys: list[str]) -> bool:
        raise DistNetworkError("Connection reset by peer")

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise DistNetworkError("Connection reset by peer")


def ended() -> subprocess.Popen[bytes]:
    """A process that has ended, and that nobody has waited for yet."""
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()  # its end
    while not Member.own()._replace(pid=process.pid).has_ended():
        pass
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
def test_processes_elsewhere_are_not_known_to_have_ended(place: str) -> None:
    process = ended()
    assert not Member.own()._replace(pid=process.pid, **{place: "another"}).has_ended()
    process.wait()


def attendance(store: Store, dead: int | None, size: int = 4) -> Attendance:
    """Of rank 1 of ``size``, whose processes live but for ``dead``."""
    own = Member.own()
    members = [own] * size
    if dead is not None:
        process = ended()
        process.wait()
        members[dead] = own._replace(pid=process.pid)
    return Attendance(store, 1, size, members, SECONDS)


def test_ended_rank_is_named_at_once() -> None:
    """Rank 3 has not come either, since it waits for another one."""
    assert attendance(HashStore(), 2).absent() == "rank 2 is gone: its process has ended"


def test_ranks_that_wait_are_there() -> None:
    store = HashStore()
    waiting = [Attendance(store, rank, 4, (), SECONDS) for rank in (0, 1, 3)]
    with ThreadPoolExecutor() as threads:
        texts = list(threads.map(Attendance.absent, waiting))
    assert texts == ["rank 2 is gone, or not there within 7 s"] * 3


def test_nobody_is_named_when_the_store_is_gone() -> None:
    gone = "a rank is gone: the store of the run is gone, which rank 0 has unless the launcher does, as torchrun"
    assert attendance(LostStore(), None).absent() == gone
    assert attendance(LostStore(), 0).absent() == "rank 0 is gone: its process has ended"


def test_meeting_tells_who_is_missing() -> None:
    store = HashStore()
    store.set("1", "")
    with pytest.raises(RankError, match=r"ranks 0, 2 have not created an optimizer within 0\.1 s"):
        wait_for_all(store, 1, ["0", "1", "2"], timedelta(seconds=0.1))
    with pytest.raises(RankError, match=r"the store of the run is gone, .* while ranks created their optimizers"):
        wait_for_all(LostStore(), 1, ["0", "1"], SECONDS)
