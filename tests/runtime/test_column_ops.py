"""The PyTorch references of the device operations against plain indexing, and the checks before dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.selection import Selection, SliceState
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (7, 130), (200, 65), (3, 1500)]
FRACTIONS = [0.0, 0.1, 0.7, 1.0]
COEFFICIENTS = StepCoefficients.known(lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, grad_scale=0.5)


def selection_of(slices: int, fraction: float) -> Selection:
    """Selected slices in no particular order."""
    return Selection.of(torch.randperm(slices)[: round(fraction * slices)], slices, CPU)


def norms_of(matrix: Tensor, dim: int) -> Tensor:
    selection = selection_of(matrix.shape[dim], 0.5)
    return column_ops.norms_and_split(matrix, dim, selection, *blocks_like(matrix, dim, selection))


def blocks_like(matrix: Tensor, dim: int, selection: Selection) -> tuple[Tensor, Tensor]:
    length = matrix.shape[1 - dim]
    return matrix.new_full((len(selection.selected), length), 9), matrix.new_full((len(selection.deferred), length), 9)


@pytest.fixture(
    autouse=True, params=[(1 << 20, 1 << 20), (1 << 20, 0), (400, 0)], ids=["small", "one chunk", "several chunks"]
)
def chunk_elements(request: pytest.FixtureRequest) -> Iterator[None]:
    chunk, small = request.param
    with mock.patch.multiple(column_ops, _CHUNK_ELEMENTS=chunk, _SQUARES_ELEMENTS=chunk, _SMALL_ELEMENTS=small):
        yield


@pytest.mark.parametrize("layout", ["row_major", "column_major", "strided"])
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_norms_and_unsplit(
    dtype: torch.dtype, shape: tuple[int, int], dim: int, fraction: float, layout: str
) -> None:
    matrix = torch.randn(shape).to(dtype)
    if layout == "column_major":
        matrix = matrix.t().contiguous().t()
    elif layout == "strided":
        matrix = torch.stack([matrix, matrix], dim=-1)[..., 0]
    selection = selection_of(shape[dim], fraction)
    selected, deferred = blocks_like(matrix, dim, selection)
    norms = column_ops.norms_and_split(matrix, dim, selection, selected, deferred)
    slices = matrix if dim == 0 else matrix.t()
    assert torch.equal(selected, slices[selection.selected.long()])
    assert torch.equal(deferred, slices[selection.deferred.long()])
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms, matrix.double().square().sum(1 - dim).float())
    assert torch.equal(norms, norms_of(matrix, dim))
    assert torch.equal(norms, column_ops.column_norms(matrix, dim))
    rebuilt = torch.empty_like(matrix)
    column_ops.unsplit_columns(rebuilt, dim, selection, selected, deferred)
    assert torch.equal(rebuilt, matrix)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_writes_only_its_slices(dtype: torch.dtype, dim: int, fraction: float) -> None:
    surrounding = torch.randn(41, 3, 60).to(dtype)
    matrix = surrounding[:, 1]  # a view whose rows lie apart
    matrix[:, 5] = float("nan")
    matrix[7] = float("nan")
    expected = surrounding.clone()
    selection = selection_of(matrix.shape[dim], fraction)
    slices = selection.deferred
    values = torch.randn(len(slices), matrix.shape[1 - dim]).to(dtype)
    if dim == 0:
        expected[slices.long(), 1] = values
    else:
        expected[:, 1, slices.long()] = values.t()
    column_ops.merge_columns(matrix, dim, selection, values)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(surrounding.view(bits), expected.view(bits))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adam_updates_state_and_selected_slices(dtype: torch.dtype, dim: int, fraction: float) -> None:
    matrix = torch.randn(31, 45).to(dtype)
    before = matrix.clone()
    selection = selection_of(matrix.shape[dim], fraction)
    gradient, _ = blocks_like(matrix, dim, selection)
    gradient.normal_()
    master = (matrix if dim == 0 else matrix.t())[selection.selected.long()].float()
    state = [master, torch.randn_like(master), torch.rand_like(master)]
    expected = [tensor.clone() for tensor in state]
    update_window_(expected, [gradient], [COEFFICIENTS], step=5)
    own = SliceState(matrix, dim, selection, gradient, state[0], tuple(state[1:]), 5)
    column_ops.update_columns_([own], COEFFICIENTS)
    for mine, theirs in zip(state, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)
    slices, old = (matrix, before) if dim == 0 else (matrix.t(), before.t())
    assert torch.equal(slices[selection.selected.long()], state[0].to(dtype))
    assert torch.equal(slices[selection.deferred.long()], old[selection.deferred.long()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_batched_update_equals_single_updates(dtype: torch.dtype) -> None:
    """The results are equal bit for bit for all shapes and step counts, and wherever a batch ends."""

    def made() -> list[SliceState]:
        torch.manual_seed(0)
        states = []
        for step, (rows, columns, dim, fraction) in enumerate(
            [(31, 45, 0, 0.2), (7, 60, 1, 0.5), (64, 3, 0, 0.0), (16, 16, 1, 1.0), (33, 20, 1, 0.3)], start=1
        ):
            matrix = torch.randn(rows, columns).to(dtype)
            selection = selection_of(matrix.shape[dim], fraction)
            gradient = blocks_like(matrix, dim, selection)[0].normal_()
            master, exp_avg = torch.randn_like(gradient, dtype=torch.float32), torch.randn_like(gradient).float()
            states.append(SliceState(matrix, dim, selection, gradient, master, (exp_avg, exp_avg.square()), step))
        return states

    together, apart = made(), made()
    column_ops.update_columns_(together, COEFFICIENTS)
    for each in apart:
        column_ops.update_columns_([each], COEFFICIENTS)
    for mine, theirs, before in zip(together, apart, made(), strict=True):
        assert torch.equal(mine.matrix, theirs.matrix)
        assert torch.equal(mine.master, theirs.master)
        assert torch.equal(mine.arrays[1], theirs.arrays[1])
        assert mine.gradient.numel() == 0 or not torch.equal(mine.master, before.master)


@pytest.mark.parametrize("dim", [0, 1])
def test_norms_are_reproducible(dim: int) -> None:
    matrix = torch.randn(700, 900).bfloat16()
    first = norms_of(matrix, dim)
    assert all(torch.equal(first, norms_of(matrix.clone(), dim)) for _ in range(5))


def test_16_bit_gradients_are_summed_in_fp32() -> None:
    matrix = torch.full((4096, 8), 1e-3, dtype=torch.float16)
    exact = matrix.double().square().sum(0).float()
    torch.testing.assert_close(norms_of(matrix, 1), exact)
    torch.testing.assert_close(norms_of(torch.full((4, 8), 3e4, dtype=torch.float16), 1)[0].item(), 3.6e9)


def test_selection_positions() -> None:
    selection = Selection.of(torch.tensor([4, 1], dtype=torch.int32), 6, CPU)
    assert selection.deferred.tolist() == [0, 2, 3, 5]
    assert selection.position.tolist() == [2, 1, 3, 4, 0, 5]
    assert selection.slices == 6
    assert selection.nbytes == 4 * 12
    kept_order = Selection.of(torch.tensor([4, 1]), 6, CPU, deferred=torch.tensor([5, 0, 3, 2]))
    assert kept_order.deferred.tolist() == [5, 0, 3, 2]
    assert kept_order.position.tolist() == [3, 1, 5, 4, 0, 2]
    assert {kept_order.selected.dtype, kept_order.deferred.dtype, kept_order.position.dtype} == {torch.int32}


@pytest.mark.parametrize(
    ("selected", "deferred"), [([0, 0], None), ([6], None), ([-1], None), ([0], [1, 2, 3]), ([0], [0, 1, 2, 3, 4])]
)
def test_selection_lists_each_slice_once(selected: list[int], deferred: list[int] | None) -> None:
    with pytest.raises(ValueError, match="slice"):
        Selection.of(torch.tensor(selected), 6, CPU, deferred=None if deferred is None else torch.tensor(deferred))
