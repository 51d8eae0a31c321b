"""What ranks send in each step, counted, and what each of them stores."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.ranks.models import OFFLOAD, as_rank
from tests.ranks.sharded import sharded
from tests.support.host import four_cores, launched_with, srun, torchrun
from tests.support.rank_processes import RankProcesses
from zenflow_compile import ZenFlow, ZenFlowAdamW
from zenflow_compile.options.options import Options
from zenflow_compile.performance.traffic import Sharing, rank_traffic
from zenflow_compile.planning.planners import ParamSpec, make_plan
from zenflow_compile.rules import AdamW, Muon, muon_groups
from zenflow_compile.runtime.host import cores
from zenflow_compile.runtime.host.cores import Core, LocalRanks, local_ranks
from zenflow_compile.runtime.parameters.capacity import worker_cores

pytestmark = pytest.mark.timeout(120)
ROWS, COLUMNS = 128, 32
"""Two matrices of so much: 25% selected, in 4 groups of rows."""
FP32 = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.ReLU(), nn.Linear(ROWS, COLUMNS))


def counted(rank: int, options: dict[str, Any], steps: int) -> tuple[list[dict[str, int]], int, int, tuple[int, ...]]:
    """Bytes that a rank sends in each step, by collective; bytes that it stores, and its workers' cores."""
    net = model()
    rule = options.get("rule", AdamW())
    groups = muon_groups(net, rule) if rule.of_matrix else net.named_parameters()
    others = {name: value for name, value in options.items() if name != "rule"}
    optimizer = ZenFlow(groups, AdamW(), **OFFLOAD, **others, process_group=dist.group.WORLD)
    sent: Counter[str] = Counter()
    optimizer.engine.recorder.sent = lambda name, count: sent.update({name: count})
    found = []
    for step in range(steps):
        sent.clear()
        generator = torch.Generator().manual_seed(10 * step + rank)
        F.mse_loss(net(torch.randn(4, COLUMNS, generator=generator)), torch.zeros(4, COLUMNS)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(dict(sent))
    stored = optimizer.host_bytes, optimizer.device_bytes
    cores = optimizer.engine.worker_cores
    optimizer.close()
    return found, *stored, cores


def test_only_changed_slices_are_gathered(two_ranks: RankProcesses) -> None:
    options = {"topk_ratio": 0.25, "update_interval": 4}
    matrix, biases = ROWS * COLUMNS * FP32, (ROWS + COLUMNS) * FP32
    for steps, *_ in two_ranks.call(counted, options, 9):
        selections = 0
        for sent in steps:
            assert sent["reduce_scatter"] == 2 * matrix
            # Selected slices of both matrices; of one that was flushed all slices of the share.
            selected, share = matrix // 2 // 4, matrix // 2
            flushed, ids = divmod(sent["all_gather"] - 2 * selected, share - selected)
            assert flushed in (0, 1, 2)
            assert ids in (0, 64, 128)
            selections += ids // 64
            norms = 2 * FP32
            assert sent["all_reduce"] >= biases + norms
            assert sent["message"] <= 2 * 2048
        assert selections == 3, "one at first, and one per matrix when its first window was flushed"
    assert sum(sent["all_gather"] > matrix // 2 for sent in steps) >= 4


WAYS: dict[str, dict[str, Any]] = {
    "zenflow": {"topk_ratio": 0.25, "update_interval": 4},
    "all selected": {"topk_ratio": 1.0, "update_interval": 4},
    "zero_offload": {"policy": "zero_offload"},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 1},
    "matrices": {"policy": "zero_offload", "rule": Muon()},
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_counted_bytes_are_those_of_the_model(
    two_ranks: RankProcesses, three_ranks: RankProcesses, ranks: int, way: str
) -> None:
    """Of the last four steps, which are as long as an update window, and in which no selection changes.

    Three ranks divide no groups of slices: each of them has all that one device would have.
    """
    options, rule = dict(WAYS[way]), WAYS[way].get("rule", AdamW())
    specs = [
        ParamSpec(name, tuple(param.shape), param.dtype, rule=rule if param.dim() == 2 else AdamW())
        for name, param in model().named_parameters()
    ]
    found = {2: two_ranks, 3: three_ranks}[ranks].call(counted, options, 9)
    options.pop("rule", None)
    expected = rank_traffic(make_plan(specs, Options(**options, **OFFLOAD)), ranks, Sharing.CHANGED_SLICES)
    assert sum(host for _, host, _, _ in found) == pytest.approx(expected.host_bytes, rel=0.02)
    for steps, *_ in found:
        last = [Counter(sent) for sent in steps[-4:]]
        assert sum(sent["reduce_scatter"] for sent in last) == 4 * expected.reduced
        assert ranks * sum(sent["all_gather"] for sent in last) == 4 * expected.gathered, "a rank puts in its part"
        norms = 0 if way in ("streamed", "matrices") else 2 * FP32  # of the parameters that are divided by slices
        assert all(sent["all_reduce"] == expected.all_reduced + norms for sent in last)


def test_ranks_divide_state_and_cores(two_ranks: RankProcesses) -> None:
    options = {"topk_ratio": 0.25, "update_interval": 4}
    (_, host, device, cores), (_, other_host, other_device, other_cores) = two_ranks.call(counted, options, 1)
    alone = ZenFlowAdamW(model().named_parameters(), **OFFLOAD, **options)
    assert host == other_host
    assert host == pytest.approx(alone.host_bytes / 2, rel=0.02)
    assert device == other_device
    assert device < 0.75 * alone.device_bytes  # biases are on each rank
    alone.close()
    if len(os.sched_getaffinity(0)) > 1:
        assert set(cores).isdisjoint(other_cores)


def test_ranks_divide_streamed_state(two_ranks: RankProcesses) -> None:
    options = {"policy": "deep_optimizer_states", "update_stride": 1}
    (steps, host, device, _), (_, other_host, other_device, _) = two_ranks.call(counted, options, 2)
    alone = ZenFlowAdamW(model().named_parameters(), **OFFLOAD, **options)
    assert [param.streamed for param in alone.engine.plan.params] == [True, False, True, False]
    assert host == other_host == pytest.approx(alone.host_bytes / 2, rel=0.02)
    assert device == other_device < 0.6 * alone.device_bytes
    alone.close()
    assert [sent["all_gather"] for sent in steps] == [ROWS * COLUMNS * FP32] * 2, "half of both matrices"


def test_files_of_ranks_have_their_own_directory(two_ranks: RankProcesses, tmp_path: Path) -> None:
    options = {"policy": "zero_infinity", "nvme_path": "", **OFFLOAD}
    two_ranks.call(as_rank, 2, options, steps=2, folder=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_local_ranks_divide_what_a_machine_has(count: int, size: int) -> None:
    parts = [LocalRanks(rank, size).part(range(count)) for rank in range(size)]
    assert all(parts)
    if count >= size:
        assert [each for part in parts for each in part] == list(range(count))


def test_ranks_next_to_each_other_share_a_numa_node() -> None:
    every = [Core(logical, node=logical % 2) for logical in range(8)]  # as some machines number them
    parts = [LocalRanks(rank, 4).cores(every) for rank in range(4)]
    assert [{core.node for core in part} for part in parts] == [{0}, {0}, {1}, {1}]
    assert sorted(core.logical for part in parts for core in part) == list(range(8))


@pytest.mark.parametrize(("rank", "size"), [("0", "0"), ("2", "2"), ("-1", "2"), ("x", "2"), ("0", None)])
def test_wrong_environment_is_one_process(rank: str, size: str | None) -> None:
    with launched_with(torchrun(rank, size)):
        assert local_ranks() == (0, 1)


@pytest.mark.parametrize(
    ("tasks", "node", "local", "found"),
    [
        ("4", "0", "3", (3, 4)),
        ("4(x2)", "1", "0", (0, 4)),
        ("4(x2),3", "2", "2", (2, 3)),
        ("4(x2),3", "3", "2", (0, 1)),
        ("4", "0", "4", (0, 1)),
        ("", "0", "0", (0, 1)),
    ],
)
def test_ranks_of_srun(tasks: str, node: str, local: str, found: tuple[int, int]) -> None:
    told = srun(tasks, node, local)
    with launched_with(told):
        assert local_ranks() == found
    with launched_with(told | torchrun("1", "2")):
        assert local_ranks() == (1, 2), "torchrun, which srun starts, knows better"


def without_a_launcher(rank: int, kind: str) -> list[Any]:
    """What a rank has of its machine, as processes do that ``multiprocessing`` starts; before, and after they met."""
    with launched_with({}), mock.patch.object(cores, "_met", []):
        found: list[Any] = [tuple(local_ranks())]
        if kind == "sharded":
            net = sharded()  # which FSDP2 does not keep
            optimizer = ZenFlowAdamW(net.named_parameters(), **OFFLOAD)
        else:
            optimizer = ZenFlowAdamW(model().named_parameters(), **OFFLOAD, process_group=dist.group.WORLD)
        with four_cores():
            found += [tuple(local_ranks()), worker_cores(Options())]
        optimizer.close()
    return found


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_ranks_divide_a_machine_without_a_launcher(two_ranks: RankProcesses, kind: str) -> None:
    first, second = two_ranks.call(without_a_launcher, kind)
    assert [first[0], second[0]] == [(0, 1)] * 2
    assert [first[1], second[1]] == [(0, 2), (1, 2)]
    assert first[2]
    assert second[2]
    assert not set(first[2]) & set(second[2])


def test_bound_processes_use_all_their_cores() -> None:
    """``srun`` and ``mpirun`` have divided them. torchrun has not, whatever a container leaves."""
    told = srun("2", "0", "1")
    with launched_with(told), four_cores():
        assert set(worker_cores(Options(workers=2))) == {2, 3}, "the second half of the machine"
        with pytest.raises(ValueError, match="workers=3"):
            worker_cores(Options(workers=3))
    with launched_with(told), four_cores(usable=[2, 3]):
        assert len(worker_cores(Options(workers=4))) == 4, "all that it was given"
    with launched_with(told | torchrun("1", "2")), four_cores(usable=[2, 3]):
        assert set(worker_cores(Options(workers=2))) == {2, 3}
