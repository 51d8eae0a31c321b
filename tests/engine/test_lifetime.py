"""What weights show and when, and what ends with an optimizer: threads, hooks, ownership, memory."""

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
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.training import ADAM, EAGER_BACKEND, ENTRIES, ENTRY_IDS, OFFLOAD_ALL, Training, assert_same, batch, mlp
from zenflow_compile import ZenFlowAdamW, optimizer_of
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.workers import Job

pytestmark = pytest.mark.timeout(60)


def plain(training: Training) -> list[Tensor]:
    return [param.detach().clone() for param in training.model.parameters()]


def threads_of_ours() -> list[str]:
    """Those that this test started; another test's may live as long as its report."""
    names = [thread.name for thread in threading.enumerate() if thread.ident not in _before]
    return [name for name in names if name.startswith("zenflow")]


_before: set[int | None] = set()


@pytest.fixture(autouse=True)
def threads_before() -> None:
    gc.collect()
    _before.clear()
    _before.update(thread.ident for thread in threading.enumerate())


# What readers of weights see.


@pytest.mark.parametrize("staleness", [0, 1])
def test_state_dict_of_a_compiled_model_sees_what_is_due(staleness: int) -> None:
    options = {"update_interval": 1, "staleness": staleness}
    training = Training(EAGER_BACKEND, options).run(0, 3)
    twin = Training(EAGER_BACKEND, options).run(0, 3)
    for model in (training.call, training.model, training.model[0]):
        state = {name.removeprefix("_orig_mod."): value for name, value in model.state_dict().items()}
        names = [name for name, _ in training.model.named_parameters()]
        expected = dict(zip(names, twin.weights(), strict=True))
        prefix = "0." if model is training.model[0] else ""
        assert state
        for name, value in state.items():
            assert torch.equal(value, expected[prefix + name]), name


def test_weights_are_behind_until_somebody_reads_them() -> None:
    """The control of the tests above: without a reader, the host's lines wait for their first use."""
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    before = plain(training)
    after = training.weights()
    assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_evaluation_sees_the_last_step(entry: dict[str, Any] | None) -> None:
    training = Training(entry, {"update_interval": 1}).run(0, 3)
    training.model.eval()
    inputs, _ = batch(77)
    with torch.no_grad():
        seen = training.call(inputs)
        training.optimizer.synchronize()
        assert torch.equal(seen, training.model(inputs))


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_two_forwards_alive_across_an_update_raise(entry: dict[str, Any] | None) -> None:
    """The older one saved weights that are no more; using the new ones in its backward would be silently wrong."""
    training = Training(entry, {"update_interval": 1}).run(0, 2)
    first, second = training.loss(2), training.loss(3)
    second.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.loss(4)  # lands what the step left for the first use
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_two_forwards_alive_without_an_update_are_fine(entry: dict[str, Any] | None) -> None:
    training = Training(entry, {"update_interval": 1}).run(0, 2)
    first, second = training.loss(2), training.loss(3)
    second.backward()
    first.backward()
    training.optimizer.step()


def test_training_outside_of_the_graph_in_between() -> None:
    """A forward that fetches nothing, when a re-selection has not landed: no line changes hands under a gradient."""
    options = {"update_interval": 1, "select_strategy": "step", "select_interval": 1, "topk_ratio": 0.3}
    training = Training(EAGER_BACKEND, options)
    reference = mlp()
    reference_optimizer = torch.optim.AdamW(reference.parameters(), **ADAM)
    for step in range(12):
        training.call = training.model if step % 3 == 2 else torch.compile(training.model, **EAGER_BACKEND)
        training.optimizer.synchronize()  # outside of graphs it is the reader who asks
        training.step(step)
        inputs, targets = batch(step)
        nn.functional.cross_entropy(reference(inputs), targets).backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
    torch.testing.assert_close(training.weights(), list(reference.parameters()), atol=1e-5, rtol=0)
    assert training.optimizer.engine.selections > 10


