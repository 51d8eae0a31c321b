"""Blocks and the window that they pass through: who gets space, in which order, and that nobody waits for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from zenflow_compile.planning.plan import FILE_WINDOW_BYTES, ParamPlan, Placement
from zenflow_compile.runtime.nvme.cache import NvmeCache, window_bytes
from zenflow_compile.runtime.nvme.cached_state import CachedState, CachedStateLock, block_bytes
from zenflow_compile.runtime.nvme.state_file import PAGE_BYTES, StateFile, StateFileError
from zenflow_compile.runtime.recorder import Recorder

pytestmark = pytest.mark.timeout(60)


def plan_of(index: int, slices: int = 40, interval: int = 1) -> ParamPlan:
    """``slices`` of 64 elements: 768 bytes of state each."""
    return ParamPlan(
        index=index,
        name=f"p{index}",
        shape=(slices, 64),
        dtype=torch.float32,
        placement=Placement.FILE,
        dim=0,
        slices=slices,
        length=64,
        interval=interval,
        in_file=True,
    )


Make = Callable[[list[ParamPlan], int], tuple[NvmeCache, list[CachedState]]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A window with blocks that hold their own index."""
    made: list[NvmeCache] = []

    def window_with(plans: list[ParamPlan], size: int) -> tuple[NvmeCache, list[CachedState]]:
        window = NvmeCache(tmp_path, Recorder(torch.device("cpu")))
        made.append(window)
        homes = list(window.add(plans, "test", size).values())
        for number, home in enumerate(homes):
            with home.acquire(write=True) as state:
                assert not any(tensor.any() for tensor in state)
                for tensor in state:
                    tensor.fill_(number)
        return window, homes

    yield window_with
    for window in made:
        window.close()


def values(home: CachedState) -> set[float]:
    with home.acquire() as state:
        return {float(value) for tensor in state for value in tensor.unique()}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)  # between two looks


def test_blocks_of_all_sizes_pass_through_the_smallest_window(make: Make) -> None:
    plans = [plan_of(index, slices) for index, slices in enumerate([3, 90, 1, 17, 55, 90, 8])]
    window, homes = make(plans, block_bytes(plans[1]))
    order = random.Random(0)
    expected = [float(number) for number in range(len(homes))]
    for _ in range(60):
        number = order.randrange(len(homes))
        assert values(homes[number]) == {expected[number]}
        with homes[number].acquire(write=True) as state:
            assert state.master.shape == (plans[number].deferred, 64)
            assert state.master.data_ptr() % 64 == 0
            for tensor in state:
                tensor.add_(1.0)
        expected[number] += 1.0
    assert window.nbytes == block_bytes(plans[1])
    assert window.file_bytes == sum(block_bytes(plan) for plan in plans)


def test_a_block_is_new_before_its_write_is_complete(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan_of(0), plan_of(1)]
    _, (first, _) = make(plans, 2 * block_bytes(plans[0]))
    write = StateFile.write

    def late(*args: object) -> int:
        time.sleep(0.05)  # many times what the reads below take
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(StateFile, "write", late)
    for number in range(5):
        with first.acquire(write=True) as state:
            for tensor in state:
                tensor.fill_(10.0 + number)
        assert values(first) == {10.0 + number}


def test_jobs_that_can_run_get_space_from_those_that_cannot(make: Make) -> None:
    """Gradients arrive last first, and the window has room for one block."""
    plans = [plan_of(index) for index in range(6)]
    _, homes = make(plans, block_bytes(plans[0]))
    leases = [home.lease(step=1, deadline=number) for number, home in enumerate(homes)]
    until(lambda: homes[0].place.name == "WINDOW")  # read ahead for the first, whose gradient has not come
    with homes[5].acquire(write=True) as state:  # the training thread goes before all of them
        state.master.fill_(7.0)
    for number, lease in enumerate(leases):
        until(lease.arrived)
        lease.ready()
        homes[number].state().exp_avg.fill_(9.0)
        lease.end()
    assert values(homes[5]) == {5.0, 7.0, 9.0}


def test_an_earlier_block_takes_the_place_of_one_that_was_read_ahead(make: Make) -> None:
    plans = [plan_of(0), plan_of(1)]
    _, (first, second) = make(plans, block_bytes(plans[0]))
    later = second.lease(step=3, deadline=0)
    until(lambda: second.place.name == "WINDOW")
    earlier = first.lease(step=2, deadline=5)
    until(earlier.arrived)
    assert second.place.name == "FILE"
    assert not later.arrived()
    earlier.end()
    until(later.arrived)
    later.end()


def test_a_held_block_keeps_its_place(make: Make) -> None:
    plans = [plan_of(0), plan_of(1)]
    _, (first, second) = make(plans, block_bytes(plans[0]))
    later = second.lease(step=3, deadline=0)
    until(later.arrived)
    earlier = first.lease(step=2, deadline=5)
    time.sleep(0.05)  # in which a wrong eviction would happen
    assert not earlier.arrived()
    assert later.arrived()
    later.end()
    until(earlier.arrived)
    earlier.end()


