"""``torch.distributed.checkpoint`` saves and loads sharded models and their optimizers."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.ranks.models import ALL_POLICIES, WINDOWED, batch, difference, optimizer_over, uneven
from tests.ranks.sharded import by_columns, sharded, whole
from tests.ranks.test_training import assert_equal_ranks
from tests.support.rank_processes import RankProcesses, messages
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.errors import LostUpdateError

pytestmark = pytest.mark.timeout(180)
SAVED_AT, STEPS = 6, 13


def steps(model: nn.Module, optimizer: Any, first: int, stop: int, rank: int, ranks: int) -> None:
    for step in range(first, stop):
        F.cross_entropy(model(batch(step, rank, ranks)[0]), batch(step, rank, ranks)[1]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def save(rank: int, ranks: int, options: dict[str, Any] | None, folder: str, *, flush: bool = False) -> list[Tensor]:
    """Train, save in between, and return the weights at the end."""
    model = sharded(mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = optimizer_over(model, options, folder)
    steps(model, optimizer, 0, SAVED_AT, rank, ranks)
    if flush:
        optimizer.flush()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/saved")
    content = get_state_dict(model, optimizer, options=WHOLE)
    if rank == 0:
        torch.save(content, f"{folder}/whole.pt")
    steps(model, optimizer, SAVED_AT, STEPS, rank, ranks)
    return ended(model, optimizer)


def ended(model: nn.Module, optimizer: Any) -> list[Tensor]:
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.flush()
    found = whole(model)
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.close()
    return found


def resume(rank: int, ranks: int, options: dict[str, Any], folder: str) -> list[Tensor]:
    """The weights at the end of a run that goes on from what was saved."""
    model = sharded(mesh=init_device_mesh("cpu", (ranks,)))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.25)
    optimizer = optimizer_over(model, options, folder)
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=f"{folder}/saved")
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    steps(model, optimizer, SAVED_AT, STEPS, rank, ranks)
    return ended(model, optimizer)


SETS = {**ALL_POLICIES, **{f"windowed {name}": options for name, options in WINDOWED.items()}}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", SETS)
def test_resumed_shards_are_bitwise_equal(two_ranks: RankProcesses, name: str, tmp_path: Path) -> None:
    expected = two_ranks.call(save, 2, SETS[name], str(tmp_path))
    found = two_ranks.call(resume, 2, SETS[name], str(tmp_path))
    assert_equal_ranks(found)
    assert difference(expected[0], found[0]) == 0.0


FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
PARTIAL = DefaultLoadPlanner(allow_partial_load=True)
"""What AdamW has not saved, and the state of this optimizer needs, stays as it is."""


def other_saved(model: nn.Module, optimizer: Any, way: str, folder: str) -> None:
    """Load what an optimizer of the other kind has saved, in one of the ways that PyTorch has."""
    if way == "dcp.load":
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": state}
        planner = PARTIAL if isinstance(optimizer, ZenFlowAdamW) else None
        dcp.load(content, checkpoint_id=f"{folder}/saved", planner=planner)
        set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        return
    weights, state = torch.load(f"{folder}/whole.pt")
    options = FROM_RANK_0 if way == "from rank 0" else WHOLE
    if way == "from rank 0" and dist.get_rank():
        weights, state = {}, {}
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def go_on(rank: int, options: dict[str, Any] | None, way: str, folder: str, trained: int = 0) -> list[Tensor]:
    """As ``resume``, from what an optimizer of the other kind has saved, after ``trained`` steps of another run."""
    model = sharded()
    optimizer = optimizer_over(model, options, folder)
    steps(model, optimizer, 0, trained, rank, 2)
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.synchronize()
    other_saved(model, optimizer, way, folder)
    steps(model, optimizer, SAVED_AT, STEPS, rank, 2)
    return ended(model, optimizer)


WAYS = ["whole", "from rank 0", "dcp.load"]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("policy", "way"), [(None, "from rank 0"), (None, "dcp.load"), *itertools.product(ALL_POLICIES, WAYS)]
)
def test_shards_go_on_from_the_other_optimizer(
    two_ranks: RankProcesses, policy: str | None, way: str, tmp_path: Path
) -> None:
    """From AdamW's state, and AdamW from that of this optimizer, saved between update windows.

    PyTorch does not load a state with further names for each parameter from each rank's file, as it does from rank 0.
    """
    own = None if policy is None else ALL_POLICIES[policy]
    other = ALL_POLICIES["zenflow"] if policy is None else None
    expected = two_ranks.call(save, 2, other, str(tmp_path), flush=policy is None)
    found = two_ranks.call(go_on, own, way, str(tmp_path))
    assert_equal_ranks(found)
    assert difference(expected[0], found[0]) < 1e-6


@pytest.mark.matrix(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trained", [SAVED_AT - 2, SAVED_AT, SAVED_AT + 2])
def test_state_of_adamw_is_refused_by_a_trained_one(
    two_ranks: RankProcesses, way: str, trained: int, tmp_path: Path
) -> None:
    """PyTorch has put it into the state that this optimizer has, whose masters are AdamW's if weights came first."""
    expected = two_ranks.call(save, 2, None, str(tmp_path))
    options = ALL_POLICIES["zenflow"]
    if trained == SAVED_AT and way != "dcp.load":
        found = two_ranks.call(go_on, options, way, str(tmp_path), trained)
        assert difference(expected[0], found[0]) < 1e-6
        return
    for text in messages(two_ranks.outcomes(go_on, options, way, str(tmp_path), trained)):
        assert re.search(rf"the state dict has step={SAVED_AT} .* (before the first step|damaged)", text)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_state_of_two_ranks_loads_on_three(
    two_ranks: RankProcesses, three_ranks: RankProcesses, policy: str, tmp_path: Path
) -> None:
    """And back: rows change ranks, and with them their place among the selected ones."""
    there, back = tmp_path / "there", tmp_path / "back"
    there.mkdir()
    back.mkdir()
    expected = two_ranks.call(save, 2, ALL_POLICIES[policy], str(there))
    assert difference(expected[0], three_ranks.call(resume, 3, ALL_POLICIES[policy], str(there))[0]) < 1e-6
    expected = three_ranks.call(save, 3, ALL_POLICIES[policy], str(back))
    assert difference(expected[0], two_ranks.call(resume, 2, ALL_POLICIES[policy], str(back))[0]) < 1e-6


