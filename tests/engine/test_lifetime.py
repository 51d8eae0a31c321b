"""Threads, hooks, ownership and memory of an optimizer end with it."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training import (
    ADAM,
    EAGER_BACKEND,
    ENTRIES,
    ENTRY_IDS,
    IN_FLIGHT,
    OFFLOAD_ALL,
    Training,
    assert_same,
    batch,
)
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.host.workers import Job

pytestmark = pytest.mark.timeout(60)


def threads_of_ours() -> list[str]:
    """Return the threads that this test started; another test's may live as long as its report."""
    names = [thread.name for thread in threading.enumerate() if thread.ident not in _before]
    return [name for name in names if name.startswith("zenflow")]


_before: set[int | None] = set()


@pytest.fixture(autouse=True)
def threads_before() -> None:
    gc.collect()
    _before.clear()
    _before.update(thread.ident for thread in threading.enumerate())


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_close_applies_open_windows(entry: dict[str, Any] | None) -> None:
    training = Training(entry, {"update_interval": 4}).run(0, 4)
    waiting = {i for i, each in training.optimizer.engine.offloaded.items() if each.host.open}
    before = training.weights()
    assert waiting
    training.optimizer.close()
    after = training.weights_as_they_are()
    moved = {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)}
    assert moved == waiting
    assert threads_of_ours() == []


def test_close_keeps_loaded_weights() -> None:
    """The best checkpoint, loaded at the end of training, is the final model."""
    training = Training(EAGER_BACKEND, {"update_interval": 4}).run(0, 6)
    best = {name: torch.randn_like(value) for name, value in training.model.state_dict().items()}
    training.step(6)
    training.model.load_state_dict(best)
    training.optimizer.close()
    assert_same(training.weights_as_they_are(), list(best.values()))


