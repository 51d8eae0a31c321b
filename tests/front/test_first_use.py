"""The optimizer allocates its state at the first use, so the model may be changed before."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.calls import interrupted
from tests.support.training import OFFLOAD_ALL
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime import ops

EXACT: dict[str, Any] = {**OFFLOAD_ALL, "update_interval": 1, "lr": 1e-2, "eps": 1e-4}
STEPS = 5
COMPILED = [None, "eager"]


def model_of(width: int = 24) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))


def train(model: nn.Module, optimizer: Any, *, inner: str | None = None, steps: int = STEPS) -> list[Tensor]:
    call: Any = torch.compile(model, backend="zenflow", options={"inner": inner}) if inner else model
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        inputs = torch.randn(8, 24, generator=generator).to(parameter.dtype)
        F.mse_loss(call(inputs).float(), torch.ones(8, 24)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for each, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=0.0, atol=0.0)


def built(optimizer: ZenFlowAdamW) -> bool:
    return any(engine.core.optimizer is optimizer for engine in ops.live_engines())


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "storage": lambda model: model._apply(torch.clone),
}


@pytest.mark.parametrize("inner", COMPILED)
@pytest.mark.parametrize("change", CHANGES)
def test_model_changed_before_first_use(change: str, inner: str | None) -> None:
    expected_model = model_of()
    CHANGES[change](expected_model)
    expected = train(expected_model, ZenFlowAdamW(expected_model.parameters(), **EXACT), inner=inner)
    model = model_of()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    CHANGES[change](model)
    assert_equal(train(model, optimizer, inner=inner), expected)


def test_nothing_is_built_before_first_use() -> None:
    threads = threading.active_count()
    model = model_of()
    with ZenFlowAdamW(model.parameters(), **EXACT) as optimizer:
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        optimizer.zero_grad()
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(24, 24))]})
        model(torch.ones(1, 24))
        assert not built(optimizer)
        assert threading.active_count() == threads
        model(torch.ones(1, 24)).sum().backward()
        assert built(optimizer)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("use", ["state_dict", "synchronize", "engine", "host_bytes"])
def test_first_uses_build_the_engine(use: str) -> None:
    with ZenFlowAdamW(model_of().parameters(), **EXACT) as optimizer:
        value = getattr(optimizer, use)
        if callable(value):
            value()
        assert built(optimizer)


@pytest.mark.parametrize("inner", COMPILED)
@pytest.mark.parametrize("change", ["bfloat16", "double"])
def test_model_changed_after_its_state_was_read(change: str, inner: str | None, tmp_path: Path) -> None:
    """Accelerate reads and loads the state before it moves the model, if ``prepare`` got the model last."""
    options = {**EXACT, "offload_device": "nvme", "nvme_path": tmp_path}
    model = model_of()
    optimizer = ZenFlowAdamW(model.parameters(), **options)
    optimizer.load_state_dict(optimizer.state_dict())
    first = optimizer.engine
    CHANGES[change](model)
    weights = train(model, optimizer, inner=inner)
    assert first.core.closed
    assert optimizer.engine.step == STEPS
    optimizer.close()
    expected_model = model_of()
    CHANGES[change](expected_model)
    assert_equal(weights, train(expected_model, ZenFlowAdamW(expected_model.parameters(), **EXACT), inner=inner))


def test_group_added_to_a_moved_model() -> None:
    model, expected_model = model_of(), model_of().bfloat16()
    optimizer = ZenFlowAdamW(model[0].parameters(), **EXACT)
    optimizer.synchronize()
    model.bfloat16()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    expected = ZenFlowAdamW(expected_model[0].parameters(), **EXACT)
    expected.add_param_group({"params": list(expected_model[2].parameters())})
    assert_equal(train(model, optimizer), train(expected_model, expected))


def test_model_changed_after_a_state_was_loaded() -> None:
    model, other = model_of(), model_of()
    saving = ZenFlowAdamW(other.parameters(), **EXACT)
    train(other, saving)
    optimizer = ZenFlowAdamW(model.named_parameters(), **EXACT)
    optimizer.load_state_dict(saving.state_dict())
    model.double()
    with pytest.raises(RuntimeError, match=r"0\.weight was float32\[32, 24\] on cpu"):
        train(model, optimizer)


@pytest.mark.parametrize("inner", COMPILED)
@pytest.mark.parametrize("change", ["bfloat16", "double"])
def test_model_changed_later_is_refused(change: str, inner: str | None) -> None:
    model = model_of()
    optimizer = ZenFlowAdamW(model.named_parameters(), **EXACT)
    train(model, optimizer, inner=inner)
    CHANGES[change](model)
    dtype = str(model[0].weight.dtype).removeprefix("torch.")
    message = rf"0\.weight was float32\[32, 24\] on cpu .*first use and is {dtype}\[32, 24\].*create it anew"
    with pytest.raises(RuntimeError, match=message):
        train(model, optimizer, inner=inner)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@pytest.mark.tier1
@pytest.mark.parametrize("options", [{}, {"update_interval": 4}, {"update_interval": 4, "gradient_transfer": "mean"}])
@pytest.mark.parametrize("synchronized", [False, True])
def test_close_after_a_change_names_the_loss(options: dict[str, Any], synchronized: bool) -> None:
    """The weights that ``model.to()`` copies have updates in flight, and lack gradients in update windows."""
    model, expected = model_of(), model_of()
    optimizer = ZenFlowAdamW(model.parameters(), **{**EXACT, **options})
    reference = ZenFlowAdamW(expected.parameters(), **{**EXACT, **options, "overlap_step": False})
    for each, own in ((model, optimizer), (expected, reference)):
        call = torch.compile(each, backend="zenflow", options={"inner": "eager"})
        for step in range(3):
            call(torch.full((8, 24), 1.0 + step)).square().mean().backward()
            own.step()
            own.zero_grad()
    if synchronized:
        optimizer.synchronize()
    holds = any(each.window_gradients for each in optimizer.engine.offloaded.values())
    due = any(each.host.flushed for each in optimizer.engine.offloaded.values())
    assert holds == bool(options)
    assert due == (not synchronized) or options
    model.bfloat16()
    assert not any(each.updates.due(optimizer.engine.step) for each in optimizer.engine.offloaded.values())
    if holds:
        with pytest.warns(UserWarning, match=r"were dropped, because .* dtype.*call optimizer\.flush\(\)"):
            optimizer.close()
        optimizer.close()
    else:
        optimizer.close()
        assert_equal(list(model.parameters()), list(expected.bfloat16().parameters()))
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()
    reference.close()


def test_changed_shape_is_refused_at_step() -> None:
    model = model_of()
    optimizer = ZenFlowAdamW(model.named_parameters(), **EXACT)
    train(model, optimizer)
    model[2].bias.data = torch.zeros(25)
    model[0].weight.grad = torch.ones(32, 24)
    with pytest.raises(RuntimeError, match=r"2\.bias was float32\[24\] on cpu .* and is float32\[25\]"):
        optimizer.step()


def test_parameter_unfrozen_before_first_use() -> None:
    expected_model, model = model_of(), model_of()
    reference = torch.optim.AdamW(expected_model.parameters(), lr=1e-2, eps=1e-4)
    expected = train(expected_model, reference)
    model[0].weight.requires_grad_(False)
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    model[0].weight.requires_grad_(True)
    weights = train(model, optimizer)
    assert 0 in optimizer.engine.offloaded
    for each, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=0.0, atol=1e-6)


def test_groups_keep_the_plan_of_their_calls() -> None:
    """Groups added before the first use are planned like groups added after it."""
    states = []
    for use_first in (True, False):
        model = model_of()
        options = {**EXACT, "policy": "twinflow", "ratio": 0.5}
        optimizer = ZenFlowAdamW(model[0].parameters(), **options)
        if use_first:
            optimizer.synchronize()
        optimizer.add_param_group({"params": list(model[2].parameters())})
        states.append([(plan.placement, plan.k) for plan in optimizer.engine.plan.params])
    assert states[0] == states[1]


def test_dropped_optimizer_releases_its_parameters() -> None:
    """The garbage collector frees an optimizer in a reference cycle, as with a scheduler or a trainer."""
    model, expected_model = model_of(), model_of()

    def rounds(trained: nn.Module, make: Callable[[Any], Any]) -> list[Tensor]:
        for _ in range(2):
            optimizer = make(trained.parameters())
            optimizer.cycle = [optimizer]
            result = train(trained, optimizer)
            del optimizer
        return result

    gc.disable()
    try:
        result = rounds(model, lambda params: ZenFlowAdamW(params, **EXACT))
    finally:
        gc.enable()
    expected = rounds(expected_model, lambda params: torch.optim.AdamW(params, lr=EXACT["lr"], eps=EXACT["eps"]))
    torch.testing.assert_close(result, expected)


def test_closed_before_first_use() -> None:
    model = model_of()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    optimizer.close()
    for use in (optimizer.step, optimizer.zero_grad, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="this ZenFlowAdamW is closed"):
            use()
    second = ZenFlowAdamW(model.parameters(), **EXACT)
    del optimizer
    gc.collect()
    train(model, second, inner="eager")
    assert all(model.get_parameter(name)._zenflow_owner for name in ("0.weight", "2.weight"))  # type: ignore[attr-defined]


def test_collected_before_first_use() -> None:
    model = model_of()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    del optimizer
    gc.collect()
    train(model, ZenFlowAdamW(model.parameters(), **EXACT))
    assert not hasattr(copy.deepcopy(model)[0].weight, "_zenflow_owner")


def test_failed_first_use_can_be_repeated() -> None:
    from zenflow_compile.runtime.host.arena import HostArena

    model = model_of()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    no_memory = interrupted(HostArena.__init__, MemoryError("no memory for a test"))
    with no_memory, pytest.raises(MemoryError, match="no memory for a test"):
        train(model, optimizer)
    optimizer.zero_grad()
    assert not built(optimizer)
    model = model_of()
    expected = train(model, ZenFlowAdamW(model.parameters(), **EXACT))
    again = model_of()
    assert_equal(train(again, ZenFlowAdamW(again.parameters(), **EXACT)), expected)


def test_first_gradients_in_several_threads() -> None:
    """Threads that find no engine at the same time build only one."""
    models = [model_of() for _ in range(4)]
    optimizer = ZenFlowAdamW([param for model in models for param in model.parameters()], **EXACT)
    barrier = threading.Barrier(4)
    engines: list[Any] = []

    def use() -> None:
        barrier.wait()
        engines.append(optimizer.engine)

    threads = [threading.Thread(target=use) for _ in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(engine) for engine in engines}) == 1
    optimizer.close()


@pytest.mark.parametrize("repetition", range(3))
def test_first_backwards_in_several_threads(repetition: int) -> None:
    """Several threads compile the first backward at the same time."""
    torch._dynamo.reset()
    model, expected = (nn.Sequential(*(model_of() for _ in range(4))) for _ in range(2))
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    call = torch.compile(model, backend="zenflow", options={"inner": "eager"})
    inputs = torch.randn(4, 8, 24, generator=torch.Generator().manual_seed(repetition))
    losses = [call(each).square().mean() for each in inputs]
    barrier = threading.Barrier(4)
    errors: list[Exception] = []

    def backward(loss: Tensor) -> None:
        barrier.wait()
        try:
            loss.backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns while they compile
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    sum(expected(each).square().mean() for each in inputs).backward()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad.clone(), other.grad)
    optimizer.close()


def append_group(optimizer: ZenFlowAdamW) -> None:
    optimizer.param_groups.append({**optimizer.defaults, "params": [nn.Parameter(torch.zeros(24, 24))]})


def append_param(optimizer: ZenFlowAdamW) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(24, 24)))


def remove_param(optimizer: ZenFlowAdamW) -> None:
    optimizer.param_groups[0]["params"].pop()


def replace_list(optimizer: ZenFlowAdamW) -> None:
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]


@pytest.mark.parametrize("edit", [append_group, append_param, remove_param, replace_list])
def test_edited_param_groups_are_refused(edit: Callable[[ZenFlowAdamW], None]) -> None:
    model = model_of()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    before = train(model, optimizer)
    saved = optimizer.state_dict()
    edit(optimizer)
    for use in (lambda: train(model, optimizer), optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(ValueError, match=r"param_groups were changed by hand.*add_param_group\(\)"):
            use()
    assert_equal([param.detach() for param in model.parameters()], before)


def test_replaced_group_with_the_same_parameters() -> None:
    """Options of a group may be set by replacing the group's dict."""
    model, expected_model = model_of(), model_of()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    expected_optimizer = ZenFlowAdamW(expected_model.parameters(), **EXACT)
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 1e-3}
    expected_optimizer.param_groups[0]["lr"] = 1e-3
    assert_equal(train(model, optimizer), train(expected_model, expected_optimizer))


