"""Checkpoints are durable, damage is found, and no other run's file is removed."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from examples import checkpoint
from examples.checkpoint import CheckpointError, CheckpointFolder, load_checkpoint
from examples.settings import TrainConfig
from tests.support.calls import Call, at_calls, interrupted
from zenflow_compile import ZenFlowAdamW

ROOT = Path(__file__).parents[2]
CONFIG = TrainConfig(device="cpu")


class Run:
    """A small run that saves into ``folder``."""

    def __init__(self, folder: Path, seed: int = 0, run: str | None = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
        self.optimizer = ZenFlowAdamW(self.model.parameters(), policy="resident")
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1.0)
        self.folder = CheckpointFolder(folder, run)

    def step(self) -> None:
        self.model(torch.ones(2, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int) -> Path:
        return self.folder.save(CONFIG, step, self.model, self.optimizer, self.scheduler)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps_of(folder: Path, run: Run) -> list[int]:
    found = (re.fullmatch(rf"step-(\d+)-{run.folder.run}\.pt", name) for name in names(folder))
    return [int(match[1]) for match in found if match]


def test_saved_state_is_loaded_as_it_was(tmp_path: Path) -> None:
    run = Run(tmp_path / "new" / "folder")
    run.step()
    path = run.save(7)
    state = load_checkpoint(path)
    assert (state["step"], state["run"]) == (7, run.folder.run)
    assert path.name == f"step-000007-{run.folder.run}.pt"
    for name, value in run.model.state_dict().items():
        assert torch.equal(state["model"][name], value)


def test_second_run_keeps_both_newest(tmp_path: Path) -> None:
    first, second = Run(tmp_path, seed=0), Run(tmp_path, seed=1)
    for step in (4, 8, 12, 16, 20, 24):
        first.save(step)
    for step in (4, 8, 12):
        path = second.save(step)
        assert path.is_file()
    assert steps_of(tmp_path, first) == [20, 24]
    assert steps_of(tmp_path, second) == [8, 12]
    weights = load_checkpoint(path)["model"]
    assert all(torch.equal(weights[name], value) for name, value in second.model.state_dict().items())


def test_resumed_run_removes_no_later_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (8, 16, 24):
        run.save(step)
    resumed = Run(tmp_path, run=run.folder.run)
    for step in (17, 18, 19):
        resumed.save(step)
    assert steps_of(tmp_path, run) == [18, 19, 24]


def test_order_of_writes_survives_a_power_loss(tmp_path: Path) -> None:
    """Content is written before the name, and the name before older files are removed."""
    run = Run(tmp_path)
    for step in (1, 2):
        run.save(step)
    made: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, Path.unlink

    def synced(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if name.endswith(".unfinished"):
            size = os.fstat(descriptor).st_size
            assert size == path_size
        made.append(f"fsync {name}")
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        made.append(f"replace {Path(target).name}")
        replace(source, target)

    def unlinked(path: Path, **keywords: Any) -> None:
        made.append(f"unlink {path.name}")
        unlink(path, **keywords)

    path_size = next(tmp_path.glob("step-000002-*")).stat().st_size
    with mock.patch.multiple(os, fsync=synced, replace=replaced), mock.patch.object(Path, "unlink", unlinked):
        run.save(3)
    end = f"-{run.folder.run}"
    assert made[1:] == [
        f"fsync step-000003{end}.unfinished",
        f"replace step-000003{end}.pt",
        f"fsync {tmp_path.name}",
        f"unlink step-000001{end}.pt",
    ]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_save_keeps_existing_checkpoints(call: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    run.save(2)
    before = names(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    with interrupted(getattr(os, call), full), pytest.raises(OSError, match="No space left"):
        run.save(3)
    assert names(tmp_path) == before
    run.save(3)
    assert steps_of(tmp_path, run) == [2, 3]


def damaged(content: bytes, trial: int) -> tuple[str, bytes]:
    """Damage a file at a random place: cut it, flip a bit, or zero a page."""
    chance = random.Random(trial)
    changed = bytearray(content)
    match trial % 3:
        case 0:
            size = chance.randrange(len(content))
            return f"cut to {size}", content[:size]
        case 1:
            bit = chance.randrange(8 * len(content))
            changed[bit // 8] ^= 1 << bit % 8
            return f"bit {bit}", bytes(changed)
        case _:
            pages = [at for at in range(0, len(content), 4096) if any(content[at : at + 4096])]
            at = chance.choice(pages)
            changed[at : at + 4096] = bytes(len(changed[at : at + 4096]))
            return f"page {at}", bytes(changed)


def refused(path: Path, content: bytes, previous: Path) -> None:
    path.write_bytes(content)
    message = f"the checkpoint {re.escape(str(path))} is damaged: .*; resume from the one before it, {previous}"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("trials", [range(30), range(30, 230)])
def test_random_damage_is_an_error_that_names_files(trials: range, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step()
    previous, path = run.save(4), run.save(8)
    content = path.read_bytes()
    found = 0
    for trial in trials:
        what, changed = damaged(content, trial)
        assert changed != content, what
        refused(path, changed, previous)
        found += 1
    assert found == len(trials)
    path.write_bytes(content)
    load_checkpoint(path)


def test_damage_at_either_end_is_found(tmp_path: Path) -> None:
    """Damage to the archive's directory, or to the digest itself, is found."""
    run = Run(tmp_path)
    previous, path = run.save(4), run.save(8)
    content = path.read_bytes()
    refused(path, b"", previous)
    refused(path, bytes(len(content)), previous)
    refused(path, content + b"\0", previous)
    for size in (1, 10, 59, 60, len(content) - 1, len(content) - 59, len(content) - 60):
        refused(path, content[:size], previous)
    for at in (*range(64), *range(len(content) - 128, len(content))):
        refused(path, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], previous)


