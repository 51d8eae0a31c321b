"""The end of training: ``total_steps`` flushes by itself, and windows that nothing has applied are named at exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.settings import settings
from tests.support.training import (
    ADAM,
    EAGER_BACKEND,
    ENTRIES,
    ENTRY_IDS,
    OFFLOAD_ALL,
    Training,
    assert_same,
    batch,
    mlp,
)
from zenflow_compile import optimizer_of
from zenflow_compile.options.options import Options

pytestmark = pytest.mark.timeout(120)

SETTINGS = settings("windows stale_windows bounded_auto summed_windows tightly_clipped each_step")
END = 6


def flushed_at(step: int, entry: dict[str, Any] | None, options: dict[str, Any]) -> Training:
    training = Training(entry, options).run(0, step)
    training.optimizer.flush()
    return training


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_last_step_flushes(name: str, entry: dict[str, Any] | None) -> None:
    """And training goes on as after ``flush()``: with empty windows, and no second flush."""
    options = SETTINGS[name]
    ours = Training(entry, {**options, "total_steps": END}).run(0, END)
    expected = flushed_at(END, entry, options)
    assert not ours.optimizer.engine.unapplied
    assert_same(ours.weights_as_they_are(), expected.weights_as_they_are())
    assert_same(ours.run(END, 2 * END + 1).weights(), expected.run(END, 2 * END + 1).weights())
    assert bool(ours.optimizer.engine.unapplied) == (name != "each_step")


def test_steps_before_the_last_do_not_flush() -> None:
    ours = Training(EAGER_BACKEND, {"total_steps": END}).run(0, END - 1)
    assert ours.optimizer.engine.unapplied
    assert_same(ours.weights(), Training(EAGER_BACKEND).run(0, END - 1).weights())


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("saved_with", [None, END], ids=["plain_state", "same_option"])
def test_steps_before_a_resume_count(saved_with: int | None, entry: dict[str, Any] | None) -> None:
    saved = Training(entry, {"total_steps": saved_with}).run(0, 3).saved()
    resumed = Training(entry, {"total_steps": END}).load(saved).run(3, END)
    assert not resumed.optimizer.engine.unapplied
    assert_same(resumed.weights_as_they_are(), flushed_at(END, entry, {}).weights_as_they_are())


@pytest.mark.parametrize("declared", [None, 2])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_last_step_in_the_backward_flushes(clip: float | None, declared: int | None) -> None:
    found = []
    for total in (END, None):
        torch._dynamo.reset()
        model = mlp()
        options = {"max_grad_norm": clip, "gradient_accumulation_steps": declared, "total_steps": total}
        call = torch.compile(model, backend="zenflow", options={"inner": "eager", **ADAM, **OFFLOAD_ALL, **options})
        for step in range(END * (declared or 1)):
            inputs, targets = batch(step)
            nn.functional.cross_entropy(call(inputs), targets).backward()
        optimizer = optimizer_of(call)
        assert optimizer is not None
        assert bool(optimizer.engine.unapplied) == (total is None)
        optimizer.flush()
        found.append([param.detach().clone() for param in model.parameters()])
        inputs, targets = batch(99)
        nn.functional.cross_entropy(call(inputs), targets).backward()
    assert_same(*found)


def test_steps_without_gradients_do_not_count() -> None:
    ours = Training(None, {"total_steps": END}).run(0, END - 1)
    ours.optimizer.step()
    assert ours.optimizer.engine.unapplied
    ours.step(END - 1)
    assert not ours.optimizer.engine.unapplied


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), (2.5, TypeError), (True, TypeError)])
def test_bad_total_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"total_steps={value}.*>= 1.*or None"):
        Options(total_steps=value)


PROGRAM = """
import torch
from tests.support.training import EAGER_BACKEND, Training

def main(**options):
    training = Training(EAGER_BACKEND, options).run(0, 6)
    training.saved()
    return training
"""
ENDS: dict[str, str] = {"alive": "kept = main()", "collected": "main()", "two": "main(); main()"}
APPLIED: dict[str, str] = {
    "flushed": "kept = main(); kept.optimizer.flush()",
    "closed": "main().optimizer.close()",
    "total_steps": "main(total_steps=6)",
    "exact": "kept = main(update_interval=1); main(update_interval=1)",
    "child": "import os; kept = main(); os.fork() or exit(); kept.optimizer.close(); os.wait()",
}


def errors_of(end: str) -> str:
    """What the program prints to stderr."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "always", "-c", PROGRAM + end]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("end", ENDS)
def test_exit_names_windows_that_were_not_applied(end: str) -> None:
    """One warning, for a program whose optimizer is alive at its end, or was collected with a function's names."""
    text = errors_of(ENDS[end])
    assert text.count("UserWarning") == 1
    params = 2 * (1 + (end == "two"))
    assert f"the update windows of {params} parameters were never applied, with gradients of up to 3 steps" in text
    assert "call optimizer.flush() before the last save, or pass total_steps=" in text


@pytest.mark.parametrize("end", APPLIED)
def test_exit_is_silent_when_all_is_applied(end: str) -> None:
    assert errors_of(APPLIED[end]) == ""
