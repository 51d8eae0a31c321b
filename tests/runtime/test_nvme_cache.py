"""The cache gives memory to chunks in the order of need, and no lock waits forever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from zenflow_compile.planning.plan import FILE_WINDOW_BYTES, ParamPlan, Placement
from zenflow_compile.runtime.nvme.cache import NvmeCache, cache_bytes
from zenflow_compile.runtime.nvme.cached_state import CachedState, CachedStateLock
from zenflow_compile.runtime.nvme.chunk import Chunk, ChunkState, chunk_bytes
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
    """A cache of chunks that are filled with their own index."""
    made: list[NvmeCache] = []

    def cache_with(plans: list[ParamPlan], size: int) -> tuple[NvmeCache, list[CachedState]]:
        cache = NvmeCache(tmp_path, Recorder())
        made.append(cache)
        stores = [CachedState(cache, chunk) for chunk in cache.add(plans, "test", size).values()]
        for number, store in enumerate(stores):
            with store.acquire(write=True) as state:
                assert not any(tensor.any() for tensor in state)
                for tensor in state:
                    tensor.fill_(number)
        return cache, stores

    yield cache_with
    for cache in made:
        cache.close()


def values(store: CachedState) -> set[float]:
    with store.acquire() as state:
        return {float(value) for tensor in state for value in tensor.unique()}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)  # between two looks


def test_chunks_of_all_sizes_use_the_smallest_cache(make: Make) -> None:
    plans = [plan_of(index, slices) for index, slices in enumerate([3, 90, 1, 17, 55, 90, 8])]
    cache, stores = make(plans, chunk_bytes(plans[1]))
    order = random.Random(0)
    expected = [float(number) for number in range(len(stores))]
    for _ in range(60):
        number = order.randrange(len(stores))
        assert values(stores[number]) == {expected[number]}
        with stores[number].acquire(write=True) as state:
            assert state.master.shape == (plans[number].deferred, 64)
            assert state.master.data_ptr() % 64 == 0
            for tensor in state:
                tensor.add_(1.0)
        expected[number] += 1.0
    assert cache.nbytes == chunk_bytes(plans[1])
    assert [store.chunk.size for store in stores] == [chunk_bytes(plan) for plan in plans]


def test_reads_see_a_chunk_whose_write_is_late(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan_of(0), plan_of(1)]
    _, (first, _) = make(plans, 2 * chunk_bytes(plans[0]))
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


def test_jobs_that_can_run_get_memory_first(make: Make) -> None:
    """Gradients arrive last first, and the cache holds one chunk."""
    plans = [plan_of(index) for index in range(6)]
    _, stores = make(plans, chunk_bytes(plans[0]))
    locks = [store.lock(step=1, deadline=number) for number, store in enumerate(stores)]
    until(lambda: stores[0].chunk.state is ChunkState.CACHED)  # read ahead for the first lock
    with stores[5].acquire(write=True) as state:  # the training thread goes before all of them
        state.master.fill_(7.0)
    for number, lock in enumerate(locks):
        until(lock.try_acquire)
        lock.check()
        stores[number].state().exp_avg.fill_(9.0)
        lock.release()
    assert values(stores[5]) == {5.0, 7.0, 9.0}


def test_earlier_chunk_evicts_one_that_was_read_ahead(make: Make) -> None:
    plans = [plan_of(0), plan_of(1)]
    _, (first, second) = make(plans, chunk_bytes(plans[0]))
    later = second.lock(step=3, deadline=0)
    until(lambda: second.chunk.state is ChunkState.CACHED)
    earlier = first.lock(step=2, deadline=5)
    until(earlier.try_acquire)
    assert second.chunk.state is ChunkState.ON_DISK
    assert not later.try_acquire()
    earlier.release()
    until(later.try_acquire)
    later.release()


def test_locked_chunk_is_not_evicted(make: Make) -> None:
    plans = [plan_of(0), plan_of(1)]
    _, (first, second) = make(plans, chunk_bytes(plans[0]))
    later = second.lock(step=3, deadline=0)
    until(later.try_acquire)
    earlier = first.lock(step=2, deadline=5)
    time.sleep(0.05)  # in which a wrong eviction would happen
    assert not earlier.try_acquire()
    assert later.try_acquire()
    later.release()
    until(earlier.try_acquire)
    earlier.release()


def test_chunks_are_read_ahead_in_order_of_updates(make: Make) -> None:
    plans = [plan_of(index) for index in range(5)]
    _, stores = make(plans, 2 * chunk_bytes(plans[0]))
    for step in range(2):
        locks = [store.lock(step=step, deadline=4 - number) for number, store in enumerate(stores)]
        for lock in reversed(locks):
            until(lock.try_acquire)
            lock.release()
        # The last deadlines of a step are in the cache when it ends; the first of the next one come back.
        until(lambda: {store.chunk.name for store in stores if store.chunk.state is ChunkState.CACHED} == {"p4", "p3"})


def test_chunks_of_windows_flushed_next_are_read_ahead(make: Make) -> None:
    """Chunks whose windows are flushed steps later are not read, although their deadlines are earlier."""
    plans = [plan_of(index, interval=2) for index in range(2)]
    _, (first, second) = make(plans, chunk_bytes(plans[0]))
    for step, store in ((0, first), (1, second)):
        lock = store.lock(step=step, deadline=store.chunk.offset)
        until(lock.try_acquire)
        lock.release()
    assert first.chunk.next_use[1] == 2
    until(lambda: first.chunk.state is ChunkState.CACHED)


def test_failed_writes_free_memory_and_name_parameters(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan_of(index) for index in range(3)]
    _, stores = make(plans, chunk_bytes(plans[0]))
    until(lambda: all(store.chunk.at_rest for store in stores))

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateFile, "write", full)
    for store in stores:
        with store.acquire(write=True):
            pass
    until(lambda: all(store.error is not None for store in stores))
    for number, store in enumerate(stores):
        lock = store.lock(step=0, deadline=0)
        assert lock.try_acquire()
        with pytest.raises(StateFileError, match=rf"p{number} .*\.state.*No space.*; load the last") as caught:
            lock.check()
        assert isinstance(caught.value.__cause__, OSError)
        lock.release()
        with pytest.raises(StateFileError), store.acquire():
            pass
    monkeypatch.undo()
    for store in stores:
        with store.acquire(write=True, fresh=True) as state:
            for tensor in state:
                tensor.fill_(4.0)
    assert [values(store) for store in stores] == [{4.0}] * 3


def test_random_jobs_of_threads_make_every_update(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take any chunk that can be acquired; reads and writes are late; the cache holds one and a half chunks."""
    chance = random.Random(1)
    for name in ("read", "write"):
        move = getattr(StateFile, name)
        late = lambda *args, move=move: (time.sleep(chance.random() * 2e-3), move(*args))[1]  # noqa: E731
        monkeypatch.setattr(StateFile, name, late)
    plans = [plan_of(index, 10 + 5 * index) for index in range(8)]
    cache, stores = make(plans, chunk_bytes(plans[-1]) * 3 // 2)
    for step in range(10):
        waiting = [(store.lock(step=step, deadline=number), store) for number, store in enumerate(stores)]
        chance.shuffle(waiting)
        guard = threading.Lock()

        def work(waiting: list[tuple[CachedStateLock, CachedState]] = waiting, guard: threading.Lock = guard) -> None:
            while waiting:
                with guard:
                    mine = next((pair for pair in waiting if pair[0].try_acquire()), None)
                    if mine is not None:
                        waiting.remove(mine)
                if mine is None:
                    time.sleep(1e-4)  # between two looks
                    continue
                lock, store = mine
                for tensor in store.state():
                    tensor.add_(1.0)
                lock.release()

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [values(store) for store in stores] == [{number + 10.0} for number in range(8)]
    assert cache.nbytes < 2 * chunk_bytes(plans[-1])


@pytest.mark.parametrize("given", [None, 40 * 768, 50 * 768, 10**9])
def test_cache_size_is_as_given_and_at_most_all_chunks(given: int | None) -> None:
    plans = [plan_of(0, 10), plan_of(1, 40), plan_of(2, 40)]
    size = cache_bytes(plans, given)
    assert size >= chunk_bytes(plans[1])
    assert size <= sum(map(chunk_bytes, plans))
    assert given is None or size < given + PAGE_BYTES


def test_default_cache_is_two_chunks_or_more() -> None:
    large = [plan_of(index, 1 << 16) for index in range(4)]  # of 48 MiB
    assert cache_bytes(large, None) == 2 * chunk_bytes(large[0]) > FILE_WINDOW_BYTES
    small = [plan_of(index, 1 << 10) for index in range(400)]  # of 0.75 MiB
    assert cache_bytes(small, None) == FILE_WINDOW_BYTES
    assert cache_bytes(small[:10], None) == sum(map(chunk_bytes, small[:10]))


def test_cache_smaller_than_a_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match=r"host_window_bytes=30719 must be at least 30720.*p1.*; raise it"):
        cache_bytes([plan_of(0, 10), plan_of(1, 40)], 40 * 768 - 1)


