"""State of slices that change sides goes through lanes and workers, and arrives as if one thread had moved it."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.calls import at_calls, interrupted
from tests.support.copies import Copies
from tests.support.edge_floats import edge_floats, same_bits
from tests.support.gated_jobs import HeldJob
from zenflow_compile.planning import plan as plans
from zenflow_compile.planning.plan import ParamPlan, Placement, Plan
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.thread_lane import ThreadLane, ThreadTicket, copy_without_gil
from zenflow_compile.runtime.device_updates.selection import Selection, Wanted, reselect
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.host.host_kernel import HostKernel
from zenflow_compile.runtime.host.state_store import InMemory
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.parameters.device_state import DeviceState, exchange_rows
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.parameters.state_exchange import StateExchange
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.state_forms import PLAIN, StateRows
from zenflow_compile.timeline import Timeline

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")
BLOCKING = {"nonzero", "_local_scalar_dense", "item", "equal", "is_nonzero", "masked_select"}


def plan_of(k: int, deferred: int, length: int, dtype: torch.dtype = torch.float32) -> ParamPlan:
    return ParamPlan(
        index=0,
        name="w",
        shape=(length, k + deferred),
        dtype=dtype,
        placement=Placement.SPLIT_COLUMNS,
        slices=k + deferred,
        length=length,
        k=k,
        interval=2,
    )


def shuffled_selection(k: int, slices: int) -> Selection:
    order = torch.randperm(slices)
    return Selection.of(order[:k], slices, CPU, deferred=order[k:])


def wanted_after(selection: Selection, swaps: int, bound: int) -> Wanted:
    """The selection after ``swaps`` random swaps, in random order."""
    inside = selection.selected[torch.randperm(len(selection.selected))]
    outside = selection.deferred[torch.randperm(len(selection.deferred))]
    slices = torch.cat([inside[swaps:], outside[:swaps]])
    return Wanted(slices[torch.randperm(len(slices))], bound)


class OnDevice(TorchDispatchMode):
    """Fails at an operator whose result a device could not have without waiting for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in BLOCKING, func
        if any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1:]):
            assert func.overloadpacket.__name__ not in ("index", "index_put_"), func  # such an index is a nonzero()
        return func(*args, **(kwargs or {}))


