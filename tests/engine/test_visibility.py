"""Readers of weights see due updates, and graphs never use weights that changed under them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.training import (
    ADAM,
    EAGER_BACKEND,
    ENTRIES,
    ENTRY_IDS,
    IN_FLIGHT,
    Training,
    assert_same,
    batch,
    mlp,
    take_step,
)
from zenflow_compile.runtime.checkpoint import save_load as checkpoints
from zenflow_compile.runtime.device_updates import column_ops

pytestmark = pytest.mark.timeout(60)


def without_modules(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Run the forward of ``mlp`` as a function of its parameters."""

    def forward(x: Tensor) -> Tensor:
        for layer in model[::2]:
            x = nn.functional.linear(x, layer.weight, layer.bias)
            x = x if layer is model[-1] else nn.functional.gelu(x)
        return x

    return forward


@pytest.mark.parametrize("staleness", [0, 1])
def test_compiled_models_state_dict_is_current(staleness: int) -> None:
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


def test_reads_and_writes_raise_until_a_reader_applies() -> None:
    """This is the control of the tests above: without a reader, no update is applied before its first use."""
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    with pytest.raises(RuntimeError, match=IN_FLIGHT):
        training.weights_as_they_are()
    with torch.no_grad(), pytest.raises(RuntimeError, match=IN_FLIGHT):
        training.model[0].weight.zero_()
    assert_same(training.weights(), Training(None, {"update_interval": 1}).run(0, 3).weights())


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
def test_backward_of_an_older_forward_raises(entry: dict[str, Any] | None) -> None:
    """The older forward saved weights that were replaced since; using the new ones in its backward would be wrong."""
    training = Training(entry, {"update_interval": 1}).run(0, 2)
    first, second = training.loss(2), training.loss(3)
    take_step(second, training.optimizer)
    training.loss(4)  # applies the updates that the step left for the first use
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_two_forwards_without_an_update_are_fine(entry: dict[str, Any] | None) -> None:
    training = Training(entry, {"update_interval": 1}).run(0, 2)
    first, second = training.loss(2), training.loss(3)
    second.backward()
    first.backward()
    training.optimizer.step()


def test_eager_training_between_compiled_steps() -> None:
    """An eager forward fetches nothing while a re-selection is not applied: no slice changes sides under a gradient."""
    options = {"update_interval": 1, "select_interval": 1, "topk_ratio": 0.3}
    training = Training(EAGER_BACKEND, options)
    reference = mlp()
    reference_optimizer = torch.optim.AdamW(reference.parameters(), **ADAM)
    for step in range(12):
        training.call = training.model if step % 3 == 2 else torch.compile(training.model, **EAGER_BACKEND)
        training.optimizer.synchronize()  # outside of graphs it is the reader who asks
        training.step(step)
        inputs, targets = batch(step)
        take_step(nn.functional.cross_entropy(reference(inputs), targets), reference_optimizer)
    torch.testing.assert_close(training.weights(), list(reference.parameters()), atol=1e-5, rtol=0)
    assert training.optimizer.engine.uploads.selections > 10


def dense_state(training: Training) -> list[dict[str, Any]]:
    """Return the state without applying due updates: a reader would apply them and change the run."""
    engine = training.optimizer.engine
    for offloaded in engine.offloaded.values():
        offloaded.host.wait()
    return [checkpoints.dense_state(offloaded) for offloaded in engine.offloaded.values()]


def test_uncompiled_call_sees_due_updates() -> None:
    options = {"update_interval": 1}
    expected = Training(None, options).run(0, 5).weights()
    training = Training(EAGER_BACKEND, options).run(0, 3)
    compiled, training.call = training.call, training.model
    training.step(3)
    training.call = compiled
    assert_same(training.run(4, 5).weights(), expected)


def test_forward_with_old_weights_raises() -> None:
    """Code that calls no module reads weights that an update in flight replaces; after synchronize() it is right."""
    options = {"update_interval": 1}
    expected = Training(None, options).run(0, 5).weights()
    training = Training(EAGER_BACKEND, options).run(0, 3)
    compiled, training.call = training.call, without_modules(training.model)
    with pytest.raises(RuntimeError, match=IN_FLIGHT):
        training.step(3)
    training.optimizer.synchronize()
    training.step(3)
    training.call = compiled
    assert_same(training.run(4, 5).weights(), expected)


def test_gradient_of_old_weights_raises() -> None:
    """Its forward came before the step, and its backward reads no weight that an update in flight replaces."""
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 2)
    training.optimizer.synchronize()
    older = nn.functional.linear(batch(9)[0], training.model[0].weight).sum()
    training.step(2)
    with pytest.raises(RuntimeError, match=r"old weights; call optimizer\.synchronize"):
        older.backward()


def test_write_over_an_update_in_flight_raises() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    with torch.no_grad(), pytest.raises(RuntimeError, match=IN_FLIGHT):
        training.model[0].weight.clamp_(-1e9, 1e9)
    training.step(3)
    assert_same(training.weights(), Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 4).weights())


@pytest.mark.parametrize("interval", [1, 4])
def test_write_after_synchronize_changes_nothing(interval: int) -> None:
    options = {"update_interval": interval}
    expected = Training(EAGER_BACKEND, options).run(0, 8).weights()
    training = Training(EAGER_BACKEND, options)
    for step in range(8):
        training.step(step)
        training.optimizer.synchronize()
        with torch.no_grad():
            for param in training.model.parameters():
                param.clamp_(-1e9, 1e9)
    assert_same(training.weights(), expected)


@pytest.mark.parametrize("interval", [1, 4])
def test_weights_swapped_for_an_evaluation(interval: int) -> None:
    """Averaged weights are put in, read by a forward, and taken out again: fp32 masters of bf16 weights stay."""
    options = {"update_interval": interval}
    expected = Training(EAGER_BACKEND, options, torch.bfloat16).run(0, 8).weights()
    training = Training(EAGER_BACKEND, options, torch.bfloat16)
    for step in range(8):
        training.step(step)
        own = training.weights()
        with torch.no_grad():
            torch._foreach_mul_(list(training.model.parameters()), 0.5)
            training.loss(step)
            torch._foreach_copy_(list(training.model.parameters()), own)
    assert_same(training.weights(), expected)


def test_every_write_bumps_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write below autograd, so neither of the two writers may count on an operator to tell."""
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 2)
    training.optimizer.synchronize()
    monkeypatch.setattr(column_ops, "merge_columns", lambda *args: None)
    monkeypatch.setattr(column_ops, "update_columns_", lambda *args, **keywords: None)
    weights = [each.param for each in training.optimizer.engine.offloaded.values()]
    versions = [[weight._version for weight in weights]]
    training.step(2)
    versions.append([weight._version for weight in weights])
    training.optimizer.synchronize()
    versions.append([weight._version for weight in weights])
    for before, after in itertools.pairwise(versions):
        assert all(new > old for old, new in zip(before, after, strict=True))
