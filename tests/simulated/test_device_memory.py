"""Freed memory holds NaN from the moment at which CUDA's caching allocator could have given it away."""

from __future__ import annotations

import pytest
import torch

from tests.simulated.process import in_simulator
from tests.simulated.simulator import Delays, Simulator, Stream

LATE = Delays(by_order={1: 0.98})


def _read_in_late_stream(simulator: Simulator, *, record: bool, allocate: bool, wait: bool = False) -> bool:
    """Whether a late stream finds the values of a tensor that the host freed after it launched the reader."""
    side = Stream()
    values = torch.full((1024,), 3.0, device=simulator.device)
    side.wait_stream(Stream(handle=0))
    with side:
        doubled = values * 2
    if record:
        values.record_stream(side)
    del values
    if wait:
        Stream(handle=0).wait_stream(side)
    if allocate:
        torch.empty(1024, device=simulator.device)
        Stream(handle=0).synchronize()
    side.synchronize()
    return bool(doubled.cpu().eq(6).all())


@pytest.mark.parametrize(
    ("how", "right"),
    [
        ({"record": False, "allocate": True}, False),
        ({"record": True, "allocate": True}, True),
        ({"record": False, "allocate": False}, True),
        ({"record": False, "allocate": True, "wait": True}, True),
    ],
    ids=["reused", "record_stream", "not reused", "reused behind a wait"],
)
@in_simulator
def test_reuse_under_a_reader(simulator: Simulator, how: dict[str, bool], right: bool) -> None:
    for late in (0.98, 1.0) if right else (1.0,):
        simulator.configure(delays=Delays(by_order={1: late}))
        assert _read_in_late_stream(simulator, **how) == right


@in_simulator
def test_reader_of_its_own_stream_is_safe(simulator: Simulator) -> None:
    for seed in range(3):
        simulator.configure(seed=seed, delays=Delays(default=0.98))
        values = torch.ones(1024, device=simulator.device)
        for _ in range(50):
            values = values + 1  # frees the old one, and the next allocation reuses it
        assert values.cpu().eq(51).all()


@in_simulator
def test_new_memory_holds_nan(simulator: Simulator) -> None:
    assert torch.empty(64, device=simulator.device).cpu().isnan().all()
    assert torch.zeros(64, device=simulator.device).cpu().eq(0).all()


@in_simulator
def test_bytes_are_counted(simulator: Simulator) -> None:
    simulator.configure(capacity=1 << 20)
    before, free = torch.sim.memory_allocated(), simulator.free_bytes()
    torch.sim.reset_peak_memory_stats()
    values = torch.zeros(1024, device=simulator.device)
    assert torch.sim.memory_allocated() == before + 4096
    assert simulator.free_bytes() == free - 4096
    assert torch.sim.mem_get_info() == (free - 4096, 1 << 20)
    del values
    assert torch.sim.memory_allocated() == before
    assert torch.sim.max_memory_allocated() == before + 4096
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.zeros(1 << 20, device=simulator.device)


@in_simulator
def test_storage_changes_its_size(simulator: Simulator) -> None:
    simulator.configure(delays="compute late")
    values = torch.arange(6.0, device=simulator.device)
    storage = values.untyped_storage()
    before = torch.sim.memory_allocated()
    storage.resize_(0)
    assert torch.sim.memory_allocated() == before - 24
    storage.resize_(24)
    values.copy_(torch.full((6,), 2.0))
    assert values.cpu().eq(2).all()
    values.resize_(12)
    assert values[:6].cpu().eq(2).all()
    other = torch.empty(0, device=simulator.device).set_(values)
    assert other.data_ptr() == values.data_ptr()


@in_simulator
def test_pinned_memory_outlives_its_copies(simulator: Simulator) -> None:
    """PyTorch's host allocator knows of the copies; it reuses a block only after them."""
    for seed in range(3):
        simulator.configure(seed=seed, delays=LATE)
        with Stream():
            pinned = torch.full((1024,), 3.0).pin_memory()
            values = pinned.to(simulator.device, non_blocking=True)
            del pinned
            torch.empty(1024, pin_memory=True)
            assert values.cpu().eq(3).all()
