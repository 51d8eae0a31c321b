"""Keywords of ``torch.optim.AdamW``, its groups as users change them, and options that are given twice."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import zenflow_compile
from examples.stdlib_text import load_text
from tests.support.loops import (
    ADAM,
    EXACT,
    PLACEMENT,
    STEPS,
    WINDOWED,
    ZERO_OFFLOAD,
    Call,
    Numbers,
    Side,
    both_entries,
    compare,
    compare_runs,
    in_backward,
    loss_of,
    plain,
    run_of,
    small,
    train,
    weights_of,
)
from tests.support.training import OFFLOAD_ALL, Training, assert_same, mlp
from zenflow_compile import ZenFlowAdamW

SWITCHES: dict[str, Any] = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
}  # fmt: skip
IMPLEMENTATIONS = ("foreach", "fused")


def test_keywords_are_those_of_adamw() -> None:
    ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (ZenFlowAdamW, torch.optim.AdamW))
    assert [*ours][: len(theirs)] == [*theirs]
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


def test_groups_hold_the_keywords_as_adamw() -> None:
    mine, reference = ZenFlowAdamW(small().parameters(), **EXACT), torch.optim.AdamW(small().parameters())
    expected = reference.defaults
    assert mine.defaults == expected
    assert {name: value for name, value in mine.param_groups[0].items() if name != "params"} == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in SWITCHES if name != "maximize" for value in (False, None)),
        *((name, True) for name in IMPLEMENTATIONS),
    ],
)
def test_values_that_change_nothing_are_taken(name: str, value: bool | None) -> None:
    model = small()
    optimizer = ZenFlowAdamW([{"params": model.parameters(), name: value}], **{name: value}, **EXACT)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()
    call = torch.compile(small(), backend="zenflow", options={"inner": "eager", **EXACT, name: value})
    loss_of(call, 0).backward()
    zenflow_compile.optimizer_of(call).close()


@pytest.mark.parametrize("name", [name for name in SWITCHES if name not in ("maximize", *IMPLEMENTATIONS)])
def test_unsupported_adamw_switches_are_refused(name: str) -> None:
    """Refused in a group, in an added group and when set later; nothing changes.

    Of a loaded state only ``amsgrad`` is refused: the other switches say how the saving optimizer computed.
    """
    model, other = small(), nn.Parameter(torch.ones(8, 8))
    message = rf"{name}=True of torch\.optim\.AdamW is not supported: .*; use {name}="
    with pytest.raises(ValueError, match=message):
        ZenFlowAdamW([{"params": model.parameters(), name: True}], **EXACT)
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [other], name: True})
    state = optimizer.state_dict()
    state["param_groups"][0][name] = True
    with pytest.raises(ValueError, match=message) if name == "amsgrad" else nullcontext():
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0][name] == SWITCHES[name]
    loss_of(model, 0).backward()
    before = weights_of(model)
    optimizer.param_groups[0][name] = True
    with pytest.raises(ValueError, match=rf"in param_groups\[0\], {message}"):
        optimizer.step()
    assert_same(list(model.parameters()), before)
    optimizer.param_groups[0][name] = SWITCHES[name]
    optimizer.step()
    assert optimizer.engine.step == 1


def test_state_of_adam_with_its_own_decay_is_refused() -> None:
    optimizer = ZenFlowAdamW(small().parameters(), **EXACT)
    state = optimizer.state_dict()
    state["param_groups"][0]["decoupled_weight_decay"] = False
    with pytest.raises(ValueError, match=r"decoupled_weight_decay=False is torch\.optim\.Adam's"):
        optimizer.load_state_dict(state)


# maximize


def ascending(step: int) -> bool:
    return step % 5 in (1, 2)


def toggling(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    """Switch ``maximize`` inside update windows, and clip gradients."""
    norms = []
    for step in range(STEPS):
        optimizer.param_groups[0]["maximize"] = ascending(step)
        loss_of(call, step).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def negated(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    """``toggling`` with the loss negated instead."""
    norms = []
    for step in range(STEPS):
        (-loss_of(call, step) if ascending(step) else loss_of(call, step)).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms


RULES: dict[str, dict[str, Any]] = {
    "exact": EXACT,
    "windowed": WINDOWED,
    "adaptive": {**PLACEMENT, "update_interval": (2, 4)},
    "summed": {**WINDOWED, "gradient_transfer": "mean"},
    "int8": {**WINDOWED, "gradient_transfer": "int8"},
    "zero_offload": ZERO_OFFLOAD,
    "streamed": {**ZERO_OFFLOAD, "policy": "deep_optimizer_states", "update_stride": 2},
    "resident": {"policy": "resident"},
}


@both_entries
@pytest.mark.parametrize("options", RULES.values(), ids=RULES.keys())
def test_maximize_is_the_negated_loss(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    """Weights and norms are equal bit for bit, since a sign is exact; selection and clipping read the norms."""
    actual, expected = (train(run_of(loop), options, entry) for loop in (toggling, negated))
    assert_same(actual.weights, expected.weights)
    assert actual.numbers == expected.numbers


@both_entries
@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD, {"policy": "resident"}], ids=["exact", "host", "resident"])
def test_maximize_equals_adamws(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    compare(toggling, entry, options, effect=plain)


@both_entries
def test_maximize_of_one_group_with_loss_scaling(entry: dict[str, Any] | None) -> None:
    def run(side: Side, maximize: bool = True) -> tuple[nn.Module, Numbers]:
        model = small()
        first, *others = model.named_parameters()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = side.optimizer([{"params": [first], "maximize": maximize}, {"params": others}])
        call = side.compile(model)
        for step in range(STEPS):
            scaler.scale(loss_of(call, step)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model, None

    compare_runs(run, entry, EXACT, effect=lambda side: run(side, maximize=False))


def test_maximize_in_backward() -> None:
    """The optimizer in backward maximizes, with and without clipping."""
    for clipping in ({}, {"max_grad_norm": 0.5}):
        weights = []
        for maximize in (True, False):
            model = small()
            call = in_backward(model, {**WINDOWED, **clipping, "maximize": maximize})
            for step in range(STEPS):
                loss = loss_of(call, step)
                (loss if maximize else -loss).backward()
            zenflow_compile.optimizer_of(call).close()
            weights.append(weights_of(model))
        assert_same(*weights)


@pytest.mark.parametrize("name", ["windowed", "summed", "int8"])
def test_maximize_resumes_in_the_middle_of_a_window(name: str) -> None:
    options = {**RULES[name], "maximize": True}
    training = Training(None, options).run(0, 6)
    resumed = Training(None, {**options, "maximize": False}).load(training.saved())
    assert resumed.optimizer.param_groups[0]["maximize"] is True
    assert_same(training.run(6, 12).weights(), resumed.run(6, 12).weights())


def test_summed_window_of_fp16_keeps_small_gradients() -> None:
    """A window's mean is scaled by the largest factor: by a factor of 1 it would underflow under a loss scale."""
    weights = []
    for sign in (1.0, -1.0):
        param = nn.Parameter(torch.ones(16, 16, dtype=torch.float16))
        options = {**WINDOWED, "gradient_transfer": "mean", "topk_ratio": 0.0}
        optimizer = ZenFlowAdamW([param], lr=1e-2, eps=1e-12, **options, maximize=sign < 0)
        for _ in range(8):
            (sign * 2.0**16 * 1e-9 * param.float().square().sum()).backward()
            param.grad.mul_(2.0**-16)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        weights.append(param.detach().clone())
    assert (weights[0] < 0.99).all()
    assert torch.equal(*weights)


