"""``torch.nn.utils.clip_grad_norm_`` and ``max_grad_norm`` on offloaded gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import zenflow_compile
from tests.support.training import ADAM, EAGER_BACKEND, ENTRIES, ENTRY_IDS, OFFLOAD_ALL, batch, mlp
from zenflow_compile import ZenFlowAdamW

EXACT = {**OFFLOAD_ALL, "update_interval": 1}
Clip = Callable[[nn.Module], Tensor | None]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(torch.tanh(self.first(x)), self.first.weight)))


def tied() -> nn.Module:
    torch.manual_seed(1)
    return Tied()


def train(
    model: nn.Module, optimizer: Any, clip: Clip, entry: dict[str, Any] | None = None, backwards: int = 1
) -> list[float]:
    call = torch.compile(model, **entry) if entry else model
    norms = []
    for step in range(8):
        for part in range(backwards):
            inputs, targets = batch(10 * step + part)
            F.cross_entropy(call(inputs), targets).backward()
        norm = clip(model)
        norms.append(0.0 if norm is None else float(norm))
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.synchronize()
    return norms


def check(
    build: Callable[[], nn.Module],
    ours: Clip,
    theirs: Clip,
    entry: dict[str, Any] | None = None,
    backwards: int = 1,
    owned: Callable[[nn.Module], Any] = nn.Module.parameters,
    **options: Any,
) -> None:
    mine, reference = build(), build()
    optimizer = ZenFlowAdamW(owned(mine), **ADAM, **EXACT, **options)
    norms = train(mine, optimizer, ours, entry, backwards)
    expected = train(reference, torch.optim.AdamW(owned(reference), **ADAM), theirs, None, backwards)
    if any(norms):
        assert norms == pytest.approx(expected, rel=1e-4)
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def torch_clip(limit: float) -> Clip:
    return lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("build", [mlp, tied])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("limit", [0.3, 100.0])
def test_clipping_equals_pytorch(
    entry: dict[str, Any] | None, build: Callable[[], nn.Module], backwards: int, limit: float
) -> None:
    check(build, lambda m: clip_grad_norm_(m.parameters(), limit), torch_clip(limit), entry, backwards)
    check(build, lambda m: None, torch_clip(limit), entry, backwards, max_grad_norm=limit)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("backwards", [1, 3])
def test_summed_windows_of_one_are_clipped_exactly(entry: dict[str, Any] | None, backwards: int) -> None:
    options = {"update_interval": 4, "gradient_transfer": "mean", "full_warm_up_rounds": 8}
    mine, reference = mlp(), mlp()
    optimizer = ZenFlowAdamW(mine.parameters(), **ADAM, **OFFLOAD_ALL, **options)
    norms = train(mine, optimizer, lambda m: clip_grad_norm_(m.parameters(), 0.3), entry, backwards)
    adam = torch.optim.AdamW(reference.parameters(), **ADAM)
    assert norms == pytest.approx(train(reference, adam, torch_clip(0.3), None, backwards), rel=1e-4)
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", ["resident", "zero_offload"])
def test_clipping_under_every_policy(policy: str) -> None:
    mine, reference = mlp(), mlp()
    optimizer = ZenFlowAdamW(mine.parameters(), **ADAM, **OFFLOAD_ALL, policy=policy)
    norms = train(mine, optimizer, lambda m: clip_grad_norm_(m.parameters(), 0.3))
    expected = train(reference, torch.optim.AdamW(reference.parameters(), **ADAM), torch_clip(0.3))
    assert norms == pytest.approx(expected, rel=1e-4)
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_optimizer_in_backward_clips() -> None:
    mine, reference = mlp(), mlp()
    options = {**EAGER_BACKEND["options"], **ADAM, **EXACT, "max_grad_norm": 0.3}
    call = torch.compile(mine, backend="zenflow", options=options)
    for step in range(8):
        F.cross_entropy(call(batch(10 * step)[0]), batch(10 * step)[1]).backward()
    zenflow_compile.optimizer_of(call).synchronize()
    train(reference, torch.optim.AdamW(reference.parameters(), **ADAM), torch_clip(0.3))
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_clip_after_optimizer_in_backward_raises() -> None:
    """After that backward the update has run: a returned norm of zero would hide it."""
    mine = mlp()
    call = torch.compile(mine, backend="zenflow", options={**EAGER_BACKEND["options"], **ADAM, **EXACT})
    F.cross_entropy(call(batch(0)[0]), batch(0)[1]).backward()
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        clip_grad_norm_(mine.parameters(), 1.0)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_subset_of_parameters_is_clipped(entry: dict[str, Any] | None) -> None:
    def some(model: nn.Module) -> list[nn.Parameter]:
        return [model[0].weight, model[2].bias]

    check(
        mlp,
        lambda m: clip_grad_norm_(some(m), 0.05),
        lambda m: torch.nn.utils.clip_grad_norm_(some(m), 0.05),
        entry,
    )


def test_one_tensor_is_clipped() -> None:
    check(
        mlp,
        lambda m: clip_grad_norm_(m[2].weight, 0.05),
        lambda m: torch.nn.utils.clip_grad_norm_(m[2].weight, 0.05),
    )


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_parameters_without_an_owner_are_clipped(entry: dict[str, Any] | None) -> None:
    """The last layer has no optimizer: its gradient stays, is part of the norm, and is scaled with the others."""

    def keep_clean(clip: Clip) -> Clip:
        def clipped(model: nn.Module) -> Tensor | None:
            norm = clip(model)
            kept.append(model[4].weight.grad.clone())
            model[4].zero_grad()
            return norm

        return clipped

    kept: list[Tensor] = []
    check(
        mlp,
        keep_clean(lambda m: clip_grad_norm_(m.parameters(), 0.3)),
        keep_clean(torch_clip(0.3)),
        entry,
        owned=lambda model: model[:4].parameters(),
    )
    assert len(kept) == 16
    for a, b in zip(kept[:8], kept[8:], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_clipped_gradients_accumulate_as_in_pytorch() -> None:
    """Clipped gradients stay clipped, and later ones are added unclipped."""
    mine, reference = mlp(), mlp()
    optimizer = ZenFlowAdamW(mine.parameters(), **ADAM, **EXACT)
    adam = torch.optim.AdamW(reference.parameters(), **ADAM)
    for step in range(4):
        for model, each, clip in ((mine, optimizer, clip_grad_norm_), (reference, adam, nn.utils.clip_grad_norm_)):
            for part in range(2):
                F.cross_entropy(model(batch(10 * step + part)[0]), batch(step)[1]).backward()
                if part == 0:
                    clip(model.parameters(), 0.1)
            each.step()
            each.zero_grad()
    optimizer.synchronize()
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_clip_factor_ends_with_its_step() -> None:
    """The factor is dropped with the step, and with a discarded gradient."""
    mine, reference = mlp(), mlp()
    optimizer, adam = (
        ZenFlowAdamW(mine.parameters(), **ADAM, **EXACT),
        torch.optim.AdamW(reference.parameters(), **ADAM),
    )
    for model, clip in ((mine, clip_grad_norm_), (reference, nn.utils.clip_grad_norm_)):
        F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        clip(model.parameters(), 1e-3)
        clip(model.parameters(), 1e-3)
    optimizer.zero_grad()
    adam.zero_grad()
    for model, each in ((mine, optimizer), (reference, adam)):
        F.cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
        each.step()
    optimizer.synchronize()
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_norm_without_gradients_is_zero() -> None:
    model = mlp()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    assert float(clip_grad_norm_(model.parameters(), 1.0)) == 0.0
    assert float(clip_grad_norm_([], 1.0)) == 0.0
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    assert float(clip_grad_norm_(model.parameters(), 1.0)) > 0.0
    optimizer.step()


def test_nonfinite_norms() -> None:
    model = mlp()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    F.cross_entropy(model(batch(0)[0] * float("inf")), batch(0)[1]).backward()
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert not torch.isfinite(clip_grad_norm_(model.parameters(), 1.0))
    optimizer.zero_grad()


def test_nan_norm_spoils_every_gradient_as_in_pytorch() -> None:
    """A NaN in one layer makes all gradients NaN: training the other layers unclipped would hide it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = ZenFlowAdamW(model.parameters(), update_interval=1, min_offload_size=1)
    with optimizer:
        model(torch.full((2, 64), float("nan"))).sum().backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.synchronize()
        assert norm.isnan()
        assert all(param.isnan().all() for param in model.parameters())


