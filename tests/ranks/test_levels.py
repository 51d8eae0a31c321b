"""Ranks of a machine divide a model, and machines have copies of it: which ranks, what they send, and exactness."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.ranks.models import ALL_POLICIES, BATCH, OFFLOAD, WINDOWED, difference, train, uneven
from tests.support.rank_processes import RankProcesses, messages
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.options.options import Options
from zenflow_compile.performance.traffic import Sharing, rank_traffic
from zenflow_compile.planning.plan import GROUPS, dividing_ranks
from zenflow_compile.planning.planners import ParamSpec, make_plan
from zenflow_compile.runtime.ranks import agreement
from zenflow_compile.runtime.ranks.agreement import levels_of_hosts, levels_of_mesh
from zenflow_compile.runtime.ranks.attendance import Member, meet
from zenflow_compile.runtime.ranks.rank_group import Levels

pytestmark = pytest.mark.timeout(180)
EXACT = 1e-6


@pytest.mark.parametrize(
    ("ranks", "dividing"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 6), (8, 8), (10, 2), (12, 12), (16, 16), (64, 16)],
)
def test_most_ranks_that_groups_allow_divide(ranks: int, dividing: int) -> None:
    assert dividing_ranks(ranks) == dividing
    assert GROUPS[0] % dividing == 0


@pytest.mark.parametrize(
    ("hosts", "copies"),
    [
        ("aaaa", [[0, 1, 2, 3]]),
        ("aabb", [[0, 1], [2, 3]]),
        ("abab", [[0, 2], [1, 3]]),
        ("aaabbb", [[0, 1, 2], [3, 4, 5]]),
        ("aaaabb", [[0, 1], [2, 3], [4, 5]]),  # machines with other numbers of ranks have copies of one size
        ("aaaaa", [[0], [1], [2], [3], [4]]),
    ],
)
def test_machines_have_copies(hosts: str, copies: list[list[int]]) -> None:
    assert levels_of_hosts(range(len(hosts)), list(hosts)) == Levels(copies, list(range(len(hosts))))


def trained(
    rank: int, options: dict[str, Any], hosts: str, *, mesh: bool, compiled: bool, rows: int = BATCH
) -> list[torch.Tensor]:
    """Weights after some steps of a rank whose machine is ``hosts[rank]``, or whose mesh has as many rows."""
    ranks = len(hosts)
    group: Any = dist.group.WORLD
    if mesh:
        group = init_device_mesh("cpu", (len(set(hosts)), ranks // len(set(hosts))), mesh_dim_names=("copies", "parts"))
    with mock.patch.object(Member, "own", return_value=Member(hosts[rank])):
        return train(options, rank, ranks, steps=12, clip=0.1, compiled=compiled, group=group, rows=rows)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graph"])
@pytest.mark.parametrize("mesh", [False, True], ids=["machines", "mesh"])
@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abcd"])
@pytest.mark.parametrize("name", ["exact", "re-selecting", "adaptive", "summed", "streamed", "zero_offload"])
def test_four_ranks_equal_one(four_ranks: RankProcesses, name: str, hosts: str, mesh: bool, compiled: bool) -> None:
    options = {
        **WINDOWED,
        "exact": ALL_POLICIES["zenflow"],
        "streamed": ALL_POLICIES["deep_optimizer_states"],
        "zero_offload": ALL_POLICIES["zero_offload"],
    }[name]
    results = four_ranks.call(trained, options, hosts, mesh=mesh, compiled=compiled)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
    assert difference(results[0], train(options, steps=12, clip=0.1)) < EXACT


@pytest.mark.parametrize("hosts", ["aaaaaa", "aaabbb", "ababab"])
def test_six_ranks_equal_one(six_ranks: RankProcesses, hosts: str) -> None:
    options = WINDOWED["re-selecting"]
    results = six_ranks.call(trained, options, hosts, mesh=False, compiled=False)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
    assert difference(results[0], train(options, steps=12, clip=0.1)) < EXACT


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["aaaaaaaa", "aaaabbbb", "aabbccdd"])
@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graph"])
def test_eight_ranks_equal_one(eight_ranks: RankProcesses, hosts: str, compiled: bool) -> None:
    options = WINDOWED["re-selecting"]
    results = eight_ranks.call(trained, options, hosts, mesh=False, compiled=compiled, rows=24)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
    assert difference(results[0], train(options, steps=12, clip=0.1, rows=24)) < EXACT


def with_other_groups(rank: int, others: list[int]) -> None:
    dist.new_group(others)  # as trainers make one of the first rank of each machine
    trained(rank, ALL_POLICIES["zero_offload"], "aabb", mesh=False, compiled=False)


@pytest.mark.parametrize("others", [[0], [0, 2], [0, 2, 3]], ids=str)
def test_groups_of_the_users_change_nothing(four_ranks: RankProcesses, others: list[int]) -> None:
    four_ranks.call(with_other_groups, others, timeout=60)


WIDE = 768
"""Slices of a matrix that three ranks divide: 16 groups of 25% would not, 48 do."""


def sent(rank: int, hosts: str) -> tuple[dict[str, int], int]:
    """Bytes of each collective of the step in which a rank sends least, which flushes nothing, and of host memory."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, WIDE, bias=False)
    with mock.patch.object(Member, "own", return_value=Member(hosts[rank])):
        optimizer = ZenFlowAdamW(
            net.named_parameters(), **OFFLOAD, topk_ratio=0.25, update_interval=4, process_group=dist.group.WORLD
        )
        assert optimizer.engine.plan.params[0].share is not None
    steps: list[Counter[str]] = []
    optimizer.engine.recorder.sent = lambda name, count: steps[-1].update({name: count})
    for _ in range(4):
        steps.append(Counter())
        net(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stored = optimizer.host_bytes
    optimizer.close()
    return dict(min(steps, key=Counter.total)), stored


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_three_ranks_send_what_arithmetic_says(three_ranks: RankProcesses, hosts: str) -> None:
    weight = WIDE * 8 * 4
    dividing = 3 // len(set(hosts))
    for counts, _ in three_ranks.call(sent, hosts):
        assert counts["reduce_scatter"] == weight
        norms = 4
        assert counts["all_reduce"] >= norms
        across = counts["all_reduce"] >= weight // dividing
        assert across == (len(set(hosts)) > 1)
        assert counts["all_gather"] == weight // dividing // 4


def test_copies_multiply_host_memory(three_ranks: RankProcesses) -> None:
    divided, copied = (sum(stored for _, stored in three_ranks.call(sent, hosts)) for hosts in ("aaa", "abc"))
    assert 2.7 * divided < copied < 3.3 * divided


def test_predicted_bytes_of_three_and_five() -> None:
    plan = make_plan(
        [ParamSpec("w", (8, WIDE), torch.float32)], Options(topk_ratio=0.25, device_share=0.0, min_offload_size=1)
    )
    three, five, one = (rank_traffic(plan, ranks, Sharing.CHANGED_SLICES) for ranks in (3, 5, 1))
    assert three.dividing == 3
    assert three.host_bytes == pytest.approx(one.host_bytes, rel=0.05)
    assert five.dividing == 1
    assert five.host_bytes == 5 * one.host_bytes
    assert five.sent == pytest.approx(2 * plan.model_bytes * 4 / 5), "an all-reduce"


def warned(rank: int) -> list[str]:
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(agreement, "dividing_ranks", return_value=1),
    ):
        warnings.simplefilter("always")
        ZenFlowAdamW(uneven().named_parameters(), **OFFLOAD, process_group=dist.group.WORLD).close()
    return [str(each.message) for each in caught if "copies" in str(each.message)]


