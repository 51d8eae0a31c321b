"""A parameter's host side: gradient buffers, flushes and the open update window, with copies and jobs run by hand."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.support.calls import Call, at_calls
from tests.support.coefficients import with_lr
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.host.arena import HostArena, touch_pages
from zenflow_compile.runtime.host.host_kernel import HostKernel, scales_and_values
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.parameters.host_state import (
    CUT_ELEMENTS,
    TASK_ELEMENTS,
    FlushedWindow,
    GradientBuffer,
    HostState,
    task_ranges,
)
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_

pytestmark = pytest.mark.timeout(60)

PLAN = ParamPlan(
    index=0,
    name="w",
    shape=(8, 32),
    dtype=torch.float32,
    placement=Placement.SPLIT_COLUMNS,
    dim=1,
    slices=32,
    length=8,
    k=8,
    interval=3,
)
STALE = replace(PLAN, interval=1, staleness=1)
COEFFICIENTS = StepCoefficients.known(lr=0.01, beta1=0.9, beta2=0.999, weight_decay=0.1)


WORKERS = Workers(2, Recorder())


def host_of(plan: ParamPlan = PLAN, workers: int = 1, task_elements: int | None = None) -> HostState:
    WORKERS.start()
    kernel = HostKernel(plan.gradient_buffers.dtype, plan.dtype, plan.gradient_buffers.count)
    host = HostState.allocate(plan, HostArena(HostState.arena_bytes(plan)), kernel, WORKERS.handle, workers)
    if task_elements is not None:
        unit = plan.length if plan.compressed else CUT_ELEMENTS
        host.ranges = task_ranges(plan.deferred * plan.length, workers, unit, task_elements)
    return host


def copied(error: BaseException | None = None) -> ThreadTicket:
    ticket = ThreadTicket()
    ticket.set(error)
    return ticket


def next_step(host: HostState) -> int:
    """The next optimizer step of a window that begins at step 1, if no gradient is missing."""
    return 1 + host.taken + len(host.open)


def put(host: HostState, value: Tensor | float, ticket: ThreadTicket | None = None, lr: float = 0.01) -> int:
    """Put one step's gradient into the update window, as ``copy_to_host`` and ``commit`` do."""
    index, buffer = host.free_buffer(next_step(host))
    buffer.copy_(torch.as_tensor(value))
    host.open.append(GradientBuffer(index, with_lr(COEFFICIENTS, lr), ticket or copied()))
    return index


def run(flushed: FlushedWindow) -> None:
    WORKERS.submit(flushed.job)
    flushed.job.settle()


def bytes_of_tasks(flushed: FlushedWindow) -> list[int]:
    work = flushed.job.work
    assert work is not None
    return [work.touched_bytes(number, record) for number, record in enumerate(flushed.job.records)]


