"""Updates of shards become visible where FSDP2 gathers weights, and to everything that reads or loads a state dict."""

from __future__ import annotations

import io
import re
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.nn import functional as F

from tests.ranks.models import ADAM, ALL_POLICIES, WINDOWED, batch, difference, optimizer_over, train, uneven
from tests.ranks.sharded import sharded, train_sharded, whole
from tests.ranks.test_sharded_references import CASES, Stack, blocks, trained
from tests.ranks.test_training import EXACT, assert_equal_ranks
from tests.support.calls import Call, at_calls
from tests.support.gated_jobs import UPDATES, gated
from tests.support.rank_processes import RankProcesses
from tests.support.training import IN_FLIGHT
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.weight_access import WeightAccess

pytestmark = pytest.mark.timeout(180)

EVERY_STEP = ALL_POLICIES["zenflow"]
"""The deferred slices are updated in each step."""
HELD = {"topk_ratio": 0.0, "update_interval": 1, "min_offload_size": 1, "device_share": 0.0}


def locals_of(model: nn.Module) -> list[Tensor]:
    """Copies of this rank's shards, as they are."""
    return [param.to_local().detach().clone() for param in model.parameters()]  # type: ignore[attr-defined]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def held_updates() -> Iterator[ThreadTicket]:
    """Let no host update begin before the ticket is set."""
    gate = ThreadTicket()
    with gated(lambda: gate, UPDATES):
        try:
            yield gate
        finally:
            gate.set()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank, 2)
    return F.cross_entropy(model(x), y)


def held(rank: int, overlap: bool) -> tuple[bool, str, bool]:
    """Whether ``step()`` returned while its update was held, and what reads find before and behind the next unshard."""
    model = sharded()
    matrices = [param for param in model.parameters() if param.dim() > 1 and len(param) > 1]
    options = {**HELD, "overlap_step": overlap}
    with tempfile.TemporaryDirectory() as folder:
        optimizer = optimizer_over(model, options, folder)
        loss_of(model, 0, rank).backward()
        before = [param.to_local().clone() for param in matrices]  # type: ignore[attr-defined]
        with held_updates() as gate:
            opener = threading.Timer(0.5, gate.set)
            opener.start()
            optimizer.step()
            returned = not gate.is_set
            try:
                old = same(before, [param.to_local() for param in matrices])  # type: ignore[attr-defined]
                found = "old weights" if old else "new weights"
            except RuntimeError as error:
                found = str(error)
            gate.set()
            opener.cancel()
        loss_of(model, 1, rank)
        seen = not any(
            torch.equal(a, b.to_local())  # type: ignore[attr-defined]
            for a, b in zip(before, matrices, strict=True)
        )
        optimizer.close()
    return returned, found, seen


@pytest.mark.parametrize("overlap", [True, False])
def test_step_waits_for_no_update_of_shards(two_ranks: RankProcesses, overlap: bool) -> None:
    for returned, found, seen in two_ranks.call(held, overlap):
        assert returned is overlap
        assert re.match(IN_FLIGHT if overlap else "new weights", found)
        assert seen


SHORT = ("nested", "tied", "unsharded early", "accumulating whole")


