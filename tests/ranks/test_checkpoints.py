"""A state dict of several ranks has the whole state, and loads into any number of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.ranks.models import ALL_POLICIES, WINDOWED, backward, batch, difference, on_ranks, optimizer_over, uneven
from tests.support.calls import interrupted
from tests.support.rank_processes import RankProcesses, messages
from zenflow_compile.runtime.checkpoint.save_load import dense_state

pytestmark = pytest.mark.timeout(180)
SETS = {**{name: WINDOWED[name] for name in ("re-selecting", "adaptive", "late", "summed", "int8")}, **ALL_POLICIES}
SETS.pop("zero_infinity")
MIDDLE, END = 5, 11


def run(
    options: dict[str, Any], begin: int, end: int, state: Any = None, rank: int = 0, ranks: int = 1
) -> tuple[list[Tensor], Any]:
    """Train from one step to another; the weights, and the state of model and optimizer."""
    model = uneven()
    optimizer = optimizer_over(model, options, "", process_group=dist.group.WORLD if ranks > 1 else None)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(begin, end):
        x, y = batch(step, rank, ranks)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = {"optimizer": optimizer.state_dict(), "model": {k: v.clone() for k, v in model.state_dict().items()}}
    optimizer.flush()
    weights = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return weights, saved


def run_as_rank(
    rank: int, options: dict[str, Any], begin: int, end: int, state: Any = None
) -> tuple[list[Tensor], Any]:
    return run(options, begin, end, state, rank, 2)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", SETS)
def test_state_moves_between_numbers_of_ranks(two_ranks: RankProcesses, name: str) -> None:
    """Saved in the middle of a window on 2 ranks or 1, and continued on 2 or 1."""
    options = SETS[name]
    near = 1e-6 if name != "int8" else 2e-3
    (one, _), (two, _) = run(options, 0, END), two_ranks.call(run_as_rank, options, 0, END)[0]
    _, saved_by_two = two_ranks.call(run_as_rank, options, 0, MIDDLE)[1]
    _, saved_by_one = run(options, 0, MIDDLE)
    continued = [
        (two_ranks.call(run_as_rank, options, MIDDLE, END, saved_by_two)[0][0], two, 0.0),
        (two_ranks.call(run_as_rank, options, MIDDLE, END, saved_by_one)[1][0], one, near),
        (run(options, MIDDLE, END, saved_by_two)[0], one, near),
    ]
    for weights, expected, tolerance in continued:
        assert difference(weights, expected) <= tolerance


def test_state_has_no_trace_of_ranks(two_ranks: RankProcesses) -> None:
    options = SETS["re-selecting"]
    _, saved_by_one = run(options, 0, MIDDLE)
    for _, saved in two_ranks.call(run_as_rank, options, 0, MIDDLE):
        states = [each["optimizer"]["state"].values() for each in (saved, saved_by_one)]
        for entry, expected in zip(*states, strict=True):
            assert {k: (v.shape, v.dtype) for k, v in entry.items()} == {
                k: (v.shape, v.dtype) for k, v in expected.items()
            }
            for key, value in entry.items():
                torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)


def save_on_one(rank: int) -> None:
    model = uneven()
    optimizer = on_ranks(model)
    for step in range(2):
        backward(model, step, rank)
        if step and rank == 0:
            optimizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()


def test_state_dict_on_one_rank_raises_on_all(two_ranks: RankProcesses) -> None:
    for text in messages(two_ranks.outcomes(save_on_one)):
        assert "state_dict()" in text


def one_step(rank: int, loads: bool) -> list[Tensor]:
    """Loads between a backward and a step are refused, and change nothing; after ``zero_grad()`` they are not."""
    model = uneven()
    optimizer = on_ranks(model)
    saved = optimizer.state_dict()
    backward(model, 0, rank)
    if loads:
        with pytest.raises(ValueError, match=r"the gradients of 1 backwards.*call step\(\) or optimizer.zero_grad\(\)"):
            optimizer.load_state_dict(saved)
    optimizer.step()
    optimizer.zero_grad()
    if loads:
        optimizer.load_state_dict(optimizer.state_dict())
        backward(model, 1, rank)
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def test_load_over_gradients_is_refused(two_ranks: RankProcesses) -> None:
    expected, loading = (two_ranks.call(one_step, loads)[0] for loads in (False, True))
    assert all(map(torch.equal, loading, expected))


def save_and_fail(rank: int) -> None:
    model = uneven()
    optimizer = on_ranks(model)
    with interrupted(dense_state, ZeroDivisionError("division by zero")) if rank == 1 else nullcontext():
        optimizer.state_dict()


def test_failed_save_of_one_rank_is_raised_by_all(two_ranks: RankProcesses) -> None:
    other, own = messages(two_ranks.outcomes(save_and_fail))
    assert "division by zero" in own
    assert "rank 1 failed" in other
    assert "division by zero" in other


def through_files(rank: int, options: dict[str, Any], folder: str) -> float:
    """Save in the middle of a window with torch.distributed.checkpoint, beside an EMA and a scheduler, and continue."""
    averaging = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]

    def new() -> tuple[Any, Any, Any, Any]:
        model = uneven()
        optimizer = on_ranks(model, **options)
        return model, optimizer, CosineAnnealingWarmRestarts(optimizer, 3), AveragedModel(model, multi_avg_fn=averaging)

    def run(parts: tuple[Any, Any, Any, Any], begin: int, end: int) -> list[Tensor]:
        model, optimizer, scheduler, average = parts
        for step in range(begin, end):
            backward(model, step, rank)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        return [param.detach().clone() for param in average.parameters()]

    first = new()
    run(first, 0, MIDDLE)
    model_state, optimizer_state = get_state_dict(first[0], first[1])
    saved = {"model": model_state, "optimizer": optimizer_state, "average": first[3].state_dict()}
    dcp.save(saved, checkpoint_id=folder)
    rates = first[2].state_dict()
    expected = run(first, MIDDLE, END)
    first[1].close()

    second = new()
    model_state, optimizer_state = get_state_dict(second[0], second[1])
    saved = {"model": model_state, "optimizer": optimizer_state, "average": second[3].state_dict()}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(second[0], second[1], model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    second[2].load_state_dict(rates)
    second[3].load_state_dict(saved["average"])
    found = run(second, MIDDLE, END)
    second[1].close()
    return difference(expected, found)


@pytest.mark.parametrize("name", ["re-selecting", "deep_optimizer_states"])
def test_distributed_checkpoints_continue_bitwise(two_ranks: RankProcesses, name: str, tmp_path: Path) -> None:
    assert two_ranks.call(through_files, SETS[name], str(tmp_path)) == [0.0, 0.0]
