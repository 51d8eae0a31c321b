"""In a forked child the optimizer refuses its use, and the directory lock ends with the parent."""

from __future__ import annotations

import atexit
import copy
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import in_child
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, LARGEST_STATE, Training, assert_same, batch
from zenflow_compile.runtime.nvme.state_file import ScratchDirectory

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

ROOT = Path(__file__).parents[2]


# In CUDA builds the autograd engine has threads for devices, and refuses a backward after a fork before we are asked.
AUTOGRADS_OWN_REFUSAL = "autograd's threading in combination with fork-based multiprocessing"

USES: dict[str, Callable[[Training], object]] = {
    "backward": lambda training: training.backward(9),
    "step": lambda training: training.optimizer.step(),
    "state_dict": lambda training: training.optimizer.state_dict(),
}


@pytest.mark.tier1
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("options", [{"update_interval": 2}, {"policy": "zero_infinity"}], ids=["memory", "files"])
def test_forked_child_refuses_every_use(entry: dict[str, Any] | None, options: dict[str, Any], tmp_path: Path) -> None:
    if "policy" in options:
        options = {**options, "nvme_path": tmp_path}
    training = Training(entry, options).run(0, 3)
    training.backward(3)
    for name, use in USES.items():
        told = in_child(lambda use=use: use(training))
        if name == "backward" and AUTOGRADS_OWN_REFUSAL in told:
            continue
        assert told.startswith("RuntimeError: this process was forked from the one that trains"), (name, told)
        assert "spawn" in told
    assert in_child(training.optimizer.zero_grad) == "returned None"
    assert in_child(training.optimizer.close) == "returned None"
    training.optimizer.step()
    training.optimizer.zero_grad()
    expected = Training(entry, {"policy": "zero_offload"} if "policy" in options else options).run(0, 5)
    assert_same(training.run(4, 5).weights(), expected.weights())
    training.optimizer.close()


def _exit(training: Training) -> None:
    """End as a script does: with the functions that are registered for the end."""
    signal.alarm(10)
    atexit._run_exitfuncs()


def _forget(training: Training) -> None:
    training.__dict__.clear()
    gc.collect()


ANYTHING: dict[str, Callable[[Training], object]] = {
    **USES,
    "whole step": lambda training: training.step(9),
    "zero_grad": lambda training: training.optimizer.zero_grad(),
    "synchronize": lambda training: training.optimizer.synchronize(),
    "flush": lambda training: training.optimizer.flush(),
    "close": lambda training: training.optimizer.close(),
    "evaluation": lambda training: training.call(batch(0)[0]).sum().item(),
    "collection": _forget,
    "end": _exit,
}
FORKED = {
    "windows": {"update_interval": 2},
    "files": {"policy": "zero_infinity", "host_window_bytes": LARGEST_STATE},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2},
}


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("options", FORKED.values(), ids=FORKED)
def test_nothing_in_a_child_crashes_or_hangs(
    entry: dict[str, Any] | None, options: dict[str, Any], tmp_path: Path
) -> None:
    """Updates are in flight at each fork; the parent trains on as if there had been none."""
    if options.get("policy") == "zero_infinity":
        options = {**options, "nvme_path": tmp_path}
    training = Training(entry, {**options, "workers": 2}).run(0, 2)
    step = 2
    for name, action in ANYTHING.items():
        training.step(step)
        step += 1
        told = in_child(lambda action=action: action(training))
        assert not told.startswith("signal"), f"{name}: {told}"
    weights = training.run(step, step + 2).weights()
    training.optimizer.close()
    undisturbed = Training(entry, {**options, "workers": 2}).run(0, step + 2)
    assert_same(weights, undisturbed.weights())
    undisturbed.optimizer.close()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_forked_child_reads_complete_weights(entry: dict[str, Any] | None) -> None:
    training = Training(entry, {"update_interval": 2}).run(0, 3)
    weights = sum(float(weight.sum()) for weight in training.weights())

    def read() -> float:
        with torch.no_grad():
            training.call(batch(0)[0])
            training.model(batch(0)[0])  # its modules have hooks, where the model is compiled
        read_by_copy = copy.deepcopy(training.model).state_dict()
        return sum(float(value.sum()) for value in read_by_copy.values())

    assert in_child(read) == f"returned {weights}"


@pytest.mark.tier1
@pytest.mark.parametrize("read", ["compiled", "uncompiled", "state_dict", "deepcopy"])
def test_forked_child_refuses_weights_before_an_update(read: str) -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    with torch.no_grad():
        training.call(batch(0)[0])  # compiled before the fork
    training.step(3)
    assert any(each.updates.due(4) for each in training.optimizer.engine.offloaded.values())
    actions: dict[str, Callable[[], object]] = {
        "compiled": lambda: training.call(batch(0)[0]),
        "uncompiled": lambda: training.model(batch(0)[0]),
        "state_dict": training.model.state_dict,
        "deepcopy": lambda: copy.deepcopy(training.model),
    }
    told = in_child(actions[read])
    assert told.startswith("RuntimeError: this process was forked")
    assert "an update of the weights was on its way" in told
    training.optimizer.close()


ORPHAN = """
import os, sys, torch
from zenflow_compile import ZenFlowAdamW
params = [torch.nn.Parameter(torch.zeros(64, 64))]
options = {"policy": "zero_infinity", "nvme_path": sys.argv[1], "min_offload_size": 100}
optimizer = ZenFlowAdamW(params, **options)
optimizer.synchronize()
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_killed_runs_child_releases_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ORPHAN, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        child = int(process.stdout.readline())
        with pytest.raises(ValueError, match=f"in use by another optimizer, of process {process.pid};"):
            ScratchDirectory(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(child, 0)  # the child lives
        ScratchDirectory(tmp_path).close()
        assert not list(tmp_path.iterdir())
        process.stdin.close()
