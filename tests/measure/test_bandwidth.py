"""Tests the list of measurements and the count of bytes; no test depends on the speed of this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.calls import calls_of
from zenflow_compile.measure import bandwidth
from zenflow_compile.runtime.host.cores import last_level_cache_bytes
from zenflow_compile.runtime.host.host_kernel import HostKernel

pytestmark = [pytest.mark.timeout(120)]

CPU = torch.device("cpu")
SMALL = 22 << 16
CORE = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def ticks(seconds: float) -> Any:
    """Let every measured work take ``seconds``."""

    def interleaved(works: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
        for work in works.values():
            work()
        return {name: [seconds] * rounds for name in works}

    return mock.patch.object(bandwidth, "in_turns", interleaved)


@ticks(2.0)
def test_host_rates_count_bytes_read_and_written() -> None:
    rates = bandwidth.host_rates(1, SMALL, 3)
    assert rates.threads == 1
    assert rates.parameters == (1 << 16) / 2
    assert (rates.copy, rates.add) == (8 * rates.parameters, 12 * rates.parameters)
    assert rates.adam == (24 + 2 * 4 + 2) * rates.parameters
    assert rates.adam_to_copy == 34 / 8


def test_each_thread_works_on_its_own_part() -> None:
    host = bandwidth.HostMemory(SMALL, 3, HostKernel(torch.bfloat16, torch.bfloat16, bandwidth.WINDOW_GRADIENTS))
    assert host.elements % 192 == 0
    assert 0 < host.elements * 22 <= SMALL
    for index in range(3):
        host.fill(index)
    assert all((tensor == 1).all() for tensor in (*host.state, *host.narrow))
    host.state[1].fill_(3.0)
    host.copy(1)
    third = host.elements // 3
    assert (host.state[2] == 3).nonzero().flatten().tolist() == list(range(third, 2 * third))
    host.add(0)
    assert (host.state[0] != 1).nonzero().flatten().tolist() == list(range(third))
    before = host.state[2].clone()
    for gradient in host.narrow[1:]:
        gradient.fill_(2.0)
    host.adam(2)
    assert torch.equal(before[: 2 * third], host.state[2][: 2 * third])
    assert not torch.equal(before, host.state[2])


def test_works_take_turns_and_warm_up_first() -> None:
    order: list[str] = []

    def work(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    seconds = bandwidth.in_turns({"a": work("a"), "b": work("b")}, 2)
    assert order == ["a", "b"] * 3
    assert seconds == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


@mock.patch.object(bandwidth, "_BUDGET_SECONDS", 0.0)
def test_long_measurements_end_after_one_round() -> None:
    assert bandwidth.in_turns({"a": lambda: 1.0}, 50) == {"a": [1.0]}


@ticks(0.5)
def test_memmove_stands_for_the_link_of_a_cpu() -> None:
    assert bandwidth.link_rates(CPU, 1 << 16, 1) == [bandwidth.LinkRates("memmove", 2 << 16, 2 << 16)]


@ticks(0.5)
def test_device_rate_counts_updated_elements() -> None:
    rate = bandwidth.device_rate(CPU, 1, slices=40, length=16)
    assert rate == bandwidth.DeviceRate(parameters=2 * 4 * 16, bytes=28 * 2 * 4 * 16)


@ticks(0.5)
@mock.patch.object(bandwidth, "_CPU_ELEMENTS", 1 << 10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resident_takes_half_of_the_free_memory(dtype: torch.dtype) -> None:
    assert bandwidth.resident_rate(CPU, dtype, 1 << 30) == bandwidth.DeviceRate(2 * 1024, 28 * 2 * 1024)
    assert bandwidth.resident_rate(CPU, dtype, 3200).parameters == 2 * 100


@mock.patch.multiple(bandwidth, _QUICK_BYTES=SMALL, _QUICK_LINK_BYTES=1 << 16)
def test_quick_rates_are_measured_once() -> None:
    bandwidth.rates.cache_clear()
    try:
        first = bandwidth.rates(CPU, (CORE,))
        assert all(0 < rate < math.inf for rate in (first.host, first.to_host, first.to_device))
        with calls_of(bandwidth.in_turns) as measured:
            assert bandwidth.rates(CPU, (CORE,)) is first
        assert measured == []
    finally:
        bandwidth.rates.cache_clear()


def test_sizes_follow_cache_and_memory(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "2048K", "266240K")):
        folder = tmp_path / f"cpu/cpu{CORE}/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert last_level_cache_bytes(tmp_path) == 260 << 20
    assert last_level_cache_bytes(tmp_path / "none") == 32 << 20
    with (
        mock.patch.object(bandwidth, "last_level_cache_bytes") as cache,
        mock.patch.object(bandwidth, "available_host_memory") as memory,
    ):
        cache.return_value, memory.return_value = 260 << 20, (1 << 40, "")
        assert bandwidth.default_bytes() == 2 << 30
        cache.return_value = 64 << 20
        assert bandwidth.default_bytes() * 8 // 22 >= 3 * (64 << 20)
        memory.return_value = (1 << 20, "")
        assert bandwidth.default_bytes() == bandwidth.default_link_bytes() == 1 << 18


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_measures_pinned_and_unpinned_memory() -> None:
    device = torch.device("cuda")
    found = bandwidth.link_rates(device, 1 << 24, 2)
    assert [rates.memory for rates in found] == ["pinned", "unpinned"]
    assert all(rates.to_host > 0 and rates.to_device > 0 for rates in found)
    assert bandwidth.device_rate(device, 2, slices=512, length=512).parameters > 0
    assert bandwidth.resident_rate(device, torch.bfloat16, 1 << 28).parameters > 0
    found_soon = bandwidth.rates(device, (CORE,))
    assert min(found_soon.host, found_soon.to_host, found_soon.to_device) > 0
