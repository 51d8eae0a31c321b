"""The norm of a gradient has the same bits however it arrived, and wherever it is. See [Note: order of a norm]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.training import ENTRIES, ENTRY_IDS
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.gradients.gradient_record import GradientState

SHAPES = {
    "rows": (70, 33),
    "columns": (33, 70),
    "many rows": (700, 600),
    "many columns": (600, 700),
    "one row": (1, 300),
    "three dims": (12, 5, 30),
}


class Weight(nn.Module):
    """The gradient of ``weight`` is ``given``: as it is, or with adjacent columns, as a graph may bring it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape).to(dtype))

    def forward(self, given: Tensor, transposed: bool) -> Tensor:
        if transposed:
            return (self.weight.t() * given.t().contiguous()).sum()
        return (self.weight * given).sum()


def once(weight: Weight, call: Any, given: Tensor, transposed: bool) -> None:
    call(given, transposed).backward()


def in_pieces(weight: Weight, call: Any, given: Tensor, transposed: bool) -> None:
    """After two contributions to a gradient, later ones are added up before they are split."""
    for _ in range(2):
        call(given, transposed).backward()
    weight.zero_grad()
    call(given, transposed).backward()


def with_zeros(weight: Weight, call: Any, given: Tensor, transposed: bool) -> None:
    call(given, transposed).backward()
    call(torch.zeros_like(given), transposed).backward()


def made_dense(weight: Weight, call: Any, given: Tensor, transposed: bool) -> None:
    call(given, transposed).backward()
    assert weight.weight.grad is not None
    weight.weight.grad.data_ptr()


ARRIVALS = [once, in_pieces, with_zeros, made_dense]
ENDS = [GradientState.PARTS, GradientState.ON_DEVICE, GradientState.ON_DEVICE, GradientState.DENSE]


def norms(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    entry: dict[str, Any] | None,
    arrive: Callable[..., None],
    transposed: bool = False,
) -> tuple[Tensor, GradientState]:
    """The norm of a gradient in front of the optimizer step, behind it, and of its slices; and its state in front."""
    model = Weight(shape, dtype)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-3, min_offload_size=1, device_share=0.0, update_interval=1)
    call = torch.compile(model, **entry) if entry else model
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    arrive(model, call, given, transposed)
    grad: Any = model.weight.grad
    state = grad._record.state
    before = torch.linalg.vector_norm(grad, dtype=torch.float32)
    optimizer.step()
    after = before if state is GradientState.DENSE else torch.linalg.vector_norm(grad, dtype=torch.float32)
    (offloaded,) = optimizer.engine.offloaded.values()
    squares = offloaded.device.norms.clone()
    optimizer.close()
    torch.testing.assert_close(before, torch.linalg.vector_norm(given.double()).float())
    return torch.cat([before[None], after[None], squares]), state


def assert_equal(found: list[tuple[Tensor, GradientState]]) -> None:
    assert all(torch.equal(each, found[0][0]) for each, _ in found)
    assert all(each[0] == each[1] for each, _ in found)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_norm_does_not_depend_on_the_arrival(name: str, dtype: torch.dtype, entry: dict[str, Any] | None) -> None:
    found = [norms(SHAPES[name], dtype, entry, arrive) for arrive in ARRIVALS]
    assert [state for _, state in found] == ENDS
    assert_equal(found)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("name", ["rows", "columns", "many rows", "many columns"])
def test_norm_does_not_depend_on_the_layout(name: str, entry: dict[str, Any] | None) -> None:
    found = [
        norms(SHAPES[name], torch.float32, entry, arrive, transposed)
        for arrive in ARRIVALS
        for transposed in (False, True)
    ]
    assert_equal(found)


def test_norm_of_zeroed_dense_gradients_is_the_same() -> None:
    """A gradient that became dense stays so under ``zero_grad(set_to_none=False)``; a resumed run has it in parts."""
    model = Weight(SHAPES["many columns"], torch.float32)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-3, min_offload_size=1, device_share=0.0, update_interval=1)
    given = torch.randn(SHAPES["many columns"], generator=torch.Generator().manual_seed(1))
    found = set()
    for arrive in (once, made_dense, once, once):
        arrive(model, model, given, False)
        found.add(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item().hex())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    grad: Any = model.weight.grad
    assert grad._record.state is GradientState.DENSE
    optimizer.close()
    assert len(found) == 1
