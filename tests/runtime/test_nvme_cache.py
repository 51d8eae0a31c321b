"""The cache gives memory to chunks in the order of their jobs, and every job ends with the right content."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_interrupts import every_point
from tests.support.calls import at_calls
from tests.support.gated_jobs import HeldJob, gated
from zenflow_compile.native.library import FAILED
from zenflow_compile.planning.cached_state import FILE_WINDOW_BYTES
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.errors import refuse_threads
from zenflow_compile.runtime.host.workers import Job, Workers, bounds_of
from zenflow_compile.runtime.nvme.cache import Cached, NvmeCache, cache_bytes
from zenflow_compile.runtime.nvme.chunk import chunk_bytes
from zenflow_compile.runtime.nvme.state_file import PAGE_BYTES, ScratchFiles, StateFileError
from zenflow_compile.runtime.parameters.state_exchange import ExchangeWork
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.state_forms import State
from zenflow_compile.timeline import Timeline

pytestmark = pytest.mark.timeout(60)

LENGTH = 64


def plan_of(index: int, slices: int = 40, interval: int = 1, phase: int = 0) -> ParamPlan:
    """``slices`` of 64 elements: 768 bytes of state each."""
    return ParamPlan(
        index=index,
        name=f"p{index}",
        shape=(slices, LENGTH),
        dtype=torch.float32,
        placement=Placement.FILE,
        dim=0,
        slices=slices,
        length=LENGTH,
        interval=interval,
        phase=phase,
        in_file=True,
    )


class Swap:
    """A job that swaps a chunk's content with ``value``; ``seen`` is what was there."""

    def __init__(self, files: Files, store: Cached[State], value: float, *, step: int, deadline: int) -> None:
        slices = store.chunk.plan.deferred
        self.blocks = [torch.full((slices, LENGTH), value) for _ in range(3)]
        self.arrived = ThreadTicket()
        needs = store.prepare(step=step, deadline=deadline)
        state = store.content()
        place = {"behind": needs.behind, "deadline": deadline, "step": step, "param": store.chunk.plan.name}
        rows, bounds = torch.arange(slices, dtype=torch.int32), bounds_of([slice(0, slices)])
        swap = ExchangeWork(state, rows, self.blocks, bounds)
        self.job = Job(swap, (self.arrived,), needs.after, files.workers.handle, **place)
        files.made.append(self.job)  # from here on it can be withdrawn
        store.used_by(self.job)

    @property
    def seen(self) -> set[float]:
        self.job.wait()
        return {float(value) for block in self.blocks for value in block.unique()}


class Files:
    """A cache of chunks that are filled with their own index, and threads for jobs on them."""

    def __init__(self, path: Path) -> None:
        self.recorder = Recorder()
        self.scratch = ScratchFiles(path, self.recorder)
        self.cache = NvmeCache(self.scratch, self.recorder)
        self.workers = Workers(2, self.recorder)
        self.stores: list[Cached[State]] = []
        self.made: list[Job] = []

    def add(self, plans: list[ParamPlan], size: int) -> list[Cached[State]]:
        new = [Cached(self.cache, chunk) for chunk in self.cache.add(plans, "test", size)]
        for number, store in enumerate(new, start=len(self.stores)):
            with store.acquire(write=True) as state:
                assert not any(tensor.any() for tensor in state)
                for tensor in state:
                    tensor.fill_(number)
        self.stores += new
        return new

    def swap(self, store: Cached[State], value: float, *, step: int = 0, deadline: int = 0, now: bool = True) -> Swap:
        made = Swap(self, store, value, step=step, deadline=deadline)
        if now:  # before an interrupt can come that leaves the job in the queue
            made.arrived.set()
        self.workers.submit(made.job)
        return made

    def moved(self, do: Callable[[], object]) -> list[tuple[str, str]]:
        """The reads and writes of ``do``, in the order of their ends."""
        self.settle()
        self.recorder.attach(timeline := Timeline())
        do()
        self.settle()
        self.recorder.attach(None)
        events = sorted(timeline.events(), key=lambda event: event.end_ns)
        return [(event.kind, event.param) for event in events if event.lane == "disk"]

    def settle(self) -> None:
        for store in self.stores:
            if store.chunk.place is not None:
                for job in store.chunk.place.users:
                    job.settle()
        self.scratch.threads.land()

    def close(self) -> None:
        self.workers.close()
        self.cache.close()
        self.scratch.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path)
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


