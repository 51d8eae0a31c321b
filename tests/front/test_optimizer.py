"""``ZenFlowAdamW`` behaves as PyTorch users expect of an optimizer; ``torch.optim.AdamW`` is the reference."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.calls import interrupted
from tests.support.training import ADAM, EAGER_BACKEND, ENTRIES, ENTRY_IDS, OFFLOAD_ALL, assert_same, batch, mlp
from zenflow_compile import ZenFlowAdamW

EXACT = {**OFFLOAD_ALL, "update_interval": 1}
Optimizers = tuple[nn.Module, torch.optim.Optimizer]


def pair(**keywords: Any) -> tuple[Optimizers, Optimizers]:
    """Make our optimizer and PyTorch's over equal models."""
    ours, theirs = mlp(), mlp()
    settings = {**ADAM, **keywords}
    return (ours, ZenFlowAdamW(ours.named_parameters(), **settings, **EXACT)), (
        theirs,
        torch.optim.AdamW(theirs.named_parameters(), **settings),
    )


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    inputs, targets = batch(step)
    return F.cross_entropy(model(inputs), targets)


def assert_close(ours: nn.Module, theirs: nn.Module, optimizer: Any) -> None:
    optimizer.synchronize()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


# Groups.


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_groups_have_their_own_coefficients(entry: dict[str, Any] | None) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": model[0].parameters(), "lr": 3e-3, "betas": (0.8, 0.99)},
            {"params": [model[2].weight], "weight_decay": 0.3, "eps": 1e-3},
            {"params": [model[2].bias, *model[4].parameters()], "lr": torch.tensor(2e-3), "weight_decay": 0.0},
        ]

    ours, theirs = mlp(), mlp()
    optimizer, adam = ZenFlowAdamW(groups(ours), **ADAM, **EXACT), torch.optim.AdamW(groups(theirs), **ADAM)
    call = torch.compile(ours, **entry) if entry else ours
    for step in range(8):
        for model, each in ((call, optimizer), (theirs, adam)):
            loss_of(model, step).backward()
            each.step()
            each.zero_grad()
        if step == 3:  # a user may write into groups at any time
            for each in (optimizer, adam):
                each.param_groups[1]["lr"] = 5e-3
                each.param_groups[0]["weight_decay"] = 0.1
    assert_close(ours, theirs, optimizer)


def test_empty_group_is_accepted() -> None:
    model = mlp()
    optimizer = ZenFlowAdamW([{"params": []}, {"params": model.parameters()}], **EXACT)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_added_group_trains_as_in_adamw(entry: dict[str, Any] | None) -> None:
    """Earlier parameters keep their phases and state; added ones start as in AdamW."""
    ours, theirs = mlp(), mlp()
    call = torch.compile(ours, **entry) if entry else ours
    optimizer = ZenFlowAdamW(ours[:3].parameters(), **ADAM, **EXACT)
    adam = torch.optim.AdamW(theirs[:3].parameters(), **ADAM)
    before = optimizer.engine.plan.params
    for step in range(8):
        if step == 4:
            optimizer.add_param_group({"params": ours[4].parameters(), "lr": 3e-3})
            adam.add_param_group({"params": theirs[4].parameters(), "lr": 3e-3})
        for model, each in ((call, optimizer), (theirs, adam)):
            loss_of(model, step).backward()
            each.step()
            ours.zero_grad() if each is optimizer else theirs.zero_grad()
            each.zero_grad()
    assert optimizer.engine.plan.params[: len(before)] == before
    assert 4 in optimizer.engine.offloaded
    assert_close(ours, theirs, optimizer)