# Groups that are changed later


LATER: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": "x"}, TypeError, r"lr='x' must be a number"),
    ({"lr": None}, TypeError, r"lr=None must be a number"),
    ({"lr": float("nan")}, ValueError, r"lr=nan must be a number in \[0, 1e\+30\]"),
    ({"lr": -1}, ValueError, r"lr=-1 must be a number in"),
    ({"lr": torch.tensor(-1.0)}, ValueError, r"lr=-1.0 must be a number in"),
    ({"lr": torch.ones(2)}, ValueError, r"lr is a tensor of 2 elements"),
    ({"weight_decay": float("inf")}, ValueError, r"weight_decay=inf must be"),
    ({"eps": -1.0}, ValueError, r"eps=-1.0 must be"),
    ({"betas": (0.9, 1.0)}, ValueError, r"betas=\(0\.9, 1\.0\) must be"),
    ({"betas": None}, ValueError, r"betas=None must be"),
    ({"maximize": "yes"}, TypeError, r"maximize='yes' must be True or False"),
]


@pytest.mark.tier1
@both_entries
@pytest.mark.parametrize(("change", "kind", "message"), LATER)
def test_bad_value_set_later_stops_the_step(
    change: dict[str, Any], kind: type[Exception], message: str, entry: dict[str, Any] | None
) -> None:
    """The error comes before any change; with the value restored the step works as usual."""
    training, reference = (Training(entry, {"update_interval": 2}).run(0, 3) for _ in range(2))
    group = training.optimizer.param_groups[0]
    good = dict(group)
    training.backward(3)
    before = training.weights()
    group.update(change)
    with pytest.raises(kind, match=rf"^in param_groups\[0\], {message}"):
        training.optimizer.step()
    assert_same(training.weights(), before)
    assert training.optimizer.engine.step == 3
    group.update(good)
    training.optimizer.step()
    training.optimizer.zero_grad()
    reference.step(3)
    assert_same(training.run(4, 8).weights(), reference.run(4, 8).weights())


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
def test_missing_value_is_named(name: str) -> None:
    training = Training()
    training.backward(0)
    kept = training.optimizer.param_groups[0].pop(name)
    with pytest.raises(ValueError, match=rf"in param_groups\[0\], {name} is missing; set it again"):
        training.optimizer.step()
    training.optimizer.param_groups[0][name] = kept
    training.optimizer.step()


