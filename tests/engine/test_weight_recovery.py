"""Weights in host memory behind loads of state, writes by others, failed jobs, and errors half-way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.calls import interrupted
from tests.support.gated_jobs import UPDATES, failed_jobs
from tests.support.training import EAGER_BACKEND, take_step
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.moved_weights import is_left_on_host, leave_on_host

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_weights")]

WIDTH = 64
ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "topk_ratio": 0.25, "device_share": 0.0, "min_offload_size": 1}


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])


class Run:
    def __init__(self, *, offloads: bool, **options: Any) -> None:
        torch._dynamo.reset()
        self.model = build()
        share = 1.0 if offloads else False
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), **{**ADAM, **options}, offload_weights=share)
        self.compile()

    def compile(self) -> None:
        self.call = torch.compile(self.model, **EAGER_BACKEND)

    def loss(self, step: int) -> Tensor:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        return self.call(x).square().mean()

    def train(self, *steps: int) -> list[Tensor]:
        losses = []
        for step in steps:
            losses.append(self.loss(step))
            take_step(losses[-1], self.optimizer)
        return [each.detach() for each in losses]


def equals_without_offloading(habit: Callable[[Run], list[Tensor]], **options: Any) -> bool:
    found = []
    for offloads in (True, False):
        run = Run(offloads=offloads, **options)
        losses = habit(run)
        run.optimizer.close()
        found.append([*losses, *[param.detach().clone() for param in run.model.parameters()]])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


SETS = [{"update_interval": 1, "staleness": 1}, {"update_interval": 2, "staleness": 1}, {"policy": "resident"}]
sets = pytest.mark.parametrize("options", [*SETS, {"update_interval": 3}], ids=lambda options: str(options))


@sets
def test_own_state_is_loaded_over_updates_in_flight(options: dict[str, Any]) -> None:
    def reload(run: Run) -> list[Tensor]:
        run.train(0, 1, 2, 3)
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        return run.train(4, 5, 6)

    assert equals_without_offloading(reload, **options)


@pytest.mark.parametrize("options", SETS, ids=lambda options: str(options))
def test_replaced_memory_is_taken_over(options: dict[str, Any]) -> None:
    def replace(run: Run) -> list[Tensor]:
        run.train(0, 1, 2)
        run.optimizer.synchronize()
        for param in run.model.parameters():
            param.data = torch.eye(WIDTH) * 0.3
        run.train(3, 4)
        run.optimizer.synchronize()
        for param in run.model.parameters():
            param.data = torch.eye(WIDTH) * 0.2
        return run.train(5, 6, 7)

    assert equals_without_offloading(replace, **options)


@sets
def test_state_dict_is_a_copy(options: dict[str, Any]) -> None:
    """Of every weight in host memory: writes reach none of them, and later steps do not change it."""
    run, other = Run(offloads=True, **options), Run(offloads=True, **options)
    for each in (run, other):
        each.compile()
        each.train(0, 1, 2)
    state = {name: value.cpu() for name, value in run.model.state_dict().items()}
    expected = {name: value.clone() for name, value in state.items()}
    torch._dynamo.reset()
    run.compile()
    other.compile()
    run.train(3)
    other.train(3)
    assert all(torch.equal(state[name], expected[name]) for name in state)
    for value in run.model.state_dict().values():
        value.mul_(0.5)
    assert torch.equal(run.loss(4), other.loss(4))
    run.optimizer.close()
    other.optimizer.close()


def test_failed_job_leaves_weights_behind_close() -> None:
    run = Run(offloads=True, update_interval=1)
    run.train(0, 1, 2)
    with failed_jobs(RuntimeError("on purpose"), UPDATES), pytest.raises(RuntimeError):
        run.train(3, 4, 5)
    with pytest.raises(RuntimeError):
        run.optimizer.close()
    assert all(bool(param.isfinite().all()) for param in run.model.parameters())


def test_failed_allocation_leaves_moved_weights() -> None:
    """The device's memory runs out at the third parameter. The next try has all values."""
    model = build()
    for param in model.parameters():
        leave_on_host(param, param.data.clone())
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, offload_weights=1.0)
    torch._dynamo.reset()
    call = torch.compile(model, **EAGER_BACKEND)
    x = torch.randn(8, WIDTH)
    no_memory = interrupted(DeviceState.allocate, torch.OutOfMemoryError("no memory"), after=2)
    with no_memory, pytest.raises(Exception, match="no memory"):
        call(x)
    assert all(is_left_on_host(param) for param in model.parameters())
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, **EAGER_BACKEND)(x), build()(x))
    optimizer.close()
    assert all(map(torch.equal, model.parameters(), build().parameters()))


def test_further_parameters_find_a_ring() -> None:
    run = Run(offloads=False)
    run.optimizer.close()
    model, extra = build(), nn.Linear(WIDTH, WIDTH, bias=False)
    budget = sum(param.nbytes for param in model.parameters())
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, offload_weights=budget)
    assert optimizer.engine.weights.weights == {}
    optimizer.add_param_group({"params": list(extra.parameters())})
    weights = optimizer.engine.weights
    assert (list(weights.weights), weights.ring_bytes) == ([3], extra.weight.nbytes)
    torch._dynamo.reset()
    torch.compile(nn.Sequential(model, extra), **EAGER_BACKEND)(torch.randn(8, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.close()


def test_interrupt_in_an_unload_loses_nothing() -> None:
    from zenflow_compile.runtime.parameters.host_weight import HostWeight

    run, other = Run(offloads=True, update_interval=2), Run(offloads=True, update_interval=2)
    for each in (run, other):
        torch._dynamo.reset()
        each.compile()
        each.train(0, 1)
    torch._dynamo.reset()
    run.compile()
    with interrupted(HostWeight._free, returned=True), pytest.raises(KeyboardInterrupt):
        run.loss(2)
    other.compile()
    assert all(map(torch.equal, run.train(2, 3), other.train(2, 3)))
    run.optimizer.close()
    other.optimizer.close()
