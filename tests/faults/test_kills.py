"""A run that is killed again and again ends with the weights of one that was not."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
STEPS = 400
KILLS = 12


def run(folder: Path, policy: str, *, kill_after: float | None = None) -> bool:
    """Run until the end, or kill the run so many seconds after its training has begun. Returns whether it ended."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.killed_run", str(folder), policy, str(STEPS)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n", "the directory or the checkpoint is not usable"
        if kill_after is not None:
            time.sleep(kill_after)
            process.send_signal(signal.SIGKILL)
        return process.wait(120) == 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["zenflow", "zero_infinity", "weights in files", "deep_optimizer_states"])
def test_killed_run_ends_like_an_undisturbed_one(policy: str, tmp_path: Path) -> None:
    draw = random.Random(policy)
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    killed.mkdir()
    undisturbed.mkdir()
    kills = 0
    for _ in range(KILLS):
        kills += not run(killed, policy, kill_after=draw.uniform(0.0, 0.5))
    assert kills > KILLS // 2
    assert run(killed, policy)
    assert run(undisturbed, policy)
    pair = (torch.load(folder / "weights") for folder in (killed, undisturbed))
    assert all(map(torch.equal, *pair))
