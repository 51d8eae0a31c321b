"""What tools do with offloaded gradients at the edges: results in place, inference mode, raw memory, forks, errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from tests.gradients.loops import ADAM, EXACT, Tool, both_entries, compare, loss_of, plain, small, with_tool
from zenflow_compile import ZenFlowAdamW


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() > 1]


def reciprocal_norms(model: nn.Module, optimizer: Optimizer) -> Tensor:
    """Norms that are changed in place do not change what clipping measures."""
    norms = torch._foreach_norm([param.grad for param in matrices(model)])
    torch._foreach_add_(norms, 1.0)
    for param in matrices(model):
        param.grad.norm().zero_()
    return clip_grad_norm_(model.parameters(), 0.05)


def write_in_inference_mode(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    with torch.inference_mode():
        for param in matrices(model):
            param.grad[0] = 0
            param.grad.view(-1)[3:5].mul_(2)
            param.grad.add_(param, alpha=0.01)
        norms = [param.grad.norm() for param in matrices(model)]
    for param in matrices(model):
        assert not param.grad.requires_grad
        param.grad.add_(0.001)
    return [float(norm) for norm in norms]


def apply_function(model: nn.Module, optimizer: Optimizer) -> None:
    for param in matrices(model):
        param.grad.apply_(lambda value: 0.5 * value)


TOOLS = {"norms": reciprocal_norms, "inference_mode": write_in_inference_mode, "apply": apply_function}


@both_entries
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS.keys())
def test_tools_equal_adamw(tool: Tool, entry: dict[str, Any] | None) -> None:
    compare(with_tool(tool), entry, effect=plain)


def copy_other_shape(grad: Tensor) -> None:
    grad.copy_(torch.ones(7, 3, 5))


def fill_with_many(grad: Tensor) -> None:
    grad.fill_(torch.ones(3))


@both_entries
@pytest.mark.parametrize("write", [copy_other_shape, fill_with_many])
def test_write_that_raises_changes_nothing(write: Callable[[Tensor], None], entry: dict[str, Any] | None) -> None:
    def tool(model: nn.Module, optimizer: Optimizer) -> None:
        for param in matrices(model):
            with pytest.raises(RuntimeError):
                write(param.grad)

    compare(with_tool(tool), entry)


@contextmanager
def waiting(entry: dict[str, Any] | None = None) -> Iterator[nn.Module]:
    """A model after a backward."""
    model = small()
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **EXACT)
    loss_of(torch.compile(model, **entry) if entry else model, 0).backward()
    try:
        yield model
    finally:
        with suppress(RuntimeError):
            optimizer.close()


def test_norm_of_inference_mode_can_be_used_after_it() -> None:
    with waiting() as model:
        with torch.inference_mode():
            model.inner.weight.grad.norm()
        weight = torch.ones((), requires_grad=True)
        (weight * model.inner.weight.grad.norm()).backward()
        assert weight.grad is not None


def test_address_without_memory_is_refused() -> None:
    """The legacy function takes the address in C++."""
    with waiting() as model, pytest.raises(RuntimeError):
        torch.utils.dlpack.to_dlpack(model.inner.weight.grad)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_cannot_read_gradients() -> None:
    with waiting() as model:
        child = os.fork()
        if child == 0:
            try:
                model.inner.weight.grad.clone()
            except RuntimeError as error:
                os._exit(0 if "inner.weight" in str(error) and "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


class Lookup(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16, sparse=True)
        self.head = nn.Linear(16, 10)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.table(numbers))


@both_entries
def test_sparse_gradient_is_refused(entry: dict[str, Any] | None) -> None:
    model = Lookup()
    with ZenFlowAdamW(model.named_parameters(), **ADAM, **EXACT) as optimizer:
        call = torch.compile(model, **entry) if entry else model
        numbers = torch.arange(8)
        with pytest.raises(TypeError, match=r"table\.weight has a sparse gradient"):
            F.cross_entropy(call(numbers), numbers).backward()
        optimizer.zero_grad()