def test_cache_goes_on_after_an_interrupted_growth(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the growing cache waits for its threads, which have been told to end."""
    plans = [plan_of(0), plan_of(1, 90)]
    cache, (first,) = make(plans[:1], chunk_bytes(plans[0]))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.add(plans[1:], "test", 4 * chunk_bytes(plans[1]))
    with first.acquire(write=True) as state:
        state.master.fill_(5.0)
    (second,) = [
        CachedState(cache, chunk) for chunk in cache.add(plans[1:], "more", 4 * chunk_bytes(plans[1])).values()
    ]
    assert values(second) == {0.0}
    assert values(first) == {0.0, 5.0}


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("choose", ["_next_to_read", "_next_to_write"])
def test_failed_choice_loses_awaited_chunks_alone(make: Make, choose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads go on, and no thread waits forever."""
    failures: list[MemoryError] = []
    original = getattr(NvmeCache, choose)

    def breaks(cache: NvmeCache) -> Chunk | None:
        if failures:
            raise failures.pop()
        found: Chunk | None = original(cache)
        return found

    monkeypatch.setattr(NvmeCache, choose, breaks)
    plans = [plan_of(index) for index in range(3)]
    _, stores = make(plans, chunk_bytes(plans[0]))
    failures.append(MemoryError("on purpose"))
    lost: list[BaseException | None] = []
    for number in (0, 1, 2, 0, 1, 2):
        try:
            with stores[number].acquire(write=True) as state:
                state.master.fill_(number)
        except StateFileError as error:
            lost.append(error.__cause__)
    assert not failures
    assert len(lost) <= 2, "one chunk, which is asked for two times"
    assert all(isinstance(each, MemoryError) for each in lost)
