"""The problem and the cases of PyTorch's ``test_optim.py``, for its optimizers and for those here."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zenflow_compile import ZenFlow

POLICIES: dict[str, dict[str, Any]] = {
    "host": {
        "update_interval": 1, "min_offload_size": 0, "device_share": 0.0, "topk_ratio": 0.2,
    },
    "resident": {"policy": "resident"},
}  # fmt: skip
both_policies = pytest.mark.parametrize("policy", POLICIES)

Make = Callable[..., Optimizer]
Numbers = list[float | Tensor]
Case = Callable[[Make], Numbers]


@cache
def optimizer_info(kind: type[Optimizer]) -> Any:
    """PyTorch's description of an optimizer. Importing it freezes the flags of ``torch.backends``, which is undone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # of an optional package
        from torch.testing._internal.common_optimizers import optim_db

    setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)
    return next(each for each in optim_db if each.optim_cls is kind)


def outcome(case: Case, make: Make) -> Numbers:
    torch.manual_seed(0)
    return case(make)


def synchronized(optimizer: Optimizer, *tensors: Tensor) -> Numbers:
    if isinstance(optimizer, ZenFlow):
        optimizer.synchronize()
    return [tensor.detach().clone() for tensor in tensors]


class Problem:
    """The problem of PyTorch's optimizer tests: train the outputs of an affine map to zero."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, holes: bool = False) -> None:
        if holes:
            self.weight = nn.Parameter(torch.randn(10, 5, 2, dtype=dtype)[..., 0])
            self.bias = nn.Parameter(torch.randn(10, 2, dtype=dtype)[..., 0])
            assert not self.weight.is_contiguous()
        else:
            self.weight = nn.Parameter(torch.randn(10, 5, dtype=dtype))
            self.bias = nn.Parameter(torch.randn(10, dtype=dtype))
        self.input = torch.randn(5, dtype=dtype)
        self.params = [self.weight, self.bias]

    def loss(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias).pow(2).sum()

    def train(self, optimizer: Optimizer, steps: int = 20) -> Numbers:
        losses: Numbers = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            optimizer.step()
            losses += synchronized(optimizer, loss)
        return losses + synchronized(optimizer, *self.params)


# Cases of test_optim.py


def by_keywords(dtype: torch.dtype = torch.float32, *, holes: bool = False, **keywords: Any) -> Case:
    def case(make: Make) -> Numbers:
        problem = Problem(dtype, holes=holes)
        return problem.train(make(problem.params, **copy.deepcopy(keywords)))

    return case


def one_element_lr(make: Make) -> Numbers:
    """The tensor is written in place between steps, as schedulers do."""
    problem, lr = Problem(), torch.tensor([0.01])
    optimizer = make(problem.params, lr=lr)
    numbers = problem.train(optimizer, 3)
    lr.fill_(0.05)
    return numbers + problem.train(optimizer, 3)


def groups(make: Make) -> Numbers:
    problem = Problem()
    weight, bias = problem.params
    params = [{"params": [weight]}, {"params": [bias], "lr": 0.03, "weight_decay": 0.5, "betas": (0.8, 0.9)}]
    return problem.train(make(params, lr=1e-2))


def names(make: Make) -> Numbers:
    problem = Problem()
    optimizer = make([("weight", problem.weight), ("bias", problem.bias)], lr=1e-2)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    return problem.train(optimizer)


def closures(make: Make) -> Numbers:
    problem = Problem()
    optimizer = make(problem.params, lr=1e-2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).detach() for _ in range(5)]
    optimizer.zero_grad()
    return [*losses, optimizer.step(lambda: 1.5), *synchronized(optimizer, *problem.params)]


def added_group(make: Make) -> Numbers:
    problem = Problem()
    optimizer = make([problem.weight], lr=1e-2)
    first = problem.train(optimizer, 3)
    problem.bias.grad = None
    optimizer.add_param_group({"params": problem.bias, "lr": 5e-2, "maximize": False})
    return first + problem.train(optimizer, 5)


def step_hooks(make: Make) -> Numbers:
    """Hooks of the class and of the optimizer run in order; one changes the arguments of ``step()``."""
    problem, calls = Problem(), []
    optimizer = make(problem.params, lr=1e-2)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append(0.0)),
        optimizer.register_step_pre_hook(lambda *_: calls.append(1.0)),
        optimizer.register_step_post_hook(lambda *_: calls.append(2.0)),
        register_optimizer_step_post_hook(lambda *_: calls.append(3.0)),
    ]
    problem.train(optimizer, 2)
    for handle in handles:
        handle.remove()
    problem.train(optimizer, 1)
    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((args[0], lambda: 7.0), kwargs))
    optimizer.zero_grad()
    return [*calls, optimizer.step(), *synchronized(optimizer, *problem.params)]


def resumed(make: Make) -> Numbers:
    """The state is saved, read with ``weights_only``, and loaded into an optimizer of other hyperparameters."""
    problem = Problem()
    optimizer = make(problem.params, lr=1e-2, weight_decay=0.1)
    problem.train(optimizer, 4)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": synchronized(optimizer, *problem.params)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = Problem()
    with torch.no_grad():
        for param, values in zip(other.params, saved["params"], strict=True):
            param.copy_(values)
    other.input = problem.input
    loaded = make(other.params, lr=0.7)
    loaded.load_state_dict(saved["optimizer"])
    assert loaded.param_groups[0]["lr"] == 1e-2
    numbers = other.train(loaded, 4)
    for a, b in zip(problem.train(optimizer, 4), numbers, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), "resuming is not deterministic"
    return numbers


def older_state(make: Make) -> Numbers:
    """Load a state that was saved before some keywords existed."""
    problem = Problem()
    optimizer = make(problem.params, lr=1e-2)
    problem.train(optimizer, 2)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for name in ("maximize", "foreach", "capturable", "differentiable", "fused"):
            group.pop(name, None)
    optimizer.load_state_dict(state)
    return problem.train(optimizer, 3)


def state_dict_hooks(make: Make) -> Numbers:
    problem, calls = Problem(), []
    optimizer = make(problem.params, lr=1e-2)
    optimizer.register_state_dict_pre_hook(lambda _: calls.append(1.0))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append(2.0))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(3.0))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append(4.0))
    problem.train(optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    return calls + problem.train(optimizer, 2)


def overflow(make: Make) -> Numbers:
    """``GradScaler`` skips the steps whose gradients are not finite, and lowers its scale."""
    problem = Problem()
    optimizer = make(problem.params, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales: Numbers = []
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(problem.loss() * (float("inf") if step % 3 == 1 else 1.0)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(problem.params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales + synchronized(optimizer, *problem.params)


def clipping_over_groups(make: Make) -> Numbers:
    problem = Problem()
    optimizer = make([{"params": [problem.weight]}, {"params": [problem.bias], "lr": 0.1}], lr=1e-2)
    norms: Numbers = []
    for norm_type in (2.0, float("inf"), 1.0, 2.0):
        optimizer.zero_grad()
        problem.loss().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(problem.params, 0.5, norm_type))
        torch.nn.utils.clip_grad_value_(problem.params, 0.1)
        optimizer.step()
    return norms + synchronized(optimizer, *problem.params)


def some_without_gradient(make: Make) -> Numbers:
    """The bias has a gradient in every other step, and its step count is its own."""
    problem = Problem()
    optimizer = make(problem.params, lr=1e-2)
    for step in range(6):
        optimizer.zero_grad()
        problem.loss().backward()
        if step % 2:
            problem.bias.grad = None
        optimizer.step()
    return synchronized(optimizer, *problem.params)


def without_elements(make: Make) -> Numbers:
    problem, empty = Problem(), [nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 4))]
    optimizer = make([*problem.params, *empty], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        (problem.loss() + sum(each.sum() for each in empty)).backward()
        optimizer.step()
    return synchronized(optimizer, *problem.params, *empty)


def kept_gradients(make: Make) -> Numbers:
    problem = Problem()
    optimizer = make(problem.params, lr=1e-2)
    for _ in range(3):
        problem.loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # on zeros: moments and weights decay
    return synchronized(optimizer, *problem.params)


def scheduler_before_training(make: Make) -> Numbers:
    """Make steps without any gradient, the idiom of scheduler tests."""
    problem = Problem()
    optimizer = make(problem.params, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    rates: Numbers = []
    for _ in range(5):
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    return rates + problem.train(optimizer, 2)


CASES: dict[str, Case] = {
    "default": by_keywords(),
    "foreach": by_keywords(foreach=True),
    "fused": by_keywords(fused=True),
    "lr_zero": by_keywords(lr=0.0),
    "tensor_betas": by_keywords(lr=torch.tensor(0.01), betas=(torch.tensor([[[0.8]]]), torch.tensor([[0.9]]))),
    "tensor_decay": by_keywords(lr=0.01, weight_decay=torch.tensor(0.3), eps=torch.tensor(1e-3)),
    "large_eps": by_keywords(lr=0.01, eps=1e-2, betas=(0.0, 0.5)),
    "fp64": by_keywords(torch.float64, lr=0.01, maximize=True),
    "non_contiguous": by_keywords(holes=True, lr=0.01),
    "one_element_lr": one_element_lr,
    "groups": groups,
    "names": names,
    "closures": closures,
    "added_group": added_group,
    "step_hooks": step_hooks,
    "resumed": resumed,
    "older_state": older_state,
    "state_dict_hooks": state_dict_hooks,
    "overflow": overflow,
    "clipping_over_groups": clipping_over_groups,
    "some_without_gradient": some_without_gradient,
    "without_elements": without_elements,
    "kept_gradients": kept_gradients,
    "scheduler_before_training": scheduler_before_training,
}
