"""An optimizer over parameters of an earlier one takes them over: that one applies what it has, and ends."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zenflow_compile
from tests.engine.test_failures import break_update
from tests.engine.test_forks import AUTOGRADS_OWN_REFUSAL
from tests.support.host import host_memory
from tests.support.processes import in_child
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
    take_step,
)
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime import ops

pytestmark = pytest.mark.timeout(60)

TAKES_OVER = "this optimizer takes over parameters of an earlier one, which raises from now on"
HAS_ENDED = "this ZenFlowAdamW has ended: another one, created later, has taken"


def taken_over(training: Training, options: dict[str, Any] | None = None) -> ZenFlowAdamW:
    """Replace the optimizer of ``training`` by a new one. Returns the earlier one."""
    earlier = training.optimizer
    with pytest.warns(UserWarning, match=TAKES_OVER) as caught:
        training.optimizer = ZenFlowAdamW(
            training.model.named_parameters(), **{**ADAM, **OFFLOAD_ALL, **training.options, **(options or {})}
        )
    texts = [each for each in caught if "takes over" in str(each.message)]
    assert [each.filename for each in texts] == [__file__]
    return earlier


def adamw_twice(steps: int, again: int) -> list[torch.Tensor]:
    model = mlp()
    for begin, end in ((0, steps), (steps, again)):
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        for step in range(begin, end):
            inputs, targets = batch(step)
            take_step(F.cross_entropy(model(inputs), targets), optimizer)
    return list(model.parameters())


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize(
    "options",
    [{"update_interval": 1}, {"policy": "zero_offload"}, {"policy": "zero_infinity"}, {"policy": "resident"}],
    ids=["zenflow", "host", "files", "resident"],
)
def test_cell_run_twice_trains_as_adamw(entry: dict[str, Any] | None, options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("policy") == "zero_infinity":
        options = {**options, "nvme_path": tmp_path}
    training = Training(entry, options).run(0, 3)
    earlier = taken_over(training)
    training.run(3, 6)
    torch.testing.assert_close(training.weights(), adamw_twice(3, 6), rtol=1e-4, atol=1e-6)
    training.optimizer.close()
    earlier.close()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_takeover_applies_open_windows(entry: dict[str, Any] | None) -> None:
    closed = Training(entry, {"update_interval": 4}).run(0, 6)
    closed.optimizer.close()
    training = Training(entry, {"update_interval": 4}).run(0, 6)
    taken_over(training)
    assert_same(training.weights_as_they_are(), closed.weights_as_they_are())


def test_taken_over_optimizer_raises_at_every_use() -> None:
    training = Training(EAGER_BACKEND).run(0, 2)
    saved = training.optimizer.state_dict()
    earlier = taken_over(training)
    schedule = torch.optim.lr_scheduler.ConstantLR(training.optimizer)
    other = nn.Parameter(torch.ones(4, 4))
    uses: list[Callable[[], Any]] = [
        *(earlier.step, earlier.zero_grad, earlier.flush, earlier.synchronize, earlier.state_dict),
        *(lambda: earlier.engine, lambda: earlier.load_state_dict(saved), earlier.offload_all),
        lambda: earlier.add_param_group({"params": [other]}),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=HAS_ENDED):
            use()
    earlier.close()
    training.run(2, 4)
    schedule.step()


@pytest.mark.parametrize("used", [False, True])
def test_takeover_of_some_parameters(used: bool) -> None:
    """The earlier optimizer ends, and its other parameters may get another one."""
    model = mlp()
    earlier = ZenFlowAdamW(model.parameters(), **ADAM, **OFFLOAD_ALL, update_interval=1)
    if used:
        F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        earlier.step()
    with pytest.warns(UserWarning, match=TAKES_OVER):
        later = ZenFlowAdamW(model[2].parameters(), **ADAM, **OFFLOAD_ALL)
    with pytest.raises(RuntimeError, match=HAS_ENDED):
        earlier.step()
    assert ops.owner_of(model[2].weight) == (later.engine, 0)
    assert ops.owner_of(model[0].weight) is None
    with warnings.catch_warnings(action="error"):
        rest = ZenFlowAdamW([*model[0].parameters(), *model[4].parameters()], **ADAM, **OFFLOAD_ALL)
    later.close(), rest.close()


def test_takeover_of_two_optimizers_warns_once() -> None:
    model = mlp()
    earlier = [ZenFlowAdamW(model[i].parameters(), **ADAM, **OFFLOAD_ALL) for i in (0, 2)]
    with pytest.warns(UserWarning, match="takes over parameters of 2 earlier ones, which raise from now on") as caught:
        ZenFlowAdamW(model.parameters(), **ADAM, **OFFLOAD_ALL)
    assert len(caught) == 1
    for each in earlier:
        with pytest.raises(RuntimeError, match=HAS_ENDED):
            each.step()


@pytest.mark.parametrize("used", [False, True])
def test_added_group_takes_over(used: bool) -> None:
    training = Training(None, {"update_interval": 1}).run(0, 3)
    other = mlp()
    later = ZenFlowAdamW(other.named_parameters(), **ADAM, **OFFLOAD_ALL)
    if used:
        assert later.engine
    weight = training.model[2].weight  # type: ignore[index]
    with pytest.raises(ValueError, match=r"a param group has topk_ratio=0\.5"):
        later.add_param_group({"params": [("w", weight)], "topk_ratio": 0.5})
    training.step(3)
    with pytest.warns(UserWarning, match=TAKES_OVER):
        later.add_param_group({"params": [("w", weight)]})
    with pytest.raises(RuntimeError, match=HAS_ENDED):
        training.optimizer.step()
    assert_same(training.weights_as_they_are(), Training(None, {"update_interval": 1}).run(0, 4).weights())
    before = weight.detach().clone()
    training.backward(4)
    later.step()
    later.synchronize()
    assert not torch.equal(weight, before)
    with pytest.raises(ValueError, match="more than one parameter group"):
        later.add_param_group({"params": [("again", weight)]})
    later.close()


@pytest.mark.tier1
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk_ratio": 2.0}, "topk_ratio"),
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({}, "of host memory"),
    ],
    ids=["option", "rate", "betas", "memory"],
)
def test_refused_takeover_changes_nothing(options: dict[str, Any], message: str, added: bool) -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 4}).run(0, 5)
    later = ZenFlowAdamW(mlp().named_parameters(), **ADAM, **OFFLOAD_ALL)
    named = [(f"of {name}", param) for name, param in training.model.named_parameters()]
    memory = nullcontext() if options else host_memory(-(2**40), "of nothing")
    with memory, warnings.catch_warnings(action="error"):
        take = (
            partial(later.add_param_group, {"params": named, **options})
            if added
            else (partial(ZenFlowAdamW, named, **{**ADAM, **OFFLOAD_ALL, **options}))
        )
        with pytest.raises(ValueError, match=message):
            take()
    expected = Training(EAGER_BACKEND, {"update_interval": 4}).run(0, 8)
    assert_same(training.run(5, 8).weights(), expected.weights())
    training.optimizer.close(), expected.optimizer.close()


def test_memory_of_the_earlier_one_counts_as_free() -> None:
    training = Training(EAGER_BACKEND).run(0, 2)
    left = training.optimizer.host_bytes // 2
    with host_memory(left, "half of it"):
        with pytest.raises(ValueError, match="half of it"):
            ZenFlowAdamW(mlp().named_parameters(), **ADAM, **OFFLOAD_ALL)
        taken_over(training)
    training.run(2, 4)


def test_failed_optimizer_is_taken_over() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    training.optimizer.synchronize()

    with break_update(0):
        training.step(3)
        with pytest.warns(UserWarning, match=r"Updates are lost \(RuntimeError: the host update of 0.weight .*: load"):
            later = ZenFlowAdamW(training.model.named_parameters(), **ADAM, **OFFLOAD_ALL)
    with pytest.raises(RuntimeError, match=HAS_ENDED):
        training.optimizer.step()
    training.optimizer = later
    training.run(4, 6)
    later.close()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_gradients_before_the_takeover_count(entry: dict[str, Any] | None) -> None:
    training = Training(entry, {"update_interval": 1}).run(0, 3)
    training.backward(3)
    taken_over(training)
    training.optimizer.step()
    training.optimizer.zero_grad()
    torch.testing.assert_close(training.run(4, 6).weights(), adamw_twice(3, 6), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("small_weights")
def test_takeover_of_weights_in_host_memory() -> None:
    options = {"offload_weights": 1.0, "update_interval": 1}
    training = Training(EAGER_BACKEND, options).run(0, 3)
    taken_over(training)
    training.run(3, 6)
    assert training.optimizer.engine.access.offloaded_weights is not None
    torch.testing.assert_close(training.weights(), adamw_twice(3, 6), rtol=1e-4, atol=1e-6)
    taken_over(training, {"offload_weights": False})
    training.run(6, 7)
    training.optimizer.close()


def test_takeover_of_memory_that_was_given_back() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    training.optimizer.offload_all()
    taken_over(training)
    torch.testing.assert_close(training.run(3, 6).weights(), adamw_twice(3, 6), rtol=1e-4, atol=1e-6)


def test_takeover_of_the_optimizer_in_backward() -> None:
    """The compiled model refuses its options from then on, since they have no effect."""
    model, reference = mlp(), mlp()
    entry = {**EAGER_BACKEND, "options": {**EAGER_BACKEND["options"], **ADAM, **OFFLOAD_ALL, "update_interval": 1}}
    compiled = torch.compile(model, **entry)
    adamw = torch.optim.AdamW(reference.parameters(), **ADAM)
    for step in range(3):
        inputs, targets = batch(step)
        F.cross_entropy(compiled(inputs), targets).backward()
        take_step(F.cross_entropy(reference(inputs), targets), adamw)
    in_backward = zenflow_compile.optimizer_of(compiled)
    with pytest.warns(UserWarning, match=TAKES_OVER):
        later = ZenFlowAdamW(model.parameters(), **ADAM, **OFFLOAD_ALL, update_interval=1)
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match=HAS_ENDED):
        in_backward.flush()
    with pytest.raises(ValueError, match="a ZenFlowAdamW owns every parameter"):
        compiled(batch(3)[0])
    F.cross_entropy(torch.compile(model, **EAGER_BACKEND)(batch(3)[0]), batch(3)[1]).backward()
    later.step()
    later.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_takes_over() -> None:
    """The host memory of update windows is the parent's, which the warning says."""
    training = Training(None, {"update_interval": 4}).run(0, 5)
    training.optimizer.synchronize()

    def train() -> bool:
        with warnings.catch_warnings(record=True, action="always") as caught:
            optimizer = ZenFlowAdamW(training.model.named_parameters(), **ADAM, **OFFLOAD_ALL)
        assert "Updates are lost" in str(caught[0].message)
        before = copy.deepcopy(training.model.state_dict())
        F.cross_entropy(training.model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
        optimizer.synchronize()
        return any(not torch.equal(before[name], now) for name, now in training.model.state_dict().items())

    told = in_child(train)
    assert told == "returned True" or AUTOGRADS_OWN_REFUSAL in told
    expected = Training(None, {"update_interval": 4}).run(0, 8)
    assert_same(training.run(5, 8).weights(), expected.weights())