@pytest.mark.matrix(2)
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_state_of_four_ranks_loads_on_one(
    one_rank: RankProcesses, four_ranks: RankProcesses, policy: str, tmp_path: Path
) -> None:
    """From ``torch.distributed.checkpoint``, and from a file with the whole state that rank 0 has written."""
    expected = four_ranks.call(save, 4, ALL_POLICIES[policy], str(tmp_path))[0]
    assert difference(expected, one_rank.call(resume, 1, ALL_POLICIES[policy], str(tmp_path))[0]) < 1e-6
    assert difference(expected, one_rank.call(resume_file, ALL_POLICIES[policy], str(tmp_path))[0]) < 1e-6


WHOLE = StateDictOptions(full_state_dict=True)


def resume_file(rank: int, options: dict[str, Any], folder: str) -> list[Tensor]:
    """As ``resume``, from a file on one rank."""
    model = sharded()
    optimizer = optimizer_over(model, options, folder)
    weights, state = torch.load(f"{folder}/whole.pt")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=WHOLE)
    steps(model, optimizer, SAVED_AT, STEPS, rank, 1)
    return ended(model, optimizer)


RESHARDED = [name for name in WINDOWED if name != "int8"]
"""Scales of int8 gradients belong to the parts of columns that ranks have: they load on as many ranks."""


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", RESHARDED)
def test_flushed_windows_load_on_three(
    two_ranks: RankProcesses, three_ranks: RankProcesses, name: str, tmp_path: Path
) -> None:
    expected = two_ranks.call(save, 2, WINDOWED[name], str(tmp_path), flush=True)
    found = three_ranks.call(resume, 3, WINDOWED[name], str(tmp_path))
    assert_equal_ranks(found)
    assert difference(expected[0], found[0]) < 0.05


ELSEWHERE = {"min_offload_size": 64}
"""The matrix of one row stays on the device where it is sharded, as ranks have no slices: so it must in both."""


def ranks_of(kind: str) -> int:
    """The number of ranks in a kind of run, as "sharded 2x1", whose mesh replicates over two ranks."""
    return math.prod(int(size) for size in kind.split()[1].split("x"))


def made(kind: str, options: dict[str, Any], folder: str, rank: int) -> tuple[nn.Module, ZenFlowAdamW]:
    """The model and the optimizer of a run: over shards of rows or columns, over replicas, or in one process."""
    form, shape = kind.split()
    if form in ("sharded", "columns"):
        sizes = tuple(int(size) for size in shape.split("x"))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        model = sharded(mesh=mesh, shard_placement_fn=by_columns if form == "columns" else None)
        return model, optimizer_over(model, options, folder)
    model = uneven()
    group = dist.group.WORLD if ranks_of(kind) > 1 else None
    return model, optimizer_over(model, options, folder, process_group=group)