def test_added_group_keeps_open_windows() -> None:
    model, twin = mlp(), mlp()
    kept = ZenFlowAdamW(model[:3].parameters(), **ADAM, **OFFLOAD_ALL, update_interval=4)
    reference = ZenFlowAdamW(twin[:3].parameters(), **ADAM, **OFFLOAD_ALL, update_interval=4)
    for step in range(7):
        if step == 2:
            extra = nn.Parameter(torch.ones(40, 60))  # larger than all before it: rings must grow
            kept.add_param_group({"params": [extra]})
        for each, optimizer in ((model, kept), (twin, reference)):
            loss_of(each, step).backward()
            if optimizer is kept and step >= 2:
                extra.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    kept.synchronize(), reference.synchronize()
    assert_same(list(model[:3].parameters()), list(twin[:3].parameters()))
    kept.close()
    assert not torch.equal(extra, torch.ones(40, 60))


def test_refused_group_changes_nothing() -> None:
    from zenflow_compile.runtime.host.arena import require_host_memory
    from zenflow_compile.runtime.parameters.device_state import DeviceState

    model = mlp()
    optimizer = ZenFlowAdamW(model[:3].parameters(), **ADAM, **EXACT)
    state = optimizer.state_dict()
    new = model[4].weight
    for function, error in (
        (require_host_memory, ValueError("too little memory")),
        (DeviceState.allocate, ZeroDivisionError("on purpose")),
    ):
        with interrupted(function, error), pytest.raises(type(error), match=str(error)):
            optimizer.add_param_group({"params": [new]})
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.engine.params) == len(optimizer.engine.plan.params) == 4
    optimizer.load_state_dict(state)
    other = ZenFlowAdamW([new], **EXACT)
    loss_of(model, 0).backward()
    optimizer.step()
    other.step()