def test_what_is_needed_next_is_read_ahead_in_the_order_of_updates(make: Make) -> None:
    plans = [plan_of(index) for index in range(5)]
    _, homes = make(plans, 2 * block_bytes(plans[0]))
    for step in range(2):
        leases = [home.lease(step=step, deadline=4 - number) for number, home in enumerate(homes)]
        for lease in reversed(leases):
            until(lease.arrived)
            lease.end()
        # The last deadlines of a step were in the window when it ended; the first of the next one come back.
        until(lambda: {home.name for home in homes if home.place.name == "WINDOW"} == {"p4", "p3"})


def test_windows_that_close_next_are_read_ahead(make: Make) -> None:
    """Not those whose turn comes steps later, although their deadlines are earlier."""
    plans = [plan_of(index, interval=2) for index in range(2)]
    _, (first, second) = make(plans, block_bytes(plans[0]))
    for step, home in ((0, first), (1, second)):
        lease = home.lease(step=step, deadline=home.offset)
        until(lease.arrived)
        lease.end()
    assert first.next_use[1] == 2
    until(lambda: first.place.name == "WINDOW")


def test_failed_writes_free_their_space_and_name_what_is_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan_of(index) for index in range(3)]
    window, homes = make(plans, block_bytes(plans[0]))
    until(lambda: all(window._at_rest(home) for home in homes))

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateFile, "write", full)
    for home in homes:
        with home.acquire(write=True):
            pass
    until(lambda: all(home.error is not None for home in homes))
    for number, home in enumerate(homes):
        lease = home.lease(step=0, deadline=0)
        assert lease.arrived()
        with pytest.raises(StateFileError, match=rf"p{number} .*\.state.*No space.*; load the last") as caught:
            lease.ready()
        assert isinstance(caught.value.__cause__, OSError)
        lease.end()
        with pytest.raises(StateFileError), home.acquire():
            pass
    monkeypatch.undo()
    for home in homes:
        with home.acquire(write=True, fresh=True) as state:
            for tensor in state:
                tensor.fill_(4.0)
    assert [values(home) for home in homes] == [{4.0}] * 3


def test_random_jobs_from_several_threads_end_with_every_update(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that take whichever lease has arrived, reads and writes that are late, a window of one and a half."""
    chance = random.Random(1)
    for name in ("read", "write"):
        move = getattr(StateFile, name)
        late = lambda *args, move=move: (time.sleep(chance.random() * 2e-3), move(*args))[1]  # noqa: E731
        monkeypatch.setattr(StateFile, name, late)
    plans = [plan_of(index, 10 + 5 * index) for index in range(8)]
    window, homes = make(plans, block_bytes(plans[-1]) * 3 // 2)
    for step in range(10):
        waiting = [home.lease(step=step, deadline=number) for number, home in enumerate(homes)]
        chance.shuffle(waiting)
        lock = threading.Lock()

        def work(waiting: list[CachedStateLock] = waiting, lock: threading.Lock = lock) -> None:
            while waiting:
                with lock:
                    mine = next((lease for lease in waiting if lease.arrived()), None)
                    if mine is not None:
                        waiting.remove(mine)
                if mine is None:
                    time.sleep(1e-4)  # between two looks
                    continue
                for tensor in mine.block.state():
                    tensor.add_(1.0)
                mine.end()

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [values(home) for home in homes] == [{number + 10.0} for number in range(8)]
    assert window.nbytes < 2 * block_bytes(plans[-1])


@pytest.mark.parametrize("given", [None, 40 * 768, 50 * 768, 10**9])
def test_the_window_is_as_large_as_asked_and_no_larger_than_all_blocks(given: int | None) -> None:
    plans = [plan_of(0, 10), plan_of(1, 40), plan_of(2, 40)]
    size = window_bytes(plans, given)
    assert size >= block_bytes(plans[1])
    assert size <= sum(map(block_bytes, plans))
    assert given is None or size < given + PAGE_BYTES


def test_the_window_is_two_blocks_unless_blocks_are_small() -> None:
    large = [plan_of(index, 1 << 16) for index in range(4)]  # of 48 MiB
    assert window_bytes(large, None) == 2 * block_bytes(large[0]) > FILE_WINDOW_BYTES
    small = [plan_of(index, 1 << 10) for index in range(400)]  # of 0.75 MiB
    assert window_bytes(small, None) == FILE_WINDOW_BYTES
    assert window_bytes(small[:10], None) == sum(map(block_bytes, small[:10]))


def test_a_window_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"host_window_bytes=30719 must be at least 30720.*p1.*; raise it"):
        window_bytes([plan_of(0, 10), plan_of(1, 40)], 40 * 768 - 1)
