"""Tools that read or change ``.grad`` between backward and step work on offloaded gradients as under AdamW."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from tests.support.loops import (
    ENTRIES,
    ENTRY_IDS,
    EXACT,
    INDUCTOR,
    STEPS,
    SUMMED,
    WINDOWED,
    ZERO_OFFLOAD,
    Call,
    Loop,
    Numbers,
    Tool,
    assert_close,
    both_entries,
    compare,
    difference,
    gradients,
    loss_of,
    plain,
    run_of,
    small,
    train,
    with_tool,
)

LIMIT = 0.05
OPTIONS = {"exact": EXACT, "zero_offload": ZERO_OFFLOAD, "summed": SUMMED}
all_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def parametrize(tools: dict[str, Tool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tool", tools.values(), ids=tools.keys())


def in_groups(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def present(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that have a gradient: all of them, so that a missing one raises."""
    for param in model.parameters():
        assert param.grad is not None, "a parameter has no gradient after the backward"
        yield param


# Norms and clipping


def clip(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return clip_grad_norm_(model.parameters(), LIMIT)


def clip_groups(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return clip_grad_norm_(in_groups(optimizer), LIMIT)


def clip_foreach(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return clip_grad_norm_(model.parameters(), LIMIT, foreach=True)


def clip_for_loop(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return clip_grad_norm_(model.parameters(), LIMIT, foreach=False)


def clip_maximum(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))


def clip_sum(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return clip_grad_norm_(model.parameters(), 1.0, norm_type=1)


def clip_one_tensor(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return clip_grad_norm_(model.down.weight, 0.01)


def clip_layers_apart(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    return [clip_grad_norm_(layer.parameters(), 0.02) for layer in model.children()]


def clip_twice(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    return [clip_grad_norm_(model.parameters(), 2 * LIMIT), clip_grad_norm_(model.parameters(), LIMIT)]


def norm_then_clip(model: nn.Module, optimizer: Optimizer) -> Tensor:
    grads = [param.grad for param in present(model)]
    norm = get_total_norm(grads)
    clip_grads_with_norm_(model.parameters(), LIMIT, norm)
    return norm


def norms_by_hand(model: nn.Module, optimizer: Optimizer) -> list[float]:
    norms = [param.grad.norm(2).item() for param in present(model)]
    total = sum(norm**2 for norm in norms) ** 0.5
    for param in present(model):
        param.grad.mul_(LIMIT / (total + 1e-6))
    return [*norms, total]


def adaptive_clip(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """AGC, of NFNets: one limit per row, relative to the weight's norm."""
    largest = []
    for param in present(model):
        if param.dim() > 1:
            norms = param.grad.norm(dim=1, keepdim=True)
            limits = 0.005 * param.detach().norm(dim=1, keepdim=True)
            param.grad.mul_((limits / norms.clamp(min=1e-6)).clamp(max=1.0))
            largest.append(norms.max())
    return largest


NORMS: dict[str, Tool] = {
    "parameters": clip,
    "groups": clip_groups,
    "foreach": clip_foreach,
    "for_loop": clip_for_loop,
    "inf": clip_maximum,
    "one": clip_sum,
    "one_tensor": clip_one_tensor,
    "layers_apart": clip_layers_apart,
    "twice": clip_twice,
    "total_norm": norm_then_clip,
    "by_hand": norms_by_hand,
    "adaptive": adaptive_clip,
}


@both_entries
@parametrize(NORMS)
def test_clipping_equals_adamw(tool: Tool, entry: dict[str, Any] | None) -> None:
    compare(with_tool(tool), entry, effect=plain)


@both_entries
def test_value_clipping_equals_adamw(entry: dict[str, Any] | None) -> None:
    compare(with_tool(lambda model, _: clip_grad_value_(model.parameters(), 0.005)), entry, effect=plain)


@pytest.mark.parametrize("foreach", [True, False])
def test_value_clipping_foreach_equals_adamw(foreach: bool) -> None:
    tool: Tool = lambda model, _: clip_grad_value_(model.parameters(), 0.005, foreach=foreach)  # noqa: E731
    compare(with_tool(tool), None, ZERO_OFFLOAD, effect=plain)


@both_entries
@all_options
def test_clip_of_three_backwards_equals_adamw(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    compare(with_tool(clip, backwards=3), entry, options, effect=with_tool(None, backwards=3))


@both_entries
@all_options
def test_clip_after_each_of_three_backwards(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        norms = []
        for step in range(STEPS):
            for part in range(3):
                loss_of(call, 10 * step + part).backward()
                norms.append(clip_grad_norm_(model.parameters(), LIMIT))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    compare(loop, entry, options, effect=with_tool(clip, backwards=3))


def test_clip_without_effect_changes_nothing() -> None:
    """A limit above the norm: the returned norm is right and gradients do not change."""
    norms = with_tool(lambda model, _: clip_grad_norm_(model.parameters(), 1e6))
    compare(norms, None)


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=["inf", "nan"])
def test_nonfinite_norm_is_reported(value: float) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        (loss_of(call, 0) * value).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        norm = get_total_norm([param.grad for param in present(model)])
        optimizer.zero_grad()
        loss_of(call, 1).backward()
        optimizer.step()
        return [norm]

    compare(loop)


@both_entries
def test_norm_can_be_read_after_step(entry: dict[str, Any] | None) -> None:
    """Trainers log the norm after the step."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        norms = []
        for step in range(4):
            loss_of(call, step).backward()
            clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            norms += [get_total_norm([param.grad for param in present(model)]), model.down.weight.grad.norm()]
            optimizer.zero_grad()
        return norms

    compare(loop, entry)


def clipped_run(options: dict[str, Any], entry: dict[str, Any] | None, tool: Tool | None) -> Any:
    return train(run_of(with_tool(tool, steps=16)), options, entry)


@both_entries
def test_windowed_clip_equals_max_grad_norm(entry: dict[str, Any] | None) -> None:
    ours = clipped_run(WINDOWED, entry, clip)
    option = clipped_run({**WINDOWED, "max_grad_norm": LIMIT}, entry, None)
    assert difference(option, clipped_run(WINDOWED, entry, None)) > 2e-4
    assert difference(ours, option) <= 1e-6


def test_windowed_clip_is_equal_at_both_entries() -> None:
    eager, compiled = (clipped_run(WINDOWED, entry, clip) for entry in ENTRIES)
    assert difference(clipped_run(WINDOWED, None, None), eager) > 2e-4
    for a, b in zip(eager.weights, compiled.weights, strict=True):
        assert torch.equal(a, b)


# Loss scaling


def scaled(*, clipped: bool, backwards: int = 1) -> Loop:
    """Twelve steps, some of which overflow. Returns the scales and the norms."""
    bad = {3: float("inf"), 4: float("nan"), 9: float("inf")}

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        numbers: list[float | Tensor] = []
        for step in range(STEPS):
            for part in range(backwards):
                factor = bad.get(step, 1.0) if part == 0 else 1.0
                (scaler.scale(loss_of(call, 10 * step + part) / backwards) * factor).backward()
            if clipped:
                scaler.unscale_(optimizer)
                numbers.append(clip_grad_norm_(model.parameters(), LIMIT))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            numbers.append(scaler.get_scale())
        assert len({float(number) for number in numbers}) > 2
        return numbers

    return loop


@both_entries
@all_options
@pytest.mark.parametrize("clipped", [False, True], ids=["plain", "unscale_and_clip"])
def test_grad_scaler_equals_adamw(options: dict[str, Any], entry: dict[str, Any] | None, clipped: bool) -> None:
    compare(scaled(clipped=clipped, backwards=2), entry, options, effect=with_tool(None, backwards=2))


@both_entries
def test_grad_scaler_with_gradients_read(entry: dict[str, Any] | None) -> None:
    """The values in ``.grad`` are scaled before ``unscale_`` and plain after it."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        numbers: list[float | Tensor] = []
        for step in range(4):
            scaler.scale(loss_of(call, step)).backward()
            numbers += [grad / 2.0**10 for grad in gradients(model)]
            scaler.unscale_(optimizer)
            numbers += gradients(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return numbers

    compare(loop, entry)


@both_entries
def test_skipped_step_changes_nothing(entry: dict[str, Any] | None) -> None:
    """At S = 4, a run with an overflow in its middle equals the run without that batch."""

    def loop(factors: list[float]) -> Loop:
        def run(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
            number = 0
            for factor in factors:
                (scaler.scale(loss_of(call, number)) * factor).backward()
                number += factor == 1.0
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return [scaler.get_scale()]

        return run

    good = [1.0] * 10
    with_overflow = train(run_of(loop([*good[:6], float("inf"), *good[6:]])), WINDOWED, entry)
    without = train(run_of(loop(good)), WINDOWED, entry)
    assert with_overflow.numbers == [4.0]
    assert difference(with_overflow, without) <= 1e-6


def test_grad_scaler_under_inductor_equals_adamw() -> None:
    compare(scaled(clipped=True), INDUCTOR, effect=plain, rel=1e-5)


# Reading


@both_entries
@pytest.mark.parametrize("backwards", [1, 3])
def test_read_gradients_equal_adamw(entry: dict[str, Any] | None, backwards: int) -> None:
    compare(with_tool(lambda model, _: gradients(model), backwards=backwards), entry)


READERS: dict[str, Tool] = {
    "tolist": lambda model, _: [torch.tensor(param.grad.tolist()) for param in present(model)],
    "numpy": lambda model, _: [torch.from_numpy(param.grad.numpy().copy()) for param in present(model)],
    "cpu": lambda model, _: [param.grad.cpu().flatten().clone() for param in present(model)],
    "double": lambda model, _: [param.grad.double().float() for param in present(model)],
    "index": lambda model, _: [param.grad[0].clone() for param in present(model)],
    "item": lambda model, _: [param.grad.flatten()[3].item() * 1.0 for param in present(model)][:1],
    "histogram": lambda model, _: [param.grad.histc(5, -0.1, 0.1) for param in present(model)],
    "statistics": lambda model, _: [
        torch.stack([param.grad.mean(), param.grad.std(), param.grad.abs().max()]) for param in present(model)
    ],
    "finite": lambda model, _: [float(torch.isfinite(param.grad).all()) for param in present(model)],
    "flattened": lambda model, _: [nn.utils.parameters_to_vector([param.grad for param in present(model)])],
    "product": lambda model, _: [param.grad @ param.grad.t() for param in present(model) if param.dim() > 1],
    "list": lambda model, _: torch._foreach_abs([param.grad for param in present(model)]),
    "deepcopy": lambda model, _: [copy.deepcopy(param.grad) for param in present(model)],
    "pickle": lambda model, _: [pickle.loads(pickle.dumps(param.grad)) for param in present(model)],
}


def checked(tool: Tool) -> Tool:
    """``tool``, whose results must be plain tensors: they outlive the gradients that they were read from."""

    def read(model: nn.Module, optimizer: Optimizer) -> Any:
        values = list(tool(model, optimizer))
        assert all(type(value) in (Tensor, float) for value in values)
        return values

    return read


@both_entries
@parametrize(READERS)
def test_readers_see_adamws_values(tool: Tool, entry: dict[str, Any] | None) -> None:
    compare(with_tool(checked(tool), steps=4), entry)


def test_saved_gradients_load_as_plain_tensors() -> None:
    def tool(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        file = io.BytesIO()
        torch.save({name: param.grad for name, param in model.named_parameters()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert all(type(grad) is Tensor for grad in loaded.values())
        return list(loaded.values())

    compare(with_tool(tool, steps=4))


def test_copied_gradient_is_independent() -> None:
    """An edited copy trains only if it replaces the gradient."""

    def tool(model: nn.Module, optimizer: Optimizer) -> None:
        for param in present(model):
            copy.deepcopy(param.grad).zero_()
            edited = copy.deepcopy(param.grad).mul_(3)
            if param.dim() > 1:
                param.grad = edited

    compare(with_tool(tool), effect=plain)


def test_copy_of_dense_gradient_is_independent() -> None:
    def tool(model: nn.Module, optimizer: Optimizer) -> None:
        for param in present(model):
            param.grad.add_(1e-3)
            copy.deepcopy(param.grad).zero_()

    compare(with_tool(tool), effect=plain)


# Editing


def mask_of(param: Tensor) -> Tensor:
    return (torch.arange(param.numel()).view_as(param) % 3 != 0).to(param.dtype)


def each(edit: Any) -> Tool:
    """The tool that calls ``edit(param)`` for every parameter."""

    def tool(model: nn.Module, optimizer: Optimizer) -> None:
        for param in present(model):
            edit(param)

    return tool


def divide(param: nn.Parameter) -> None:
    param.grad /= 3


def multiply_by_mask(param: nn.Parameter) -> None:
    param.grad *= mask_of(param)


def fill_mask(param: nn.Parameter) -> None:
    param.grad.masked_fill_(mask_of(param) == 0, 0.0)


def assign_at_mask(param: nn.Parameter) -> None:
    param.grad[mask_of(param) == 0] = 0.01


def add_noise(param: nn.Parameter) -> None:
    param.grad.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(3)), alpha=0.02)


def center(param: nn.Parameter) -> None:
    param.grad.sub_(param.grad.mean(dim=-1, keepdim=True))


def take_sign(param: nn.Parameter) -> None:
    param.grad.sign_().mul_(0.01)


def zero_through_view(param: nn.Parameter) -> None:
    param.grad.view(-1)[::2].zero_()


def zero_row(param: nn.Parameter) -> None:
    param.grad[0] = 0


def transpose_and_scale(param: nn.Parameter) -> None:
    param.grad.t().mul_(2.0)


def clamp_data(param: nn.Parameter) -> None:
    param.grad.data.clamp_(-0.005, 0.005)


def set_data(param: nn.Parameter) -> None:
    param.grad.data = param.grad.data * 2 + 0.003


def edit_numpy(param: nn.Parameter) -> None:
    array = param.grad.numpy()
    array *= 2
    array[0] = 0.01


def copy_into(param: nn.Parameter) -> None:
    param.grad.copy_(0.01 * torch.ones_like(param) + 0.5 * param.grad.clone())


def scale_list(model: nn.Module, optimizer: Optimizer) -> None:
    torch._foreach_mul_([param.grad for param in present(model)], 0.2)


def scale_by_tensor(model: nn.Module, optimizer: Optimizer) -> None:
    """The tensor changes after its use, as a schedule's would."""
    factor = torch.tensor(0.2)
    for param in present(model):
        param.grad.mul_(factor)
    factor.fill_(7.0)


def add_weight_decay(param: nn.Parameter) -> None:
    param.grad.add_(param.detach(), alpha=0.05)


def assign_sum(param: nn.Parameter) -> None:
    param.grad = param.grad + 0.01


def assign_ones(param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param) * 0.01


def assign_zeros(param: nn.Parameter) -> None:
    if param.dim() > 1:
        param.grad.zero_()


def delete_rectangles(model: nn.Module, optimizer: Optimizer) -> None:
    model.inner.weight.grad = None
    model.up.bias.grad = None


def delete_now_and_then(model: nn.Module, optimizer: Optimizer) -> None:
    """Each matrix misses the gradient of other steps: every missing gradient stays missing."""
    optimizer.calls = getattr(optimizer, "calls", -1) + 1
    for index, layer in enumerate(model.children()):
        if (optimizer.calls + index) % 3 == 0:
            layer.weight.grad = None


EDITS: dict[str, Tool] = {
    "divide": each(divide),
    "mask": each(multiply_by_mask),
    "masked_fill": each(fill_mask),
    "assign_at_mask": each(assign_at_mask),
    "noise": each(add_noise),
    "center": each(center),
    "sign": each(take_sign),
    "view": each(zero_through_view),
    "row": each(zero_row),
    "transpose": each(transpose_and_scale),
    "data_clamp": each(clamp_data),
    "data_set": each(set_data),
    "numpy": each(edit_numpy),
    "copy": each(copy_into),
    "foreach": scale_list,
    "factor": scale_by_tensor,
    "weight_decay": each(add_weight_decay),
    "zero": each(assign_zeros),
    "assign_sum": each(assign_sum),
    "assign_ones": each(assign_ones),
    "none_for_some": delete_rectangles,
    "none_in_turns": delete_now_and_then,
}


@both_entries
@parametrize(EDITS)
def test_edited_gradients_train_as_adamw(tool: Tool, entry: dict[str, Any] | None) -> None:
    compare(with_tool(tool), entry, effect=plain)


@both_entries
@parametrize({name: EDITS[name] for name in ("divide", "mask", "row", "assign_sum", "none_for_some", "zero")})
@pytest.mark.parametrize("options", [ZERO_OFFLOAD, SUMMED], ids=["zero_offload", "summed"])
def test_edits_under_other_policies(options: dict[str, Any], tool: Tool, entry: dict[str, Any] | None) -> None:
    compare(with_tool(tool, backwards=2), entry, options, effect=with_tool(None, backwards=2))


@both_entries
@parametrize({name: EDITS[name] for name in ("mask", "data_clamp", "divide", "assign_sum", "zero", "none_for_some")})
def test_edit_between_backwards_equals_adamw(tool: Tool, entry: dict[str, Any] | None) -> None:
    """Edited gradients stay edited, and the next backward adds to them."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(STEPS):
            loss_of(call, 10 * step).backward()
            tool(model, optimizer)
            loss_of(call, 10 * step + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        return None

    compare(loop, entry, effect=with_tool(None, backwards=2))


@both_entries
def test_edits_and_clips_alternate(entry: dict[str, Any] | None) -> None:
    """One gradient goes through several tools; some steps use none, so that both kinds of gradients alternate."""

    def tool(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        optimizer.calls = getattr(optimizer, "calls", -1) + 1
        if optimizer.calls % 3 == 0:
            return []
        norms = [clip(model, optimizer)]
        each(divide)(model, optimizer)
        if optimizer.calls % 3 == 1:
            each(zero_row)(model, optimizer)
        return [*norms, get_total_norm([param.grad for param in present(model)]), clip_maximum(model, optimizer)]

    compare(with_tool(tool), entry, effect=plain)


def test_windowed_edit_is_equal_at_both_entries() -> None:
    eager, compiled = (train(run_of(with_tool(each(multiply_by_mask))), WINDOWED, entry) for entry in ENTRIES)
    assert difference(eager, train(run_of(plain), WINDOWED)) > 2e-4
    assert difference(eager, compiled) <= 1e-6


def test_windowed_whole_edit_equals_scaled_loss() -> None:
    """Gradients that are doubled by hand are the gradients of the doubled loss, inside windows as well."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(STEPS):
            (2 * loss_of(call, 10 * step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return None

    expected = train(run_of(loop), WINDOWED)
    assert difference(expected, train(run_of(plain), WINDOWED)) > 2e-4
    for double in (lambda p: p.grad.mul_(2), lambda p: p.grad.view(-1).mul_(2), lambda p: p.grad.copy_(2 * p.grad)):
        assert difference(train(run_of(with_tool(each(double))), WINDOWED), expected) <= 1e-6


# Clearing, keeping and replacing


def discarding(clear: Any) -> Loop:
    """Every step has a batch whose gradients ``clear`` discards, and one that is trained on."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(STEPS):
            loss_of(call, 10 * step + 1).backward()
            clear(model, optimizer)
            loss_of(call, 10 * step).backward()
            optimizer.step()
            clear(model, optimizer)
        return None

    return loop


def clear_by_hand(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


CLEARS: dict[str, Any] = {
    "model": lambda model, _: model.zero_grad(),
    "model_zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer_zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "by_hand": clear_by_hand,
}


@both_entries
@pytest.mark.filterwarnings("error:.*zero_grad.*")
@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS.keys())
def test_cleared_gradients_are_discarded(clear: Any, entry: dict[str, Any] | None) -> None:
    compare(discarding(clear), entry, effect=discarding(lambda model, optimizer: None))


@both_entries
@pytest.mark.parametrize("options", [ZERO_OFFLOAD, SUMMED], ids=["zero_offload", "summed"])
def test_model_zero_grad_under_other_policies(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    compare(discarding(CLEARS["model"]), entry, options, effect=discarding(lambda model, optimizer: None))


class Branches(nn.Module):
    """``left`` or ``right`` is used, not both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(x)


def branches() -> nn.Module:
    torch.manual_seed(1)
    return Branches()


def alternate(set_to_none: bool) -> Loop:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(STEPS):
            loss_of(lambda x, left=step % 2 == 0: call(x, left), step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return None

    return loop


@both_entries
@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD], ids=["exact", "zero_offload"])
def test_gradients_of_zeros_are_stepped(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    """After ``zero_grad(set_to_none=False)`` a parameter without a backward moves by its moments and weight decay."""
    compare(alternate(False), entry, options, branches, effect=alternate(True))


@both_entries
def test_steps_on_some_gradients_equal_adamw(entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(6):
            loss_of(call, step).backward()
            if step % 2:
                model.zero_grad()
            else:
                optimizer.step()
                optimizer.zero_grad()
            if step == 3:
                for layer in (model.up, model.inner):
                    layer.weight.grad = torch.full_like(layer.weight, 0.01)
                optimizer.step()
                optimizer.zero_grad()
        return None

    compare(loop, entry)


@both_entries
@pytest.mark.parametrize("clear", ["optimizer", "model", "by_hand"])
def test_kept_gradients_keep_their_values(clear: str, entry: dict[str, Any] | None) -> None:
    """References kept across ``zero_grad()`` still show the old gradient, and can be added to the next one."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        values: list[float | Tensor] = []
        for step in range(STEPS):
            loss_of(call, 10 * step).backward()
            kept = [param.grad for param in present(model)]
            CLEARS[clear](model, optimizer)
            loss_of(call, 10 * step + 1).backward()
            values += [grad.clone() for grad in kept]
            for param, grad in zip(present(model), kept, strict=True):
                param.grad.add_(grad, alpha=2.0)
            optimizer.step()
            optimizer.zero_grad()
        return values

    compare(loop, entry, effect=with_tool(None, backwards=2))


@both_entries
def test_gradients_taken_out_and_put_back(entry: dict[str, Any] | None) -> None:
    """A batch between the two calls is discarded."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(STEPS):
            loss_of(call, 10 * step).backward()
            kept = [param.grad for param in present(model)]
            for param in model.parameters():
                param.grad = None
            loss_of(call, 10 * step + 1).backward()
            for param, grad in zip(model.parameters(), kept, strict=True):
                param.grad = grad
            optimizer.step()
            optimizer.zero_grad()
        return None

    compare(loop, entry, effect=with_tool(None, backwards=2))


@both_entries
def test_gradients_swapped_between_parameters(entry: dict[str, Any] | None) -> None:
    """A gradient object assigned to another parameter of its shape is that parameter's gradient."""

    def tool(model: nn.Module, optimizer: Optimizer) -> None:
        first, second = model[0].weight, model[2].weight
        first.grad, second.grad = second.grad, first.grad

    def square() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    compare(with_tool(tool), entry, build=square, effect=plain)


@both_entries
def test_gradients_set_by_hand_equal_adamw(entry: dict[str, Any] | None) -> None:
    """Steps on gradients that no backward made, between steps on a backward's."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(STEPS):
            if step % 2:
                loss_of(call, step).backward()
            else:
                generator = torch.Generator().manual_seed(step)
                for param in model.parameters():
                    param.grad = 0.05 * torch.randn(param.shape, generator=generator)
            optimizer.step()
            optimizer.zero_grad()
        return None

    compare(loop, entry, effect=plain)


@both_entries
def test_backward_adds_to_gradients_set_by_hand(entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        values: list[float | Tensor] = []
        for step in range(STEPS):
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.01)
            loss_of(call, 10 * step).backward()
            values += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return values

    compare(loop, entry, effect=plain)


@both_entries
@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD], ids=["exact", "zero_offload"])
def test_flat_buffer_as_gradients_equals_adamw(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    """Every ``.grad`` is a view of one buffer, which is edited and zeroed as a whole; ``zero_grad`` is never called."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        values: list[float | Tensor] = []
        flat = torch.zeros(sum(param.numel() for param in model.parameters()))
        begin = 0
        for param in model.parameters():
            param.grad = flat[begin : begin + param.numel()].view_as(param)
            begin += param.numel()
        for step in range(STEPS):
            for part in range(2):
                loss_of(call, 10 * step + part).backward()
            values.append(flat.clone())
            flat.mul_(LIMIT / flat.norm())
            optimizer.step()
            values.append(flat.clone())  # the step has not changed it
            flat.zero_()
        return values

    compare(loop, entry, options, effect=with_tool(None, backwards=2))


@both_entries
def test_closure_that_clips_equals_adamw(entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        numbers: list[float | Tensor] = []
        for step in range(STEPS):

            def closure(number: int = 10 * step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(call, number)
                loss.backward()
                numbers.append(clip_grad_norm_(model.parameters(), LIMIT))
                return loss.detach()

            numbers.append(optimizer.step(closure))
        return numbers

    compare(loop, entry, effect=plain)


@both_entries
def test_second_optimizer_reads_the_same_gradients(entry: dict[str, Any] | None) -> None:
    """A plain SGD on copies of the weights uses the gradients of the model before the step."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        copies = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
        other = torch.optim.SGD(copies, lr=0.1, momentum=0.9)
        for step in range(STEPS):
            loss_of(call, step).backward()
            for twin, param in zip(copies, model.parameters(), strict=True):
                twin.grad = param.grad
            other.step()
            optimizer.step()
            optimizer.zero_grad()
            other.zero_grad()
        return [twin.detach().clone() for twin in copies]

    compare(loop, entry)


def test_gradient_has_the_parameters_metadata() -> None:
    def tool(model: nn.Module, optimizer: Optimizer) -> list[float]:
        for param in present(model):
            grad = param.grad
            assert isinstance(grad, Tensor)
            assert (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device)
            assert grad.stride() == param.stride()
            assert grad.numel() == param.numel()
            assert not grad.requires_grad
            assert grad.is_leaf
            assert grad.layout is torch.strided
            assert not grad.is_sparse
            assert param.grad is grad
            repr(grad)
        return []

    compare(with_tool(tool, steps=2), None)
    compare(with_tool(tool, steps=2), ENTRIES[1], ZERO_OFFLOAD)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_half_precision_gradients_are_read(entry: dict[str, Any] | None) -> None:
    """In bf16 masters differ from AdamW's weights, so only the first step's gradients and norms are compared."""

    def build() -> nn.Module:
        return small().to(torch.bfloat16)

    def read(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        loss_of(lambda x: call(x.bfloat16()).float(), 0).backward()
        norms = [param.grad.norm() for param in present(model)]
        assert all(norm.dtype == torch.bfloat16 for norm in norms)
        values = [grad.float() for grad in gradients(model)]
        return [*values, *(norm.float() for norm in norms), clip_grad_norm_(model.parameters(), LIMIT).float()]

    expected, actual = train(run_of(read, build), None), train(run_of(read, build), EXACT, entry)
    assert_close(actual, expected, rel=1e-2)