def test_close_keeps_weights_that_a_forward_has_read() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 4}).run(0, 10)
    training.optimizer.synchronize()
    best = {name: 1.01 * value for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(best)
    with torch.no_grad():
        training.loss(10)
    with pytest.warns(UserWarning, match="were dropped"):
        training.optimizer.close()
    assert_same(training.weights_as_they_are(), list(best.values()))


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_close_applies_windows_of_a_loaded_state(weights_first: bool, dtype: torch.dtype) -> None:
    training = Training(None, {"update_interval": 4}, dtype).run(0, 6)
    saved = training.saved()
    training.optimizer.close()
    resumed = Training(None, {"update_interval": 4}, dtype).load(saved, weights_first=weights_first)
    before = resumed.weights_as_they_are()
    resumed.optimizer.close()
    assert_same(resumed.weights_as_they_are(), training.weights_as_they_are())
    assert not all(torch.equal(a, b) for a, b in zip(resumed.weights_as_they_are(), before, strict=True))


def test_close_flushes_no_window_to_other_weights() -> None:
    """A state was loaded without its weights: its open windows are not applied to these."""
    training = Training(None, {"update_interval": 4}).run(0, 6)
    saved = training.optimizer.state_dict()
    resumed = Training(None, {"update_interval": 4})
    before = resumed.weights_as_they_are()
    resumed.optimizer.load_state_dict(saved)
    resumed.optimizer.close()
    assert_same(resumed.weights_as_they_are(), before)


@pytest.mark.tier1
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_closed_optimizer_refuses_every_call(entry: dict[str, Any] | None) -> None:
    training = Training(entry).run(0, 2)
    optimizer = training.optimizer
    state = optimizer.state_dict()
    optimizer.close()
    optimizer.close()
    param = torch.nn.Parameter(torch.zeros(4, 4))
    calls: list[Callable[[], Any]] = [
        optimizer.step,
        optimizer.zero_grad,
        optimizer.synchronize,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(state),
        lambda: optimizer.add_param_group({"params": [param]}),
        lambda: optimizer.engine,
    ]
    training.model[0].bias.grad = torch.ones_like(training.model[0].bias)
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert training.model[0].bias.grad is not None
    assert len(optimizer.param_groups) == 1
    assert "ZenFlowAdamW" in repr(optimizer)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_closed_model_trains_with_another_optimizer(entry: dict[str, Any] | None) -> None:
    training = Training(entry).run(0, 2)
    training.optimizer.close()
    training.optimizer = ZenFlowAdamW(training.model.parameters(), **ADAM, **OFFLOAD_ALL)
    before = training.weights()
    training.run(2, 6)
    assert not any(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
    training.optimizer.close()
    training.backward(7)
    assert all(param.grad is not None for param in training.model.parameters())


def test_with_block_closes() -> None:
    training = Training(None, {"update_interval": 4})
    with training.optimizer as optimizer:
        assert optimizer is training.optimizer
        training.run(0, 3)
        before = training.weights()
    assert not torch.equal(before[0], training.model[0].weight)
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()


def test_with_block_flushes_nothing_after_an_error() -> None:
    training = Training(None, {"update_interval": 4}).run(0, 3)
    before = training.weights()
    with pytest.raises(KeyError), training.optimizer:
        raise KeyError
    assert_same(training.weights_as_they_are(), before)
    assert threads_of_ours() == []


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_collected_optimizer_applies_and_ends_threads(entry: dict[str, Any] | None) -> None:
    expected = Training(entry, {"update_interval": 1}).run(0, 3).weights()
    training = Training(entry, {"update_interval": 1}).run(0, 3)
    gc.collect()
    assert threads_of_ours()
    reference = weakref.ref(training.optimizer.engine)
    del training.optimizer
    gc.collect()
    assert reference() is None
    assert threads_of_ours() == []
    assert_same(training.weights_as_they_are(), expected)
    assert all(ops.owner_of(param) is None for param in training.model.parameters())


def test_lane_may_collect_the_optimizer() -> None:
    """The collector runs in any thread, and a lane that joined itself would deadlock."""
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 2)
    engine = training.optimizer.engine
    holder = [training.optimizer]
    del training.optimizer
    dropped = threading.Event()

    class Work:
        flag = error = None

        def done(self) -> bool:
            return False

        def wait(self) -> None:
            holder.clear()
            gc.collect()
            dropped.set()

    nothing = torch.empty(0)
    engine.registry.transport.to_device.submit(nothing, nothing, step=0, param="", after=Work())
    assert dropped.wait(20)
    for thread in threading.enumerate():
        if thread.name == "zenflow-close":
            thread.join(20)
    assert engine.core.closed
    assert threads_of_ours() == []


def test_interpreter_exits_with_work_in_flight() -> None:
    """Exit does not hang, and calls no PyTorch after its teardown."""
    script = """
from tests.support.training import EAGER_BACKEND, Training
training = Training(EAGER_BACKEND, {"update_interval": 1, "staleness": 1}).run(0, 3)
other = Training(None, {"staleness": 1})
other.run(0, 3)
training.backward(3)
print("end")
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore:the update windows", "-c", script]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "end"
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_error_before_the_first_use_ends_cleanly() -> None:
    """The traceback keeps the optimizer until the interpreter has cleared modules."""
    script = """
from tests.support.training import Training
training = Training()
raise KeyboardInterrupt
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert "Exception ignored" not in done.stderr
    assert "KeyboardInterrupt" in done.stderr


def test_copied_model_has_no_owner() -> None:
    training = Training(EAGER_BACKEND).run(0, 2)
    twin = copy.deepcopy(training.model)
    assert all(ops.owner_of(param) is None for param in twin.parameters())
    nn.functional.cross_entropy(twin(batch(0)[0]), batch(0)[1]).backward()
    assert all(param.grad is not None for param in twin.parameters())
    assert not training.optimizer.engine.steps.has_gradients


def test_saved_parameters_have_no_owner() -> None:
    """The test pickles ``Parameter`` objects, not the plain tensors of a state dict."""
    training = Training(EAGER_BACKEND).run(0, 2)
    with pytest.raises(RuntimeError, match=IN_FLIGHT):
        torch.save(dict(training.model.named_parameters()), io.BytesIO())
    training.optimizer.synchronize()
    file = io.BytesIO()
    torch.save(dict(training.model.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(ops.owner_of(param) is None for param in loaded.values())
    file = io.BytesIO()
    torch.save(training.model, file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    call = torch.compile(model, **EAGER_BACKEND)
    nn.functional.cross_entropy(call(batch(0)[0]), batch(0)[1]).backward()
    assert all(param.grad is not None for param in model.parameters())
    assert not training.optimizer.engine.steps.has_gradients


def test_optimizer_copy_is_refused() -> None:
    optimizer = Training(None).run(0, 1).optimizer
    for copies_it in (copy.copy, copy.deepcopy, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(TypeError, match=r"state_dict\(\)"):
            copies_it(optimizer)
    optimizer.synchronize()


@pytest.mark.parametrize("staleness", [0, 1])
def test_ended_jobs_are_freed(staleness: int) -> None:
    """Each job of a parameter waits for the one before it, where updates are stale."""

    def jobs() -> int:
        gc.collect()
        return sum(isinstance(each, Job) for each in gc.get_objects())

    before = jobs()
    training = Training(EAGER_BACKEND, {"update_interval": 1, "staleness": staleness}).run(0, 20)
    assert jobs() - before <= 4 * len(training.optimizer.engine.offloaded)  # those that read or write a buffer
    training.optimizer.close()