def flushed_state(model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    """Whole weights, masters and moments behind ``flush()``."""
    optimizer.flush()
    weights, state = get_state_dict(model, optimizer)
    found = list(weights.values())
    for _, entry in sorted(state["state"].items()):
        found += [entry[key] for key in ("master", "exp_avg", "exp_avg_sq") if key in entry]
    # Of one rank, full_tensor() is the weight itself, which training goes on to change.
    return [(each.full_tensor() if isinstance(each, DTensor) else each).clone() for each in found]


def save_as(rank: int, kind: str, options: dict[str, Any], folder: str) -> list[Tensor]:
    """Train, save in the middle of update windows, and flush."""
    model, optimizer = made(kind, options, folder, rank)
    steps(model, optimizer, 0, SAVED_AT, rank, ranks_of(kind))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/saved")
    return closed_behind(optimizer, flushed_state(model, optimizer))


def load_as(rank: int, kind: str, options: dict[str, Any], folder: str) -> list[Tensor]:
    """Load what was saved, and flush."""
    model, optimizer = made(kind, options, folder, rank)
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(content, checkpoint_id=f"{folder}/saved")
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    found = flushed_state(model, optimizer)
    steps(model, optimizer, SAVED_AT, STEPS, rank, ranks_of(kind))
    return closed_behind(optimizer, found)


def closed_behind(optimizer: ZenFlowAdamW, found: list[Tensor]) -> list[Tensor]:
    optimizer.close()
    return found


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("re-selecting", "late") else pytest.mark.long)
        for name in (*RESHARDED, "zenflow")
    ],
)
@pytest.mark.parametrize(
    ("there", "back"),
    [
        ("sharded 2", "sharded 3"),
        ("sharded 3", "sharded 2"),
        ("sharded 2", "sharded 1"),
        ("sharded 1", "sharded 2"),
        ("sharded 4", "sharded 1"),
        ("sharded 2", "replicated 2"),
        ("replicated 2", "sharded 2"),
        ("sharded 2", "alone 1"),
        ("alone 1", "sharded 2"),
    ],
)
def test_no_update_is_lost_on_other_ranks(
    one_rank: RankProcesses,
    two_ranks: RankProcesses,
    three_ranks: RankProcesses,
    four_ranks: RankProcesses,
    there: str,
    back: str,
    name: str,
    tmp_path: Path,
) -> None:
    """In the middle of windows: behind flush(), both runs have the same weights, masters and moments."""
    options = {**ALL_POLICIES, **WINDOWED}[name] | ELSEWHERE
    runners = {"1": one_rank, "2": two_ranks, "3": three_ranks, "4": four_ranks}

    def run(act: Callable[..., list[Tensor]], kind: str) -> list[Tensor]:
        if kind == "alone 1":
            return act(0, kind, options, str(tmp_path))
        return runners[kind[-1]].call(act, kind, options, str(tmp_path))[0]

    assert difference(run(save_as, there), run(load_as, back)) < 1e-6


SAME_ROWS = [
    ("sharded 2", "sharded 1x2"),
    ("sharded 1x2", "sharded 2"),
    ("columns 2", "columns 1x2"),
    ("columns 1x2", "columns 2"),
    ("sharded 2x1", "sharded 1x1"),
]
OTHER_ROWS = [
    ("sharded 2", "columns 2"),
    ("columns 2", "sharded 2"),
    ("sharded 2", "sharded 2x1"),
    ("sharded 2x1", "sharded 1x2"),
    ("columns 2x1", "sharded 1x2"),
    ("sharded 1x2", "columns 2x1"),
]
SHORT = {("sharded 2", "columns 2"), ("columns 2", "sharded 2"), ("sharded 2x1", "sharded 1x2")}


@pytest.mark.parametrize(
    ("there", "back"),
    [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in (*SAME_ROWS, *OTHER_ROWS)],
)
@pytest.mark.parametrize("name", ["zenflow", "re-selecting", "late"])
def test_no_update_is_lost_on_another_mesh(
    two_ranks: RankProcesses, one_rank: RankProcesses, there: str, back: str, name: str, tmp_path: Path
) -> None:
    """As PyTorch's tests of DTensors in checkpoints: with other placements, and dimensions of the mesh."""
    options = {**ALL_POLICIES, **WINDOWED}[name] | ELSEWHERE
    runners = {1: one_rank, 2: two_ranks}
    expected = runners[ranks_of(there)].call(save_as, there, options, str(tmp_path))
    found = runners[ranks_of(back)].call(load_as, back, options, str(tmp_path))
    assert_equal_ranks(found)
    if (there, back) in SAME_ROWS:
        assert difference(expected[0], found[0]) == 0.0
    else:
        assert difference(expected[0], found[0]) < 1e-6


