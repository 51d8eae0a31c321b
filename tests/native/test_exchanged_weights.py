"""A native exchange writes the weights of rows that enter the host's state: the bits of PyTorch's cast."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.edge_floats import edge_floats, same_bits
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.host.workers import Job, Workers, bounds_of
from zenflow_compile.runtime.parameters.state_exchange import ExchangeWork
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import Timeline

pytestmark = pytest.mark.timeout(60)

DEFERRED, ROWS, SWAPPED = 23, 11, 8
PARTS = [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 11)]  # the third one ends at a -1, the last one begins with it
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 3, 16, 17, 64, 100)


@pytest.fixture
def pool() -> Iterator[Workers]:
    made = Workers(2, Recorder())
    yield made
    made.close()


def exchange_of(length: int, weights: Tensor | None) -> ExchangeWork:
    """Rows in random places, and -1 behind them."""
    state, blocks = (
        [edge_floats(rows, length, seed=first + part) for part in range(3)]
        for rows, first in ((DEFERRED, length), (ROWS, length + 7))
    )
    rows = torch.full((ROWS,), -1, dtype=torch.int32)
    rows[:SWAPPED] = torch.randperm(DEFERRED, generator=torch.Generator().manual_seed(length))[:SWAPPED]
    return ExchangeWork(state, rows, blocks, bounds_of(PARTS), weights)


def run(work: ExchangeWork, pool: Workers) -> None:
    job = Job(work, (), (), pool.handle, deadline=0, step=0, param="w")
    pool.submit(job)
    job.wait()
    job.settle()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_have_the_bits_of_the_cast(dtype: torch.dtype, length: int, pool: Workers) -> None:
    before = edge_floats(DEFERRED, length, seed=99).to(dtype)
    memory = torch.cat([before.new_full((1, length), 7.0), before, before.new_full((1, length), 7.0)])
    work = exchange_of(length, memory[1:-1])
    rows = work.rows[:SWAPPED].long()
    incoming = work.blocks[0][:SWAPPED].clone()
    run(work, pool)
    assert same_bits(work.state[0][rows], incoming)
    assert same_bits(memory[1:-1], before.index_copy(0, rows, incoming.to(dtype)))
    assert bool((memory[[0, -1]] == 7.0).all()), "memory around the weights"


@pytest.mark.parametrize("length", LENGTHS)
def test_weights_change_no_state(length: int, pool: Workers) -> None:
    works = [exchange_of(length, None), exchange_of(length, torch.zeros(DEFERRED, length))]
    for work in works:
        run(work, pool)
    one, other = ([*work.state, *work.blocks] for work in works)
    assert all(same_bits(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_weights_are_counted(dtype: torch.dtype) -> None:
    recorder = Recorder()
    recorder.attach(timeline := Timeline())
    pool = Workers(2, recorder)
    for weights in (None, torch.zeros(DEFERRED, 5, dtype=dtype)):
        run(exchange_of(5, weights), pool)
    pool.close()
    moved = [event.bytes for event in timeline.events()]
    assert sum(moved) == SWAPPED * 5 * (2 * 4 * 12 + dtype.itemsize)


def test_queued_job_keeps_its_weights(pool: Workers) -> None:
    """Native threads write through an address until the job is settled."""
    gate, weights = ThreadTicket(), torch.zeros(DEFERRED, 5, dtype=torch.bfloat16)
    alive = weakref.ref(weights)
    job = Job(exchange_of(5, weights), (gate,), (), pool.handle, deadline=0, step=0, param="w")
    pool.submit(job)
    job.work = None  # the pool alone keeps the memory
    del weights
    gc.collect()
    kept = alive() is not None
    gate.set()
    job.settle()
    assert kept
    pool.land()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "weights",
    [
        torch.zeros(DEFERRED, 6),
        torch.zeros(5, DEFERRED).t(),
        torch.zeros(DEFERRED, 5, dtype=torch.float64),
        torch.zeros(DEFERRED, 5, dtype=torch.int8),
    ],
    ids=["length", "strides", "fp64", "int8"],
)
def test_other_weights_are_refused(weights: Tensor, pool: Workers) -> None:
    with pytest.raises((AssertionError, KeyError)):
        Job(exchange_of(5, weights), (), (), pool.handle, deadline=0, step=0, param="w")