class Wrapper(ZenFlowAdamW):
    """Shares the attributes of an optimizer, as Lightning's wrapper does."""

    def __init__(self, optimizer: ZenFlowAdamW) -> None:
        self.__dict__ = {**optimizer.__dict__, "wrapped": optimizer}


class LateWrapper(ZenFlowAdamW):
    """Forwards reads of attributes to the optimizer and keeps writes itself, as Lightning's wrapper does."""

    def __init__(self, optimizer: ZenFlowAdamW) -> None:
        self.wrapped = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


@pytest.mark.parametrize("wrapper_class", [Wrapper, LateWrapper])
def test_first_use_through_a_wrapper(wrapper_class: type[ZenFlowAdamW]) -> None:
    model, expected_model = model_of(), model_of()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    wrapper = wrapper_class(optimizer)
    wrapper.state_dict()
    assert wrapper.engine is optimizer.engine
    expected = train(expected_model, ZenFlowAdamW(expected_model.parameters(), **EXACT))
    assert_equal(train(model, optimizer), expected)
    wrapper.add_param_group({"params": [nn.Parameter(torch.ones(32, 32))]})
    assert len(optimizer.engine.plan.params) == len(list(model.parameters())) + 1
    wrapper.close()
    with pytest.raises(RuntimeError, match="is closed"):
        optimizer.step()


@pytest.mark.parametrize("used", [False, True])
def test_collected_wrapper_does_not_close(used: bool) -> None:
    model = model_of()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    if used:
        train(model, optimizer)
    wrapper = Wrapper(optimizer)
    del wrapper
    gc.collect()
    train(model, optimizer)
    assert built(optimizer)


def test_missing_gradients_are_warned_of_once() -> None:
    optimizer = ZenFlowAdamW(model_of().parameters(), **EXACT)
    with pytest.warns(UserWarning, match="no parameter of this optimizer has had a gradient"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