def written(build: Callable[[], nn.Module] = mlp) -> nn.Module:
    """Write ones into every ``.grad``."""
    model = build()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model


@pytest.mark.parametrize("options", [{"policy": "zero_offload"}, {"update_interval": 1}, {"policy": "resident"}])
def test_gradients_written_by_hand_are_clipped(options: dict[str, Any]) -> None:
    mine, reference = written(), written()
    optimizer = ZenFlowAdamW(mine.parameters(), **ADAM, **{**OFFLOAD_ALL, **options}, eps=1.0)  # the scale matters
    theirs = torch.optim.AdamW(reference.parameters(), **ADAM, eps=1.0)
    elements = sum(param.numel() for param in mine.parameters())
    norm = clip_grad_norm_(mine.parameters(), 0.1)
    assert float(norm) == pytest.approx(elements**0.5)
    assert float(clip_grad_norm_(mine.parameters(), 1.0)) == pytest.approx(0.1, rel=1e-4)  # once is enough
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    optimizer.step()
    theirs.step()
    optimizer.synchronize()
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_written_gradient_replaces_a_backwards_own() -> None:
    ours, theirs = mlp(), mlp()
    optimizer, adam = ZenFlowAdamW(ours.parameters(), **ADAM, **EXACT), torch.optim.AdamW(theirs.parameters(), **ADAM)
    inputs, targets = batch(0)
    for model, each in ((ours, optimizer), (theirs, adam)):
        F.cross_entropy(model(inputs), targets).backward()
        model[0].weight.grad = torch.ones_like(model[0].weight)
        clip_grad_norm_(model.parameters(), 1.0)
        each.step()
    optimizer.synchronize()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
