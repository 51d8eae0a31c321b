"""Tests which gradients become dense, how that is reported, and which objects a gradient keeps alive."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import zenflow_compile as zf
from tests.support.loops import ENTRIES, ENTRY_IDS
from tests.support.training import OFFLOAD_ALL, Training, batch
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient

pytestmark = pytest.mark.timeout(120)

both_entries = pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)


# Dense gradients


def offloaded_gradients(training: Training) -> list[Tensor | None]:
    return [each.param.grad for each in training.optimizer.engine.offloaded.values()]


@both_entries
@pytest.mark.parametrize("backwards", [1, 3])
def test_clip_and_scaler_make_nothing_dense(entry: dict[str, Any] | None, backwards: int) -> None:
    """Averaging, ``zero_grad(set_to_none=False)``, a backward after it and norms after ``step()`` do not, either."""
    training = Training(entry, {"update_interval": 2})
    params = list(training.model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(6):
        for part in range(backwards):
            (scaler.scale(training.loss(10 * step + part)) / backwards).backward()
            assert all(grad._record.state is not GradientState.DENSE for grad in offloaded_gradients(training))
        for param in params:
            assert param.grad is not None
            param.grad /= 2
        scaler.unscale_(training.optimizer)
        clip_grad_norm_(params, 0.05)
        scaler.step(training.optimizer)
        scaler.update()
        assert all(param.grad.norm() > 0 for param in params if param.grad is not None)
        training.optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert training.optimizer.engine.registry.gradients.dense == 0
    training.optimizer.close()


def test_cleared_gradients_cost_no_memory() -> None:
    training = Training(None)
    for step in range(4):
        training.backward(step)
        [training.optimizer.zero_grad, training.model.zero_grad][step % 2]()
    shared = training.optimizer.engine.registry.gradients
    training.backward(4)
    assert shared.dense == 0
    training.optimizer.close()
    assert shared.dense == 3  # those that stay in ``.grad``


@both_entries
def test_zeroed_gradient_stays_the_same_tensor(entry: dict[str, Any] | None) -> None:
    """The next backward writes into the tensor that ``zero_grad(set_to_none=False)`` has left in ``.grad``."""
    training = Training(entry)
    offloaded = training.optimizer.engine.offloaded.values()
    training.backward(0)
    before = offloaded_gradients(training)
    for step in range(1, 4):
        training.optimizer.zero_grad(set_to_none=False)
        training.backward(step)
        for each, grad in zip(offloaded, before, strict=True):
            assert each.param.grad is grad
            assert grad is not None
            assert grad.norm() > 0
        training.optimizer.step()
    assert training.optimizer.engine.registry.gradients.dense == 0
    training.optimizer.close()


def line_here() -> str:
    """``file:line`` of the caller's next line."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{Path(__file__).name}:{frame.f_back.f_lineno + 1}"


