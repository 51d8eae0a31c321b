"""The user of a ring's buffer takes it in one assignment, and waits for the copy that read it."""

from __future__ import annotations

import pytest
import torch

from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.device.staging_ring import Block, StagingBuffer, StagingRing
from zenflow_compile.runtime.device.thread_lane import ThreadTicket

CPU = torch.device("cpu")
SMALL: Block = (1, 4), torch.float32
EMPTY: Block = (0, 4), torch.float32
pytestmark = pytest.mark.timeout(60)


def take(ring: StagingRing, block: Block = EMPTY) -> StagingBuffer:
    buffer = ring.next_free(block)
    buffer.in_use = True
    return buffer


def give_back(buffer: StagingBuffer, reader: Ticket | None = None) -> None:
    buffer.in_use, buffer.read_by = False, reader


def test_next_user_sees_the_last_reader() -> None:
    ring = StagingRing(1, 64, CPU)
    buffer = take(ring, ((2, 4), torch.float32))
    first = buffer.tensor
    ticket = ThreadTicket()
    give_back(buffer, ticket)
    again = take(ring, ((4, 8), torch.bfloat16))
    assert again.read_by is ticket
    view = again.tensor
    assert view.shape == (4, 8)
    assert view.dtype == torch.bfloat16
    assert view.data_ptr() == first.data_ptr()


def test_buffers_are_used_round_robin() -> None:
    ring = StagingRing(3, 16, CPU)
    seen = []
    for _ in range(6):
        buffer = take(ring)
        seen.append(buffer)
        give_back(buffer)
    assert seen[:3] == seen[3:]
    assert len(set(seen)) == 3
    assert ring.nbytes == 48


def test_buffers_in_use_are_skipped() -> None:
    ring = StagingRing(3, 16, CPU)
    kept = take(ring)
    seen = set()
    for _ in range(6):
        buffer = take(ring)
        seen.add(buffer)
        give_back(buffer)
    assert len(seen) == 2
    assert kept not in seen


def test_failed_copy_keeps_its_buffer() -> None:
    ring = StagingRing(1, 16, CPU)
    give_back(take(ring), ThreadTicket.ended(ValueError("on purpose")))
    assert ring.free == 1
    assert ring.next_free(EMPTY).read_by is not None
    ring.settle()
    assert take(ring).read_by is None
    assert ring.free == 0


def test_buffer_is_free_until_it_is_marked() -> None:
    ring = StagingRing(2, 16, CPU)
    first = ring.next_free(EMPTY)
    assert ring.free == 2
    first.in_use = True
    assert ring.free == 1
    assert ring.next_free(EMPTY) is not first
    give_back(first)
    assert ring.free == 2


def test_settling_frees_every_buffer_once() -> None:
    """This includes a buffer that was taken and not given back, or given back twice."""
    ring = StagingRing(3, 16, CPU)
    take(ring)
    twice = take(ring)
    give_back(twice)
    give_back(twice)
    ring.settle()
    assert len({take(ring) for _ in range(3)}) == 3
    assert ring.free == 0


def test_ring_grows_when_nothing_is_in_use() -> None:
    ring = StagingRing(2, 0, CPU)
    ring.fit(64)
    assert ring.nbytes == 128
    ring.fit(32)
    assert (ring.nbytes, ring.free) == (128, 2)
    assert take(ring, ((4, 4), torch.float32)).tensor.shape == (4, 4)


def test_grown_ring_forgets_old_views() -> None:
    ring = StagingRing(1, 64, CPU)
    buffer = take(ring, SMALL)
    first = buffer.tensor
    give_back(buffer)
    assert take(ring, SMALL).tensor is first
    give_back(buffer)
    ring.fit(128)
    assert take(ring, SMALL).tensor.data_ptr() == ring.buffers[0].memory.data_ptr()
