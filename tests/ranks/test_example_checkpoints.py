"""Checkpoints of sharded runs: a kill leaves one, and what fails on one rank raises on all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from examples import checkpoint
from examples.checkpoint import CheckpointFolder, load_checkpoint, load_weights
from examples.settings import TrainConfig
from tests.support.calls import interrupted
from tests.support.rank_processes import RankProcesses, messages
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(180)
CHANGES = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))


class Run:
    """A run that saves into ``folder``, sharded unless ``whole``."""

    def __init__(self, folder: str | Path, run: str | None = None, *, whole: bool = False) -> None:
        self.model = network()
        if not whole:
            fully_shard(self.model)
        group = torch.distributed.group.WORLD if whole else None
        self.optimizer = ZenFlowAdamW(self.model.parameters(), policy="resident", process_group=group)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1.0)
        self.config = TrainConfig(device="cpu", fsdp=not whole)
        self.folder = CheckpointFolder(folder, run)

    def save(self, step: int, value: float) -> Path:
        """Save weights that are all ``value``."""
        with torch.no_grad():
            for param in self.model.parameters():
                param.fill_(value)
        return self.folder.save(self.config, step, self.model, self.optimizer, self.scheduler)


def value_of(path: Path) -> float:
    """The value of all weights in a checkpoint."""
    model = network()
    load_weights(load_checkpoint(path), path, model)
    (value,) = {element for param in model.parameters() for element in param.flatten().tolist()}
    return float(value)


class Killed(BaseException):
    """The end of the process."""


@contextmanager
def killed_at(change: int) -> Iterator[None]:
    """End the process at the ``change``-th change of files or folders: none of them, and none later, happens."""
    left = [change]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **keywords: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                raise Killed
            return call(*arguments, **keywords)

        return changed

    with patch.multiple(os, **{name: counted(getattr(os, name)) for name in CHANGES}):
        yield


def saved_and_killed(rank: int, folder: str) -> list[float]:
    """Save a step, and again with a kill at each change. Returns what was left each time."""
    left: list[float] = []
    for change in range(1, 200):
        shutil.rmtree(folder, ignore_errors=True)
        run = Run(folder, "abc")
        path = run.save(3, 1.0)
        finished = True
        try:
            with killed_at(change):
                run.save(3, 2.0)
        except BaseException:  # also the CheckpointException that reports Killed, which is no Exception
            finished = False
        if change % 2:  # of another run that cleans up before this one goes on
            Run(folder, "def").folder._prepare()
        left.append(value_of(path))
        assert run.save(3, 3.0) == path
        assert value_of(path) == 3.0
        assert os.listdir(folder) == [path.name], change
        if finished:
            return left
    raise AssertionError("the save never came to its end")


def test_killed_save_of_the_same_step_leaves_one(one_rank: RankProcesses, tmp_path: Path) -> None:
    (left,) = one_rank.call(saved_and_killed, str(tmp_path / "out"))
    assert len(left) > 10
    assert left == sorted(left)  # first the earlier one, then the later one
    assert set(left) == {1.0, 2.0}


def replaced_and_killed(rank: int, folder: str) -> float:
    """All ranks load a checkpoint at the same time whose replacement was killed between the two renames."""
    run = Run(folder, "abc")
    path = run.save(3, 1.0)
    if rank == 0:
        path.with_suffix(".unfinished").touch()
        path.with_suffix(".parts").mkdir()
        path.rename(path.with_suffix(".replaced"))
    torch.distributed.barrier()
    return value_of(path)


def test_all_ranks_find_the_replaced_one(two_ranks: RankProcesses, tmp_path: Path) -> None:
    assert two_ranks.call(replaced_and_killed, str(tmp_path)) == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003-abc"]


def on_two_nodes(rank: int, folder: str) -> None:
    """Save into a folder of which the second rank sees another one of the same name."""

    def save_there(state: dict[str, Any], *, checkpoint_id: Path) -> None:
        save(state, checkpoint_id=checkpoint_id if rank == 0 else Path(f"{folder}-{rank}"))

    run = Run(folder, "abc")
    with patch.object(checkpoint, "save", save_there):
        run.save(3, 1.0)


def test_folder_that_nodes_do_not_share_is_an_error(two_ranks: RankProcesses, tmp_path: Path) -> None:
    for message in messages(two_ranks.outcomes(on_two_nodes, str(tmp_path / "out"))):
        assert "does not see __1_0.distcp in " in message
        assert "--out must be a folder on a file system that all nodes share" in message
    assert not (tmp_path / "out" / "step-000003-abc").exists()


def not_removed(rank: int, folder: str, whole: bool) -> None:
    run = Run(folder, "abc", whole=whole)
    run.save(1, 1.0)
    run.save(2, 1.0)
    with patch.object(checkpoint, "_remove", side_effect=OSError("cannot be removed")):
        run.save(3, 1.0)


def not_written(rank: int, folder: str, whole: bool) -> None:
    run = Run(folder, "abc", whole=whole)
    with interrupted(os.replace, OSError("cannot be written")):
        run.save(1, 1.0)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("fails", [not_removed, not_written])
def test_failed_save_raises_on_all_ranks(
    two_ranks: RankProcesses, fails: Callable[..., None], whole: bool, tmp_path: Path
) -> None:
    for message in messages(two_ranks.outcomes(fails, str(tmp_path), whole)):
        assert "cannot be" in message
