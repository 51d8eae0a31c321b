"""``get_state_dict`` and ``set_state_dict`` under every option, on sharded models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

from tests.ranks.models import ADAM, ALL_POLICIES, WINDOWED, batch, difference, optimizer_over, uneven
from tests.ranks.sharded import by_columns, sharded, whole
from tests.ranks.test_training import EXACT, assert_equal_ranks
from tests.support.rank_processes import RankProcesses
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(180)

SETS = {
    "resident": ALL_POLICIES["resident"],
    "zero_offload": ALL_POLICIES["zero_offload"],
    "zenflow": ALL_POLICIES["zenflow"],
    "re-selecting": WINDOWED["re-selecting"],
    "late": WINDOWED["late"],
}


def steps(model: nn.Module, optimizer: Any, first: int, stop: int, rank: int, ranks: int = 2) -> None:
    for step in range(first, stop):
        x, y = batch(step, rank, ranks)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(state: Any) -> list[Tensor]:
    """Copies of all tensors in a nested state, as this rank has them."""
    if isinstance(state, dict):
        return [each for value in state.values() for each in tensors(value)]
    if isinstance(state, (list, tuple)):
        return [each for value in state for each in tensors(value)]
    if not isinstance(state, Tensor):
        return []
    return [(state.to_local() if hasattr(state, "to_local") else state).detach().clone()]  # type: ignore[operator]


def read(rank: int, options: dict[str, Any], trained: int) -> bool:
    """Whether reading the optimizer's state two times leaves weights, state and the step number as they are."""
    model = sharded()
    optimizer = optimizer_over(model, options, "")
    steps(model, optimizer, 0, trained, rank)
    optimizer.synchronize()
    weights, number = whole(model), optimizer.engine.step
    before = tensors(optimizer.state_dict())
    for _ in range(2):
        get_optimizer_state_dict(model, optimizer)
    after = tensors(optimizer.state_dict())
    equal = [torch.equal(one, other) for one, other in zip([*before, *weights], [*after, *whole(model)], strict=True)]
    no_gradient = all(param.grad is None for param in model.parameters())
    found = all(equal) and optimizer.engine.step == number == trained and no_gradient
    optimizer.close()
    return found


@pytest.mark.parametrize("trained", [0, 5])
@pytest.mark.parametrize("name", SETS)
def test_reading_state_changes_nothing(two_ranks: RankProcesses, name: str, trained: int) -> None:
    assert two_ranks.call(read, SETS[name], trained) == [True, True]


OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "on the host": {"cpu_offload": True},
    "whole": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "flattened": {"flatten_optimizer_state_dict": True},
}


def there_and_back(
    rank: int, options: dict[str, Any], name: str, trained: int, shape: tuple[int, ...] = (2,)
) -> tuple[list[Tensor], list[Tensor]]:
    """The weights of a run on a mesh of ``shape``, and those of another one that goes on from its state."""
    keywords = dict(OPTIONS[name])
    broadcasts = keywords.pop("broadcast_from_rank0", False)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    ranks = mesh.size()
    model = sharded(mesh=mesh)
    optimizer = optimizer_over(model, options, "")
    steps(model, optimizer, 0, trained, rank, ranks)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**keywords))
    # The state is of this moment, whatever the run does next.
    weights, state = copy.deepcopy(weights), copy.deepcopy(state)
    if broadcasts and rank:
        for entry in [weights, *state["state"].values()]:
            for value in entry.values():
                value.zero_()
    steps(model, optimizer, trained, trained + 6, rank, ranks)
    optimizer.flush()
    expected = whole(model)
    optimizer.close()

    other = sharded(mesh=mesh)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(0.25)
    resumed = optimizer_over(other, options, "")
    set_state_dict(
        other,
        resumed,
        model_state_dict=weights,
        optim_state_dict=state,
        options=StateDictOptions(**keywords, broadcast_from_rank0=broadcasts),
    )
    steps(other, resumed, trained, trained + 6, rank, ranks)
    resumed.flush()
    found = whole(other)
    resumed.close()
    return expected, found


@pytest.mark.matrix(2)
@pytest.mark.parametrize("trained", [0, 6])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["resident", "zenflow"])
def test_state_goes_there_and_back(two_ranks: RankProcesses, name: str, option: str, trained: int) -> None:
    results = two_ranks.call(there_and_back, SETS[name], option, trained)
    assert_equal_ranks([found for _, found in results])
    assert difference(*results[0]) < EXACT


@pytest.mark.parametrize("option", ["sharded", "on the host"])
@pytest.mark.parametrize("name", ["re-selecting", "late"])
def test_windows_go_there_and_back(two_ranks: RankProcesses, name: str, option: str) -> None:
    results = two_ranks.call(there_and_back, SETS[name], option, 6)
    assert difference(*results[0]) == 0.0


