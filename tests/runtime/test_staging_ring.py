"""Rings hand a buffer out only when the copy that read it is done."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from zenflow_compile.runtime.transfer.copy_lanes import CopyError, Ticket
from zenflow_compile.runtime.transfer.cpu_lane import ThreadTicket
from zenflow_compile.runtime.transfer.staging_ring import StagedBlock, StagingRing

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(60)


def take(ring: StagingRing, shape: tuple[int, int], dtype: torch.dtype) -> StagedBlock:
    block = ring.first_free(shape, dtype)
    ring.unused = ring.without(block)
    return block


def give_back(ring: StagingRing, block: StagedBlock, after: Ticket | None = None) -> None:
    ring.unused = ring.with_back(block, after)


def test_a_ring_waits_for_the_copy_that_read_its_buffer() -> None:
    ring = StagingRing(1, 64, CPU)
    block = take(ring, (2, 4), torch.float32)
    ticket = ThreadTicket()
    give_back(ring, block, ticket)
    threading.Timer(0.05, ticket.finish).start()
    begin = time.perf_counter()
    again = take(ring, (4, 8), torch.bfloat16)
    assert time.perf_counter() - begin > 0.04
    assert again.tensor.shape == (4, 8)
    assert again.tensor.dtype == torch.bfloat16
    assert again.tensor.data_ptr() == block.tensor.data_ptr()


def test_buffers_go_round() -> None:
    ring = StagingRing(3, 16, CPU)
    seen = []
    for _ in range(6):
        block = take(ring, (1, 4), torch.float32)
        seen.append(block.tensor.data_ptr())
        give_back(ring, block)
    assert seen[:3] == seen[3:]
    assert len(set(seen)) == 3
    assert ring.nbytes == 48


def test_a_failed_copy_does_not_lose_its_buffer() -> None:
    ring = StagingRing(1, 16, CPU)
    ticket = ThreadTicket()
    ticket.finish(ValueError("on purpose"))
    give_back(ring, take(ring, (1, 4), torch.float32), ticket)
    for _ in range(2):
        with pytest.raises(CopyError):
            take(ring, (1, 4), torch.float32)
        assert ring.free == 1
    ring.settle()
    take(ring, (1, 4), torch.float32)
    assert ring.free == 0


def test_a_buffer_is_unused_until_that_is_assigned() -> None:
    ring = StagingRing(2, 16, CPU)
    first = ring.first_free((1, 4), torch.float32)
    assert (ring.free, ring.first_free((1, 4), torch.float32).number) == (2, first.number)
    assert [number for number, _ in ring.without(first)] == [1]
    assert ring.free == 2
    ring.unused = ring.without(first)
    assert [number for number, _ in ring.with_back(first)] == [1, first.number]
    assert ring.free == 1


def test_settling_has_every_buffer_free_once() -> None:
    """Also one that was taken and not given back, or given back twice."""
    ring = StagingRing(3, 16, CPU)
    take(ring, (1, 4), torch.float32)
    twice = take(ring, (1, 4), torch.float32)
    give_back(ring, twice)
    give_back(ring, twice)
    ring.settle()
    assert len({take(ring, (1, 4), torch.float32).number for _ in range(3)}) == 3
    assert ring.free == 0


def test_a_ring_grows_when_nothing_is_in_use() -> None:
    ring = StagingRing(2, 0, CPU)
    ring.fit(2, 64)
    assert ring.nbytes == 128
    ring.fit(2, 32)
    assert ring.nbytes == 128
    ring.fit(4, 32)
    assert (ring.nbytes, ring.free) == (256, 4)
    assert take(ring, (4, 4), torch.float32).tensor.shape == (4, 4)


def test_a_ring_that_grows_forgets_the_views_of_its_old_buffers() -> None:
    ring = StagingRing(1, 64, CPU)
    first = take(ring, (2, 4), torch.float32)
    give_back(ring, first)
    again = take(ring, (2, 4), torch.float32)
    assert again.tensor is first.tensor
    give_back(ring, again)
    ring.fit(1, 128)
    assert take(ring, (2, 4), torch.float32).tensor.data_ptr() == ring._buffers[0].data_ptr()
