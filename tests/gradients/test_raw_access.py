"""Gradients in inference mode, raw addresses, forked processes and other threads, and unsupported gradients."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.support.loops import (
    ADAM,
    EXACT,
    ZERO_OFFLOAD,
    Call,
    Numbers,
    Tool,
    both_entries,
    compare,
    loss_of,
    plain,
    small,
    with_tool,
)
from tests.support.training import EAGER_BACKEND, batch
from zenflow_compile import ZenFlowAdamW


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() > 1]


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


TOOLS = {"inference_mode": write_in_inference_mode, "apply": apply_function}


@both_entries
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS.keys())
def test_tools_equal_adamw(tool: Tool, entry: dict[str, Any] | None) -> None:
    compare(with_tool(tool), entry, effect=plain)


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


def test_inference_mode_norm_is_usable_afterwards() -> None:
    with waiting() as model:
        with torch.inference_mode():
            model.inner.weight.grad.norm()
        weight = torch.ones((), requires_grad=True)
        (weight * model.inner.weight.grad.norm()).backward()
        assert weight.grad is not None


def test_address_without_memory_is_refused() -> None:
    """A legacy C++ function asks for the address."""
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


@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD], ids=["exact", "zero_offload"])
def test_compiled_backwards_in_threads_accumulate(options: dict[str, Any]) -> None:
    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        loss_of(call, 99).backward()  # AOTAutograd compiles backwards in one thread only
        optimizer.zero_grad()
        for step in range(6):
            losses = [loss_of(call, 10 * step + part) for part in range(3)]
            threads = [Thread(target=loss.backward) for loss in losses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            optimizer.step()
            optimizer.zero_grad()
        return None

    compare(loop, EAGER_BACKEND, options)


def test_eager_backwards_in_threads_are_refused() -> None:
    """Autograd may add to a gradient that is being taken out of ``.grad``."""
    model = small()
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **EXACT)
    errors: list[BaseException] = []
    other_loss = loss_of(model, 1)

    def run_other(grad: Tensor) -> None:
        def other() -> None:
            try:
                other_loss.backward()
            except RuntimeError as error:
                errors.append(error)

        thread = Thread(target=other)
        thread.start()
        thread.join()

    # Computed after the gradients of later layers.
    handle = model.inner.register_forward_hook(lambda module, inputs, output: output.register_hook(run_other) and None)
    loss = loss_of(model, 0)
    handle.remove()
    with pytest.raises(RuntimeError, match="one after the other"):
        loss.backward()
    assert "one after the other" in str(errors[0])
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    optimizer.close()


def test_shallow_copy_shares_the_gradient() -> None:
    with waiting() as model:
        grad = model.inner.weight.grad
        copy.copy(grad).fill_(3.0)
        assert torch.equal(grad.clone(), torch.full_like(model.inner.weight, 3.0))


def test_data_of_an_alias_is_its_own() -> None:
    with waiting() as model:
        grad = model.inner.weight.grad
        before = grad.clone()
        alias = grad.detach()
        alias.data = torch.zeros_like(before)
        assert not alias.any()
        assert torch.equal(model.inner.weight.grad.clone(), before)


@both_entries
def test_changed_dtype_is_refused(entry: dict[str, Any] | None) -> None:
    model = small()
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **EXACT)
    call = torch.compile(model, **entry) if entry else model
    inputs, targets = batch(0)
    theirs = small()
    adamw = torch.optim.AdamW(theirs.parameters(), **ADAM)
    for each, stepped in ((call, optimizer), (theirs, adamw)):
        F.cross_entropy(each(inputs), targets).backward()
        stepped.step()
        stepped.zero_grad()
    model.double()
    with pytest.raises(RuntimeError, match=r"was float32\[.* at the optimizer's first use and is float64"):
        F.cross_entropy(call(inputs.double()), targets).backward()
    # The cast took current weights: nothing is lost.
    optimizer.close()
    for param, reference in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param, reference.double(), atol=1e-6, rtol=0)


def test_sharded_parameter_is_refused() -> None:
    class Sharded(Tensor):
        """A tensor subclass without memory of its own, as a DTensor."""

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return [], None

        @staticmethod
        def __tensor_unflatten__(*arguments: object) -> None: ...

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    param = Tensor._make_wrapper_subclass(Sharded, (4, 4), requires_grad=True)
    with pytest.raises(TypeError, match="a parameter is a Sharded"):
        ZenFlowAdamW([param], **ADAM, **EXACT)
