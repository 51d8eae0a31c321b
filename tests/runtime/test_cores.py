"""Tests which physical cores are found, which run workers, and that threads stay on them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.calls import Call, at_calls
from zenflow_compile.options.options import Options
from zenflow_compile.runtime.device.devices import CpuDevice
from zenflow_compile.runtime.host.cores import (
    Core,
    LocalRanks,
    choose_cores,
    nodes_of,
    physical_cores,
    run_pinned,
    worker_count,
)
from zenflow_compile.runtime.parameters.capacity import nodes_of_ranks


class PluggedIn(CpuDevice):
    """The first of four devices; the last two are near node 0."""

    def __init__(self, index: int) -> None:
        super().__init__(torch.device("cuda", index))

    @classmethod
    def pci_addresses(cls) -> list[str]:
        return ["0000:C1:00.0", "0000:e2:00.0", "0000:01:00.0", "0000:21:00.0"]


affinity = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin threads")


def machine(folder: Path, *, cores: int, threads: int, nodes: int = 1, name: str = "core_cpus_list") -> Path:
    """Write the files of a machine that numbers the second threads of its cores after all first ones."""
    for logical in range(cores * threads):
        cpu = folder / f"cpu/cpu{logical}"
        (cpu / "topology").mkdir(parents=True)
        siblings = range(logical % cores, cores * threads, cores)
        (cpu / "topology" / name).write_text(",".join(map(str, siblings)) + "\n")
        (cpu / f"node{(logical % cores) * nodes // cores}").mkdir()
    return folder


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_one_logical_core_per_physical_one(tmp_path: Path, name: str) -> None:
    system = machine(tmp_path, cores=4, threads=2, nodes=2, name=name)
    assert physical_cores(system, range(8)) == (Core(0, 0), Core(1, 0), Core(2, 1), Core(3, 1))
    # 5 is 1's other thread; of 2 only its second one may be used.
    assert physical_cores(system, [1, 3, 5, 6]) == (Core(1, 0), Core(3, 1), Core(6, 1))
    assert nodes_of([0, 1], system) == {0}
    assert nodes_of([0, 7], system) == {0, 1}


def test_without_topology_the_first_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    assert physical_cores(tmp_path, range(8)) == tuple(Core(logical) for logical in range(4))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert len(physical_cores(tmp_path, range(8))) == 8


@affinity
def test_cores_of_this_machine_are_in_its_mask() -> None:
    found = physical_cores()
    assert found
    assert {core.logical for core in found} <= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("cores", "reserved", "workers"),
    [(8, 0.0, 8), (8, 0.5, 4), (8, 0.9, 1), (8, 1.0, 1), (8, 0.3, 5), (2, 0.5, 1), (10, 0.9, 1), (20, 0.9, 2)],
)
def test_reserved_share_is_left_free(cores: int, reserved: float, workers: int) -> None:
    assert Options(workers=1.0 - reserved).threads(cores) == workers


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 14)])
def test_unset_leaves_two_cores(cores: int, workers: int) -> None:
    assert worker_count(cores, None) == workers


@pytest.mark.parametrize(("quota", "workers"), [(None, 14), (64.0, 14), (8.0, 6), (3.9, 1), (0.5, 1)])
def test_unset_workers_follow_the_container_quota(quota: float | None, workers: int) -> None:
    assert worker_count(16, quota) == workers
    assert worker_count(16, quota, 12) == 12


def test_unset_workers_leave_cores_to_data_loaders() -> None:
    context = multiprocessing.get_context("fork")
    end = context.Event()
    children = [context.Process(target=end.wait, args=(60,), daemon=daemon) for daemon in (True, True, False)]
    try:
        for child in children:
            child.start()
        assert worker_count(16, None) == 12
        assert worker_count(3, None) == 1
    finally:
        end.set()
        for child in children:
            child.join()
    assert worker_count(16, None) == 14


def test_more_workers_than_cores_are_refused() -> None:
    assert worker_count(4, None, 4) == 4
    with pytest.raises(ValueError, match=r"workers=5 must be in \[1, 4\]: .* 4 physical cores.*lower it"):
        worker_count(4, None, 5)


def test_last_cores_first_and_even_over_nodes() -> None:
    one_node = [Core(logical) for logical in range(4)]
    assert choose_cores(one_node, 3, {}) == (3, 2, 1)
    two_nodes = [Core(logical, logical // 4) for logical in range(8)]
    assert choose_cores(two_nodes, 4, {}) == (3, 7, 2, 6)
    assert sorted(choose_cores(two_nodes, 8, {})) == list(range(8))


def test_cores_that_have_workers_come_last() -> None:
    cores = [Core(logical) for logical in range(4)]
    assert choose_cores(cores, 2, {3: 1}) == (2, 1)
    assert choose_cores(cores, 4, {3: 1, 2: 2, 1: 1}) == (0, 3, 1, 2)
    assert choose_cores(cores, 2, {3: 1, 2: 1, 1: 1, 0: 1}) == (3, 2)


@affinity
def test_pinned_threads_run_in_parallel_on_their_cores() -> None:
    mine = os.sched_getaffinity(0)
    meeting = threading.Barrier(3, timeout=20)
    seen: dict[int, set[int]] = {}

    def work(index: int) -> None:
        meeting.wait()
        seen[index] = os.sched_getaffinity(0)

    cores = [max(mine), min(mine), max(mine)]
    run_pinned(cores, work)
    assert seen == {index: {core} for index, core in enumerate(cores)}
    assert os.sched_getaffinity(0) == mine


def test_error_is_raised_after_all_pinned_threads() -> None:
    ended = threading.Event()

    def work(index: int) -> None:
        if index == 0:
            raise ZeroDivisionError("on purpose")
        ended.set()

    with pytest.raises(ZeroDivisionError):
        run_pinned([0, 0], work)
    assert ended.is_set()


def test_work_runs_where_pinning_is_forbidden() -> None:
    asked: list[Call] = []

    def forbidden(call: Call) -> None:
        asked.append(call)
        raise PermissionError

    ran: list[int] = []
    with at_calls(forbidden, os.sched_setaffinity, new_threads=True):
        run_pinned([0, 0], ran.append)
    assert sorted(ran) == [0, 1]
    assert len(asked) == 2


def test_ranks_are_near_their_devices(tmp_path: Path) -> None:
    def ranks_nodes(rank: int, size: int = 4) -> list[int] | None:
        return nodes_of_ranks(LocalRanks(rank, size), PluggedIn(rank), tmp_path)

    for address, node in {"0000:c1:00.0": 1, "0000:e2:00.0": 1, "0000:01:00.0": 0}.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
    assert ranks_nodes(3) is None, "one is not known"
    (tmp_path / "0000:21:00.0").mkdir()
    (tmp_path / "0000:21:00.0/numa_node").write_text("-1\n")
    assert ranks_nodes(3) is None, "the firmware does not say"
    (tmp_path / "0000:21:00.0/numa_node").write_text("0\n")
    assert [ranks_nodes(rank) for rank in range(4)] == [[1, 1, 0, 0]] * 4
    assert ranks_nodes(0, 1) is None, "alone, a process uses all nodes"
    assert nodes_of_ranks(LocalRanks(2, 4), PluggedIn(0), tmp_path) is None, "devices are not numbered as ranks are"
    assert nodes_of_ranks(LocalRanks(0, 8), PluggedIn(0), tmp_path) is None, "ranks share devices"
    assert nodes_of_ranks(LocalRanks(1, 2), PluggedIn(1), tmp_path) is None, "the other rank may have another device"

    cores = [Core(logical, node=logical % 2) for logical in range(8)]
    parts = [LocalRanks(rank, 4).cores(cores, ranks_nodes(rank)) for rank in range(4)]
    assert [{core.node for core in part} for part in parts] == [{1}, {1}, {0}, {0}]
    assert sorted(core.logical for part in parts for core in part) == list(range(8))
    # Two of three devices are near node 0, and still each rank has a third of the cores.
    assert [[core.logical for core in LocalRanks(rank, 3).cores(cores[:6], [0, 1, 0])] for rank in range(3)] == [
        [0, 2], [3, 5], [4, 1]
    ]  # fmt: skip