def test_damaged_previous_one_is_not_suggested(tmp_path: Path) -> None:
    run, other = Run(tmp_path), Run(tmp_path)
    bad, newest = run.save(4), run.save(8)
    other.save(6)
    newest.write_bytes(b"")
    bad.write_bytes(bad.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="no good one before it is in its folder"):
        load_checkpoint(newest)
    good = Run(tmp_path, run=run.folder.run).save(2)
    with pytest.raises(CheckpointError, match=f"resume from the one before it, {good}$"):
        load_checkpoint(newest)
    escape = bad.rename(tmp_path / "x\x1b.pt")
    with pytest.raises(CheckpointError, match=r"x\\x1b\.pt is damaged"):
        load_checkpoint(escape)


def test_unfinished_files_of_killed_saves_are_removed(tmp_path: Path) -> None:
    left, writing = tmp_path / "step-000003-00000000.unfinished", tmp_path / "step-000004-11111111.unfinished"
    left.write_bytes(b"half")
    writing.write_bytes(b"half")
    run = Run(tmp_path)
    with writing.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the run that writes it does
        path = run.save(1)
        assert names(tmp_path) == sorted([path.name, writing.name])
    run.save(2)
    assert not list(tmp_path.glob("*.unfinished"))


def test_file_of_another_live_save_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    writing = tmp_path / f"step-000001-{run.folder.run}.unfinished"
    with checkpoint._create_locked(writing):
        with pytest.raises(FileExistsError):
            run.save(1)
        assert writing.exists()


@contextmanager
def before_the_lock(act: Callable[[], object]) -> Iterator[None]:
    """Let another run ``act`` after this one has opened a file and before it has locked it, the first time."""
    acts = [act]

    def late(call: Call) -> None:
        if acts:
            acts.pop()()

    with at_calls(late, fcntl.flock):
        yield


def test_file_is_made_again_if_removed_before_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "step-000001-abc.unfinished"

    def clean() -> None:
        checkpoint._recover(path, wait=False)
        assert not path.exists()

    with before_the_lock(clean), checkpoint._create_locked(path):
        checkpoint._recover(path, wait=False)
        assert path.exists()


def test_file_made_again_is_not_removed(tmp_path: Path) -> None:
    """A cleaning run opens a file that is gone, and has another's name, before it has the lock."""
    path = tmp_path / "step-000001-abc.unfinished"
    path.touch()

    def make_again() -> None:
        path.rename(tmp_path / "step-000001-abc.pt")
        path.touch()

    with before_the_lock(make_again):
        checkpoint._recover(path, wait=False)
    assert path.exists()


def test_load_waits_for_the_save_of_its_file(tmp_path: Path) -> None:
    path = Run(tmp_path, run="abc").save(1)
    content = path.read_bytes()
    path.unlink()
    unfinished = path.with_suffix(".unfinished")
    with ThreadPoolExecutor(1) as loader:
        with checkpoint._create_locked(unfinished) as file:
            loading = loader.submit(load_checkpoint, path)
            with pytest.raises(TimeoutError):
                loading.result(timeout=0.5)
            file.write(content)
            file.flush()
            unfinished.rename(path)
        assert loading.result(timeout=60)["step"] == 1


KILLED = """
import sys
from pathlib import Path
from tests.examples.test_checkpoint import Run
run = Run(Path(sys.argv[1]), run="abc")
print("saves", flush=True)
for step in range(1, 10**6):
    run.save(step)
"""


def test_killed_save_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while len(list(tmp_path.glob("*.pt"))) < 2 and process.poll() is None:
            pass
        process.send_signal(signal.SIGKILL)
    newest = checkpoint._checkpoints(tmp_path, "abc")[-1]
    assert load_checkpoint(newest[1])["step"] == newest[0]
    Run(tmp_path, run="abc").save(newest[0] + 1)
    assert not list(tmp_path.glob("*.unfinished"))
