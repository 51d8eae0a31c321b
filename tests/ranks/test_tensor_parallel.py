"""FSDP2 beside tensor and expert parallelism, which divide parameters before it: trains as AdamW, and resumes."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from tests.ranks.models import ADAM, ALL_POLICIES, BATCH, WINDOWED, difference, optimizer_over
from tests.ranks.sharded import whole
from tests.ranks.test_training import EXACT, assert_equal_ranks
from tests.support.rank_processes import RankProcesses, messages

pytestmark = pytest.mark.timeout(180)


class Mlp(nn.Module):
    """A norm that tensor parallelism leaves alone, and two layers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, hidden)
        self.down = nn.Linear(hidden, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def mlps(layers: str) -> Any:
    """The same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(Mlp(68), Mlp(67 if layers == "uneven" else 66))


BOTH: dict[str, ParallelStyle] = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
PLANS: dict[str, dict[str, ParallelStyle]] = {
    "both": BOTH,
    "uneven": BOTH,
    "rows": {"down": RowwiseParallel(input_layouts=Replicate())},
}
"""Layers that are parallel. "uneven": with pieces of 34 and 33 features; "rows": the second one's input is divided."""


def parallel(shape: tuple[int, ...], layers: str = "both") -> nn.Module:
    """The model on a mesh of so many ranks in each dimension; the first of three has replicas. That of norms has no
    dimension of tensor parallelism."""
    model = mlps(layers)
    names = ("replicas", "data", "tensor")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model:
        parallelize_module(block, mesh["tensor"], PLANS[layers])
        fully_shard(block, mesh=mesh[names[:-1]])
    sharded: nn.Module = fully_shard(model, mesh=mesh[names[:-1]])
    return sharded


def backward(model: nn.Module, step: int, rank: int = 0, ranks: int = 1) -> None:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, 32, generator=generator)[:, BATCH * rank // ranks : BATCH * (rank + 1) // ranks]
    F.mse_loss(model(x), y).backward()


def trained(
    rank: int,
    shape: tuple[int, ...],
    layers: str,
    options: dict[str, Any],
    steps: int,
    resumes: str = "",
) -> list[Tensor]:
    """The whole weights. Ranks that differ by their place in the last dimension of the mesh have the same batch.

    Args:
        resumes: in the middle a new model goes on with the state, "in memory" or from a folder.
    """
    model = parallel(shape, layers)
    tensor, ranks = shape[-1], torch.distributed.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        optimizer = optimizer_over(model, options, folder)
        for step in range(steps):
            if resumes and step == steps // 2:
                weights, state = get_state_dict(model, optimizer)
                if resumes != "in memory":
                    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=resumes)
                before, model = optimizer, parallel(shape, layers)
                optimizer = optimizer_over(model, options, folder)
                if resumes != "in memory":
                    weights, state = get_state_dict(model, optimizer)
                    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=resumes)
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
                before.close()  # changes the weights that were saved
            backward(model, step, rank // tensor, ranks // tensor)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        found = whole(model)
        optimizer.close()
    return found


def of_adamw(layers: str, steps: int, clip: float | None = None) -> list[Tensor]:
    """The weights of one process on the joint batch."""
    model = mlps(layers)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(steps):
        backward(model, step)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def processes(request: pytest.FixtureRequest, ranks: int) -> RankProcesses:
    found: RankProcesses = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    return found


@pytest.mark.matrix(12)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(
    ("shape", "layers"),
    [((1, 2), "both"), ((2, 2), "uneven"), ((2, 2), "rows"), ((2, 1, 2), "both")],
)
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_pieces_equal_adamw(
    request: pytest.FixtureRequest, policy: str, shape: tuple[int, ...], layers: str, clip: float | None
) -> None:
    options = ALL_POLICIES[policy] | {"max_grad_norm": clip}
    results = processes(request, torch.Size(shape).numel()).call(trained, shape, layers, options, 6)
    assert_equal_ranks(results)
    assert difference(results[0], of_adamw(layers, 6, clip)) < EXACT


@pytest.mark.matrix(12)
@pytest.mark.parametrize(
    ("shape", "layers"), [((2, 1), "both"), ((2, 2), "uneven"), ((2, 2), "both"), ((2, 2), "rows")]
)
@pytest.mark.parametrize(
    ("name", "resumes"),
    [
        ("re-selecting", "in memory"),
        ("late", "from a folder"),
        ("adaptive", "from a folder"),
        ("int8", "from a folder"),
    ],
)
def test_windowed_pieces_resume(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, shape: tuple[int, ...], layers: str, resumes: str
) -> None:
    """Bit for bit, in the middle of update windows, and near to AdamW."""
    runners = processes(request, torch.Size(shape).numel())
    expected = runners.call(trained, shape, layers, WINDOWED[name], 12)
    place = resumes if resumes == "in memory" else str(tmp_path)
    found = runners.call(trained, shape, layers, WINDOWED[name], 12, place)
    assert_equal_ranks(found)
    assert difference(expected[0], found[0]) == 0.0
    assert 0.0 < difference(found[0], of_adamw(layers, 12)) < 0.1


def scores(rank: int) -> list[Tensor]:
    """By which a rank selects slices of its pieces of the second layers."""
    model = parallel((2, 2), "rows")
    optimizer = optimizer_over(model, WINDOWED["re-selecting"], "")
    for step in range(5):
        backward(model, step, rank // 2, 2)
        optimizer.step()
        optimizer.zero_grad()
    named = zip(model.named_parameters(), optimizer.state_dict()["state"].values(), strict=True)
    found = [entry["score"].to_local().clone() for (name, _), entry in named if name.endswith("down.weight")]
    optimizer.close()
    return found


def test_pieces_select_by_their_own_norms(four_ranks: RankProcesses) -> None:
    """Ranks 0 and 2 have parts of each slice of one piece, and ranks 1 and 3 of the other one."""
    found = four_ranks.call(scores)
    assert_equal_ranks([found[0], found[2]])
    assert_equal_ranks([found[1], found[3]])
    assert len(found[0]) == 2
    assert all(difference([first], [second]) > 1e-5 for first, second in zip(found[0], found[1], strict=True))


def planned(rank: int, layers: str) -> list[Any]:
    """How a rank plans whole parameters, or pieces."""
    model = parallel((1, 2), layers)
    optimizer = optimizer_over(model, WINDOWED["re-selecting"] | {"device_share": 0.5}, "")
    backward(model, 0)
    optimizer.step()
    found = [(plan.whole.shape, plan.whole.placement, plan.whole.phase) for plan in optimizer.engine.plan.params]
    optimizer.close()
    return found


@pytest.mark.parametrize("layers", ["both", "uneven"])
def test_ranks_plan_pieces_alike(two_ranks: RankProcesses, layers: str) -> None:
    first, second = two_ranks.call(planned, layers)
    assert first == second


def part_of_a_run(
    rank: int, shape: tuple[int, ...], options: dict[str, Any], folder: str, first: int, stop: int
) -> list[Tensor]:
    """The whole weights behind ``flush()``, of a run that begins with what an earlier part has saved, and saves."""
    model, tensor, ranks = parallel(shape, "rows"), shape[-1], torch.distributed.get_world_size()
    optimizer = optimizer_over(model, options, folder)
    if first:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/saved")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for step in range(first, stop):
        backward(model, step, rank // tensor, ranks // tensor)
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    if not first:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/saved")
    optimizer.flush()
    found = whole(model)
    optimizer.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [((4, 1), (2, 2)), ((2, 2), (4, 1)), ((2, 2), (1, 2)), ((1, 2), (2, 2))])
@pytest.mark.parametrize("name", ["zero_offload", "zenflow", "re-selecting"])
def test_state_loads_on_other_meshes(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """The update windows are flushed there where ranks have other slices."""
    options = {**ALL_POLICIES, **WINDOWED}[name]
    saving, loading = (processes(request, torch.Size(shape).numel()) for shape in (before, after))
    expected = saving.call(part_of_a_run, before, options, str(tmp_path), 0, 6)
    if name == "re-selecting":
        found = loading.call(part_of_a_run, after, options, str(tmp_path), 6, 6)
        assert difference(expected[0], found[0]) < EXACT
        return
    found = loading.call(part_of_a_run, after, options, str(tmp_path), 6, 12)
    assert_equal_ranks(found)
    assert difference(found[0], of_adamw("rows", 12)) < EXACT


class OwnExperts(nn.Module):
    """Eight experts, of which a rank of expert parallelism has four."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        weight = torch.randn(8, 32, 34) / 6
        self.weight = nn.Parameter(weight if mesh is None else distribute_tensor(weight, mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.tanh(x @ weight).mean(0)


class Mixture(nn.Module):
    """Experts, and a layer that all ranks have."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.router = nn.Linear(32, 34)
        self.experts = OwnExperts(mesh)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.router(x) + self.experts(x)
        return found


def mixture() -> nn.Module:
    """On four ranks: the layer is sharded over all of them, and each pair of experts over two."""
    torch.manual_seed(0)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("of experts", "experts"))
    model = Mixture(both["experts"])
    fully_shard(model.experts, mesh=both["of experts"])
    sharded: nn.Module = fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return sharded


def trained_mixture(rank: int, options: dict[str, Any] | None, steps: int, resumes: bool = False) -> list[Tensor]:
    """The whole weights; of AdamW without options."""
    model = mixture()
    with tempfile.TemporaryDirectory() as folder:
        optimizer = optimizer_over(model, options, folder)
        for step in range(steps):
            if resumes and step == steps // 2:
                weights, state = get_state_dict(model, optimizer)
                before, model = optimizer, mixture()
                optimizer = optimizer_over(model, options, folder)
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
                before.close()
            generator = torch.Generator().manual_seed(10 * step + rank)
            x, y = torch.randn(6, 32, generator=generator), torch.randn(6, 34, generator=generator)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if options is not None:
            optimizer.flush()
        found = whole(model)
        if options is not None:
            plan = next(each for each in optimizer.engine.plan.params if each.name == "experts.weight")
            assert plan.offloaded or options.get("policy") in ("resident", "twinflow", "deep_optimizer_states")
            optimizer.close()
    return found


@pytest.mark.matrix(12)
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_experts_over_other_ranks_equal_adamw(four_ranks: RankProcesses, policy: str) -> None:
    """In one optimizer, with parameters that are sharded over all ranks."""
    results = four_ranks.call(trained_mixture, ALL_POLICIES[policy], 6)
    assert_equal_ranks(results)
    assert difference(results[0], four_ranks.call(trained_mixture, None, 6)[0]) < EXACT


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", ["re-selecting", "late", "adaptive", "int8"])
def test_windowed_experts_resume(four_ranks: RankProcesses, name: str) -> None:
    expected = four_ranks.call(trained_mixture, WINDOWED[name], 12)
    found = four_ranks.call(trained_mixture, WINDOWED[name], 12, True)
    assert_equal_ranks(found)
    assert difference(expected[0], found[0]) == 0.0
    assert 0.0 < difference(found[0], four_ranks.call(trained_mixture, None, 12)[0]) < 0.1


def adding(rank: int) -> None:
    model = mixture()
    assert isinstance(model, Mixture)
    optimizer = optimizer_over(model.router, ALL_POLICIES["zenflow"], "")
    optimizer.add_param_group({"params": list(model.experts.named_parameters("experts"))})


def test_group_over_other_ranks_is_refused(four_ranks: RankProcesses) -> None:
    for text in messages(four_ranks.outcomes(adding)):
        assert "sharded over other ranks" in text


def twice_divided(rank: int) -> list[Any]:
    """Six experts over two dimensions of a mesh, both along the first dimension: pieces of two and of one."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "experts", "tensor"))
    found = []
    for kind in (None, ALL_POLICIES["zenflow"]):
        torch.manual_seed(0)
        model = OwnExperts(None)
        weight = torch.randn(6, 32, 34) / 6
        model.weight = nn.Parameter(distribute_tensor(weight, mesh["experts", "tensor"], [Shard(0), Shard(0)]))
        fully_shard(model, mesh=mesh["data"])
        optimizer = optimizer_over(model, kind, "")
        for step in range(4):
            x = torch.randn(6, 32, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model)[0])
        if kind is not None:
            optimizer.close()
    return found


def test_pieces_of_two_divisions_equal_adamw(four_ranks: RankProcesses) -> None:
    expected, found = four_ranks.call(twice_divided)[0]
    assert difference([expected], [found]) < EXACT


def with_own_experts(rank: int) -> None:
    """Each rank of a pair makes experts of its own, as plain parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    torch.manual_seed(0)
    model = Mixture(None)
    with torch.no_grad():
        model.experts.weight.add_(rank % 2)
    fully_shard(model.experts, mesh=mesh["data"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = optimizer_over(model, ALL_POLICIES["zenflow"], "")
    model(torch.randn(6, 32)).square().sum().backward()
    optimizer.step()


def test_experts_that_are_no_dtensors_are_refused(four_ranks: RankProcesses) -> None:
    """The norm of gradients would count those of one rank of a pair."""
    for text in messages(four_ranks.outcomes(with_own_experts)):
        assert re.search(r"rank 0 and rank 1 have different weights of parameter 2.* make them DTensors", text)