def values(store: Cached[State]) -> set[float]:
    with store.acquire() as state:
        return {float(value) for tensor in state for value in tensor.unique()}


@contextmanager
def file_replaced(files: Files, path: str, flags: int) -> Iterator[None]:
    """Let the number of the chunks' file mean another file: what the system then says is real."""
    (number,) = {store.chunk.description.file for store in files.stores}
    kept, other = os.dup(number), os.open(path, flags)
    os.dup2(other, number, inheritable=False)
    os.close(other)
    try:
        yield
    finally:
        os.dup2(kept, number, inheritable=False)
        os.close(kept)


def test_chunks_of_all_sizes_use_the_smallest_cache(files: Files) -> None:
    plans = [plan_of(index, slices) for index, slices in enumerate([3, 90, 1, 17, 55, 90, 8])]
    stores = files.add(plans, chunk_bytes(plans[1]))
    order = random.Random(0)
    expected = [float(number) for number in range(len(stores))]
    for _ in range(60):
        number = order.randrange(len(stores))
        assert values(stores[number]) == {expected[number]}
        with stores[number].acquire(write=True) as state:
            assert state.master.shape == (plans[number].deferred, LENGTH)
            assert state.master.data_ptr() % 64 == 0
            for tensor in state:
                tensor.add_(1.0)
        expected[number] += 1.0
    assert files.cache.nbytes == chunk_bytes(plans[1])
    assert [store.chunk.size for store in stores] == [chunk_bytes(plan) for plan in plans]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_random_jobs_see_what_was_there(seed: int, share: float, files: Files) -> None:
    """Inputs arrive in any order, several steps are in flight, and the training thread reads in between."""
    chance = random.Random(seed)
    plans = [plan_of(index, chance.randrange(1, 60), interval=chance.randrange(1, 3)) for index in range(9)]
    sizes = [chunk_bytes(plan) for plan in plans]
    stores = files.add(plans, max(max(sizes), int(share * sum(sizes)) // PAGE_BYTES * PAGE_BYTES))
    expected = [float(number) for number in range(len(stores))]
    made: list[tuple[Swap, float]] = []
    pending: list[Swap] = []
    for step in range(12):
        files.recorder.step = step
        flushed = [number for number in range(len(stores)) if chance.random() < 0.7]
        chance.shuffle(flushed)
        for number in flushed:
            value = 100.0 * step + number
            swap = files.swap(stores[number], value, step=step, deadline=number, now=False)
            made.append((swap, expected[number]))
            pending.append(swap)
            expected[number] = value
        files.cache.read_ahead()
        chance.shuffle(pending)
        while len(pending) > (0 if step % 4 == 3 else 6):
            pending.pop().arrived.set()
        if step % 4 == 3:
            number = chance.randrange(len(stores))
            assert values(stores[number]) == {expected[number]}
    assert [swap.seen for swap, _ in made] == [{value} for _, value in made]
    assert [values(store) for store in stores] == [{value} for value in expected]


def test_resident_chunks_are_neither_read_nor_written(files: Files) -> None:
    plans = [plan_of(index) for index in range(8)]
    stores = files.add(plans, 6 * chunk_bytes(plans[0]))

    def step() -> None:
        for number, store in enumerate(stores):
            files.swap(store, 9.0, deadline=number).job.wait()

    moved = files.moved(step)
    assert {name for _, name in moved} == {f"p{number}" for number in range(2, 8)}
    assert sorted(moved) == sorted([(kind, f"p{number}") for number in range(2, 8) for kind in ("read", "write")])


def test_everything_stays_if_everything_fits(files: Files) -> None:
    plans = [plan_of(index) for index in range(5)]
    stores = files.add(plans, 5 * chunk_bytes(plans[0]))
    assert files.moved(lambda: [files.swap(store, 2.0).job.wait() for store in stores]) == []
    assert [values(store) for store in stores] == [{2.0}] * 5


def test_next_chunks_are_read_ahead_in_order(files: Files) -> None:
    """As many as the ring holds, in the order of their uses, and behind the writes of this step."""
    plans = [plan_of(index) for index in range(7)]
    stores = files.add(plans, 3 * chunk_bytes(plans[0]))
    order = [3, 1, 6, 0, 5, 2, 4]
    for step in range(2):
        for number in order:
            files.swap(stores[number], 1.0, step=step, deadline=number)
        files.cache.read_ahead()
    held = {store.chunk.plan.name for store in stores if store.chunk.place is not None}
    assert held == {"p3", "p1", "p6"}
    assert files.moved(lambda: [values(stores[number]) for number in (3, 1, 6)]) == []


def test_chunks_of_windows_flushed_next_come_first(files: Files) -> None:
    """Chunks whose windows are flushed steps later are not read ahead."""
    plans = [plan_of(index, interval=2, phase=index // 2) for index in range(4)]
    stores = files.add(plans, 2 * chunk_bytes(plans[0]))
    for step in range(2):
        for number in (2 * step, 2 * step + 1):
            files.swap(stores[number], 1.0, step=step, deadline=number)
    files.cache.read_ahead()
    assert [store.chunk.next_use[0] for store in stores] == [2, 2, 3, 3]
    assert [store.chunk.place is not None for store in stores] == [True, True, False, False]


def test_memory_is_kept_until_a_failed_job_is_settled(files: Files) -> None:
    """A job that has failed is done while another task of it still writes."""
    first, second = files.add([plan_of(0), plan_of(1)], chunk_bytes(plan_of(0)))
    first.prepare(step=0, deadline=0)
    first.used_by(job := HeldJob(files.workers))
    job.memory.state = FAILED
    other = files.swap(second, 5.0, deadline=1)
    assert other.job.is_settled is False
    time.sleep(0.05)  # in which a read into the same memory would run
    assert second.chunk.place is not None
    read = second.chunk.place.read
    assert read is not None
    assert not read.is_set
    job.gate.set()
    assert other.seen == {1.0}


def test_failed_job_is_not_written(files: Files) -> None:
    """Its chunk stays as it was in the file, until it is overwritten."""
    first, second = files.add([plan_of(0), plan_of(1)], chunk_bytes(plan_of(0)))
    values(second)
    swap = files.swap(first, 7.0, now=False)
    swap.arrived.set(OSError("on purpose"))
    with pytest.raises(RuntimeError):
        swap.job.wait()
    assert first.error is None  # the disk is well
    with first.acquire(write=True, fresh=True) as state:
        for tensor in state:
            tensor.fill_(3.0)
    assert (values(second), values(first)) == ({1.0}, {3.0})


def test_late_write_does_not_undo_an_overwrite(files: Files) -> None:
    """Its old content is still to be written, from memory that another chunk will have."""
    stores = files.add([plan_of(index) for index in range(4)], 2 * chunk_bytes(plan_of(0)))
    first = stores[0]
    values(first), values(stores[1])
    files.settle()
    swap = files.swap(first, 7.0, step=5, now=False)
    write = first.chunk.write
    for number in (1, 2):
        files.swap(stores[number], 8.0, step=5, deadline=number)
    assert first.chunk.place is None
    threading.Timer(0.1, swap.arrived.set).start()
    with first.acquire(write=True, fresh=True) as state:
        assert write is not None
        assert write.is_settled
        for tensor in state:
            tensor.fill_(99.0)
    assert [values(store) for store in (stores[1], stores[2], first)] == [{8.0}, {8.0}, {99.0}]


@pytest.mark.parametrize("window", [1, 3])
def test_chunk_of_a_failed_read_is_never_written(window: int, files: Files) -> None:
    """Also if it has a home, or its last job was never made; its error stays."""
    stores = files.add([plan_of(index) for index in range(3)], window * chunk_bytes(plan_of(0)))
    files.cache.write_back()
    with file_replaced(files, "/dev/null", os.O_RDWR):
        needs = stores[1].prepare(step=0, deadline=0)
        read = needs.after[0]
        with pytest.raises(StateFileError):
            read.wait()
        stores[1].used_by(job := HeldJob(files.workers), last=False)
        job.gate.set()
        job.settle()
    with pytest.raises(StateFileError):
        files.cache.write_back()
    assert isinstance(stores[1].error, StateFileError)
    with pytest.raises(StateFileError):
        values(stores[1])
    with stores[1].acquire(write=True, fresh=True) as state:
        for tensor in state:
            tensor.fill_(6.0)
    assert [values(store) for store in stores] == [{0.0}, {6.0}, {2.0}]


def test_growth_on_a_full_disk_keeps_what_is_in_memory(files: Files) -> None:
    stores = files.add([plan_of(index) for index in range(3)], 3 * chunk_bytes(plan_of(0)))
    with file_replaced(files, "/dev/full", os.O_RDWR), pytest.raises(StateFileError, match="No space"):
        files.cache.add([plan_of(3, 90)], "test", 9 * chunk_bytes(plan_of(0)))
    assert all(store.chunk.place is not None for store in stores)
    assert all(isinstance(store.error, StateFileError) for store in stores)
    for number, store in enumerate(stores):
        with store.acquire(write=True, fresh=True) as state:
            assert {float(value) for tensor in state for value in tensor.unique()} == {float(number)}
    files.cache.add([plan_of(3, 90)], "test", 9 * chunk_bytes(plan_of(0)))
    assert [values(store) for store in stores] == [{0.0}, {1.0}, {2.0}]


def test_growth_refuses_a_lost_chunk_each_time(files: Files) -> None:
    """Its memory is another chunk's by now."""
    first, second, _ = files.add([plan_of(index) for index in range(3)], chunk_bytes(plan_of(0)))
    values(second)
    with file_replaced(files, "/dev/full", os.O_RDWR):
        assert files.swap(second, 5.0).seen == {1.0}
        assert second.chunk.write is not None
        second.chunk.write.settle()
    values(first)
    assert second.chunk.place is None
    for _ in range(2):
        with pytest.raises(StateFileError, match="No space"):
            files.cache.add([plan_of(3)], "test", chunk_bytes(plan_of(0)))


def test_full_disk_raises_until_overwritten(files: Files) -> None:
    plans = [plan_of(index) for index in range(4)]
    stores = files.add(plans, 3 * chunk_bytes(plans[0]))[1:]  # those that are in memory
    files.settle()
    with file_replaced(files, "/dev/full", os.O_RDWR):
        for number, store in enumerate(stores):
            assert files.swap(store, 5.0, step=1, deadline=number).seen == {number + 1.0}
        for store in stores:
            assert store.chunk.write is not None
            store.chunk.write.settle()
    assert files.scratch.threads.failed
    for number, store in enumerate(stores, start=1):
        assert isinstance(store.error, StateFileError)
        for use in (lambda store=store: values(store), files.swap(store, 6.0, step=2).job.wait):
            with pytest.raises(RuntimeError) as caught:
                use()
            causes = [caught.value]
            while (cause := causes[-1].__cause__) is not None:
                causes.append(cause)
            assert isinstance(causes[-1], OSError)
            text = " ".join(map(str, causes))
            assert f"p{number}" in text
            assert ".state" in text
            assert "load the last" in text
    for store in stores:
        with store.acquire(write=True, fresh=True) as state:
            for tensor in state:
                tensor.fill_(4.0)
        assert store.error is None
    assert [values(store) for store in stores] == [{4.0}] * 3
    assert files.swap(stores[0], 6.0, step=3).seen == {4.0}


@pytest.mark.parametrize(
    ("path", "flags", "message"),
    [
        ("/dev/null", os.O_RDWR, "file ends|Input/output error"),
        ("/dev/zero", os.O_RDWR, "checksum"),
        (__file__, os.O_WRONLY | os.O_APPEND, "Bad file descriptor"),
    ],
    ids=["short", "zeros", "not readable"],
)
def test_unreadable_chunk_raises(path: str, flags: int, message: str, files: Files) -> None:
    first, second = files.add([plan_of(0), plan_of(1)], chunk_bytes(plan_of(0)))
    values(first)
    with file_replaced(files, path, flags):
        with pytest.raises(StateFileError, match=message):
            values(second)
        swap = files.swap(second, 5.0)
        with pytest.raises(RuntimeError) as caught:
            swap.job.wait()
        assert isinstance(caught.value.__cause__, StateFileError)
        assert isinstance(second.error, StateFileError)
    assert values(first) == {0.0}


def test_cache_grows_with_its_chunks(files: Files) -> None:
    small = [plan_of(index) for index in range(3)]
    files.add(small, 3 * chunk_bytes(small[0]))
    for store in files.stores:  # resident, so that their files do not have it
        assert files.swap(store, 7.0).seen <= {0.0, 1.0, 2.0}
    large = [plan_of(3, 90), plan_of(4, 90)]
    files.add(large, chunk_bytes(large[0]))
    assert files.cache.nbytes == 3 * chunk_bytes(small[0]) < chunk_bytes(small[0]) + chunk_bytes(large[0])
    assert [values(store) for store in files.stores] == [{7.0}, {7.0}, {7.0}, {3.0}, {4.0}]
    files.cache.remove([store.chunk for store in files.stores[3:]])
    assert [values(store) for store in files.stores[:3]] == [{7.0}] * 3


METHODS = {
    "acquire", "prepare", "used_by", "read_ahead", "_bring", "_fill", "_overwritten", "_take", "_write", "_transfer",
    "_queue", "_withdraw", "submit", "make_transfer",
}  # fmt: skip


def test_interrupted_acquire_loses_nothing(tmp_path: Path) -> None:
    """Ctrl-C at any point: what the training thread has written is there, and no memory has two users."""
    files = Files(tmp_path)
    stores = files.add([plan_of(index) for index in range(5)], 2 * chunk_bytes(plan_of(0)))
    expected = [float(number) for number in range(5)]
    turn = [0]

    def write() -> None:
        number = turn[0] % 5
        with stores[number].acquire(write=True) as state:
            expected[number] = 100.0 + turn[0]
            for tensor in state:
                tensor.fill_(expected[number])

    def check() -> None:
        turn[0] += 1
        assert [values(store) for store in stores] == [{value} for value in expected]

    assert every_point(write, METHODS, check) > 10
    assert every_point(files.cache.read_ahead, METHODS, check) > 10
    files.close()


def test_interrupted_job_blocks_no_other(tmp_path: Path) -> None:
    """A job that was made, and never queued, is withdrawn by its owner; no other chunk's job waits for it."""
    files = Files(tmp_path)
    stores = files.add([plan_of(index) for index in range(4)], chunk_bytes(plan_of(0)))

    def swap() -> None:
        files.swap(stores[0], 50.0)

    def go_on() -> None:
        files.workers.withdraw(files.made)
        files.made.clear()
        for number, store in enumerate(stores):
            with suppress(RuntimeError):
                values(store)
            with store.acquire(write=True, fresh=True) as state:
                for tensor in state:
                    tensor.fill_(number)
        assert [values(store) for store in stores] == [{0.0}, {1.0}, {2.0}, {3.0}]

    assert every_point(swap, METHODS, go_on) > 10
    files.close()


def test_interrupted_growth_loses_nothing(files: Files) -> None:
    first = files.add([plan_of(index) for index in range(3)], 3 * chunk_bytes(plan_of(0)))
    for store in first:
        assert len(files.swap(store, 7.0).seen) == 1
    number = [3]

    def grow() -> None:
        number[0] += 1
        files.cache.add([plan_of(number[0], 90)], "test", chunk_bytes(plan_of(number[0], 90)))

    functions = {"add", "write_back", "_laid_out", "_write", "_queue", "create"}
    every_point(grow, functions, lambda: [values(store) for store in first] == [{7.0}] * 3 or pytest.fail("lost"))
    assert [values(store) for store in first] == [{7.0}] * 3


def test_reads_and_writes_of_a_chunk_take_turns(files: Files) -> None:
    """A job overwrites a chunk in other memory than a late read fills. The file is written behind that read."""
    first, second, third = files.add([plan_of(index) for index in range(3)], 2 * chunk_bytes(plan_of(0)))
    assert values(second) | values(third) == {1.0, 2.0}
    arrived = ThreadTicket()
    with gated(lambda: arrived, ("read",)):
        assert files.cache.bring(first.chunk, step=0) is not None
    for store in (second, third):  # one of them takes its memory, behind the read
        files.cache.bring(store.chunk, step=0)
    assert first.chunk.place is None
    needs = files.cache.prepare_fresh(first.chunk)
    assert first.chunk.fresh is not None
    state = first.chunk.fresh.content
    blocks = [torch.full((40, LENGTH), 9.0) for _ in range(3)]
    swap = ExchangeWork(state, torch.arange(40, dtype=torch.int32), blocks, bounds_of([slice(0, 40)]))
    files.workers.start()
    job = Job(
        swap, (), needs.after, files.workers.handle, behind=needs.behind, deadline=0, step=0, param="p0"
    )  # fmt: skip
    first.used_by(job)
    files.workers.submit(job)
    write = first.chunk.write
    assert write is not None
    job.wait()
    time.sleep(0.05)
    assert not write.is_set
    arrived.set()
    write.wait()
    assert values(first) == {9.0}


def test_fresh_memory_is_not_read(files: Files) -> None:
    first, second, _ = files.add([plan_of(index) for index in range(3)], chunk_bytes(plan_of(0)))

    def overwrite() -> None:
        needs = files.cache.prepare_fresh(first.chunk)
        assert first.chunk.fresh is not None
        state = first.chunk.fresh.content
        place: dict[str, Any] = {"behind": needs.behind, "deadline": 0, "step": 0, "param": "p0"}
        blocks = [torch.full((40, LENGTH), 5.0) for _ in range(3)]
        rows, bounds = torch.arange(40, dtype=torch.int32), bounds_of([slice(0, 40)])
        job = Job(ExchangeWork(state, rows, blocks, bounds), (), needs.after, files.workers.handle, **place)
        first.used_by(job)
        files.workers.submit(job)

    values(second)
    assert files.moved(overwrite) == [("write", "p0")]
    assert values(second) == {1.0}
    assert values(first) == {5.0}


def test_unused_fresh_memory_loses_nothing(files: Files) -> None:
    """An interrupt comes between memory and job."""
    first, second, third = files.add([plan_of(index) for index in range(3)], 2 * chunk_bytes(plan_of(0)))
    assert values(second) | values(third) == {1.0, 2.0}
    files.cache.prepare_fresh(first.chunk)
    assert values(first) == {0.0}
    assert values(second) | values(third) == {1.0, 2.0}
    files.cache.prepare_fresh(first.chunk)
    assert files.swap(first, 7.0).seen == {0.0}
    assert values(second) | values(third) == {1.0, 2.0}
    assert values(first) == {7.0}


def test_copies_keep_their_memory(files: Files) -> None:
    first, second = files.add([plan_of(0), plan_of(1)], chunk_bytes(plan_of(0)))
    filling = files.cache.bring(first.chunk, step=0)
    assert filling is not None
    files.cache.read_by(first.chunk, copy := ThreadTicket())
    filling.wait()
    memory = Cached(files.cache, first.chunk).content().master
    after = files.cache.bring(second.chunk, step=0)
    assert after is not None
    time.sleep(0.05)
    assert not after.is_set
    assert float(memory.mean()) == 0.0
    copy.set(OSError("a copy that fails has ended, too"))
    after.wait()
    assert values(second) == {1.0}


@pytest.mark.parametrize("given", [None, 40 * 768, 50 * 768, 10**9])
def test_cache_size_is_as_given_and_at_most_all_chunks(given: int | None) -> None:
    plans = [plan_of(0, 10), plan_of(1, 40), plan_of(2, 40)]
    size = cache_bytes(plans, given).state
    assert size >= chunk_bytes(plans[1])
    assert size <= sum(map(chunk_bytes, plans))
    assert given is None or size < given + PAGE_BYTES


def test_default_cache_is_two_chunks_or_more() -> None:
    large = [plan_of(index, 1 << 16) for index in range(4)]  # of 48 MiB
    assert cache_bytes(large, None).state == 2 * chunk_bytes(large[0]) > FILE_WINDOW_BYTES
    small = [plan_of(index, 1 << 10) for index in range(400)]  # of 0.75 MiB
    assert cache_bytes(small, None).state == FILE_WINDOW_BYTES
    assert cache_bytes(small[:10], None).state == sum(map(chunk_bytes, small[:10]))


def test_cache_smaller_than_a_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match=r"host_window_bytes=30719 must be at least 30720.*p1.*; raise it"):
        cache_bytes([plan_of(0, 10), plan_of(1, 40)], 40 * 768 - 1)


def test_refused_threads_raise_and_give_back(files: Files) -> None:
    refuse = at_calls(lambda _: refuse_threads(RuntimeError("EAGAIN")), Workers.start)
    with refuse, pytest.raises(RuntimeError, match="thread"):
        files.add([plan_of(0), plan_of(1)], chunk_bytes(plan_of(0)))
    files.stores = []
    files.add([plan_of(2), plan_of(3)], chunk_bytes(plan_of(0)))
    assert [values(store) for store in files.stores] == [{0.0}, {1.0}]