def test_flushed_window_equals_rule_p() -> None:
    host = host_of()
    torch.manual_seed(0)
    host.state().master.normal_()
    master, exp_avg, exp_avg_sq = (tensor.clone() for tensor in host.state())
    gradients = [torch.randn(24, 8) for _ in range(6)]
    taken = 0
    for window in (gradients[:3], gradients[3:5], gradients[5:]):
        for number, gradient in enumerate(window):
            put(host, gradient, lr=0.01 * (1 + number))
        flushed = host.flush_window(at=taken, deadline=0)
        run(flushed)
        taken += len(window)
        coefficients = [with_lr(COEFFICIENTS, 0.01 * (1 + number)) for number in range(len(window))]
        update_window_((master, exp_avg, exp_avg_sq), window, coefficients, step=taken)
        for actual, expected in zip(host.state(), (master, exp_avg, exp_avg_sq), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(flushed.upload.content(), host.state().master, atol=0, rtol=0)
        assert host.taken == taken
        assert host.open == []
        host.flushed.pop(0)


def test_uncommitted_gradient_buffer_is_reused() -> None:
    """The buffer is reused after a skipped step, or after a gradient was discarded."""
    host = host_of()
    first, _ = host.free_buffer(1)
    again, _ = host.free_buffer(1)
    assert first == again == 0
    assert [put(host, 0.0) for _ in range(3)] == [0, 1, 2]


def test_reused_gradient_buffer_waits_for_its_job() -> None:
    host = host_of()
    for _ in range(3):
        put(host, 1.0)
    flushed = host.flush_window(at=0, deadline=0)
    threading.Timer(0.05, lambda: run(flushed)).start()
    assert put(host, 2.0) == 0
    assert flushed.job.done()
    assert host.state()[1].abs().max() < 0.5  # of the ones, not of the twos


def test_staleness_adds_a_buffer_and_an_upload() -> None:
    host = host_of(STALE)
    put(host, 1.0)
    first = host.flush_window(at=0, deadline=0)
    assert put(host, 1.0) == 1  # without waiting for the first
    second = host.flush_window(at=1, deadline=0)
    assert (first.visible_at, second.visible_at) == (2, 3)
    assert first.upload.content().data_ptr() != second.upload.content().data_ptr()
    run(first)
    run(second)
    put(host, 1.0)
    assert host.flush_window(at=2, deadline=0).upload is first.upload


def test_update_is_visible_one_step_after_its_flush() -> None:
    host = host_of()
    put(host, 1.0)
    assert host.flush_window(at=5, deadline=0).visible_at == 6


def test_long_parameters_are_split_into_tasks() -> None:
    whole, cut = host_of(), host_of(task_elements=64)
    for host in (whole, cut):
        host.state().master.fill_(1.0)
        for step in range(3):
            put(host, torch.full((24, 8), 0.5 + step))
    flushed = cut.flush_window(at=0, deadline=0)
    assert bytes_of_tasks(flushed) == [64 * (6 * 4 + 4 * 4)] * 3
    run(flushed)
    reference = whole.flush_window(at=0, deadline=0)
    assert len(bytes_of_tasks(reference)) == 1
    run(reference)
    for actual, expected in zip(cut.state(), whole.state(), strict=True):
        assert torch.equal(actual, expected)


def test_compressed_gradients_expand_by_whole_slices() -> None:
    """The flush of int8 blocks equals rule P on the expanded values, split into tasks."""
    plan = replace(PLAN, compressed=True)
    large = host_of(replace(plan, shape=(7, 300_008), slices=300_008, length=7))
    assert [part.start for part in large.ranges] == [0, 700_000, 1_400_000]  # no multiples of 64 elements
    host = host_of(plan, task_elements=70)
    torch.manual_seed(0)
    host.state().master.normal_()
    master, exp_avg, exp_avg_sq = (tensor.clone() for tensor in host.state())
    gradients = []
    for number in range(3):
        block = torch.empty(plan.gradient_buffers.shape, dtype=plan.gradient_buffers.dtype)
        scales, values = scales_and_values(block)
        scales.uniform_()
        values.random_(-127, 128)
        put(host, block, lr=0.01 * (1 + number))
        gradients.append(values * scales.unsqueeze(1))
    coefficients = [with_lr(COEFFICIENTS, 0.01 * (1 + number)) for number in range(3)]
    flushed = host.flush_window(at=0, deadline=0)
    assert len(bytes_of_tasks(flushed)) == 3
    run(flushed)
    flushed.job.wait()
    update_window_((master, exp_avg, exp_avg_sq), gradients, coefficients, step=3)
    for actual, expected in zip(host.state(), (master, exp_avg, exp_avg_sq), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("workers", [1, 2, 3, 14])
@pytest.mark.parametrize("elements", [0, 1, 63, 64, 65, 1 << 16, (1 << 20) - 1, (1 << 20) + 1, 8_493_466, 33 << 20])
def test_parameter_is_split_evenly_over_workers(elements: int, workers: int) -> None:
    ranges = task_ranges(elements, workers)
    assert [part.start for part in ranges] == [0, *(part.stop for part in ranges)][: len(ranges)]
    assert (ranges[-1].stop if ranges else 0) == elements
    sizes = [part.stop - part.start for part in ranges]
    assert all(size % 64 == 0 for size in sizes[:-1])
    assert max(sizes, default=0) <= TASK_ELEMENTS
    if elements >= workers << 18:  # large enough for all: the last task is hardly smaller, and no worker gets one more
        assert len(ranges) % workers == 0
        assert max(sizes) - min(sizes) <= 64 * len(ranges)


def test_small_parameters_are_one_task() -> None:
    assert len(task_ranges(100_000, 14)) == 1
    assert len(task_ranges((1 << 20) + 1, 14)) == 14
    assert len(task_ranges((1 << 20) + 1, 1)) == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_touch_their_ranges_once(workers: int) -> None:
    host = host_of(workers=workers, task_elements=64)
    touched: list[tuple[int, int]] = []

    def note(call: Call) -> None:
        tensor = call.arguments["tensor"]
        touched.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))

    by_worker = []
    for worker in range(workers):
        begin = len(touched)
        with at_calls(note, touch_pages):
            host.touch(worker)
        by_worker.append(sum(end - start for start, end in touched[begin:]))
    assert sum(by_worker) == PLAN.host_bytes
    assert max(by_worker) == min(by_worker) == PLAN.host_bytes // workers
    ordered = sorted(touched)
    assert all(end <= start for (_, end), (start, _) in pairwise(ordered))