@pytest.mark.parametrize("windows", ["re-selecting", pytest.param("late", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in CASES]
)
def test_unshards_see_what_step_would_apply(two_ranks: RankProcesses, name: str, windows: str) -> None:
    results = two_ranks.call(trained, WINDOWED[windows], name, 9)
    assert_equal_ranks(results)
    assert same(results[0], two_ranks.call(trained, {**WINDOWED[windows], "overlap_step": False}, name, 9)[0])


def prepared(rank: int, overlap: bool, use: Callable[..., Any]) -> Any:
    """What ``use`` returns: it is called behind a step whose updates are on their way."""
    torch.manual_seed(0)
    model: Any = Stack()
    blocks(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, workers=1, **EVERY_STEP, overlap_step=overlap)
    for step in range(3):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = use(rank, model, optimizer)
    optimizer.close()
    return found


def state_of_model(rank: int, model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    return [value.full_tensor() for value in model.state_dict().values()]


def state_by_checkpoint(rank: int, model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    return [value.full_tensor() for value in get_model_state_dict(model).values()]  # type: ignore[union-attr]


def state_of_block(rank: int, model: Any, optimizer: ZenFlowAdamW) -> list[Tensor]:
    return [value.full_tensor() for value in model.blocks[1].up.state_dict().values()]


def evaluated(rank: int, model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    with torch.no_grad():
        return [loss_of(model, 7, 0)]


def inferred(rank: int, model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    with torch.inference_mode():
        loss = loss_of(model, 7, 0)
    loss_of(model, 8, rank).backward()
    optimizer.step()
    optimizer.flush()
    return [loss.clone(), *whole(model)]


def gathered_by_hand(rank: int, model: Any, optimizer: ZenFlowAdamW) -> list[Tensor]:
    model.blocks[1].unshard()
    weights = [param.detach().clone() for param in model.blocks[1].parameters()]
    model.blocks[1].reshard()
    return weights


def synchronized(rank: int, model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    optimizer.synchronize()
    return whole(model)


def loaded(rank: int, model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    """Loaded weights win over updates that are on their way, and training goes on from them."""
    halved = {name: value * 0.5 for name, value in model.state_dict().items()}
    loss_of(model, 3, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(halved)
    for step in range(4, 6):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    return whole(model)


def left_whole(rank: int, model: Any, optimizer: ZenFlowAdamW) -> list[Tensor]:
    """Weights that stay gathered over a step do not see it, as with AdamW."""
    model.set_reshard_after_backward(False)
    for step in range(3, 6):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.set_reshard_after_backward(True)
    loss_of(model, 6, rank).backward()
    optimizer.step()
    optimizer.flush()
    return whole(model)


USES = [
    state_of_model, state_by_checkpoint, state_of_block, evaluated, inferred, gathered_by_hand, synchronized, loaded,
    left_whole,
]  # fmt: skip


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
@pytest.mark.parametrize("use", USES)
def test_readers_of_shards_see_updates(request: pytest.FixtureRequest, use: Callable[..., Any], ranks: str) -> None:
    call = request.getfixturevalue(ranks).call
    late, at_once = (call(prepared, overlap, use)[0] for overlap in (True, False))
    assert same(late, at_once)


def streams_of_updates(rank: int, model: Any, optimizer: ZenFlowAdamW) -> set[bool]:
    """Whether updates are applied in the stream of the forward that gathers the weights."""
    forward, found = torch.cpu.current_stream(), set()

    def record(call: Call) -> None:
        found.add(torch.cpu.current_stream() is forward)

    with at_calls(record, WeightAccess.before_unshard):
        loss_of(model, 3, rank)
    return found


def test_updates_are_applied_where_shards_are_read(one_rank: RankProcesses, two_ranks: RankProcesses) -> None:
    """FSDP2 copies the shards of one rank in the forward's stream, and those of several in one that runs ahead."""
    assert one_rank.call(prepared, True, streams_of_updates) == [{True}]
    assert two_ranks.call(prepared, True, streams_of_updates) == [{False}, {False}]


ACCESSES: dict[str, Callable[[Any], Any]] = {
    "to_local": lambda param: param.to_local().clone(),
    "full_tensor": lambda param: param.full_tensor().clone(),
    "norm": lambda param: param.detach().norm().full_tensor(),
    "redistribute": lambda param: param.redistribute(placements=[Replicate()]).to_local().clone(),
    "foreach": lambda param: torch._foreach_norm([param.to_local()]),
    "save": lambda param: torch.save(param, io.BytesIO()),
    "write": lambda param: param.detach().mul_(2),
    "write to the shard": lambda param: param.to_local().detach().zero_(),
}


def accessed(rank: int, model: Any, optimizer: ZenFlowAdamW) -> tuple[dict[str, str], list[Tensor]]:
    """What accesses to the shards of a block raise, and the weights of all after that."""
    found = {}
    matrices = {name: param for name, param in model.blocks[1].named_parameters() if param.dim() > 1}
    for (of, param), (how, access) in product(matrices.items(), ACCESSES.items()):
        try:
            access(param)
            found[f"{how} of {of}"] = "nothing"
        except RuntimeError as error:
            found[f"{how} of {of}"] = str(error)
    optimizer.synchronize()
    return found, [param.full_tensor().detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_direct_accesses_to_shards_raise(ranks: str, request: pytest.FixtureRequest) -> None:
    processes: RankProcesses = request.getfixturevalue(ranks)
    for found, weights in processes.call(prepared, True, accessed):
        assert {name: text for name, text in found.items() if not re.match(IN_FLIGHT, text)} == {}
        assert same(weights, processes.call(prepared, False, synchronized)[0])


def on_their_way(rank: int, model: Any, optimizer: ZenFlowAdamW) -> tuple[int, list[int]]:
    """How many parameters have an update on its way behind a step, and their order."""
    runtime: Engine = optimizer.engine
    return sum(bool(each.host.flushed) for each in runtime.offloaded.values()), [
        each.plan.index for each in runtime.uploads.by_deadline()
    ]


def test_uploads_follow_the_order_of_unshards(two_ranks: RankProcesses) -> None:
    """The root has the embedding and the head, and gathers them first."""
    flushed, order = two_ranks.call(prepared, True, on_their_way)[0]
    assert flushed == len(order) > 4
    of_root = (0, max(order))
    assert order == [*of_root, *sorted(p for p in order if p not in of_root)]
    assert two_ranks.call(prepared, False, on_their_way)[0][0] == 0


def two_optimizers(rank: int) -> tuple[list[Tensor], int, int]:
    """The weights that two optimizers over one group of weights train, and the groups that call listeners."""
    model = uneven()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert isinstance(model, FSDPModule)
    params = list(model.parameters())
    optimizers = [ZenFlowAdamW(each, **ADAM, **EVERY_STEP) for each in (params[:5], params[5:])]
    for step in range(4):
        loss_of(model, step, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    listened = listened_groups(model)
    optimizers[0].close()
    assert listened_groups(model) == listened
    loss_of(model, 4, rank).backward()
    optimizers[1].step()
    optimizers[1].close()
    return whole(model), listened, listened_groups(model)


def listened_groups(model: Any) -> int:
    groups = model._get_fsdp_state()._fsdp_param_groups
    return sum("unshard" in vars(group) for group in groups)


def test_two_optimizers_share_a_group_of_shards(two_ranks: RankProcesses) -> None:
    results = two_ranks.call(two_optimizers)
    assert_equal_ranks([weights for weights, _, _ in results])
    assert [(listened, left) for _, listened, left in results] == [(1, 0), (1, 0)]


def beside_other_models(rank: int) -> list[Tensor]:
    """The weights of a sharded model beside one whose process group was destroyed, and one that FSDP2 replicates."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    gone = dist.new_group()
    others = [uneven(), uneven()]
    fully_shard(others[0], mesh=DeviceMesh.from_group(gone, "cpu"))
    replicate(others[1], mesh=init_device_mesh("cpu", (2,)))
    dist.destroy_process_group(gone)
    weights = train_sharded(rank, 2, EVERY_STEP)
    assert len(others) == 2  # they live until here
    return weights


def test_other_models_are_left_alone(two_ranks: RankProcesses) -> None:
    weights, _ = two_ranks.call(beside_other_models)
    assert difference(weights, train(None)) < EXACT


def with_broken_host(rank: int) -> None:
    """The host updates of rank 1 fail in the second step, and the loop goes on."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    model = uneven()
    for child in (*model.children(), model):
        fully_shard(child, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, workers=1, **EVERY_STEP)
    broken = False

    def gate() -> None:
        if broken:
            raise OSError("the memory of the host is broken")

    with gated(gate, UPDATES):
        for step in range(3):
            broken = rank == 1 and step >= 1
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_failed_update_of_shards_raises_on_all(two_ranks: RankProcesses) -> None:
    other, own = two_ranks.outcomes(with_broken_host, timeout=60)
    assert isinstance(own, RuntimeError)
    assert "the memory of the host is broken" in "".join(traceback.format_exception(own))
    assert isinstance(other, RuntimeError)  # no TimeoutError of the call


def test_sharded_runs_are_as_exact_as_before(two_ranks: RankProcesses) -> None:
    """Applied late, updates of every step leave AdamW's weights."""
    results = two_ranks.call(trained, EVERY_STEP, "nested", 6)
    assert difference(results[0], two_ranks.call(trained, None, "nested", 6)[0]) < 1e-6