def test_a_pending_selection_waits_where_its_forward_fetched_nothing() -> None:
    options = {"update_interval": 1, "select_strategy": "step", "select_interval": 1, "topk_ratio": 0.3}
    training = Training(EAGER_BACKEND, options).run(0, 3)
    training.call = training.model
    for step in range(3, 6):
        training.step(step)
    state = training.optimizer.state_dict()["state"]
    weights = training.weights()
    for index, offloaded in training.optimizer.engine.offloaded.items():
        assert torch.equal(state[index]["master"], weights[index])
        assert offloaded.device.steps == offloaded.host.taken == 6


# Ends.


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_closing_applies_waiting_windows(entry: dict[str, Any] | None) -> None:
    training = Training(entry, {"update_interval": 4}).run(0, 4)
    waiting = {i for i, each in training.optimizer.engine.offloaded.items() if each.host.open}
    before = training.weights()
    assert waiting
    training.optimizer.close()
    after = plain(training)
    moved = {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)}
    assert moved == waiting
    assert threads_of_ours() == []


def test_closing_leaves_weights_that_somebody_loaded() -> None:
    """The best checkpoint, loaded at the end of training, is what remains."""
    training = Training(EAGER_BACKEND, {"update_interval": 4}).run(0, 6)
    best = {name: torch.randn_like(value) for name, value in training.model.state_dict().items()}
    training.step(6)
    training.model.load_state_dict(best)
    training.optimizer.close()
    assert_same(plain(training), list(best.values()))


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_a_closed_optimizer_refuses_everything(entry: dict[str, Any] | None) -> None:
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
def test_after_closing_the_model_trains_with_another_optimizer(entry: dict[str, Any] | None) -> None:
    training = Training(entry).run(0, 2)
    training.optimizer.close()
    training.optimizer = ZenFlowAdamW(training.model.parameters(), **ADAM, **OFFLOAD_ALL)
    before = training.weights()
    training.run(2, 6)
    assert not any(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
    training.optimizer.close()
    training.backward(7)
    assert all(param.grad is not None for param in training.model.parameters())


def test_the_block_form_closes() -> None:
    training = Training(None, {"update_interval": 4})
    with training.optimizer as optimizer:
        assert optimizer is training.optimizer
        training.run(0, 3)
        before = training.weights()
    assert not torch.equal(before[0], training.model[0].weight)
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()


def test_after_an_error_the_block_form_flushes_nothing() -> None:
    training = Training(None, {"update_interval": 4}).run(0, 3)
    before = training.weights()
    with pytest.raises(KeyError), training.optimizer:
        raise KeyError
    assert_same(plain(training), before)
    assert threads_of_ours() == []


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_a_collected_optimizer_ends_its_threads_and_lands_what_is_due(entry: dict[str, Any] | None) -> None:
    expected = Training(entry, {"update_interval": 1}).run(0, 3).weights()
    training = Training(entry, {"update_interval": 1}).run(0, 3)
    gc.collect()
    assert threads_of_ours()
    reference = weakref.ref(training.optimizer.engine)
    del training.optimizer
    gc.collect()
    assert reference() is None
    assert threads_of_ours() == []
    assert_same(plain(training), expected)
    assert all(ops.owner_of(param) is None for param in training.model.parameters())


def test_collected_by_its_own_worker() -> None:
    """The collector runs in any thread, and a worker that waited for itself would wait for ever."""
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 2)
    engine = training.optimizer.engine
    holder = [training.optimizer]
    del training.optimizer
    dropped = threading.Event()

    def drop() -> int:
        holder.clear()
        gc.collect()
        dropped.set()
        return 0

    engine.roster.transport.workers.submit(Job([drop], deadline=-1, step=0, param="", ready=lambda: None))
    assert dropped.wait(20)
    for thread in threading.enumerate():
        if thread.name == "zenflow-close":
            thread.join(20)
    assert engine.closed
    assert threads_of_ours() == []