def test_numbers_that_do_not_divide_warn_once(two_ranks: RankProcesses) -> None:
    first, second = two_ranks.call(warned)
    assert len(first) == 1
    assert "2 copies of the optimizer's state, each divided by 1" in first[0]
    assert "2 does not divide the 48 groups" in first[0]
    assert second == []


def lonely(rank: int) -> None:
    if rank == 0:
        meet([0, 1], Member.own(), timedelta(seconds=1))
    raise RuntimeError("rank 1 has not created an optimizer within 1 s")


def test_rank_that_does_not_come_is_named(two_ranks: RankProcesses) -> None:
    for text in messages(two_ranks.outcomes(lonely)):
        assert re.search(r"rank 1 has not created an optimizer within 1 s", text)


@pytest.mark.parametrize(
    ("rows", "copies"),
    [
        ([[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        ([[1, 0], [3, 2]], [[0, 1], [2, 3]]),  # as the ranks of process groups are ordered
        ([[0, 2], [3, 1]], [[0, 2], [1, 3]]),
    ],
)
def test_rows_of_a_mesh_divide(rows: list[list[int]], copies: list[list[int]]) -> None:
    assert levels_of_mesh(rows) == Levels(copies, [0, 1, 2, 3])


def test_bad_meshes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a mesh of 1 times 5 ranks, .* must have a size among 1, 2, 3, 4, 6, 8, 12"):
        levels_of_mesh([[0, 1, 2, 3, 4]])


def outside(rank: int) -> None:
    mesh = DeviceMesh("cpu", [[0, 1]])
    model = uneven()
    if rank < 2:
        ZenFlowAdamW(model.named_parameters(), process_group=mesh).close()
        return
    with pytest.raises(ValueError, match=r"does not hold this rank \(2\)"):
        ZenFlowAdamW(model.named_parameters(), process_group=mesh)


def test_rank_outside_of_a_mesh_is_refused(three_ranks: RankProcesses) -> None:
    three_ranks.call(outside)