def test_open_windows_want_the_saved_weights(
    two_ranks: RankProcesses, three_ranks: RankProcesses, tmp_path: Path
) -> None:
    """Gradients of an update window that is flushed at loading belong to these weights."""
    options = WINDOWED["re-selecting"] | ELSEWHERE
    two_ranks.call(save_as, "sharded 2", options, str(tmp_path))
    errors = three_ranks.outcomes(load_over_others, options, str(tmp_path))
    assert all("load the model's weights first" in str(each) for each in errors), errors


def load_over_others(rank: int, options: dict[str, Any], folder: str) -> None:
    model, optimizer = made("sharded 3", options, folder, rank)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.25)
    content = {"optimizer": get_state_dict(model, optimizer)[1]}
    dcp.load(content, checkpoint_id=f"{folder}/saved")
    set_optimizer_state_dict(model, optimizer, optim_state_dict=content["optimizer"])


def loaded(kind: str, options: dict[str, Any], folder: str) -> tuple[nn.Module, ZenFlowAdamW, dict[str, Any]]:
    """A model, its optimizer, and what was saved, which has not been set yet."""
    model, optimizer = made(kind, options, folder, 0)
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(content, checkpoint_id=f"{folder}/saved")
    return model, optimizer, content


def set_both(model: nn.Module, optimizer: ZenFlowAdamW, content: dict[str, Any]) -> None:
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])


