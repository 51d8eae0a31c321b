"""Every rule is PyTorch's optimizer of that name under each policy, and itself in every form, however it is run."""

from __future__ import annotations

import gc
import io
import pickle
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import zenflow_compile as zf
from zenflow_compile import rules
from zenflow_compile.rules import Array, Rule
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import resident_updates
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_

OFFLOAD = {"min_offload_size": 1}
POLICIES: dict[str, dict[str, Any]] = {
    "resident": {"policy": "resident"},
    "zero_offload": {"policy": "zero_offload"},
    "twinflow": {"policy": "twinflow", "ratio": 0.5},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2},
    "zenflow": {"policy": "zenflow", "topk_ratio": 0.25, "device_share": 0.0, "update_interval": 1},
}
WINDOWS = POLICIES["zenflow"] | {"update_interval": 4}


class LionReference(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, line by line."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = (beta1 * average + (1 - beta1) * param.grad).sign()
                param.sub_(group["lr"] * (update + group["weight_decay"] * param))
                average.mul_(beta2).add_((1 - beta2) * param.grad)


# An eps that noise of the last bit does not multiply: a difference of 1e-8 would count as 1 under a smaller one.
EPS = {"eps": 1e-4}
CASES: dict[str, tuple[Rule, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (rules.AdamW(**EPS), torch.optim.AdamW, EPS),
    "AdamWAMSGrad": (rules.AdamWAMSGrad(**EPS), torch.optim.AdamW, EPS | {"amsgrad": True}),
    "Adam": (rules.Adam(weight_decay=0.1, **EPS), torch.optim.Adam, EPS | {"weight_decay": 0.1}),
    "AMSGrad": (
        rules.AMSGrad(weight_decay=0.1, **EPS),
        torch.optim.Adam,
        EPS | {"weight_decay": 0.1, "amsgrad": True},
    ),
    "NAdam": (rules.NAdam(weight_decay=0.1, **EPS), torch.optim.NAdam, EPS | {"weight_decay": 0.1}),
    "RAdam": (rules.RAdam(weight_decay=0.1, **EPS), torch.optim.RAdam, EPS | {"weight_decay": 0.1}),
    "Adamax": (rules.Adamax(weight_decay=0.1, **EPS), torch.optim.Adamax, EPS | {"weight_decay": 0.1}),
    "Adagrad": (
        rules.Adagrad(lr_decay=0.1, weight_decay=0.1, **EPS),
        torch.optim.Adagrad,
        EPS | {"lr_decay": 0.1, "weight_decay": 0.1},
    ),
    "RMSprop": (
        rules.RMSprop(weight_decay=0.1, lr=1e-3, **EPS),
        torch.optim.RMSprop,
        EPS | {"lr": 1e-3, "weight_decay": 0.1},
    ),
    "MomentumRMSprop": (
        rules.MomentumRMSprop(momentum=0.8, lr=1e-3, **EPS),
        torch.optim.RMSprop,
        EPS | {"lr": 1e-3, "momentum": 0.8},
    ),
    "CenteredRMSprop": (
        rules.CenteredRMSprop(momentum=0.5, lr=1e-3, **EPS),
        torch.optim.RMSprop,
        EPS | {"lr": 1e-3, "momentum": 0.5, "centered": True},
    ),
    "SGD": (
        rules.SGD(lr=0.1, dampening=0.1, weight_decay=0.1),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    ),
    "NesterovSGD": (
        rules.NesterovSGD(lr=0.1, weight_decay=0.1),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "PlainSGD": (rules.PlainSGD(lr=0.1, weight_decay=0.1), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "Lion": (
        rules.Lion(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        LionReference,
        {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
    ),
}  # fmt: skip
Make = Callable[[nn.Module], torch.optim.Optimizer]


def mlp(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 40)).to(dtype)


def train(
    make: Make, *, dtype: torch.dtype = torch.float32, compiled: bool = False, resumed_at: int | None = None
) -> Tensor:
    """The weights after 14 steps; ``resumed_at`` goes on in a new model and optimizer from a file."""

    def start(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        run = torch.compile(model, backend="zenflow", options={"inner": "eager"}) if compiled else model
        return make(model), run

    model = mlp(dtype)
    optimizer, run = start(model)
    generator = torch.Generator().manual_seed(1)
    for step in range(14):
        if step == resumed_at:
            file = io.BytesIO()
            optimizer.synchronize()  # type: ignore[attr-defined]
            torch.save((model.state_dict(), optimizer.state_dict()), file)
            optimizer.close()  # type: ignore[attr-defined]
            file.seek(0)
            weights, state = torch.load(file)
            model = mlp(dtype)
            model.load_state_dict(weights)
            optimizer, run = start(model)
            optimizer.load_state_dict(state)
        batch = torch.randn(16, 48, generator=generator).to(dtype)
        run(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, zf.ZenFlow):
        optimizer.close()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor) -> None:
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ours(rule: Rule, **options: Any) -> Make:
    return lambda model: zf.ZenFlow(model.parameters(), rule, **OFFLOAD, **options)


@cache
def reference(name: str) -> Tensor:
    _, theirs, keywords = CASES[name]
    return train(lambda model: theirs(model.parameters(), **keywords))


@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graphs"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_one_gradient_is_pytorch(name: str, policy: str, compiled: bool) -> None:
    rule, expected = CASES[name][0], reference(name)
    found = train(ours(rule, **POLICIES[policy]), compiled=compiled)
    # Rounding alone: RMSprop's first steps divide by small roots.
    tolerance = 1e-5 if "RMSprop" in name else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    start = torch.cat([param.detach().flatten() for param in mlp(torch.float32).parameters()])
    assert float((found - start).abs().max()) > 1000 * tolerance / 10


SCHEDULED = [
    name for name in CASES if "SGD" in name or "Adam" in name or name in ("MomentumRMSprop", "CenteredRMSprop")
]


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_of_rates_and_momenta(name: str) -> None:
    """OneCycleLR changes beta1, or the momentum, at every step."""
    rule, theirs, keywords = CASES[name]
    found = []
    for make in (lambda model: theirs(model.parameters(), **keywords), ours(rule, **POLICIES["zenflow"])):
        model = mlp(torch.float32)
        optimizer = make(model)
        if name == "PlainSGD":
            scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        else:
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=15)
        generator = torch.Generator().manual_seed(4)
        for _ in range(14):
            model(torch.randn(16, 48, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if isinstance(optimizer, zf.ZenFlow):
            optimizer.close()
        found.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_windows_do_not_depend_on_how_they_run(name: str, dtype: torch.dtype) -> None:
    """To the bit: hooks and graphs, overlap on and off, and a resume in the middle of a window."""
    rule = CASES[name][0]
    expected = train(ours(rule, **WINDOWS), dtype=dtype, compiled=True)
    assert torch.equal(train(ours(rule, **WINDOWS), dtype=dtype), expected)
    assert torch.equal(train(ours(rule, **WINDOWS, overlap_step=False), dtype=dtype, compiled=True), expected)
    assert torch.equal(train(ours(rule, **WINDOWS), dtype=dtype, compiled=True, resumed_at=6), expected)


@pytest.mark.parametrize("state_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_state_in_fewer_bytes_resumes(name: str, state_dtype: str) -> None:
    rule = CASES[name][0]
    options = WINDOWS | {"state_dtype": state_dtype, "split_master": True}
    expected = train(ours(rule, **options), dtype=torch.bfloat16, compiled=True)
    assert torch.equal(train(ours(rule, **options), dtype=torch.bfloat16, compiled=True, resumed_at=6), expected)
    in_fp32 = train(ours(rule, **WINDOWS), dtype=torch.bfloat16, compiled=True)
    assert torch.equal(in_fp32, expected) == (not any(array.rounded for array in rule.arrays))


@pytest.mark.parametrize("name", CASES)
def test_windows_follow_the_definition(name: str) -> None:
    """Every slice is deferred: each flush applies the gradients of up to four steps."""
    rule = CASES[name][0]
    options = rule.initial
    weight = nn.Parameter(torch.randn(64, 48, generator=torch.Generator().manual_seed(2)))
    expected = [weight.detach().clone(), *(torch.zeros(64, 48) for _ in rule.arrays)]
    windows = WINDOWS | {"topk_ratio": 0.0, "full_warm_up_rounds": 0}
    optimizer = zf.ZenFlow([weight], rule, **OFFLOAD, **windows)
    (plan,) = optimizer.engine.plan.params
    generator, waiting, sizes = torch.Generator().manual_seed(3), [], []
    for step in range(18):
        waiting.append(torch.randn(64, 48, generator=generator))
        weight.grad = waiting[-1].clone()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == plan.phase or step == 17:
            own = [StepCoefficients(options, Number.known(1.0), rule)] * len(waiting)
            update_window_(expected, waiting, own, step=step + 1)
            sizes.append(len(waiting))
            waiting = []
    optimizer.close()
    assert max(sizes) == 4
    torch.testing.assert_close(weight.detach(), expected[0], rtol=1e-5, atol=1e-6)


# A user's own rule.


class SignMomentum(Rule):
    """Moves by the sign of a momentum (signSGD, arXiv 1802.04434)."""

    defaults: Mapping[str, Any] = {"lr": 1e-3, "momentum": 0.9}  # type: ignore[misc]
    arrays = (Array("buffer"),)
    of_gradient = ("momentum",)
    of_window = ("rate",)

    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return (options.momentum,)

    def window_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        return (sum(each.lr for each in options),)

    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> Any:
        return (c.momentum * state.buffer + gradient,)

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight - c.rate * state.buffer.sign()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rule_of_ones_own(policy: str) -> None:
    model, reference = mlp(torch.float32), mlp(torch.float32)
    optimizer = zf.ZenFlow(model.parameters(), SignMomentum(lr=1e-2), **OFFLOAD, **POLICIES[policy])
    buffers = [torch.zeros_like(param) for param in reference.parameters()]
    for _ in range(5):
        batch = torch.randn(16, 48)
        for each in (model, reference):
            each(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        with torch.no_grad():
            for param, buffer in zip(reference.parameters(), buffers, strict=True):
                buffer.mul_(0.9).add_(param.grad)
                param.sub_(1e-2 * buffer.sign())
                param.grad = None
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert set(optimizer.state_dict()["state"][0]) >= {"step", "buffer"}
    optimizer.close()


class Unmoved(rules.AdamW):
    """AdamW's state and numbers, and weights that stay."""

    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        return weight + 0.0 * state.exp_avg


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rule_that_derives_from_adamw(policy: str) -> None:
    """AdamW's kernels on devices are not used for it."""
    model = mlp(torch.float32)
    before = [param.detach().clone() for param in model.parameters()]
    with zf.ZenFlow(model.parameters(), Unmoved(), **OFFLOAD, **POLICIES[policy]) as optimizer:
        model(torch.randn(16, 48)).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_momentum_of_zero_in_some_groups() -> None:
    """The gradient alone moves their weights, whatever the dampening, and the buffer stays."""
    weights = [[nn.Parameter(torch.ones(40, 40)) for _ in range(2)] for _ in range(2)]
    groups = [[{"params": [one]}, {"params": [two], "momentum": 0.0}] for one, two in weights]
    ours = zf.ZenFlow(groups[0], rules.SGD(lr=0.1, dampening=0.5), **OFFLOAD, **POLICIES["zenflow"])
    theirs = torch.optim.SGD(groups[1], lr=0.1, momentum=0.9, dampening=0.5)
    for step in range(6):
        for each, optimizer in zip(weights, (ours, theirs), strict=True):
            for weight in each:
                weight.grad = torch.full_like(weight, 1.0 + step)
            optimizer.param_groups[0]["momentum"] = 0.9 * (step != 3)
            optimizer.step()
            optimizer.zero_grad()
    ours.close()
    for one, two in zip(*weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_no_tensor_outlives_a_window() -> None:
    """Without Python's collector of cycles, which some training loops turn off."""
    gc.disable()
    try:
        gradient = torch.ones(8)
        found = weakref.ref(gradient)
        options = rules.Lion().initial
        own = StepCoefficients(options, Number.known(1.0), rules.Lion())
        update_window_((torch.ones(8), torch.zeros(8)), [gradient], [own], step=1)
        del gradient
        assert found() is None
    finally:
        gc.enable()


# Bad input.


@pytest.mark.parametrize(
    ("rule", "switch", "message"),
    [
        (rules.AdamW(), {"amsgrad": True}, "amsgrad=True of torch.optim.AdamW .*AdamWAMSGrad.*use amsgrad=False"),
        (rules.Adam(), {"amsgrad": True}, "amsgrad=True of torch.optim.Adam is not supported.*AMSGrad"),
        (rules.RAdam(weight_decay=0.1), {"decoupled_weight_decay": True}, "decoupled_weight_decay=True is torch.optim"),
        (rules.SGD(), {"nesterov": True}, "nesterov=True .*NesterovSGD"),
        (rules.NesterovSGD(), {"dampening": 0.5}, r"dampening=0.5 .*SGD\(.*use dampening=0.0"),
        (rules.PlainSGD(), {"momentum": 0.9}, r"momentum=0.9 of torch.optim.SGD .*SGD\(.*use momentum=0.0"),
        (rules.RMSprop(), {"centered": True}, "centered=True of torch.optim.RMSprop .*CenteredRMSprop"),
    ],
)
def test_switch_of_another_rule_is_refused(rule: Rule, switch: dict[str, Any], message: str) -> None:
    """In a group at first, and in the middle of training."""
    weight = nn.Parameter(torch.ones(40, 40))
    with pytest.raises(ValueError, match=message):
        zf.ZenFlow([{"params": [weight], **switch}], rule, **OFFLOAD)
    optimizer = zf.ZenFlow([weight], rule, **OFFLOAD)
    weight.grad = torch.ones(40, 40)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0].update(switch)
    weight.grad = torch.ones(40, 40)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    optimizer.close()


def test_state_of_adamw_is_refused_by_radam() -> None:
    model = mlp(torch.float32)
    with zf.ZenFlowAdamW(model.parameters(), **OFFLOAD) as adamw:
        model(torch.ones(2, 48)).sum().backward()
        adamw.step()
        state = adamw.state_dict()
    radam = zf.ZenFlow(model.parameters(), rules.RAdam(), **OFFLOAD)
    with pytest.raises(ValueError, match=r"the rule is 'AdamW', and this optimizer's 'RAdam'"):
        radam.load_state_dict(state)
    radam.close()
    with zf.ZenFlow(model.parameters(), rules.AdamW(), **OFFLOAD) as same:
        same.load_state_dict(state)


def test_numbers_of_another_rule_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Lion has no 'eps'; it has lr, betas, weight_decay"):
        rules.Lion(eps=1e-8)
    with pytest.raises(ValueError, match=r"lr=-1.* must be a number in"):
        rules.Lion(lr=-1.0)
    with pytest.raises(ValueError, match=r"betas=\(0.9, 1.0\) must be two numbers"):
        rules.Lion(betas=(0.9, 1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_numbers": lambda *_: 0.5}, "gradient_numbers returned 0.5; it must return 1 numbers, momentum"),
        ({"window_numbers": lambda *_: ("0.5",)}, "window_numbers returned .*; it must return 1 numbers, rate"),
        ({"arrays": ("buffer",)}, r"arrays=\('buffer',\) must be Array"),
        ({"apply": lambda self, weight, state, c: weight - float("inf") * state.buffer}, "a number that is not finite"),
        ({"__init__": lambda self: None}, r"__init__ must call super\(\).__init__\(\*\*numbers\)"),
    ],
)
def test_malformed_rule_is_refused(changes: dict[str, Any], message: str) -> None:
    rule = type("Malformed", (SignMomentum,), changes)()
    with pytest.raises((TypeError, ValueError), match=message):
        zf.ZenFlow(mlp(torch.float32).parameters(), rule)


@pytest.mark.parametrize(("defaults", "message"), [({}, "has no 'lr'"), ({"lr": 1.0, "rule": 2.0}, "has a 'rule'")])
def test_malformed_numbers_are_refused(defaults: dict[str, float], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        type("Malformed", (SignMomentum,), {"defaults": defaults})


def test_something_else_than_a_rule_is_refused() -> None:
    model = mlp(torch.float32)
    with pytest.raises(TypeError, match=r"rule=.* must be an instance of a rule, such as zenflow_compile.rules.Lion"):
        zf.ZenFlow(model.parameters(), rules.Lion)  # type: ignore[arg-type]


def test_rule_that_cannot_be_printed_is_refused() -> None:
    class NotPointwise(SignMomentum):
        def apply(self, weight: Any, state: Any, c: Any) -> Any:
            return weight - c.rate * state.buffer / state.buffer.sum()

    model = mlp(torch.float32)
    with pytest.raises(ValueError, match=r"NotPointwise.apply uses aten.sum.default; a rule may use"):
        zf.ZenFlow(model.parameters(), NotPointwise())
    zf.ZenFlowAdamW(model.parameters()).close()  # nothing owns the parameters


def test_state_of_another_rule_is_refused() -> None:
    model = mlp(torch.float32)
    with zf.ZenFlow(model.parameters(), rules.Lion(), **OFFLOAD) as lion:
        model(torch.ones(2, 48)).sum().backward()
        lion.step()
        state = lion.state_dict()
    adam = zf.ZenFlow(model.parameters(), rules.Adam(), **OFFLOAD)
    with pytest.raises(ValueError, match=r"the rule is 'Lion', and this optimizer's 'Adam'; load it into one"):
        adam.load_state_dict(state)
    adam.close()
    adamw = zf.ZenFlowAdamW(model.parameters(), **OFFLOAD)
    with pytest.raises(ValueError, match=r"the rule is 'Lion', and this optimizer's 'AdamW'"):
        adamw.load_state_dict(state)
    adamw.close()
    of_adamw = torch.optim.AdamW(model.parameters(), weight_decay=0.1).state_dict()
    adam = zf.ZenFlow(model.parameters(), rules.Adam(), **OFFLOAD)
    with pytest.raises(ValueError, match=r"decoupled_weight_decay=True is torch.optim.AdamW's"):
        adam.load_state_dict(of_adamw)
    adam.close()


@pytest.mark.parametrize("policy", ["zenflow", "resident"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("AdamW", "Lion")])
def test_states_of_pytorch_load(name: str, policy: str) -> None:
    """Training goes on as PyTorch's does."""
    rule, theirs, keywords = CASES[name]
    if name == "MomentumRMSprop":  # PyTorch's state has no buffer then
        rule, keywords = rules.MomentumRMSprop(momentum=0.0, lr=1e-3, **EPS), keywords | {"momentum": 0.0}
    model, other = mlp(torch.float32), mlp(torch.float32)
    optimizer = theirs(model.parameters(), **keywords)
    batches = torch.randn(6, 16, 48)

    steps(model, optimizer, batches[:3])
    other.load_state_dict(model.state_dict())
    mine = zf.ZenFlow(other.parameters(), rule, **OFFLOAD, **POLICIES[policy])
    mine.load_state_dict(optimizer.state_dict())
    steps(model, optimizer, batches[3:])
    steps(other, mine, batches[3:])
    mine.close()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_groups_differ_in_the_numbers_of_the_rule() -> None:
    model, reference = mlp(torch.float32), mlp(torch.float32)
    groups: list[list[dict[str, Any]]] = [
        [{"params": [*layers[:2]], "lr": 0.2}, {"params": [*layers[2:]], "momentum": 0.5}]
        for layers in ([*each.parameters()] for each in (model, reference))
    ]
    optimizer = zf.ZenFlow(groups[0], rules.SGD(lr=0.1), **OFFLOAD, **POLICIES["zenflow"])
    theirs = torch.optim.SGD(groups[1], lr=0.1, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, theirs)]
    for _ in range(4):
        batch = torch.randn(16, 48)
        for each, update, scheduler in zip((model, reference), (optimizer, theirs), schedulers, strict=True):
            each(batch).square().mean().backward()
            update.step()
            update.zero_grad()
            scheduler.step()
    optimizer.close()
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def several(model: nn.Module, **policy: Any) -> zf.ZenFlow:
    """Matrices by AdamW, the last one by SGD, and vectors by Adagrad."""
    first, second, third = (model[number] for number in (0, 2, 4))  # type: ignore[index]
    groups = [
        {"params": [first.weight, second.weight]},
        {"params": [third.weight], "rule": rules.SGD(lr=0.1)},
        {"params": [first.bias, second.bias, third.bias], "rule": rules.Adagrad(**EPS)},
    ]
    return zf.ZenFlow(groups, rules.AdamW(**EPS), **OFFLOAD, **policy)


class Several(torch.optim.Optimizer):
    """PyTorch's optimizers of these rules, as one."""

    def __init__(self, model: nn.Module) -> None:
        first, second, third = (model[number] for number in (0, 2, 4))  # type: ignore[index]
        self.all = (
            torch.optim.AdamW([first.weight, second.weight], **EPS),
            torch.optim.SGD([third.weight], lr=0.1, momentum=0.9),
            torch.optim.Adagrad([first.bias, second.bias, third.bias], **EPS),
        )
        super().__init__(list(model.parameters()), {})

    def step(self, closure: Any = None) -> None:
        for each in self.all:
            each.step()


@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graphs"])
@pytest.mark.parametrize("policy", POLICIES)
def test_groups_have_rules_of_their_own(policy: str, compiled: bool) -> None:
    expected = train(Several)
    weights = train(lambda model: several(model, **POLICIES[policy]), compiled=compiled)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_groups_of_several_rules_resume() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return several(model, **WINDOWS)

    assert torch.equal(train(make), train(make, resumed_at=6))


def test_groups_of_several_rules_are_checked() -> None:
    model = mlp(torch.float32)
    with several(model, **POLICIES["resident"]) as optimizer:
        assert [group["rule"] for group in optimizer.param_groups] == ["AdamW", "SGD", "Adagrad"]
        assert optimizer.param_groups[1]["momentum"] == 0.9
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "rule": rules.Lion(lr=0.5)})
        assert optimizer.param_groups[3]["lr"] == 0.5
        state = optimizer.state_dict()
        with pytest.raises(ValueError, match=r"learning rate|lr=-1"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "rule": rules.Lion(), "lr": -1.0})
        with pytest.raises(TypeError, match=r"rule='Lyon' must be an instance of a rule"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "rule": "Lyon"})
        assert len(optimizer.param_groups) == 4
    other = mlp(torch.float32)
    with several(other, **POLICIES["resident"]) as optimizer:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "rule": rules.Adam()})
        with pytest.raises(ValueError, match=r"in param group 3 .*the rule is 'Lion', and this optimizer's 'Adam'"):
            optimizer.load_state_dict(state)
    with pytest.raises(TypeError, match="a ZenFlowAdamW has the rule Lion; for groups of several rules pass"):
        zf.ZenFlowAdamW([{"params": other.parameters(), "rule": rules.Lion()}])


def test_groups_have_their_own_numbers_alone() -> None:
    """Numbers of the optimizer's rule would ask for another one there: a momentum, Nesterov's."""
    params = [nn.Parameter(torch.ones(8, 8)) for _ in range(4)]
    group = {"params": [params[1]], "rule": rules.PlainSGD(lr=0.5)}
    groups = [{"params": [params[0]]}, group, {"params": [params[2]], "rule": rules.RMSprop()}]
    for _ in range(2):  # the dicts are as they were
        with zf.ZenFlow(groups, rules.NesterovSGD(), policy="resident") as optimizer:
            assert set(optimizer.param_groups[1]) == {"params", "rule", "lr", "weight_decay", "maximize"}
            with pytest.raises(ValueError, match="more than one parameter group"):
                optimizer.add_param_group(group)
            assert group["rule"] is optimizer.rules[1]
            optimizer.param_groups[1]["rule"] = "SGD"
            params[1].grad = torch.ones(8, 8)
            with pytest.raises(ValueError, match="rule='SGD' of a param group cannot change: it is PlainSGD"):
                optimizer.step()
            params[1].grad = None


@pytest.mark.parametrize("name", CASES)
def test_rules_are_pickled(name: str) -> None:
    """Processes that search plans get them."""
    rule = CASES[name][0]
    again = pickle.loads(pickle.dumps(rule))
    assert again.numbers == rule.numbers
    assert again.initial == rule.initial


def test_empty_parameters_and_default_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(3, 0)), nn.Parameter(torch.ones(4, 4))]
    monkeypatch.setattr(resident_updates, "has_kernels", lambda _: True)
    with zf.ZenFlow(params, rules.Lion(), policy="resident") as optimizer:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        torch.set_default_dtype(torch.bfloat16)
        try:
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(entry["step"].dtype == torch.float32 for entry in state["state"].values())


