"""Tests what the measurement of the host's rate runs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.support.calls import Call, at_calls
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.host.host_kernel import HostKernel
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step import host_rate as measuring
from zenflow_compile.runtime.step.host_rate import host_rate

# 80 deferred slices of 100: 8000 elements, of which a flush of four steps touches 34 bytes each.
PLAN = ParamPlan(
    index=0, name="w", shape=(100, 100), dtype=torch.bfloat16, placement=Placement.SPLIT_COLUMNS, dim=1, slices=100,
    length=100, k=20, interval=4,
)  # fmt: skip


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("cache_bytes", "rounds"), [(0, 1), (5000 * 34 * 3, 6)])
def test_host_rate_uses_the_kernel_on_all_workers(workers: int, cache_bytes: int, rounds: int) -> None:
    touched: list[tuple[int, int]] = []

    def note(call: Call) -> None:
        (job,) = call.arguments["jobs"]
        job.settle()
        assert job.work is not None
        touched.append((len(job.records), sum(job.work.touched_bytes(*each) for each in enumerate(job.records))))
        assert all(record.end_ns for record in job.records)

    pool = Workers(workers, Recorder())
    cache = mock.Mock(return_value=cache_bytes * workers)
    small = mock.patch.multiple(measuring, TASK_ELEMENTS=5000, last_level_cache_bytes=cache)
    try:
        with small, at_calls(note, Workers.submit, returned=True):
            assert host_rate(HostKernel(torch.bfloat16, torch.bfloat16, 4), PLAN, pool) > 0
    finally:
        pool.close()
    tasks = rounds * workers
    assert touched == [(tasks, tasks * 5000 * 34)] * 2