@both_entries
def test_dense_gradients_name_the_users_line(entry: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(entry).run(0, 2)
    params = list(training.model.parameters())
    with zf.profile(training.optimizer) as profile:
        for step in range(2, 4):
            training.backward(step)
            edited = line_here()
            params[0].grad[0] = 0.0
            clipped = line_here()
            clip_grad_value_(params, 0.01)
            assert params[2].grad is not None
            params[2].grad.mul_(2.0)  # dense since ``clip_grad_value_``
            training.optimizer.step()
            training.optimizer.zero_grad()
        training.backward(4)
        kept = [param.grad for param in params]
        cleared = line_here()
        training.optimizer.zero_grad()
    summary = profile.summary()
    assert len(kept) == 6
    assert summary["dense_gradients"] == {clipped: 4, cleared: 3, edited: 2}
    assert training.optimizer.engine.registry.gradients.dense == 9
    profile.report()
    assert f"4, for {clipped}" in capsys.readouterr().out
    training.optimizer.close()


# What a gradient keeps alive


class Made:
    """Weak references to a tiny model after one backward, and to its engine.

    Args:
        way: runs before the model and its optimizer are dropped; it returns the gradients to keep.
    """

    def __init__(self, way: Callable[[nn.Module, ZenFlowAdamW], list[Tensor] | None]) -> None:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        optimizer = ZenFlowAdamW(model.parameters(), **{**OFFLOAD_ALL, "min_offload_size": 1}, workers=1)
        engine = optimizer.engine
        model(torch.ones(2, 6)).square().sum().backward()
        offloaded = list(engine.offloaded.values())
        assert len(offloaded) == 2
        self.expected = [each.shown.record.read().clone() for each in offloaded if each.shown.record is not None]
        self.records = [weakref.ref(each.shown.record) for each in offloaded if each.shown.record is not None]
        stages = [stage for each in offloaded for stage in (each, each.gradient, each.updates)]
        self.others = [weakref.ref(each) for each in (engine, model, *model.parameters(), *stages)]
        self.kept = way(model, optimizer)

    @property
    def alive(self) -> Counter[str]:
        """Count the living objects by type, without records."""
        return Counter(type(found).__name__ for ref in self.others if (found := ref()) is not None)

    @property
    def live_records(self) -> int:
        return sum(ref() is not None for ref in self.records)


def dropped(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    """Gradients are in ``.grad`` when the model is dropped."""


def closed(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    optimizer.close()


def failed(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    """An exception leaves the ``with`` block."""
    optimizer.__exit__(RuntimeError, None, None)


def stepped(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    optimizer.step()


def zeroed(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    optimizer.zero_grad(set_to_none=False)


def edited(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad[0] = 1.0


def second_backward(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    model(torch.ones(2, 6)).sum().backward()


def in_cycle(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    """Objects in a reference cycle are freed by the garbage collector."""
    model.trainer = {"model": model, "optimizer": optimizer}


WAYS = [dropped, closed, failed, stepped, zeroed, edited, second_backward, in_cycle]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_thousand_engines_leave_nothing(way: Callable[[nn.Module, ZenFlowAdamW], None]) -> None:
    """All cases together make a thousand engines."""
    before = set(ops.live_engines())
    made = [Made(way) for _ in range(125)]
    gc.collect()
    assert sum((each.alive for each in made), Counter()) == Counter()
    assert sum(each.live_records for each in made) == 0
    assert set(ops.live_engines()) <= before


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if isinstance(param.grad, OffloadedGradient)]


def kept(model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    """The optimizer is collected."""
    return gradients_of(model)


def kept_and_closed(model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    grads = gradients_of(model)
    optimizer.close()
    return grads


def kept_and_failed(model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    grads = gradients_of(model)
    optimizer.__exit__(RuntimeError, None, None)
    return grads


def detached(model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    return [grad.detach() for grad in gradients_of(model)]


def cleared(model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    grads = gradients_of(model)
    model.zero_grad()
    return grads


KEEPING = [kept, kept_and_closed, kept_and_failed, detached, cleared]


@pytest.mark.parametrize("way", KEEPING, ids=lambda way: way.__name__)
def test_kept_gradient_keeps_only_its_values(way: Callable[[nn.Module, ZenFlowAdamW], list[Tensor]]) -> None:
    made = Made(way)
    gc.collect()
    assert made.alive == Counter()
    assert made.live_records == 2
    assert made.kept is not None
    for grad, expected in zip(made.kept, made.expected, strict=True):
        torch.testing.assert_close(grad.clone(), expected, atol=0, rtol=0)
        grad.mul_(2)  # without an engine, too
        torch.testing.assert_close(grad.norm(), 2 * expected.norm())
    del grad
    made.kept.clear()
    assert made.live_records == 0


def test_kept_consumed_gradient_raises() -> None:
    def way(model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
        grads = gradients_of(model)
        optimizer.step()
        return grads

    made = Made(way)
    gc.collect()
    assert made.alive == Counter()
    for grad in made.kept or ():
        for read in (torch.clone, torch.norm, torch.sum):
            with pytest.raises(RuntimeError, match=r"the gradient of param\d: step\(\) has consumed it"):
                read(grad)
        assert "consumed" in repr(grad)


@both_entries
@pytest.mark.parametrize("backwards", [1, 2])
def test_closing_leaves_values_in_grad(entry: dict[str, Any] | None, backwards: int) -> None:
    """An unused gradient is a plain tensor afterwards, and the next backward adds to it."""
    training, reference = Training(entry), Training(None).model
    for part in range(backwards):
        training.backward(part)
        nn.functional.cross_entropy(reference(batch(part)[0]), batch(part)[1]).backward()
    training.optimizer.close()
    for param, expected in zip(training.model.parameters(), reference.parameters(), strict=True):
        assert type(param.grad) is Tensor
        torch.testing.assert_close(param.grad, expected.grad, atol=1e-6, rtol=0)
    nn.functional.cross_entropy(training.model(batch(7)[0]), batch(7)[1]).backward()
    nn.functional.cross_entropy(reference(batch(7)[0]), batch(7)[1]).backward()
    for param, expected in zip(training.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, atol=1e-6, rtol=0)


def test_collected_optimizer_leaves_no_gradients() -> None:
    """``.grad`` of a model that is still used needs no engine, with and without a ``step()`` before."""
    for steps in (0, 1):
        training = Training(None).run(0, steps)
        model, optimizer = training.model, weakref.ref(training.optimizer)
        training.backward(steps)
        del training
        gc.collect()
        assert optimizer() is None
        assert not any(isinstance(param.grad, OffloadedGradient) for param in model.parameters())
        before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
        nn.functional.cross_entropy(model(batch(7)[0]), batch(7)[1]).backward()
        for param, old in zip(model.parameters(), before, strict=True):
            assert type(param.grad) is Tensor
            assert old is None or not torch.equal(param.grad, old)