@pytest.mark.parametrize("policy", ["resident", "zero_offload"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "Lion"])
def test_states_of_pytorch_are_read_into_ours(name: str, policy: str, tmp_path: Path) -> None:
    """As docs/guide/checkpoints.md has it: ``dcp.load`` reads a state of PyTorch's optimizer into that of a new one."""
    rule, theirs, keywords = CASES[name]
    model, other = mlp(torch.float32), mlp(torch.float32)
    optimizer = theirs(model.parameters(), **keywords)
    batches = torch.randn(4, 16, 48)

    steps(model, optimizer, batches[:2])
    other.load_state_dict(model.state_dict())
    dcp.save({"state": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    mine = zf.ZenFlow(other.parameters(), rule, **OFFLOAD, **POLICIES[policy])
    found = {"state": get_optimizer_state_dict(other, mine)}
    dcp.load(found, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    if name == "NAdam":  # ours has no entry for the product of momenta
        with pytest.raises(ValueError, match=r"has no 'mu_product', .*: load it by optimizer.load_state_dict\(\)"):
            set_optimizer_state_dict(other, mine, found["state"])
        mine.close()
        return
    set_optimizer_state_dict(other, mine, found["state"])
    steps(model, optimizer, batches[2:])
    steps(other, mine, batches[2:])
    mine.close()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "theirs", "name"),
    [
        (rules.NesterovSGD(), lambda params: torch.optim.SGD(params, momentum=0.9, nesterov=True), "nesterov"),
        (rules.CenteredRMSprop(), lambda params: torch.optim.RMSprop(params, centered=True), "centered"),
        (rules.AdamWAMSGrad(), lambda params: torch.optim.AdamW(params, amsgrad=True), "amsgrad"),
    ],
)
def test_flags_of_rules_are_in_their_states(rule: Rule, theirs: Any, name: str) -> None:
    """PyTorch's optimizers take them from there; a state without the flag is of another rule."""
    param = nn.Parameter(torch.ones(8, 8))
    with zf.ZenFlow([param], rule, policy="resident") as optimizer:
        param.grad = torch.ones_like(param)
        optimizer.step()
        state = optimizer.state_dict()
        of_pytorch = theirs([param])
        of_pytorch.load_state_dict(state)
        assert of_pytorch.param_groups[0][name] is True
        state["param_groups"][0][name] = False
        with pytest.raises(
            ValueError, match=f"{name}=False differs from the True of the rule .*; choose the rule that"
        ):
            optimizer.load_state_dict(state)
        optimizer.param_groups[0][name] = False
        with pytest.raises(ValueError, match=f"{name}=False differs"):
            optimizer.step()


def test_dampening_of_a_later_momentum_is_refused() -> None:
    param = nn.Parameter(torch.ones(4, 4))
    with zf.ZenFlow([param], rules.SGD(momentum=0.0, dampening=0.5), policy="resident") as optimizer:
        param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(ValueError, match=r"momentum=0.9 with dampening=0.5 is not .*set dampening=0"):
            optimizer.step()
        optimizer.param_groups[0]["dampening"] = 0.0
        optimizer.step()


def test_groups_are_added_by_the_name_of_a_rule() -> None:
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    groups = [{"params": [params[0]], "rule": rules.SGD(lr=0.5)}, {"params": [params[1]]}]
    with zf.ZenFlow(groups, rules.AdamW(), policy="resident") as optimizer:
        options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        optimizer.add_param_group({**options, "params": [params[2]]})
        assert optimizer.rules[2] is optimizer.rules[0]
        assert set(optimizer.param_groups[2]) == set(optimizer.param_groups[0])