def test_leaving_the_interpreter_with_work_in_flight() -> None:
    """Nothing hangs, and PyTorch is not called when it has been taken apart already."""
    script = """
from tests.engine.training import EAGER_BACKEND, Training
training = Training(EAGER_BACKEND, {"update_interval": 1, "staleness": 1}).run(0, 3)
other = Training(None, {"staleness": 1})
other.run(0, 3)
training.backward(3)
print("end")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "end"
    assert (done.returncode, done.stderr.strip()) == (0, "")


# Copies.


def test_a_copied_model_is_nobodys() -> None:
    training = Training(EAGER_BACKEND).run(0, 2)
    twin = copy.deepcopy(training.model)
    assert all(ops.owner_of(param) is None for param in twin.parameters())
    nn.functional.cross_entropy(twin(batch(0)[0]), batch(0)[1]).backward()
    assert all(param.grad is not None for param in twin.parameters())
    assert not training.optimizer.engine.has_gradients


def test_an_optimizer_is_not_copied() -> None:
    optimizer = Training(None).run(0, 1).optimizer
    for copies_it in (copy.copy, copy.deepcopy, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(TypeError, match=r"state_dict\(\)"):
            copies_it(optimizer)
    optimizer.synchronize()


# Backwards of all kinds.


class Product(nn.Module):
    """Its backward reads both weights themselves, so that their updates are on its tail."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, 32) / 4)
        self.bias = nn.Parameter(torch.zeros(32))
        self.second = nn.Parameter(torch.randn(32, 10) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first + self.bias) @ self.second


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_failed_backward_of_the_implicit_form_is_dropped(max_grad_norm: float | None) -> None:
    """Parameters that were updated before it failed have made their step; nothing is applied twice or kept."""
    torch.manual_seed(1)
    model = Product()
    keywords = {"inner": "eager", **ADAM, **OFFLOAD_ALL, "update_interval": 2, "max_grad_norm": max_grad_norm}
    call = torch.compile(model, backend="zenflow", options=keywords)

    def loss(step: int) -> Tensor:
        inputs = batch(step)[0].requires_grad_()
        return nn.functional.cross_entropy(call(inputs), batch(step)[1])

    for step in range(3):
        loss(step).backward()
    optimizer = optimizer_of(call)
    steps = optimizer.engine.step
    handle = model.bias.register_post_accumulate_grad_hook(lambda param: 1 / 0)
    failing = loss(3)
    with pytest.raises(ZeroDivisionError):
        failing.backward()
    handle.remove()
    updated = [each.plan.name for each in optimizer.engine.offloaded.values() if each.updated]
    assert bool(updated) == (max_grad_norm is None)
    loss(4).backward()
    optimizer.synchronize()
    assert optimizer.engine.step == steps + 1 + bool(updated)
    assert all(param.grad is None for param in model.parameters())
    for each in optimizer.engine.offloaded.values():
        attempts = each.host.taken + len(each.host.open)
        assert each.device.steps == attempts == steps + 1 + (each.plan.name in updated)
        assert len(each.host.open) < each.plan.interval
    before = [param.detach().clone() for param in model.parameters()]
    for step in range(5, 7):
        loss(step).backward()
    optimizer.synchronize()
    for old, new in zip(before, model.parameters(), strict=True):
        assert 0 < (new - old).abs().max() < 0.05


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.second, torch.tanh(x), use_reentrant=True)


@pytest.mark.parametrize("declared", [None, 1, 2])
def test_reentrant_checkpointing(declared: int | None) -> None:
    """Every segment is a backward of its own, inside the other: none of them is the end of the step."""
    options = {"update_interval": 1, "gradient_accumulation_steps": declared}
    training = Training(None, options, build=lambda dtype: (torch.manual_seed(1), Reentrant())[1])
    torch.manual_seed(1)
    reference = Reentrant()
    adam = torch.optim.AdamW(reference.parameters(), **ADAM)
    for step in range(4):
        for _ in range(declared or 1):
            training.backward(step)
            nn.functional.cross_entropy(reference(batch(step)[0]), batch(step)[1]).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        adam.step()
        adam.zero_grad()
    torch.testing.assert_close(training.weights(), list(reference.parameters()), atol=1e-5, rtol=0)


def test_reentrant_checkpointing_of_compiled_blocks_without_an_optimizer_object() -> None:
    torch.manual_seed(1)
    model = Reentrant()
    options = {"inner": "eager", **ADAM, **OFFLOAD_ALL}
    model.first = torch.compile(model.first, backend="zenflow", options=options)
    model.second = torch.compile(model.second, backend="zenflow", options=options)
    loss = nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1])
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss.backward()
