"""``torch.amp.GradScaler``: unscaling multiplies a gradient's factor, and a skipped step changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from tests.support.training import ADAM, ENTRIES, ENTRY_IDS, OFFLOAD_ALL, Training, assert_same, batch, mlp
from zenflow_compile import ZenFlowAdamW

EXACT = {**OFFLOAD_ALL, "update_interval": 1}
SUMMED = {**OFFLOAD_ALL, "gradient_transfer": "mean", "full_warm_up_rounds": 100}


def scaled_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    entry: dict[str, Any] | None,
    bad: dict[int, float],
    clip: Any = None,
    backwards: int = 1,
) -> list[float]:
    """Twelve steps; in step ``i`` of ``bad`` the inputs are multiplied by ``bad[i]``. Returns the scales."""
    call = torch.compile(model, **entry) if entry else model
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    scales = []
    for step in range(12):
        for part in range(backwards):
            inputs, targets = batch(10 * step + part)
            loss = F.cross_entropy(call(inputs * bad.get(step, 1.0)), targets)
            scaler.scale(loss / backwards).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.synchronize()
    return scales


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("clipped", [False, True], ids=["plain", "unscale_and_clip"])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("options", [EXACT, SUMMED], ids=["exact", "summed"])
def test_loss_scaling_equals_pytorch(
    entry: dict[str, Any] | None, clipped: bool, backwards: int, options: dict[str, Any]
) -> None:
    bad = {2: float("inf"), 3: float("nan"), 7: float("inf")}
    ours, theirs = mlp(), mlp()
    optimizer = ZenFlowAdamW(ours.parameters(), **ADAM, **options)
    adam = torch.optim.AdamW(theirs.parameters(), **ADAM)
    mine = scaled_run(
        ours, optimizer, entry=entry, bad=bad, clip=clip_grad_norm_ if clipped else None, backwards=backwards
    )
    reference = scaled_run(
        theirs, adam, entry=None, bad=bad, clip=nn.utils.clip_grad_norm_ if clipped else None, backwards=backwards
    )
    assert mine == reference
    assert len(set(mine)) > 2
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_max_grad_norm_bounds_unscaled_gradients() -> None:
    ours, theirs = mlp(), mlp()
    optimizer = ZenFlowAdamW(ours.parameters(), **ADAM, **EXACT, max_grad_norm=0.3)
    scaled_run(ours, optimizer, entry=None, bad={3: float("inf")})
    adam = torch.optim.AdamW(theirs.parameters(), **ADAM)
    scaled_run(theirs, adam, entry=None, bad={3: float("inf")}, clip=nn.utils.clip_grad_norm_)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def state_of(optimizer: ZenFlowAdamW) -> list[Tensor]:
    """Return everything that an update could change."""
    return [tensor for entry in optimizer.state_dict()["state"].values() for tensor in entry.values()]


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=["inf", "nan"])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_transfer": "mean"}, {"gradient_transfer": "int8"}], ids=["plain", "summed", "int8"]
)
def test_skipped_step_changes_nothing(
    entry: dict[str, Any] | None, value: float, interval: int, options: dict[str, Any]
) -> None:
    training = Training(entry, {"update_interval": interval, **options})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(number: int, factor: float = 1.0) -> None:
        inputs, targets = batch(number)
        scaler.scale(F.cross_entropy(training.call(inputs * factor), targets)).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()

    for number in range(4):
        step(number)
    engine = training.optimizer.engine
    before, weights = state_of(training.optimizer), training.weights()
    steps = engine.step
    step(90, value)
    assert engine.step == steps
    assert_same(state_of(training.optimizer), before)
    assert_same(training.weights(), weights)
    step(5)
    assert all(torch.isfinite(weight).all() for weight in training.weights())


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_overflow_without_nan_skips_the_step(value: float) -> None:
    """A column of an offloaded gradient is infinite. All other elements are finite, and there is no other gradient."""
    model = nn.Linear(32, 32, bias=False)
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, **EXACT)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    inputs = torch.ones(2, 32)
    inputs[:, 3] = value
    scaler.scale(model(inputs).sum()).backward()
    assert list(optimizer.engine.offloaded) == [0]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert optimizer.engine.step == 0
    assert torch.equal(model.weight, before)


def clear(optimizer: ZenFlowAdamW) -> None:
    """Clear the gradients of all offloaded parameters before the next step."""
    for offloaded in optimizer.engine.offloaded.values():
        offloaded.param.grad = None


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("staleness", [0, 1])
def test_window_flushes_without_missing_gradients(staleness: int, summed: bool) -> None:
    """A window with one gradient and one missing gradient flushes as a window of one. All flush at the end."""

    def run(steps: int) -> list[Tensor]:
        options: dict[str, Any] = {"update_interval": 4, "topk_ratio": 0.0, "staleness": staleness}
        options["full_warm_up_rounds"] = 1
        options["gradient_transfer"] = "mean" if summed else "each"
        training = Training(None, options)
        for step in range(steps):
            training.backward(step)
            if step == 1:
                clear(training.optimizer)
            training.optimizer.step()
            training.optimizer.zero_grad()
        phases = {each.phase for each in training.optimizer.engine.plan.params if each.offloaded}
        assert phases == {0, 1, 2}  # none flushes in step 3, so the missing gradient is inside of every window
        training.optimizer.close()
        return [param.detach().clone() for param in training.model.parameters() if param.dim() > 1]

    assert_same(run(2), run(1))


def test_window_of_missing_gradients_is_not_flushed() -> None:
    training = Training(None, {"update_interval": 2})
    before = training.weights()
    for step in range(4):
        training.backward(step)
        clear(training.optimizer)
        training.optimizer.step()
        training.optimizer.zero_grad()
    engine = training.optimizer.engine
    assert engine.steps.windows_flushed == 0
    assert engine.step == 4
    changed = [not torch.equal(old, new) for old, new in zip(before, training.weights(), strict=True)]
    assert changed == [p not in engine.offloaded for p in range(len(engine.params))]


def test_loss_scaling_may_stop() -> None:
    """A loop may stop loss scaling: later gradients are unscaled."""
    ours, theirs = mlp(), mlp()
    optimizer, adam = ZenFlowAdamW(ours.parameters(), **ADAM, **EXACT), torch.optim.AdamW(theirs.parameters(), **ADAM)
    for model, each in ((ours, optimizer), (theirs, adam)):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(6):
            loss = F.cross_entropy(model(batch(step)[0]), batch(step)[1])
            if step < 3:
                scaler.scale(loss).backward()
                scaler.unscale_(each)
                scaler.step(each)
                scaler.update()
            else:
                loss.backward()
                each.step()
            each.zero_grad()
    optimizer.synchronize()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert len(optimizer.param_groups[0]["params"]) == 6


def test_torch_clipping_over_groups_is_exact() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Linear(64, 128, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    batch = torch.randn(8, 64)
    with ZenFlowAdamW(ours.parameters(), lr=1e-2, update_interval=1, min_offload_size=1) as optimizer:
        assert optimizer.engine.offloaded
        for step in range(4):
            norms = []
            for model, stepping in ((ours, optimizer), (theirs, reference)):
                (model(batch).square().mean() * (step + 1)).backward()
                params = [param for group in stepping.param_groups for param in group["params"]]
                norms.append(torch.nn.utils.clip_grad_norm_(params, 0.01))
                stepping.step()
                stepping.zero_grad()
            torch.testing.assert_close(*norms)
        optimizer.synchronize()
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-6)