CASES = [
    (k, deferred, swaps, bound)
    for k, deferred in ((1, 1), (3, 9), (9, 3), (16, 64))
    for swaps in sorted({0, 1, min(k, deferred) // 2, min(k, deferred)})
    for bound in sorted({max(1, swaps), min(k, deferred), k + deferred})
]


def reselected_on_host(before: Selection, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors of the new selection, by indices that are known: entering slices take the rows of leaving ones."""
    selected, deferred, position = (each.clone() for each in before.tensors())
    chosen = torch.zeros(before.slices, dtype=torch.bool)
    chosen[wanted.slices] = True
    device_rows = torch.nonzero(~chosen[selected]).flatten()
    host_rows = torch.nonzero(chosen[deferred]).flatten()
    leaving, entering = selected[device_rows], deferred[host_rows]
    selected[device_rows], deferred[host_rows] = entering, leaving
    position[entering] = device_rows.int()
    position[leaving] = host_rows.int() + selected.numel()
    return selected, deferred, position


@pytest.mark.parametrize(("k", "deferred", "swaps", "bound"), CASES)
def test_reselect_equals_reselection_by_index(k: int, deferred: int, swaps: int, bound: int) -> None:
    torch.manual_seed(k + swaps)
    before = shuffled_selection(k, k + deferred)
    wanted = wanted_after(before, swaps, bound)
    kept = [each.clone() for each in before.tensors()]
    with OnDevice():
        change = reselect(before, wanted)
    for actual, other in zip(change.selection.tensors(), reselected_on_host(before, wanted), strict=True):
        assert actual.dtype == torch.int32
        assert torch.equal(actual, other)
    assert all(torch.equal(a, b) for a, b in zip(before.tensors(), kept, strict=True))
    assert len(change.device_rows) == len(change.host_rows) == min(bound, k, deferred)
    assert len(set(change.device_rows.tolist())) == len(change.device_rows)
    rows = change.host_rows.tolist()
    assert rows[:swaps] == sorted(rows[:swaps])
    assert [row >= 0 for row in rows] == [True] * swaps + [False] * (len(rows) - swaps)


class Sides:
    """A parameter's state on both sides, of random values."""

    def __init__(self, plan: ParamPlan, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.plan = plan
        self.device = DeviceState.allocate(plan, CPU)
        self.device.selection = shuffled_selection(plan.k, plan.slices)
        kernel = HostKernel(plan.dtype, plan.dtype, plan.interval)
        self.host = HostState.allocate(plan, HostArena(HostState.arena_bytes(plan)), kernel, ctypes.c_void_p())
        for tensor in self.tensors():
            tensor.view(torch.int32).random_(-(2**31), 2**31 - 1)  # any bits: NaN, too

    def tensors(self) -> list[Tensor]:
        return [*self.device.rows.stored, *self.host.state()]

    def bits(self) -> list[Tensor]:
        return [each.view(torch.int32).clone() for each in self.tensors()]

    def assert_same(self, other: Sides) -> None:
        mine, theirs = ([*each.bits(), *each.device.selection.tensors()] for each in (self, other))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def exchange_now(self, wanted: Wanted) -> None:
        """Swap by single rows, without the code under test."""
        before = self.device.selection
        self.device.selection = Selection(*reselected_on_host(before, wanted))
        k = before.selected.numel()
        for on_device, on_host in zip(self.device.rows.stored, self.host.state(), strict=True):
            joined = torch.cat([on_device, on_host])
            new = torch.cat([self.device.selection.selected, self.device.selection.deferred])
            moved = joined[before.position[new].long()]
            on_device.copy_(moved[:k])
            on_host.copy_(moved[k:])

    def start(self, exchange: StateExchange, wanted: Wanted, **keywords: Any) -> None:
        change = reselect(self.device.selection, wanted)
        self.host.pool = exchange._workers.handle
        exchange.start(self.device, self.host, change, step=0, deadline=0, **keywords)
        self.device.selection = change.selection


class Weights:
    """Weights of the deferred slices, and what they must be after exchanges."""

    def __init__(self, sides: Sides) -> None:
        plan = sides.plan
        for number, master in enumerate((sides.device.state.master, sides.host.state()[0])):
            master.copy_(edge_floats(*master.shape, seed=number))
        self.tensor = edge_floats(plan.deferred, plan.length, seed=2).to(plan.dtype)
        self.expected = self.tensor.clone()

    def expect(self, before: Tensor, sides: Sides) -> None:
        """Rows of other slices than those of ``before``, i32[deferred], have the cast masters."""
        rows = torch.nonzero(before != sides.device.selection.deferred).flatten()
        self.expected[rows] = sides.host.state()[0][rows].to(self.expected.dtype)


class Engine:
    """Lanes, workers and an exchange, as an engine has them."""

    def __init__(
        self, *params: ParamPlan, workers: int = 2, lane: type[ThreadLane] = ThreadLane, buffer_bytes: int = 1 << 30
    ) -> None:
        self.recorder = Recorder()
        self.to_host, self.to_device = (lane(name, self.recorder) for name in ("D2H", "H2D"))
        self.workers = Workers(workers, self.recorder)
        self.workers.start()
        self.exchange = StateExchange(self.to_host, self.to_device, self.workers, self.recorder, device_of(CPU))
        all_slices = Plan(policy="zenflow", params=params).exchange_buffer_bytes
        self.exchange.fit(min(all_slices, max(buffer_bytes, *(param.swap_bytes for param in params), 0)))

    def close(self) -> None:
        self.workers.close()
        self.to_host.close()
        self.to_device.close()
        self.exchange.free()


@contextmanager
def engine(*params: ParamPlan, **keywords: Any) -> Iterator[Engine]:
    made = Engine(*params, **keywords)
    try:
        yield made
    finally:
        made.close()


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(4, 4, 3), (3, 9, 5), (9, 3, 7), (16, 64, 33)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_exchanged_at_once_are_the_same(shape: tuple[int, int, int]) -> None:
    k, deferred, length = shape
    for swaps in range(min(k, deferred) + 1):
        sides, expected = (Sides(plan_of(k, deferred, length), seed=swaps) for _ in range(2))
        wanted = wanted_after(sides.device.selection, swaps, min(k, deferred))
        change = reselect(sides.device.selection, wanted)
        moved = exchange_rows(
            sides.device.rows, StateRows(PLAIN, sides.host.state()), change.device_rows, change.host_rows
        )
        sides.device.selection = change.selection
        expected.exchange_now(wanted)
        sides.assert_same(expected)
        assert moved == 3 * 4 * swaps * length


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 9, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exchange_equals_the_host_path(shape: tuple[int, int, int], buffer_bytes: int) -> None:
    """For any number of swaps, cut into any chunks; later exchanges build on the earlier ones' rows."""
    plan = plan_of(*shape)
    expected, actual = Sides(plan), Sides(plan)
    with engine(plan, workers=3, buffer_bytes=buffer_bytes) as made:
        made.to_host.inline_bytes = made.to_device.inline_bytes = 64
        for swaps in range(plan.most_swaps + 1):
            bound = random.Random(swaps).randint(max(1, swaps), plan.slices)
            wanted = wanted_after(expected.device.selection, swaps, bound)
            expected.exchange_now(wanted)
            actual.start(made.exchange, wanted)
            made.exchange.finish()
            actual.host.wait()
            actual.assert_same(expected)
    assert actual.host.applied_failure is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_exchanged_at_once_have_weights(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    k, deferred, length = shape
    for swaps in range(min(k, deferred) + 1):
        sides = Sides(plan_of(*shape, dtype), seed=swaps)
        weights = Weights(sides)
        before = sides.device.selection.deferred
        change = reselect(sides.device.selection, wanted_after(sides.device.selection, swaps, min(k, deferred)))
        host_side = StateRows(PLAIN, sides.host.state(), weights.tensor)
        moved = exchange_rows(sides.device.rows, host_side, change.device_rows, change.host_rows)
        sides.device.selection = change.selection
        weights.expect(before, sides)
        assert same_bits(weights.tensor, weights.expected)
        assert moved == 3 * 4 * swaps * length


@pytest.mark.parametrize("buffer_bytes", [1 << 9, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exchange_writes_the_weights(shape: tuple[int, int, int], dtype: torch.dtype, buffer_bytes: int) -> None:
    """In any number of chunks and tasks, with rows beyond the real ones; the state is that without weights."""
    plan = plan_of(*shape, dtype)
    expected, actual = Sides(plan), Sides(plan)
    weights, _ = Weights(expected), Weights(actual)
    with engine(plan, workers=3, buffer_bytes=buffer_bytes) as made:
        for swaps in range(plan.most_swaps + 1):
            before = expected.device.selection.deferred
            wanted = wanted_after(expected.device.selection, swaps, swaps + 1)
            expected.exchange_now(wanted)
            weights.expect(before, expected)
            actual.start(made.exchange, wanted, weights=InMemory(weights.tensor))
            made.exchange.finish()
            actual.host.wait()
            actual.assert_same(expected)
            assert same_bits(weights.tensor, weights.expected)


class StoredSides:
    """A parameter's state on both sides, in fewer bytes."""

    def __init__(self, moments: str, split: bool, length: int) -> None:
        self.plan = replace(plan_of(5, 9, length, torch.bfloat16), moments=moments, split_master=split)
        torch.manual_seed(0)
        self.device = DeviceState.allocate(self.plan, CPU)
        self.device.selection = shuffled_selection(5, 14)
        kernel = HostKernel(torch.bfloat16, torch.bfloat16, 2)
        arena = HostArena(HostState.arena_bytes(self.plan))
        self.host = HostState.allocate(self.plan, arena, kernel, ctypes.c_void_p())
        self.device.rows.write([torch.randn(5, length), torch.randn(5, length), torch.rand(5, length) ** 4])
        with self.host.acquire(write=True, fresh=True) as rows:
            rows.write([torch.randn(9, length), torch.randn(9, length), torch.rand(9, length) ** 4])

    def tensors(self) -> list[Tensor]:
        """A row on the device that was copied to the host and back may have another scale for the same numbers."""
        return [*self.device.rows.read(), *self.host.state(), *(each.content() for each in self.host.uploads)]


@pytest.mark.parametrize("buffer_bytes", [1 << 9, 1 << 20])
@pytest.mark.parametrize("length", [128, 333])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_exchange_converts_rows(moments: str, split: bool, length: int, buffer_bytes: int) -> None:
    """The job and the swap in the calling thread have the same bits."""
    expected, actual = (StoredSides(moments, split, length) for _ in range(2))
    with engine(actual.plan, workers=3, buffer_bytes=buffer_bytes) as made:
        actual.host.pool = made.workers.handle
        for swaps in range(6):
            change = reselect(expected.device.selection, wanted_after(expected.device.selection, swaps, swaps + 1))
            with expected.host.acquire(write=True) as rows:
                exchange_rows(expected.device.rows, rows, change.device_rows, change.host_rows)
            weights = actual.host.newest_upload if split else None
            made.exchange.start(actual.device, actual.host, change, step=0, deadline=0, weights=weights)
            for each in (expected, actual):
                each.device.selection = change.selection
            made.exchange.finish()
            actual.host.wait()
            assert all(same_bits(*pair) for pair in zip(actual.tensors(), expected.tensors(), strict=True))


def test_exchange_waits_for_reads_of_the_weights() -> None:
    """The job of every chunk writes what a late copy still reads."""
    plan = plan_of(4, 12, 8, torch.bfloat16)
    sides = Sides(plan)
    weights, reads = Weights(sides), ThreadTicket()
    kept = weights.tensor.clone()
    with engine(plan, buffer_bytes=200) as made:  # chunks of two slices
        before = sides.device.selection.deferred
        sides.start(
            made.exchange,
            wanted_after(sides.device.selection, 4, 4),
            weights=InMemory(weights.tensor),
            reads=reads,
        )
        first, second = sides.host.exchanges
        time.sleep(0.05)  # a job that does not wait has run
        assert not first.is_set
        assert not second.is_set
        assert same_bits(weights.tensor, kept)
        reads.set()
        made.exchange.finish()
        sides.host.wait()
        weights.expect(before, sides)
        assert same_bits(weights.tensor, weights.expected)
        assert not same_bits(weights.tensor, kept)


def test_ended_reads_are_no_input() -> None:
    plan = plan_of(4, 12, 8)
    sides = Sides(plan)
    with engine(plan) as made:
        sides.host.last_job = held = HeldJob(made.workers, deadline=7)
        wanted, weights = wanted_after(sides.device.selection, 4, 4), InMemory(torch.zeros(12, 8))
        sides.start(made.exchange, wanted, weights=weights, reads=ThreadTicket.ended(None))
        (job,) = sides.host.exchanges
        inputs = len(job.inputs)
        held.gate.set()
        made.exchange.finish()
        assert inputs == 1


def test_exchanges_overlap_in_a_few_buffers() -> None:
    """More parameters than buffers: the oldest exchange ends first, and none mixes with another one."""
    params = [replace(plan_of(4, 12, 8 + number), index=number) for number in range(7)]
    expected, actual = ([Sides(plan, plan.index) for plan in params] for _ in range(2))
    with engine(*params) as made:
        for old, new in zip(expected, actual, strict=True):
            wanted = wanted_after(old.device.selection, 3, 4)
            old.exchange_now(wanted)
            new.start(made.exchange, wanted)
            assert sum(made.exchange.moves(each.device) for each in actual) <= plans.EXCHANGE_BUFFERS
        made.exchange.start_uploads()
        made.exchange.finish()
        for old, new in zip(expected, actual, strict=True):
            new.host.wait()
            new.assert_same(old)


def test_exchange_waits_for_the_jobs_before_it() -> None:
    plan = plan_of(4, 12, 8)
    sides = Sides(plan)
    before = sides.bits()
    with engine(plan) as made:
        held = sides.host.last_job = HeldJob(made.workers, deadline=7)
        sides.start(made.exchange, wanted_after(sides.device.selection, 4, 4))
        (job,) = sides.host.exchanges
        assert sides.host.last_job is job
        assert job.deadline == held.deadline  # not before it in the queue of the workers
        time.sleep(0.02)  # in which a job that does not wait would run
        assert not job.is_set
        assert all(torch.equal(a, b) for a, b in zip(sides.bits(), before, strict=True))
        held.gate.set()
        made.exchange.finish()
        assert job.is_set
        assert job.succeeded
        assert not any(torch.equal(a, b) for a, b in zip(sides.bits(), before, strict=True))


class WithoutFlags(ThreadLane):
    """A lane that cannot wait for jobs."""

    def can_wait_for(self, work: object) -> bool:
        return False


def test_lane_that_cannot_wait_gets_finished_jobs() -> None:
    """Without flags the host waits for the job, and only when the state is needed."""
    plan = plan_of(4, 12, 8)
    expected, actual = Sides(plan), Sides(plan)
    submitted: list[bool] = []
    with engine(plan, lane=WithoutFlags) as made:
        held = actual.host.last_job = HeldJob(made.workers, deadline=7)
        wanted = wanted_after(expected.device.selection, 2, 4)
        expected.exchange_now(wanted)
        with at_calls(lambda call: submitted.append(call.arguments["after"].is_set), made.to_device.submit):
            actual.start(made.exchange, wanted)
            made.exchange.start_uploads()
            assert submitted == []
            held.gate.set()
            made.exchange.finish()
        assert submitted == [True]
        actual.assert_same(expected)


def test_failed_job_stops_its_exchange() -> None:
    """The error of the job before is raised until the exchange is abandoned, which frees its buffer."""
    plan = plan_of(4, 12, 8)
    sides = Sides(plan)
    before = sides.bits()
    with engine(plan) as made:
        held = sides.host.last_job = HeldJob(made.workers, deadline=7)
        sides.start(made.exchange, wanted_after(sides.device.selection, 4, 4))
        held.gate.set(ValueError("on purpose"))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="host update"):
                made.exchange.finish()
        assert sides.host.applied_failure is not None
        sides.host.clear_windows()
        made.exchange.abandon()
        assert not made.exchange.moves(sides.device)
        assert sides.host.applied_failure is None
        made.exchange.finish()
        assert all(torch.equal(a, b) for a, b in zip(sides.bits(), before, strict=True))


@pytest.mark.parametrize("lane", ["D2H", "H2D"])
def test_failed_copy_stops_its_exchange(lane: str, copies: Copies) -> None:
    plan = plan_of(4, 12, 8)
    sides = Sides(plan)
    error = ValueError("on purpose")

    def broken(target: Tensor, source: Tensor) -> None:
        if threading.current_thread().name == f"zenflow-{lane}":
            raise error
        copy_without_gil(target, source)

    copies.make = broken
    with engine(plan) as made:
        sides.start(made.exchange, wanted_after(sides.device.selection, 4, 4))
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                made.exchange.finish()
            assert caught.value.__cause__ is error
        with suppress(RuntimeError):
            sides.host.wait()
        sides.host.clear_windows()
        made.exchange.abandon()


class InterruptedWrite(TorchDispatchMode):
    """An interrupt between writes of rows: at the third one."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.writes += func is torch.ops.aten.index_put_.default
        if self.writes == 3:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_repeated_end_of_an_exchange_is_harmless() -> None:
    """An interrupt between the blocks of state leaves the exchange in flight; the next call repeats its end."""
    plan = plan_of(4, 12, 8)
    expected, actual = Sides(plan), Sides(plan)
    wanted = wanted_after(expected.device.selection, 3, 4)
    expected.exchange_now(wanted)
    with engine(plan) as made:
        actual.start(made.exchange, wanted)
        with InterruptedWrite(), pytest.raises(KeyboardInterrupt):
            made.exchange.finish()
        assert made.exchange.moves(actual.device)
        made.exchange.finish()
        actual.assert_same(expected)


def test_interrupted_upload_is_queued_again() -> None:
    plan = plan_of(4, 12, 8)
    expected, actual = Sides(plan), Sides(plan)
    wanted = wanted_after(expected.device.selection, 3, 4)
    expected.exchange_now(wanted)
    with engine(plan) as made:
        actual.start(made.exchange, wanted)
        with interrupted(made.to_device.submit, returned=True), pytest.raises(KeyboardInterrupt):
            made.exchange.start_uploads()
        made.exchange.finish()
        actual.assert_same(expected)


def test_lanes_record_the_moved_state() -> None:
    """Both directions, as bytes of the bound."""
    plan = plan_of(4, 12, 8)
    sides = Sides(plan)
    with engine(plan) as made:
        made.recorder.attach(timeline := Timeline())
        sides.start(made.exchange, wanted_after(sides.device.selection, 1, 3))
        made.exchange.finish()
        events = {event.lane: event for event in timeline.events() if event.kind == "state"}
    assert events["D2H"].bytes == 3 * plan.swap_bytes
    assert events["H2D"].bytes == 3 * 12 * plan.length
    workers = [event for event in timeline.events() if event.is_worker]
    assert {event.kind for event in workers} == {"state"}
    assert sum(event.bytes for event in workers) == 4 * 12 * plan.length  # read and written on either place, one slice


def test_workers_record_the_written_weights() -> None:
    plan = plan_of(4, 12, 8, torch.bfloat16)
    sides = Sides(plan)
    with engine(plan) as made:
        made.recorder.attach(timeline := Timeline())
        weights = InMemory(torch.zeros(12, 8, dtype=torch.bfloat16))
        sides.start(made.exchange, wanted_after(sides.device.selection, 3, 4), weights=weights)
        made.exchange.finish()
        sides.host.wait()
    workers = [event for event in timeline.events() if event.is_worker]
    assert sum(event.bytes for event in workers) == 3 * (4 * 12 + 2) * plan.length


def test_buffers_are_bounded_and_accounted_for() -> None:
    small, large = plan_of(4, 12, 8), plan_of(64, 600, 30_000)
    with engine(small) as made:
        assert made.exchange.nbytes == Plan(policy="zenflow", params=(small,)).exchange_bytes
        assert made.exchange.nbytes == plans.EXCHANGE_BUFFERS * 4 * (12 * 8 + 4)
        sides = Sides(small)
        sides.start(made.exchange, wanted_after(sides.device.selection, 4, 4))
        plan = Plan(policy="zenflow", params=(small, large))
        made.exchange.fit(plan.exchange_buffer_bytes)  # ends what is in flight
        assert not made.exchange.moves(sides.device)
        assert made.exchange.nbytes == plan.exchange_bytes == plans.EXCHANGE_BUFFERS * plans.EXCHANGE_BYTES
        made.exchange.fit(1)
        assert made.exchange.nbytes == plan.exchange_bytes
    assert plan_of(64, 600, 9 << 20).swap_bytes > plans.EXCHANGE_BYTES
    assert Plan(policy="zenflow", params=(plan_of(64, 600, 9 << 20),)).exchange_buffer_bytes == 12 * (9 << 20) + 4
    in_file = Plan(policy="zenflow", params=(replace(large, in_file=True),))
    assert in_file.exchange_buffer_bytes == plans.EXCHANGE_BYTES
    unused = [replace(large, fixed=True), replace(large, k=0)]
    assert Plan(policy="zenflow", params=tuple(unused)).exchange_bytes == 0


def test_ended_copies_are_forgotten() -> None:
    """A job that has ended keeps neither its copy nor the jobs before it alive."""
    plan = plan_of(4, 12, 8)
    sides = Sides(plan)
    with engine(plan) as made:
        for _ in range(3):
            sides.start(made.exchange, wanted_after(sides.device.selection, 2, 4))
            made.exchange.finish()
            (job,) = sides.host.exchanges
            job.settle()
            made.workers.land()
            assert job.inputs == job.after == ()