@pytest.mark.tier1
@pytest.mark.parametrize("clipping", [{}, {"max_grad_norm": 1.0}], ids=["unclipped", "clipped"])
def test_bad_value_set_later_stops_the_backward(clipping: dict[str, Any]) -> None:
    """With the optimizer in backward, too, nothing of the step is applied."""
    model = small()
    call = in_backward(model, {**EXACT, **clipping})
    loss_of(call, 0).backward()
    loss_of(call, 1).backward()
    optimizer = zenflow_compile.optimizer_of(call)
    optimizer.synchronize()
    before = weights_of(model)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"in param_groups\[0\], lr=nan"):
        loss_of(call, 2).backward()
    optimizer.synchronize()
    assert_same(list(model.parameters()), before)
    optimizer.param_groups[0]["lr"] = 1e-3
    loss_of(call, 2).backward()
    assert optimizer.engine.step == 3
    optimizer.close()


# Parameters


PARAMS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: None, TypeError, r"params is of type NoneType; give the parameters, as in model\.parameters\(\)"),
    (lambda: {nn.Parameter(torch.ones(2))}, TypeError, r"params is a set, which has no order; give a list"),
    (lambda: nn.Linear(2, 2), TypeError, r"params is of type Linear; give the parameters"),
    (lambda: nn.Sequential(nn.Linear(2, 2)), TypeError, r"params is of type Sequential; give the parameters"),
    (lambda: [{"params": None}], TypeError, r"params is of type NoneType; give the parameters"),
    (lambda: [{"lr": 1e-3}], ValueError, r"a param group has no 'params', only \['lr'\]; give its parameters"),
    (lambda: nn.LazyLinear(3).parameters(), ValueError, r"not initialized yet .*run the model once before"),
    (
        lambda: [nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))],
        TypeError,
        r"nested tensor; only dense .*one parameter for each",
    ),
    (
        lambda: [nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))],
        TypeError,
        r"nested tensor; only dense .*one parameter for each",
    ),
    (
        lambda: [nn.Parameter(torch.ones(8, 8).to(torch.float8_e4m3fn))],
        TypeError,
        r"dtype torch\.float8_e4m3fn; only parameters of torch\.float32, .*leave it out",
    ),
    (
        lambda: [("a\x1b[2J", nn.Parameter(torch.ones(2))), ("a\x1b[2J", nn.Parameter(torch.ones(2)))],
        ValueError,
        r"^2 parameters have the name 'a\\x1b\[2J'; give each its own",
    ),
    (
        lambda: [{"params": [(name, nn.Parameter(torch.ones(2)))]} for name in ("a", "b", "a")],
        ValueError,
        r"^2 parameters have the name 'a'",
    ),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("params", "kind", "message"), PARAMS)