@pytest.mark.parametrize(
    "option",
    [pytest.param(each, marks=() if each in ("sharded", "from rank 0") else pytest.mark.long) for each in OPTIONS],
)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["zenflow", pytest.param("re-selecting", marks=pytest.mark.long)])
def test_state_on_a_mesh_of_two_dimensions(
    request: pytest.FixtureRequest, name: str, shape: tuple[int, int], option: str
) -> None:
    ranks: RankProcesses = request.getfixturevalue("four_ranks" if shape == (2, 2) else "two_ranks")
    results = ranks.call(there_and_back, SETS[name], option, 6, shape)
    assert_equal_ranks([found for _, found in results])
    assert difference(*results[0]) == 0.0


class Verify(VerifyStateDictMixin, TestCase):
    """PyTorch's own comparison of state dicts."""


def verified(rank: int, options: dict[str, Any]) -> None:
    """Compare the state of shards with that of a whole model, which each rank trains on the joint batch."""
    model, alone = sharded(), uneven()
    optimizer = optimizer_over(model, options, "")
    reference = optimizer_over(alone, options, "", process_group=False)
    steps(model, optimizer, 0, 6, rank)
    steps(alone, reference, 0, 6, 0, 1)
    verify = Verify()
    verify._verify_msd(get_model_state_dict(alone), get_model_state_dict(model))
    expected, found = reference.state_dict(), get_optimizer_state_dict(model, optimizer)
    if options["policy"] == "resident":  # a row of one is offloaded where it is whole, and has other entries
        verify._verify_osd(alone, reference, expected, found)
    gathered = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        names = [name for name, _ in alone.named_parameters()]
        for name, entry in zip(names, expected["state"].values(), strict=True):
            for key in ("step", "exp_avg", "exp_avg_sq"):
                verify._compare_tensor(entry[key], gathered["state"][name][key])
    dist.barrier()
    reference.close()
    optimizer.close()


@pytest.mark.parametrize("name", ["resident", "zero_offload"])
def test_pytorchs_comparison_of_state_passes(two_ranks: RankProcesses, name: str) -> None:
    two_ranks.call(verified, SETS[name])


def verified_by_load(rank: int, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Load the state of shards, gathered, into an optimizer of the whole model."""
    model, alone = sharded(mesh=init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])), uneven()
    optimizer = optimizer_over(model, options, "")
    reference = optimizer_over(alone, options, "", process_group=False)
    steps(model, optimizer, 0, 6, rank)
    steps(alone, reference, 0, 6, 0, 1)
    reference.synchronize()
    copied = copy.deepcopy(alone)
    loads = optimizer_over(copied, options, "", process_group=False)
    Verify()._verify_osd_by_load(copied, reference, loads, get_optimizer_state_dict(model, optimizer))
    dist.barrier()
    for each in (loads, reference, optimizer):
        each.close()


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["resident", "zero_offload"])
def test_pytorchs_comparison_by_load_passes(two_ranks: RankProcesses, name: str, shape: tuple[int, ...]) -> None:
    """The row of one stays on the device, as shards leave it there."""
    two_ranks.call(verified_by_load, SETS[name] | {"min_offload_size": 64}, shape)


def from_alone(rank: int, options: dict[str, Any], columns: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Behind ``flush()``: masters and moments of a whole model, and of shards that load its state dict as it is."""
    alone = uneven()
    reference = optimizer_over(alone, options, "", process_group=False)
    steps(alone, reference, 0, 6, 0, 1)
    state = copy.deepcopy(reference.state_dict())
    model = sharded(shard_placement_fn=by_columns if columns else None)
    with torch.no_grad():
        for param, own in zip(model.parameters(), alone.parameters(), strict=True):
            param.copy_(distribute_tensor(own.detach(), param.device_mesh, param.placements))  # type: ignore[attr-defined]
    optimizer = optimizer_over(model, options, "")
    optimizer.load_state_dict(state)
    found = []
    for each in (reference, optimizer):
        each.flush()
        entries = each.state_dict()["state"].values()
        values = [entry[name] for entry in entries for name in ("master", "exp_avg", "exp_avg_sq") if name in entry]
        found.append([value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in values])
        each.close()
    return found[0], found[1]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_shards_load_whole_state_directly(two_ranks: RankProcesses, name: str, columns: bool) -> None:
    """By ``load_state_dict``, in the middle of update windows."""
    for expected, found in two_ranks.call(from_alone, SETS[name] | {"min_offload_size": 64}, columns):
        assert difference(expected, found) < EXACT


def frozen_left_out(rank: int) -> bool:
    """Parameters without gradients, and a state that has no entry of them."""
    model: Any = uneven()
    model.middle.requires_grad_(False)
    model = sharded(lambda: model)
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    optimizer = ZenFlowAdamW(trainable, **ADAM, **ALL_POLICIES["zenflow"])
    steps(model, optimizer, 0, 3, rank)
    options = StateDictOptions(ignore_frozen_params=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    before = whole(model)
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))
    set_optimizer_state_dict(model, optimizer, state, options=options)
    steps(model, optimizer, 3, 4, rank)
    optimizer.close()
    left_out = not any("middle" in name for name in [*weights, *state["state"]])
    return left_out and difference(before, whole(model)) > 0


def test_frozen_parameters_are_left_out(two_ranks: RankProcesses) -> None:
    assert two_ranks.call(frozen_left_out) == [True, True]