# Steps.


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_closures(entry: dict[str, Any] | None) -> None:
    (ours, optimizer), (theirs, adam) = pair()
    call = torch.compile(ours, **entry) if entry else ours
    for step in range(4):
        losses = []
        for model, each in ((call, optimizer), (theirs, adam)):

            def closure(model: Any = model, each: Any = each, step: int = step) -> Tensor:
                each.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            losses.append(each.step(closure).item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert_close(ours, theirs, optimizer)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("declared", [None, 1, 2, 3])
def test_gradient_accumulation(entry: dict[str, Any] | None, declared: int | None) -> None:
    """A step may have any number of backwards, whether declared or not."""
    ours, theirs = mlp(), mlp()
    optimizer = ZenFlowAdamW(ours.parameters(), **ADAM, **EXACT, gradient_accumulation_steps=declared)
    adam = torch.optim.AdamW(theirs.parameters(), **ADAM)
    call = torch.compile(ours, **entry) if entry else ours
    for step, backwards in enumerate((1, 3, 2, 1, 4, 3)):
        for model, each in ((call, optimizer), (theirs, adam)):
            for part in range(backwards):
                (loss_of(model, 10 * step + part) / backwards).backward()
            each.step()
            each.zero_grad()
    assert_close(ours, theirs, optimizer)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_retained_graphs_accumulate(entry: dict[str, Any] | None) -> None:
    (ours, optimizer), (theirs, adam) = pair()
    if entry:
        with torch._functorch.config.patch(donated_buffer=False):
            loss = loss_of(torch.compile(ours, **entry), 0)
    else:
        loss = loss_of(ours, 0)
    for each in (loss, loss_of(theirs, 0)):
        each.backward(retain_graph=True)
        each.backward()
    optimizer.step()
    adam.step()
    assert_close(ours, theirs, optimizer)


def test_gradients_set_by_hand_count() -> None:
    (ours, optimizer), (theirs, adam) = pair()
    for step in range(3):
        for model in (ours, theirs):
            generator = torch.Generator().manual_seed(step)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
        for each in (optimizer, adam):
            each.step()
            each.zero_grad()
    assert_close(ours, theirs, optimizer)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_discards(entry: dict[str, Any] | None, set_to_none: bool) -> None:
    (ours, optimizer), (theirs, adam) = pair()
    call = torch.compile(ours, **entry) if entry else ours
    for step in range(4):
        for model, each in ((call, optimizer), (theirs, adam)):
            loss_of(model, 100 + step).backward()
            each.zero_grad(set_to_none=set_to_none)
            loss_of(model, step).backward()
            loss_of(model, 50 + step).backward()
            each.step()
            each.zero_grad(set_to_none=set_to_none)
    assert_close(ours, theirs, optimizer)


def clear(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("clearing", [nn.Module.zero_grad, clear])
def test_gradients_cleared_elsewhere_do_not_count(
    entry: dict[str, Any] | None, clearing: Callable[[nn.Module], None]
) -> None:
    (ours, optimizer), (theirs, adam) = pair()
    call = torch.compile(ours, **entry) if entry else ours
    for model, run, each in ((ours, call, optimizer), (theirs, theirs, adam)):
        for step in range(3):
            loss_of(run, 50 + step).backward()
            clearing(model)
            loss_of(run, step).backward()
            each.step()
            clearing(model)
    assert_close(ours, theirs, optimizer)


def test_expected_clearing_of_gradients_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    (ours, optimizer), _ = pair()
    for step in range(3):
        loss_of(ours, step).backward()
        optimizer.zero_grad()  # a skipped batch
        loss_of(ours, step).backward()
        loss_of(ours, step).backward()  # accumulated
        optimizer.step()
        ours.zero_grad()  # they have been used
    ours[0].weight.grad = torch.ones_like(ours[0].weight)  # without a backward, by hand
    torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
    optimizer.step()
    assert not [each for each in recwarn if "zero_grad" in str(each.message)]


def test_parameters_without_gradients_are_skipped() -> None:
    (ours, optimizer), (theirs, adam) = pair()
    for step in range(6):
        for model, each in ((ours, optimizer), (theirs, adam)):
            model[2].requires_grad_(step % 2 == 0)
            loss_of(model, step).backward()
            each.step()
            each.zero_grad()
    assert_close(ours, theirs, optimizer)


def test_several_optimizers_share_a_model() -> None:
    ours, theirs = mlp(), mlp()
    call = torch.compile(ours, **EAGER_BACKEND)
    mine = [
        ZenFlowAdamW(ours[0].parameters(), **ADAM, **EXACT),
        ZenFlowAdamW(ours[2].parameters(), lr=3e-3, **EXACT, staleness=0),
        torch.optim.AdamW(ours[4].parameters(), **ADAM),
    ]
    reference = [
        torch.optim.AdamW(theirs[0].parameters(), **ADAM),
        torch.optim.AdamW(theirs[2].parameters(), lr=3e-3, weight_decay=0.01),
        torch.optim.AdamW(theirs[4].parameters(), **ADAM),
    ]
    for step in range(6):
        for model, optimizers in ((call, mine), (theirs, reference)):
            loss_of(model, step).backward()
            for number, each in enumerate(optimizers):
                if number != 1 or step % 2:  # one of them accumulates over two steps
                    each.step()
                    each.zero_grad()
    for each in mine[:2]:
        each.synchronize()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


# Hooks.


def test_step_hooks() -> None:
    (model, optimizer), _ = pair()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    loss_of(model, 0).backward()
    optimizer.step()
    assert calls == ["before", "after"]


def test_state_dict_hooks() -> None:
    (model, optimizer), _ = pair()
    loss_of(model, 0).backward()
    optimizer.step()
    calls: list[str] = []

    def after(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("saved")
        return {**state, "extra": 1}

    def before_load(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("loading")
        assert state.pop("extra") == 1
        return state

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    optimizer.register_state_dict_post_hook(after)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert calls == ["saving", "saved", "loading", "loaded"]
    assert state["extra"] == 1


def test_hook_may_change_the_loaded_state_in_place() -> None:
    (_, optimizer), _ = pair()
    state = {**optimizer.state_dict(), "extra": 1}
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state.pop("extra") and None)
    optimizer.load_state_dict(state)
    assert state["extra"] == 1


# Representation and state.


def test_repr_shows_the_groups() -> None:
    (_, optimizer), _ = pair()
    assert repr(optimizer).startswith("ZenFlowAdamW (")
    assert "weight_decay: 0.01" in repr(optimizer)


def test_state_dict_reads_like_adamws() -> None:
    (model, optimizer), (theirs, adam) = pair()
    for each, their in ((model, optimizer), (theirs, adam)):
        loss_of(each, 0).backward()
        their.step()
    mine, reference = optimizer.state_dict(), adam.state_dict()
    assert mine["state"].keys() == reference["state"].keys()
    for index, entry in reference["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine["state"][index][name], entry[name], atol=1e-6, rtol=1e-5)
        assert float(mine["state"][index]["step"]) == float(entry["step"])
    assert mine["param_groups"][0]["params"] == reference["param_groups"][0]["params"]
    assert mine["param_groups"][0]["param_names"] == reference["param_groups"][0]["param_names"]


def test_state_dict_before_step_changes_nothing() -> None:
    (ours, optimizer), (theirs, adam) = pair()
    scaler, reference = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    for step in range(3):
        scaler.scale(loss_of(ours, step)).backward()
        state = optimizer.state_dict()
        assert len(state["param_groups"][0]["params"]) == 6
        torch.save(state, io.BytesIO())
        scaler.step(optimizer)
        reference.scale(loss_of(theirs, step)).backward()
        reference.step(adam)
        for each in (scaler, reference):
            each.update()
        optimizer.zero_grad()
        adam.zero_grad()
    assert_close(ours, theirs, optimizer)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()


# Frozen parameters of dtypes that cannot be optimized.


class Quantized(nn.Module):
    """A base of integers and 8-bit numbers, as quantizing packages keep it, and a low-rank adapter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Parameter(torch.randn(64, 8) * 0.1)
        values = torch.randint(0, 2, (64, 64))
        self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        self.scales = nn.Parameter(values[0].to(dtype), requires_grad=False)
        self.up = nn.Parameter(torch.randn(8, 10) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weight, scales = (each.to(torch.float32) for each in (self.weight, self.scales))
        hidden = torch.tanh(x @ (weight / 8) * scales + x)
        return hidden @ self.down @ self.up


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64, torch.complex128],
    ids=str,
)
def test_frozen_quantized_weights_are_accepted(dtype: torch.dtype, entry: dict[str, Any] | None) -> None:
    ours, theirs = Quantized(dtype), Quantized(dtype)
    call = torch.compile(ours, **entry) if entry else ours
    before = ours.weight.clone()
    optimizer, adam = ZenFlowAdamW(ours.parameters(), **ADAM, **EXACT), torch.optim.AdamW(theirs.parameters(), **ADAM)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    assert optimizer.engine.plan.params[1].device_bytes == 0
    for step in range(8):
        for model, each in ((call, optimizer), (theirs, adam)):
            F.cross_entropy(model(x), batch(0)[1]).backward()
            each.step()
            each.zero_grad()
        if step == 3:
            state = optimizer.state_dict()
            assert state["state"].keys() == adam.state_dict()["state"].keys()
            assert [param is ours.weight or param is ours.scales for param in optimizer.state] == [False, False]
            optimizer.load_state_dict(state)
    optimizer.synchronize()
    torch.testing.assert_close([ours.down, ours.up], [theirs.down, theirs.up], atol=1e-5, rtol=0)
    assert torch.equal(ours.weight.to(torch.complex128), before.to(torch.complex128))
    adam.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(adam.state_dict())


@pytest.mark.tier1
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_unfrozen_quantized_weight_is_refused(dtype: torch.dtype) -> None:
    model = Quantized(dtype)
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **EXACT)
    model.weight.requires_grad_(True)
    model.weight.grad = torch.ones_like(model.weight)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(TypeError, match=r"weight has a gradient, and its dtype torch\.float8_.* cannot be optimized"):
        optimizer.step()
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.float(), value.float())