def test_params_that_cannot_be_optimized(params: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ZenFlowAdamW(params(), **EXACT)


def test_added_group_must_be_a_dict() -> None:
    optimizer = ZenFlowAdamW(small().parameters(), **EXACT)
    with pytest.raises(TypeError, match=r"a param group is of type int; give a dict"):
        optimizer.add_param_group(3)  # type: ignore[arg-type]


# Options given twice


TWICE: list[tuple[dict[str, Any], str]] = [
    ({"lr": 1e-4, "max_grad_norm": 1.0}, r"\(lr=0\.0001, max_grad_norm=1\.0\)"),
    ({"topk_ratio": 0.2}, r"\(topk_ratio=0\.2\)"),
    ({"config": {"gradient_clipping": 1.0}}, r"\(policy='resident', max_grad_norm=1\.0\)"),
    ({"config": {}}, r"\(policy='resident'\)"),
]


@pytest.mark.tier1
@pytest.mark.parametrize(("options", "named"), TWICE)
def test_options_besides_an_optimizer_are_refused(options: dict[str, Any], named: str) -> None:
    model = small()
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, **EXACT)
    call = torch.compile(model, backend="zenflow", options={"inner": "eager", **options})
    message = rf"set up an optimizer {named}, but a ZenFlowAdamW owns every parameter .*pass them to that"
    with pytest.raises(ValueError, match=message):
        loss_of(call, 0)
    call = torch.compile(model, backend="zenflow", options={"inner": "eager", "mode": "default"})
    loss_of(call, 0).backward()
    optimizer.step()
    assert zenflow_compile.optimizer_of(call) is optimizer


def test_options_for_a_frozen_model_are_accepted() -> None:
    """Nothing is trained, and no optimizer owns the parameters."""
    model = small().requires_grad_(False)
    call = torch.compile(model, backend="zenflow", options={"inner": "eager", "lr": 1e-3})
    assert not loss_of(call, 0).requires_grad


def test_options_serve_parameters_without_an_owner() -> None:
    model = small()
    mine = ZenFlowAdamW(model.inner.parameters(), **ADAM, **EXACT)
    call = torch.compile(model, backend="zenflow", options={"inner": "eager", **ADAM, **EXACT})
    loss_of(call, 0).backward()
    assert zenflow_compile.optimizer_of(model.up) is zenflow_compile.optimizer_of(model.down) is not mine
    # A second call of torch.compile finds all parameters owned, some of them by the optimizer of the first call.
    loss_of(torch.compile(model, backend="zenflow", options={"inner": "eager", **ADAM, **EXACT}), 0)


# Memory and threads


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


THREADED: dict[str, dict[str, Any]] = {
    "memory": OFFLOAD_ALL,
    "files": {**OFFLOAD_ALL, "policy": "zero_infinity"},
}


@pytest.mark.parametrize("options", THREADED.values(), ids=THREADED.keys())
def test_no_thread_names_a_remedy(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = {"nvme_path": tmp_path_factory.mktemp("state")} if options.get("policy") else {}
    model = mlp()
    monkeypatch.setattr(threading.Thread, "start", no_thread)

    def train_one_step() -> None:
        optimizer = ZenFlowAdamW(model.parameters(), **options, **path, update_interval=1)
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"\(can't start new thread\): raise the limit on processes \(ulimit -u\)"):
        train_one_step()


def test_max_events_is_an_integer() -> None:
    with pytest.raises(TypeError, match=r"max_events=1000000\.0 must be an integer >= 1; leave it out"):
        zenflow_compile.profile(max_events=1e6)  # type: ignore[arg-type]


def test_too_small_string_value_names_its_limit() -> None:
    with pytest.raises(ValueError, match=r"^text_bytes=100000 gave .*raise it"):
        load_text(100_000)
