"""Autograd calls, hooks, views and compiled training steps change training as they do under AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from tests.support.loops import (
    ENTRIES,
    EXACT,
    INDUCTOR,
    STEPS,
    SUMMED,
    WINDOWED,
    ZERO_OFFLOAD,
    Call,
    Loop,
    Numbers,
    Side,
    both_entries,
    compare,
    compare_in_backward,
    compare_runs,
    difference,
    gradients,
    loss_of,
    plain,
    run_of,
    small,
    synchronize,
    train,
    with_tool,
)
from tests.support.training import EAGER_BACKEND, batch

every_policy = pytest.mark.parametrize(
    "options", [EXACT, ZERO_OFFLOAD, SUMMED], ids=["exact", "zero_offload", "summed"]
)

Ask = Callable[[Tensor, Tensor], Tensor]


# Gradients of a loss that is not trained on


def by_grad(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x)[0]


def by_inputs(loss: Tensor, x: Tensor) -> Tensor:
    loss.backward(inputs=[x])
    assert x.grad is not None
    return x.grad


asking = pytest.mark.parametrize("ask", [by_grad, by_inputs], ids=["autograd_grad", "backward_inputs"])


def saliency(ask: Ask, call: Call, number: int) -> Tensor:
    """The gradient with respect to the inputs, of a loss that is not trained on."""
    inputs, targets = batch(number)
    x = inputs.clone().requires_grad_()
    return ask(5 * F.cross_entropy(call(x), targets), x)


@both_entries
@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD], ids=["exact", "zero_offload"])
@asking
def test_gradient_of_inputs_trains_nothing(options: dict[str, Any], entry: dict[str, Any] | None, ask: Ask) -> None:
    """The gradient is computed before the backward, between two backwards, and after a step."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        values: list[float | Tensor] = []
        for step in range(6):
            values.append(saliency(ask, call, 100 + step))
            assert all(param.grad is None for param in model.parameters())
            loss_of(call, 10 * step).backward()
            values.append(saliency(ask, call, 200 + step))
            loss_of(call, 10 * step + 1).backward()
            optimizer.step()
            values.append(saliency(ask, call, 300 + step))
            optimizer.zero_grad()
        return values

    compare(loop, entry, options, effect=with_tool(None, steps=6))


@asking
def test_windows_do_not_see_gradients_of_inputs(ask: Ask) -> None:
    """At S = 4, weights equal those of the run without saliency maps, bit for bit."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(STEPS):
            loss_of(call, 10 * step).backward()
            saliency(ask, call, 100 + step)
            optimizer.step()
            optimizer.zero_grad()
        return None

    for entry in ENTRIES:
        assert difference(train(run_of(loop), WINDOWED, entry), train(run_of(plain), WINDOWED, entry)) == 0.0


@asking
def test_gradient_of_inputs_does_not_step_in_backward(ask: Ask) -> None:
    def loop(model: nn.Module, call: Call, step: Callable[[], None]) -> Numbers:
        values: list[float | Tensor] = []
        for number in range(STEPS):
            values.append(saliency(ask, call, 100 + number))
            loss_of(call, 10 * number).backward()
            step()
        return values

    compare_in_backward(loop)


def test_backward_steps_without_resident_parameters() -> None:
    """Every parameter is updated inside the backward, and none has a gradient in ``.grad`` at its end."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(16, 12, bias=False), nn.Tanh(), nn.Linear(12, 10, bias=False))

    def loop(model: nn.Module, call: Call, step: Callable[[], None]) -> Numbers:
        for number in range(STEPS):
            loss_of(call, number).backward()
            step()
        return None

    compare_in_backward(loop, build)


