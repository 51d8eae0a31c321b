"""Schedulers write into param groups; an update window applies the coefficients of each of its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

from tests.support.training import OFFLOAD_ALL, batch, mlp
from zenflow_compile import ZenFlowAdamW

EXACT = {**OFFLOAD_ALL, "update_interval": 1}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4], 0.3),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.3, 3),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 6, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=8),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-4, 4),
}


def test_every_scheduler_is_tested() -> None:
    here = {*SCHEDULERS, "LRScheduler"}
    assert {name for name in schedulers.__all__ if isinstance(getattr(schedulers, name), type)} <= here


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_schedulers_equal_adamw(make: Callable[[torch.optim.Optimizer], Any], tensor_lr: bool) -> None:
    ours, theirs = mlp(), mlp()
    rate = torch.tensor(1e-2) if tensor_lr else 1e-2
    optimizer = ZenFlowAdamW(ours.parameters(), lr=rate, weight_decay=0.01, **EXACT)
    adam = torch.optim.AdamW(theirs.parameters(), lr=rate if not tensor_lr else rate.clone(), weight_decay=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*epoch parameter.*")
        pairs = [(ours, optimizer, make(optimizer)), (theirs, adam, make(adam))]
        for step in range(7):
            for model, each, scheduler in pairs:
                F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
                each.step()
                each.zero_grad()
                plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
                scheduler.step(*([1.0 + step] if plateau else []))
    assert float(optimizer.param_groups[0]["lr"]) == float(adam.param_groups[0]["lr"])
    optimizer.synchronize()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_tensor_lr_is_not_shared_by_a_state_dict() -> None:
    model = mlp()
    optimizer = ZenFlowAdamW(model.parameters(), lr=torch.tensor(1e-2), **EXACT)
    state = optimizer.state_dict()
    optimizer.param_groups[0]["lr"].fill_(1.0)
    assert float(state["param_groups"][0]["lr"]) == pytest.approx(1e-2)
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["lr"].fill_(1.0)
    assert float(state["param_groups"][0]["lr"]) == pytest.approx(1e-2)


def test_windows_use_the_coefficients_of_each_step() -> None:
    """Rule P: rates add up and decays multiply over the window; the values at its flush do not matter."""
    param = nn.Parameter(torch.full((20, 20), 2.0))
    optimizer = ZenFlowAdamW([param], lr=0.1, weight_decay=0.5, **{**OFFLOAD_ALL, "topk_ratio": 0.0}, update_interval=4)
    phase = optimizer.engine.plan.params[0].phase
    rates = [0.1, 0.05, 0.2, 0.01, 0.3, 0.02, 0.04, 0.08]
    for step in range(phase + 5):
        optimizer.param_groups[0]["lr"] = rates[step]
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == phase:
            optimizer.synchronize()
            begin = param.detach().clone()
    optimizer.synchronize()
    window = rates[phase + 1 : phase + 5]
    decay = torch.tensor([1 - 0.5 * lr for lr in window]).prod()
    torch.testing.assert_close(param.detach(), begin * decay - sum(window), atol=1e-5, rtol=1e-5)