def one_step(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    steps(model, optimizer, SAVED_AT, SAVED_AT + 1, 0, 1)


def flushes(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    optimizer.flush()


def synchronizes(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    optimizer.synchronize()


@pytest.mark.tier1
@pytest.mark.parametrize("name", ["re-selecting", "late"])
@pytest.mark.parametrize("call", [one_step, flushes, synchronizes])
def test_weights_after_a_flushed_state_are_refused(
    two_ranks: RankProcesses, call: Callable[[nn.Module, ZenFlowAdamW], None], name: str, tmp_path: Path
) -> None:
    """They are older than the masters, whose update would be lost. In the other order both are as after flush()."""
    options = WINDOWED[name] | ELSEWHERE
    expected = two_ranks.call(save_as, "sharded 2", options, str(tmp_path))[0]
    model, optimizer, content = loaded("alone 1", options, str(tmp_path))
    # Copies: dcp has loaded into the memory of the model, which set_state_dict() would copy onto itself.
    content["model"] = {key: value.clone() for key, value in content["model"].items()}
    set_both(model, optimizer, content)  # the optimizer's state first
    with pytest.raises(LostUpdateError, match=r"load the model's weights first"):
        call(model, optimizer)
    model.load_state_dict(content["model"])
    set_optimizer_state_dict(model, optimizer, optim_state_dict=content["optimizer"])
    assert difference(expected, closed_behind(optimizer, flushed_state(model, optimizer))) < 1e-6


def test_weights_are_written_after_a_flushed_state(two_ranks: RankProcesses, tmp_path: Path) -> None:
    """By hand, behind ``synchronize()``."""
    options = WINDOWED["re-selecting"] | ELSEWHERE
    two_ranks.call(save_as, "sharded 2", options, str(tmp_path))
    model, optimizer, content = loaded("alone 1", options, str(tmp_path))
    set_both(model, optimizer, content)
    optimizer.synchronize()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    written = [param.detach().clone() for param in model.parameters()]
    optimizer.synchronize()
    assert difference(written, [param.detach() for param in model.parameters()]) == 0.0
    optimizer.close()


def test_open_windows_load_over_replaced_memory(
    one_rank: RankProcesses, two_ranks: RankProcesses, tmp_path: Path
) -> None:
    options = WINDOWED["re-selecting"] | ELSEWHERE
    expected = two_ranks.call(save_as, "sharded 2", options, str(tmp_path))[0]
    assert difference(expected, one_rank.call(load_over_replaced, options, str(tmp_path))[0]) < 1e-6


def load_over_replaced(rank: int, options: dict[str, Any], folder: str) -> list[Tensor]:
    """Load the weights as new memory of the shards."""
    model, optimizer, content = loaded("sharded 1", options, folder)
    for name, param in model.named_parameters():
        param._local_tensor = content["model"][name].to_local().clone()  # type: ignore[attr-defined]
    set_optimizer_state_dict(model, optimizer, optim_state_dict=content["optimizer"])
    return closed_behind(optimizer, flushed_state(model, optimizer))


@pytest.mark.parametrize("adamw", [False, True])
def test_state_of_shards_is_refused_elsewhere(one_rank: RankProcesses, adamw: bool, tmp_path: Path) -> None:
    """As ``state_dict()`` returned it: nothing has changed then, and training goes on."""
    refusal, unchanged = one_rank.call(load_dtensors, adamw, WINDOWED["re-selecting"], str(tmp_path))[0]
    assert "as a DTensor of a sharded model, and here this parameter is not sharded" in refusal
    assert unchanged


def load_dtensors(rank: int, adamw: bool, options: dict[str, Any], folder: str) -> tuple[str, bool]:
    model = sharded()
    saved: Any = optimizer_over(model, None if adamw else options | ELSEWHERE, folder)
    steps(model, saved, 0, SAVED_AT, rank, 1)
    whole_model = uneven()
    optimizer = optimizer_over(whole_model, options | ELSEWHERE, folder)
    steps(whole_model, optimizer, 0, 3, rank, 1)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="DTensor") as refused:
        optimizer.load_state_dict(saved.state_dict())
    after = optimizer.state_dict()
    unchanged = all(
        torch.equal(value, after["state"][i][key]) for i, e in before["state"].items() for key, value in e.items()
    )
    steps(whole_model, optimizer, 3, 5, rank, 1)
    optimizer.close()
    if not adamw:
        saved.close()
    return str(refused.value), unchanged


@pytest.mark.parametrize("kind", ["sharded 2", "replicated 2"])
def test_state_of_one_rank_that_is_damaged(two_ranks: RankProcesses, kind: str, tmp_path: Path) -> None:
    """Both ranks refuse it, and both go on training."""
    first, second = two_ranks.call(load_damaged, kind, WINDOWED["re-selecting"], str(tmp_path))
    assert first.startswith("rank 1 cannot load its state dict, so no rank has loaded one: the state dict has 'exp_avg")
    assert second.startswith("the state dict has 'exp_avg")


def load_damaged(rank: int, kind: str, options: dict[str, Any], folder: str) -> str:
    model, optimizer = made(kind, options, folder, rank)
    steps(model, optimizer, 0, SAVED_AT, rank, 2)
    state = optimizer.state_dict()
    if rank == 1:
        state["state"][1]["exp_avg"].fill_(float("nan"))
    with pytest.raises(ValueError, match="exp_avg") as refused:
        optimizer.load_state_dict(state)
    steps(model, optimizer, SAVED_AT, STEPS, rank, 2)
    optimizer.close()
    return str(refused.value)


def save_beside_training(rank: int, options: dict[str, Any], folder: str, dies: int | None) -> list[Tensor]:
    """Save in each step while training goes on; rank 1 is gone in step ``dies``, in the middle of a save."""
    model, optimizer = made("sharded 2", options, folder, rank)
    group = dist.new_group()  # the saving thread's messages must not mix with those of training
    saving: Any = None
    for step in range(STEPS):
        steps(model, optimizer, step, step + 1, rank, 2)
        if saving is not None:
            saving.result()
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": state}
        saving = dcp.async_save(content, checkpoint_id=f"{folder}/step-{step + 1:02d}", process_group=group)
        if rank == 1 and step == dies:
            os.kill(os.getpid(), signal.SIGKILL)
    saving.result()
    return ended(model, optimizer)


def resume_last(rank: int, options: dict[str, Any], folder: str) -> tuple[int, list[Tensor]]:
    """The step of the last whole checkpoint, and the weights at the end of a run that goes on from there."""
    last = max(path.parent for path in Path(folder).glob("step-*/.metadata"))
    step = int(last.name.removeprefix("step-"))
    model, optimizer = made("sharded 2", options, folder, rank)
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(content, checkpoint_id=str(last))
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    steps(model, optimizer, step, STEPS, rank, 2)
    return step, ended(model, optimizer)


@pytest.mark.parametrize("dies", [pytest.param(2, marks=pytest.mark.long), 7])
@pytest.mark.parametrize("name", [pytest.param("late", marks=pytest.mark.long), "re-selecting"])
def test_asynchronous_saves_survive_a_kill(two_ranks: RankProcesses, name: str, dies: int, tmp_path: Path) -> None:
    whole_run, killed = tmp_path / "whole", tmp_path / "killed"
    expected = two_ranks.call(save_beside_training, WINDOWED[name], str(whole_run), None)[0]
    two_ranks.outcomes(save_beside_training, WINDOWED[name], str(killed), dies)
    step, found = two_ranks.call(resume_last, WINDOWED[name], str(killed))[0]
    assert step in (dies, dies + 1)
    assert difference(expected, found) == 0.0
