"""A background failure raises in the training thread, nothing hangs, and the last saved state can be loaded."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from tests.support.calls import interrupted
from tests.support.copies import copied_by
from tests.support.gated_jobs import UPDATES, failed_jobs, gated
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, Training, assert_same
from zenflow_compile.runtime.device.thread_lane import copy_without_gil
from zenflow_compile.runtime.parameters.incoming_gradient import IncomingGradient

pytestmark = pytest.mark.timeout(60)


class BrokenError(Exception):
    """The error that these tests inject."""


def failing_after(calls: int, function: Callable[..., Any], error: BaseException | None = None) -> Callable[..., Any]:
    """Wrap ``function`` so that it raises at one call, after ``calls`` good ones."""
    left = [calls]

    def sometimes(*args: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise error or BrokenError("on purpose")
        return function(*args, **keywords)

    return sometimes


def root_of(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def break_update(calls: int) -> AbstractContextManager[object]:
    return gated(failing_after(calls, lambda: None), UPDATES)


def break_copy(calls: int) -> AbstractContextManager[None]:
    return copied_by(failing_after(calls, copy_without_gil))


def train_until_it_fails(training: Training, begin: int, steps: int) -> RuntimeError:
    """Train for ``steps`` steps, and return the error that surfaces."""

    def train() -> None:
        training.run(begin, begin + steps)
        training.optimizer.synchronize()

    with pytest.raises(RuntimeError) as caught:
        train()
    return caught.value


@pytest.mark.matrix(3)
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize(
    "options",
    [{"update_interval": 1}, {}, {"gradient_transfer": "mean"}, {"gradient_transfer": "int8"}],
    ids=["windows_of_one", "defaults", "summed", "int8"],
)
@pytest.mark.parametrize("break_it", [break_update, break_copy])
@pytest.mark.parametrize("calls", [0, 1, 4])
def test_saved_state_continues_after_a_failure(
    entry: dict[str, Any] | None,
    options: dict[str, Any],
    break_it: Callable[[int], AbstractContextManager[object]],
    calls: int,
) -> None:
    training = Training(entry, options).run(0, 6)
    saved = training.saved()
    expected = training.run(6, 10).weights()
    training.load(saved)
    with break_it(calls):
        error = train_until_it_fails(training, 6, 9)
    root = root_of(error)
    assert isinstance(root, BrokenError)
    assert "sometimes" in {frame.name for frame in traceback.extract_tb(root.__traceback__)}
    assert_same(Training(entry, options).load(saved).run(6, 10).weights(), expected)
    assert_same(training.load(saved).run(6, 10).weights(), expected)
    training.optimizer.close()


def test_original_error_is_the_cause() -> None:
    for break_it in (break_update, break_copy):
        training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
        training.optimizer.synchronize()
        with break_it(0):
            error = train_until_it_fails(training, 3, 2)
        assert isinstance(error.__cause__, BrokenError)


@pytest.mark.parametrize("break_it", [break_update, break_copy])
def test_failed_engine_is_collected(break_it: Callable[[int], AbstractContextManager[object]]) -> None:
    """With the last reference to its error. Its threads end then, and its memory is free for a new run."""
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    engine = weakref.ref(training.optimizer.engine)
    with break_it(0):
        train_until_it_fails(training, 3, 2)
    del training
    gc.collect()
    assert engine() is None


@pytest.mark.parametrize("interval", [1, 4])
def test_failed_copy_raises_at_the_next_call(interval: int) -> None:
    """The error comes at the next call, and not at the flush of the update window some steps later."""
    training = Training(EAGER_BACKEND, {"update_interval": interval}).run(0, 5)
    training.optimizer.synchronize()
    lane = training.optimizer.engine.registry.transport.to_host
    with break_copy(2):  # the last of this backward; the ring would see an earlier one
        training.backward(5)
        lane.submit(torch.zeros(1), torch.ones(1), step=0, param="").settle()  # copies end in order
    with pytest.raises(RuntimeError, match="copy"):
        training.optimizer.step()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_failure_is_raised_by_every_later_call(entry: dict[str, Any] | None) -> None:
    training = Training(entry, {"update_interval": 1}).run(0, 3)
    with break_update(0):
        train_until_it_fails(training, 3, 2)
    optimizer = training.optimizer
    calls: list[Callable[[], Any]] = [lambda: training.step(9), optimizer.synchronize, optimizer.state_dict]
    for call in calls * 2:
        with pytest.raises(RuntimeError):
            call()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError):
        optimizer.close()
    optimizer.close()  # it is closed all the same


def test_other_parameters_are_applied_when_one_fails() -> None:
    expected = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 4).weights()
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)
    training.optimizer.synchronize()
    with break_update(0):
        training.step(3)
        with pytest.raises(RuntimeError):
            training.optimizer.close()
    same = [torch.equal(a, b) for a, b in zip(training.model.parameters(), expected, strict=True)]
    assert same.count(False) == 1


@pytest.mark.tier1
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_half_done_step_stops_training(calls: int) -> None:
    """An allocation fails in the training thread after some parameters have taken the gradient."""
    training = Training(EAGER_BACKEND).run(0, 3)
    saved = training.saved()
    expected = training.run(3, 6).weights()
    training.load(saved)
    error = torch.OutOfMemoryError("on purpose")
    with interrupted(IncomingGradient.commit, error, after=calls), pytest.raises(torch.OutOfMemoryError):
        training.step(3)
    with pytest.raises(RuntimeError, match="half-way") as caught:
        training.backward(4)
    assert caught.value.__cause__ is error
    assert_same(training.load(saved).run(3, 6).weights(), expected)


def test_error_in_the_with_block_is_raised() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 2)
    training.optimizer.synchronize()
    with break_update(0):
        training.step(2)  # fails in the background, and the error is not raised before the block ends
    with pytest.raises(KeyError, match="theirs"), training.optimizer:
        raise KeyError("theirs")


def test_training_continues_after_a_failed_backward() -> None:
    training = Training(EAGER_BACKEND).run(0, 3)
    expected = Training(EAGER_BACKEND).run(0, 6).weights()
    loss = training.loss(3)
    handle = training.model[0].bias.register_post_accumulate_grad_hook(lambda param: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    training.optimizer.zero_grad()
    assert_same(training.run(3, 6).weights(), expected)


def test_failed_jobs_return_their_ring_buffers() -> None:
    """More jobs fail than the ring has buffers; the error is still the jobs', and loading a state recovers."""
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 2)
    saved = training.optimizer.state_dict()
    ring = training.optimizer.engine.registry.transport.up_ring
    blocks = len(ring.buffers)
    with failed_jobs(BrokenError("on purpose"), UPDATES):
        failure = train_until_it_fails(training, 2, 3)
        assert isinstance(root_of(failure), BrokenError)
        for _ in range(2 * blocks):
            with pytest.raises(RuntimeError):
                training.optimizer.synchronize()
    training.optimizer.load_state_dict(saved)
    assert ring.free == blocks
    training.run(2, 2)


@pytest.mark.parametrize("policy", [{"update_interval": 1}, {"policy": "deep_optimizer_states", "update_stride": 1}])
def test_unstarted_copies_keep_their_buffers(policy: dict[str, Any]) -> None:
    """There are more such copies than buffers."""
    training = Training(None, policy)
    saved = training.saved()
    lane, error = training.optimizer.engine.registry.transport.to_device, RuntimeError("can't start new thread")
    for _ in range(5):
        for _ in range(4):
            with interrupted(lane.submit, error), pytest.raises(RuntimeError, match=r"new thread|half-way"):
                training.step(0)
        training.load(saved)
    expected = Training(None, policy).run(0, 3).weights()
    assert_same(training.run(0, 3).weights(), expected)