def test_job_waits_for_its_copies() -> None:
    host = host_of()
    ticket = ThreadTicket()
    put(host, 1.0, ticket)
    flushed = host.flush_window(at=0, deadline=0)
    worker = threading.Thread(target=run, args=(flushed,))
    worker.start()
    worker.join(0.05)
    assert worker.is_alive()
    assert not host.state()[1].any()
    ticket.set()
    worker.join(20)
    assert host.state()[1].all()


def test_wait_for_copies_of_the_open_window() -> None:
    host = host_of()
    ticket = ThreadTicket()
    put(host, 1.0, ticket)
    threading.Timer(0.05, ticket.set).start()
    host.wait_for_copies()
    assert ticket.done()


def test_failures_are_raised_without_waiting() -> None:
    host = host_of()
    put(host, 1.0, ThreadTicket())
    host.raise_failures()  # nothing has failed so far, and nothing is waited for
    put(host, 1.0, copied(ValueError("on purpose")))
    with pytest.raises(RuntimeError, match="copy"):
        host.raise_failures()
    other = host_of()
    put(other, 1.0, copied(ValueError("on purpose")))
    flushed = other.flush_window(at=0, deadline=0)
    other.raise_failures()
    run(flushed)
    for raises in (other.raise_failures, other.wait):
        with pytest.raises(RuntimeError, match="host update of w") as caught:
            raises()
        assert isinstance(caught.value.__cause__, ValueError)


def test_clear_waits_for_running_jobs() -> None:
    """A failed job is done before its tasks have ended; they must not write into state that is loaded next."""
    host = host_of()
    put(host, 1.0)
    flushed = host.flush_window(at=0, deadline=0)
    put(host, 1.0, copied(ValueError("on purpose")))
    late = ThreadTicket()
    put(host, 1.0, late)
    threading.Timer(0.02, lambda: run(flushed)).start()
    threading.Timer(0.06, late.set).start()
    host.clear_windows()
    assert flushed.job.done()
    assert late.done()
    assert (host.open, host.flushed) == ([], [])
    assert host.free_buffer(1)[0] == 0
    host.wait()
    host.raise_failures()


def test_job_waits_for_the_factors_of_its_gradients() -> None:
    """A worker that took the job earlier would block in its middle, before a job that could run."""
    host, factor = host_of(), ThreadTicket()
    scale = Number(torch.tensor(0.5, dtype=torch.float64), [factor], [torch.tensor(0.5, dtype=torch.float64)])
    for number in (Number.known(1.0), scale, scale):
        index, buffer = host.free_buffer(next_step(host))
        buffer.fill_(1.0)
        host.open.append(GradientBuffer(index, COEFFICIENTS._replace(grad_scale=number), copied()))
    flushed = host.flush_window(at=0, deadline=0)
    WORKERS.submit(flushed.job)
    time.sleep(0.02)  # in which a job that does not wait would run
    assert not flushed.job.is_set
    factor.set()
    flushed.job.wait()