@asking
def test_gradient_of_inputs_between_accumulated_ones(ask: Ask) -> None:
    """It does not count as one of the declared backwards after which the optimizer in backward steps."""

    def loop(model: nn.Module, call: Call, step: Callable[[], None]) -> Numbers:
        values: list[float | Tensor] = []
        for number in range(STEPS):
            loss_of(call, 10 * number).backward()
            values.append(saliency(ask, call, 100 + number))
            loss_of(call, 10 * number + 1).backward()
            step()
            values.append(saliency(ask, call, 200 + number))
        return values

    compare_in_backward(loop, options={**EXACT, "gradient_accumulation_steps": 2})


def test_gradient_of_inputs_alone_moves_no_weight() -> None:
    def loop(model: nn.Module, call: Call, step: Callable[[], None]) -> Numbers:
        loss_of(call, 0).backward()
        step()
        for number in range(3):
            saliency(by_grad, call, number)
            saliency(by_inputs, call, number)
        return None

    compare_in_backward(loop)


def test_gradient_of_inputs_under_inductor() -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(STEPS):
            saliency(by_grad, call, 100 + step)
            saliency(by_inputs, call, 200 + step)
            loss_of(call, 10 * step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return None

    compare(loop, INDUCTOR)


@both_entries
@every_policy
def test_backward_of_some_parameters(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    """``backward(inputs=)`` leaves the other parameters without a gradient, or with the one they have."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        norms: list[float | Tensor] = []
        for step in range(STEPS):
            chosen = [model.up.weight, model.down.weight, model.down.bias]
            if step % 2:
                loss_of(call, 10 * step).backward()
                chosen = [model.inner.weight, model.up.bias]
            loss_of(call, 10 * step + 1).backward(inputs=chosen)
            assert step % 2 or model.inner.weight.grad is None
            norms += [param.grad.norm() for param in model.parameters() if param.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return norms

    compare(loop, entry, options, effect=with_tool(None))


@both_entries
@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD], ids=["exact", "zero_offload"])
def test_gradients_of_parameters_assigned_by_hand(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        values: list[float | Tensor] = []
        for step in range(STEPS):
            grads = torch.autograd.grad(loss_of(call, 10 * step), list(model.parameters()))
            assert all(param.grad is None for param in model.parameters())
            values += grads
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = 0.5 * grad
            optimizer.step()
            optimizer.zero_grad()
        return values

    compare(loop, entry, options, effect=plain)


@both_entries
def test_gradients_of_some_parameters_train_nothing(entry: dict[str, Any] | None) -> None:
    """Influence functions: captured gradients of offloaded and resident parameters, besides a usual backward."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        values: list[float | Tensor] = []
        for step in range(STEPS):
            loss_of(call, 10 * step).backward()
            values += torch.autograd.grad(loss_of(call, 10 * step + 1), [model.inner.weight, model.up.bias])
            optimizer.step()
            optimizer.zero_grad()
        return values

    compare(loop, entry)


def test_gradients_of_parameters_under_inductor() -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        for step in range(STEPS):
            grads = torch.autograd.grad(loss_of(call, 10 * step), list(model.parameters()))
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad
            optimizer.step()
            optimizer.zero_grad()
        return None

    compare(loop, INDUCTOR)


# A forward before the step


def test_hooks_of_equal_layers_under_inductor() -> None:
    """The memory of one gradient is used again for the next one, before autograd calls the hooks of the first."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())))

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        seen: list[float | Tensor] = []
        for param in model.parameters():
            param.register_hook(lambda grad: seen.append(grad.norm()))
        for step in range(6):
            linear_loss(call, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sorted(seen, key=float)

    compare(loop, INDUCTOR, build=build, rel=1e-4)


class Factors(nn.Module):
    """Matrix factorization: no weight is saved for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(24, 16), nn.Embedding(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.users(x[:, 0]) * self.items(x[:, 1])).sum(-1)


def factors() -> nn.Module:
    torch.manual_seed(1)
    return Factors()


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(16, 24)


def factors_loss(call: Call, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    pairs = torch.stack(
        [torch.randint(0, 24, (64,), generator=generator), torch.randint(0, 32, (64,), generator=generator)], 1
    )
    return (call(pairs) - torch.randn(64, generator=generator)).square().mean()


def linear_loss(call: Call, number: int) -> Tensor:
    return (call(batch(number)[0]) - 1).square().mean()


def prefetched(loss: Callable[[Call, int], Tensor], ahead: bool = True) -> Loop:
    """With ``ahead``, each forward reads the weights before the update of the batch before."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        following = loss(call, 0)
        for step in range(STEPS):
            following.backward()
            if ahead:
                following = loss(call, step + 1)
            optimizer.step()
            optimizer.zero_grad()
            if not ahead:
                following = loss(call, step + 1)
        return None

    return loop


@both_entries
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(("build", "loss"), [(factors, factors_loss), (linear, linear_loss)], ids=["factors", "linear"])
def test_forward_before_step_equals_adamw(
    entry: dict[str, Any] | None, interval: int, build: Callable[[], nn.Module], loss: Callable[[Call, int], Tensor]
) -> None:
    options = {**EXACT, "select_interval": interval}
    compare(prefetched(loss), entry, options, build, effect=prefetched(loss, ahead=False))


@pytest.mark.parametrize(("build", "loss"), [(factors, factors_loss), (linear, linear_loss)], ids=["factors", "linear"])
def test_forward_before_step_with_windows(build: Callable[[], nn.Module], loss: Callable[[Call, int], Tensor]) -> None:
    """At S = 2, overlap and entry do not change numbers."""
    options = {**WINDOWED, "update_interval": 2, "select_interval": 2}
    runs = [
        train(run_of(prefetched(loss), build), {**options, "overlap_step": overlap}, entry)
        for overlap in (False, True)
        for entry in ENTRIES
    ]
    assert all(difference(runs[0], other) <= 1e-6 for other in runs[1:])


def test_hook_added_between_forward_and_step() -> None:
    """The graph read the weights before the update, as it would under AdamW, and returns its gradient to the hook."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        following = linear_loss(call, 0)
        for step in range(STEPS):
            following.backward()
            following = linear_loss(call, step + 1)
            if step == 3:
                model.weight.register_hook(lambda grad: 0.5 * grad)
            optimizer.step()
            optimizer.zero_grad()
        return None

    compare(loop, EAGER_BACKEND, build=linear, effect=prefetched(linear_loss))


# Clipping over groups and of values


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": list(model.up.parameters()), "lr": 2e-3},
        {"params": [*model.inner.parameters(), *model.down.parameters()], "weight_decay": 0.1},
    ]


def clip_groups(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], 0.05)


@both_entries
@every_policy
def test_clip_over_groups_equals_adamw(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    compare(with_tool(clip_groups, backwards=2), entry, options, groups=two_groups, effect=with_tool(None, backwards=2))


@both_entries
def test_groups_hold_only_the_users_parameters(entry: dict[str, Any] | None) -> None:
    def tool(model: nn.Module, optimizer: Optimizer) -> float:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        assert {id(param) for param in params} == {id(param) for param in model.parameters()}
        return float(len(params))

    compare(with_tool(tool, steps=2), entry)


@both_entries
@every_policy
def test_value_clip_equals_adamw(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    def tool(model: nn.Module, optimizer: Optimizer) -> None:
        clip_grad_value_(model.parameters(), 0.005)

    compare(with_tool(tool), entry, options, effect=plain)


# Parameters that are views of one tensor


class Views(nn.Module):
    """Two matrices with one storage, or with separate ones."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        flat = torch.randn(24 * 16 + 10 * 24) * 0.2
        parts = [flat[:384].view(24, 16), flat[384:].view(10, 24)]
        if not shared:
            parts = [part.clone() for part in parts]
        self.first, self.second = (nn.Parameter(part) for part in parts)
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.first)), self.second, self.bias)


def views() -> nn.Module:
    torch.manual_seed(1)
    return Views(True)


def apart() -> nn.Module:
    torch.manual_seed(1)
    return Views(False)


def synchronizing(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    for step in range(STEPS):
        loss_of(call, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(optimizer)
    return None


@both_entries
@every_policy
@pytest.mark.parametrize("loop", [plain, synchronizing], ids=["plain", "synchronizing"])
def test_views_of_one_storage_equal_adamw(options: dict[str, Any], entry: dict[str, Any] | None, loop: Loop) -> None:
    assert views().first.untyped_storage().data_ptr() != apart().first.untyped_storage().data_ptr()
    compare(loop, entry, options, views)


@both_entries
@pytest.mark.parametrize("interval", [1, 2, 4])
@pytest.mark.parametrize("staleness", [0, 1])
def test_views_train_like_separate_tensors(entry: dict[str, Any] | None, interval: int, staleness: int) -> None:
    options = {**WINDOWED, "update_interval": interval, "staleness": staleness}
    loop = with_tool(None, steps=16)
    together, separate = (train(run_of(loop, build), options, entry) for build in (views, apart))
    assert difference(together, separate) == 0.0


# Hooks


def halve(grad: Tensor) -> Tensor:
    return grad * 0.5


def shift(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad + 0.01


def keep_some(grad: Tensor) -> Tensor:
    return grad * (torch.arange(grad.numel()).view_as(grad) % 2)


HOOKS = {"halve": halve, "shift": shift, "mask": keep_some}
hooks = pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS.keys())


HOOK, POST_HOOK = nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook


def hooked(build: Callable[[], nn.Module], hook: Any, register: Any = HOOK) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = build()
        for param in model.parameters():
            register(param, hook)
        return model

    return made


def hooked_in_loop(hook: Any, at: int, register: Any = HOOK) -> Loop:
    """Register hooks at step ``at`` and remove them four steps before the end."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        values: list[float | Tensor] = []
        handles = []
        for step in range(STEPS):
            if step == at:
                handles = [register(param, hook) for param in model.parameters()]
            if step == STEPS - 4:
                for handle in handles:
                    handle.remove()
            loss_of(call, step).backward()
            values += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return values

    return loop


@both_entries
@hooks
def test_hooks_before_the_optimizer(hook: Any, entry: dict[str, Any] | None) -> None:
    run = run_of(with_tool(lambda model, _: gradients(model)), hooked(small, hook))
    compare_runs(run, entry, effect=run_of(plain))


@both_entries
@hooks
@pytest.mark.parametrize("at", [0, 3], ids=["before_compilation", "after_compilation"])
def test_hooks_after_the_optimizer(hook: Any, entry: dict[str, Any] | None, at: int) -> None:
    compare(hooked_in_loop(hook, at), entry, effect=plain)


@both_entries
@pytest.mark.parametrize("options", [ZERO_OFFLOAD, SUMMED], ids=["zero_offload", "summed"])
def test_hooks_under_other_policies(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    compare(hooked_in_loop(keep_some, 3), entry, options, effect=plain)


@both_entries
def test_reading_hook_sees_each_backward(entry: dict[str, Any] | None) -> None:
    """A hook gets one backward's gradient, not the sum, and may return nothing."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        seen: list[float | Tensor] = []

        def read(grad: Tensor) -> None:
            seen.append(grad.clone())

        model.inner.weight.register_hook(read)
        model.up.bias.register_hook(read)
        for step in range(4):
            for part in range(2):
                loss_of(call, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == 16
        return sorted(seen, key=lambda grad: grad.dim())

    compare(loop, entry)


@hooks
@pytest.mark.parametrize("at", [0, 3], ids=["before_compilation", "after_compilation"])
def test_hooks_with_optimizer_in_backward(hook: Any, at: int) -> None:
    def loop(model: nn.Module, call: Call, step: Callable[[], None]) -> Numbers:
        for number in range(STEPS):
            if number == at:
                for param in model.parameters():
                    param.register_hook(hook)
            loss_of(call, number).backward()
            step()
        return None

    compare_in_backward(loop)


def clamp_grad(param: Tensor) -> None:
    param.grad.clamp_(-0.005, 0.005)


def scale_grad(param: Tensor) -> None:
    param.grad.mul_(0.3)


def replace_grad(param: Tensor) -> None:
    param.grad = param.grad * 0.5 + 0.003


POST = {"clamp": clamp_grad, "scale": scale_grad, "replace": replace_grad}
post_hooks = pytest.mark.parametrize("hook", POST.values(), ids=POST.keys())


@both_entries
@post_hooks
def test_post_hooks_before_the_optimizer(hook: Any, entry: dict[str, Any] | None) -> None:
    loop = with_tool(lambda model, _: gradients(model), backwards=2)
    compare_runs(run_of(loop, hooked(small, hook, POST_HOOK)), entry, effect=run_of(with_tool(None, backwards=2)))


@both_entries
@post_hooks
@pytest.mark.parametrize("at", [0, 3], ids=["before_compilation", "after_compilation"])
def test_post_hooks_after_the_optimizer(hook: Any, entry: dict[str, Any] | None, at: int) -> None:
    compare(hooked_in_loop(hook, at, POST_HOOK), entry, effect=plain)


@both_entries
def test_reading_post_hook_sees_the_sum(entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        norms: dict[str, list[Tensor]] = {}
        for name, param in model.named_parameters():
            norms[name] = []
            param.register_post_accumulate_grad_hook(lambda p, name=name: norms[name].append(p.grad.norm()))
        for step in range(4):
            for part in range(2):
                loss_of(call, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(len(each) == 8 for each in norms.values())
        return [norm for each in norms.values() for norm in each]

    compare(loop, entry)


@both_entries
def test_tensor_and_post_hooks_together(entry: dict[str, Any] | None) -> None:
    run = run_of(with_tool(lambda model, _: gradients(model)), hooked(hooked(small, shift), clamp_grad, POST_HOOK))
    compare_runs(run, entry, effect=run_of(plain, hooked(small, shift)))


# One parameter at two inputs of a graph


@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD], ids=["exact", "zero_offload"])
def test_weights_tied_after_the_first_step(options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def loop(model: nn.Module, call: Call, optimizer: Optimizer, tie: bool = True) -> Numbers:
        norms: list[float | Tensor] = []
        for step in range(STEPS):
            if step == 3 and tie:
                model[2].weight = model[0].weight
            (call(batch(step)[0]) - 1).square().mean().backward()
            norms.append(model[0].weight.grad.norm())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    def untied(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        loop(model, call, optimizer, tie=False)
        model[2].weight = model[0].weight
        return None

    for entry in ENTRIES:
        torch._dynamo.reset()
        compare(loop, entry, options, build, effect=untied)


@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD], ids=["exact", "zero_offload"])
def test_function_called_with_one_parameter_twice(options: dict[str, Any]) -> None:
    """The calls before and after it have two parameters."""

    def run(side: Side) -> tuple[nn.Module, Numbers]:
        torch.manual_seed(1)
        weights = nn.ParameterList([torch.randn(16, 16) * 0.2, torch.randn(16, 16) * 0.2])
        optimizer = side.optimizer(weights.named_parameters())
        function = side.compile(lambda x, a, b: F.linear(torch.tanh(F.linear(x, a)), b))
        norms: list[float | Tensor] = []
        for step in range(STEPS):
            x, (first, second) = batch(step)[0], weights
            outputs = function(x, first, first if step % 3 == 1 else second)
            (outputs - 1).square().mean().backward()
            norms.append(first.grad.norm())
            optimizer.step()
            optimizer.zero_grad()
        return weights, norms

    compare_runs(run, EAGER_BACKEND, options)


@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD], ids=["exact", "zero_offload"])
@pytest.mark.parametrize("how", ["hook", "tensor"])
@pytest.mark.parametrize("eager_first", [True, False])
def test_eager_and_compiled_uses_in_one_backward(options: dict[str, Any], how: str, eager_first: bool) -> None:
    """Autograd adds both gradients before the engine sees one: for a hook, or into a tensor of the user's."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        weight = model.inner.weight
        if how == "hook":
            weight.register_hook(lambda grad: 0.5 * grad)
        losses: list[float | Tensor] = []
        for step in range(STEPS):
            if how == "tensor":
                weight.grad = torch.full_like(weight, 0.01)
            late = None if eager_first else loss_of(call, step)
            eager = model.inner(batch(step)[0]).square().mean()
            compiled = loss_of(call, step) if late is None else late
            (eager + compiled).backward()
            losses += [eager.detach(), compiled.detach()]
            optimizer.step()
            optimizer.zero_grad()
        return losses

    compare(loop, EAGER_BACKEND, options, rel=1e-5)


# Compilation of other parts


@both_entries
def test_compiled_step_equals_adamw(entry: dict[str, Any] | None) -> None:
    """``torch.compile(lambda: optimizer.step())``, as PyTorch's tutorial compiles optimizers."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for number in range(4):
            loss_of(call, number).backward()
            if number >= 2:
                clip_grad_norm_(model.parameters(), 0.05)
            step()
            optimizer.zero_grad()
        return None

    compare(loop, entry)


def compiled_train_step(**keywords: Any) -> Loop:
    """One compiled function has forward, backward, clip, step and zero_grad."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        def train_step(inputs: Tensor, targets: Tensor) -> Tensor:
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        compiled = torch.compile(train_step, **keywords)
        return [compiled(*batch(step)).detach() for step in range(4)]

    return loop


def test_compiled_train_step_equals_adamw() -> None:
    for options in (EXACT, ZERO_OFFLOAD):
        torch._dynamo.reset()
        expected = train(run_of(compiled_train_step(backend="eager")), None)
        torch._dynamo.reset()
        actual = train(run_of(compiled_train_step(**EAGER_BACKEND)), options)
        assert difference(actual, expected) <= 1e-5
        assert [float(loss) for loss in actual.numbers] == pytest.approx([float(loss) for loss in expected.numbers])


def test_train_step_compiled_by_another_backend() -> None:
    compare(compiled_train_step(backend="aot_eager"), None, rel=1e-5)


@both_entries
def test_compiled_clip_equals_adamw(entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        params = list(model.parameters())
        clip = torch.compile(lambda: clip_grad_norm_(params, 0.05), backend="eager")
        norms: list[float | Tensor] = []
        for step in range(6):
            loss_of(call, step).backward()
            norms.append(clip())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    compare(loop, entry, effect=plain)


def under_compiled_autograd(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    """Backwards run as graphs that compiled autograd captures. Gradients are clipped and read."""
    values: list[float | Tensor] = []
    compiler = torch.compile(backend="eager")
    for step in range(3):
        for part in range(1 + step % 2):
            loss = loss_of(call, 10 * step + part)
            with torch._dynamo.compiled_autograd._enable(compiler):
                loss.backward()
        if step > 0:
            values += [clip_grad_norm_(model.parameters(), 0.05), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return values


@both_entries
def test_compiled_autograd_equals_adamw(entry: dict[str, Any] | None) -> None:
    compare(under_compiled_autograd, entry)


@both_entries
def test_compiled_autograd_by_config_equals_adamw(entry: dict[str, Any] | None) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        backward = torch.compile(lambda loss: loss.backward(), backend="eager")
        for step in range(6):
            backward(loss_of(call, step))
            optimizer.step()
            optimizer.zero_grad()
        return None

    with torch._dynamo.config.patch(compiled_autograd=True):
        compare(loop, entry)
