"""Gradient buffers that share memory, with copies and jobs run by hand."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.calls import interrupted
from tests.support.copies import Copies
from tests.support.gated_jobs import HeldJob
from tests.support.training import Training
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.device.copy_lanes import Users
from zenflow_compile.runtime.device.thread_lane import ThreadLane, ThreadTicket
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.host.host_kernel import HostKernel
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.parameters.allocation import allocate_pools, connect, pools_arena_bytes
from zenflow_compile.runtime.parameters.flushed_updates import Upload
from zenflow_compile.runtime.parameters.host_state import FlushedWindow, GradientBuffer, HostState
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.update_rule import StepCoefficients

pytestmark = pytest.mark.timeout(60)

WORKERS = Workers(1, Recorder())
COEFFICIENTS = StepCoefficients.known(lr=0.01, beta1=0.9, beta2=0.999, weight_decay=0.1)


def plans(*, in_place: bool) -> list[ParamPlan]:
    """Two parameters with update windows of two steps. The last buffers of both have the same memory."""
    first = ParamPlan(
        index=0, name="first", shape=(8, 8), dtype=torch.float32, placement=Placement.SPLIT_COLUMNS, slices=8, length=8,
        interval=2, pool=0, in_place=in_place,
    )  # fmt: skip
    return [first, replace(first, index=1, name="second", phase=1)]


def hosts_of(*, in_place: bool) -> tuple[HostState, HostState]:
    WORKERS.start()
    pool = plans(in_place=in_place)
    arena = HostArena(sum(map(HostState.arena_bytes, pool)) + pools_arena_bytes(pool))
    kernel = HostKernel(torch.float32, torch.float32, 2)
    buffers = allocate_pools(pool, arena)
    hosts = [HostState.allocate(plan, arena, kernel, WORKERS.handle, gradients=buffers[plan.index]) for plan in pool]
    connect(dict(enumerate(hosts)))
    first, second = hosts
    assert first.gradients[1].data_ptr() == second.gradients[1].data_ptr()
    return first, second


def flushed(host: HostState, step: int) -> FlushedWindow:
    """Fill and flush the update window that ends with ``step``."""
    for each in (step - 1, step):
        index, buffer = host.free_buffer(each)
        buffer.fill_(each)
        host.open.append(GradientBuffer(index, COEFFICIENTS, ThreadTicket.ended()))
    return host.flush_window(at=step, deadline=0)


def run(window: FlushedWindow) -> None:
    WORKERS.submit(window.job)
    window.job.settle()


def test_gradient_waits_for_the_job_of_a_sharer() -> None:
    first, second = hosts_of(in_place=False)
    window = flushed(first, 2)
    users, updates = second.users_of(second.plan.gradient_buffers.index(3))
    assert (users.jobs, users.copies, updates) == ([window.job], [], [])
    threading.Timer(0.05, run, (window,)).start()
    second.free_buffer(3)
    assert window.job.done()
    assert second.users_of(second.plan.gradient_buffers.index(3)) == (Users([], []), [])


def test_gradient_waits_for_the_upload_of_a_sharer() -> None:
    first, second = hosts_of(in_place=True)
    window, copy = flushed(first, 2), ThreadTicket()
    run(window)
    first.uploading[window.buffer] = copy
    assert second.users_of(second.plan.gradient_buffers.index(3)) == (Users([], [copy]), [])
    first.flushed.clear()  # applied in another stream, which waits for the copy
    assert second.users_of(second.plan.gradient_buffers.index(3)) == (Users([], [copy]), [])
    threading.Timer(0.05, copy.set).start()
    second.free_buffer(3)
    assert copy.done()


@pytest.mark.parametrize("ended", [False, True])
def test_unread_update_leaves_its_buffer(ended: bool) -> None:
    first, second = hosts_of(in_place=True)
    window = flushed(first, 2)
    assert window.upload.content() is first.gradients[1]
    if ended:
        run(window)
        assert first.users_of(1)[1] == [window]
    else:
        threading.Timer(0.05, run, (window,)).start()
    index, buffer = second.free_buffer(3)
    assert window.job.done()
    buffer.fill_(7.0)
    assert torch.equal(window.upload.content(), first.state().master)
    assert second.users_of(index) == (Users([], []), [])


def test_gradient_in_an_open_window_is_not_overwritten() -> None:
    first, second = hosts_of(in_place=True)
    index, _ = first.free_buffer(2)
    first.open.append(GradientBuffer(index, COEFFICIENTS, ThreadTicket.ended()))
    with pytest.raises(RuntimeError, match=r"over one of first that waits in an update window.*update_interval=1"):
        second.free_buffer(3)
    with pytest.raises(RuntimeError, match="over one of first"):
        first.free_buffer(4)


def test_forgotten_windows_leave_their_buffers() -> None:
    first, second = hosts_of(in_place=True)
    window, copy = flushed(first, 2), ThreadTicket()
    first.uploading[window.buffer] = copy
    run(window)
    first.clear_windows()
    assert second.users_of(1) == (Users([], []), [])


def test_upload_of_an_earlier_window_does_not_count() -> None:
    first, second = hosts_of(in_place=True)
    window = flushed(first, 2)
    run(window)
    first.uploading[window.buffer] = ThreadTicket.ended()
    first.flushed.clear()  # applied
    assert second.users_of(1) == (Users([], []), [])
    window = flushed(first, 4)
    assert second.users_of(1)[1] == [window]


def test_buffers_are_freed_without_the_collector() -> None:
    first, second = hosts_of(in_place=True)
    memory = [weakref.ref(host.gradients[0]) for host in (first, second)]
    gc.disable()
    try:
        del first
        second.free_buffer(3)  # has no sharer any more
        del second
        assert [each() for each in memory] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["job", "copy"])
def test_lane_waits_for_users_of_its_target(kind: str) -> None:
    lane, workers = ThreadLane("D2H", Recorder()), Workers(1, Recorder())
    first, last = HeldJob(workers), HeldJob(workers)
    copy = ThreadTicket()
    users = Users([first, last], []) if kind == "job" else Users([], [ThreadTicket.ended(), copy])
    target = torch.zeros(4)
    ticket = lane.submit(target, torch.ones(4), step=0, param="w", users=users)
    first.gate.set()
    time.sleep(0.05)
    assert not ticket.done()
    assert not target.any()
    last.gate.set()
    copy.set()
    ticket.wait()
    assert target.all()
    lane.close(), workers.close()


def test_interrupted_upload_leaves_its_buffer() -> None:
    options: dict[str, Any] = {"topk_ratio": 0.0, "update_interval": 4}
    training = Training(None, options).run(0, 3)
    offloaded = next(each for each in training.optimizer.engine.offloaded.values() if each.host.open)
    window = offloaded.updates.flush(at=3, selection=None, promptly=True)
    assert window is not None
    assert window.buffer is not None
    offloaded.transport.workers.submit(window.job)
    window.job.wait()
    with interrupted(Upload.__init__), pytest.raises(KeyboardInterrupt):
        offloaded.updates.start_upload()
    assert offloaded.host.users_of(window.buffer) == (Users([], []), [window])
    assert offloaded.updates.start_upload()
    assert offloaded.host.users_of(window.buffer)[1] == []
    training.optimizer.close()


def test_dropped_gradient_has_been_copied(copies: Copies) -> None:
    """Its copy would end later than a small one that shares the memory in the next step, and overtakes it."""
    options: dict[str, Any] = {"topk_ratio": 0.0, "update_interval": 4}
    training = Training(None, options).run(0, 3)
    ended = []

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(0.05)
        ended.append(target)

    copies.make = slow
    training.backward(3)  # no update window is flushed in this step, so that nothing else waits for copies
    dropped = training.model[0].weight  # type: ignore[index]
    dropped.grad = None
    training.optimizer.step()
    offloaded = training.optimizer.engine.offloaded[0]
    buffer = offloaded.host.gradients[offloaded.plan.gradient_buffers.index(3)]
    assert any(target is buffer for target in ended)
    training.optimizer.close()
