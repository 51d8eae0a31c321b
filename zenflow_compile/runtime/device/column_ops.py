"""What the device does to a gradient and a parameter, slice by slice: Triton on CUDA, PyTorch elsewhere.

A *slice* is a column (``dim`` 1) or a row (``dim`` 0) of a matrix ``[rows, columns]``. Blocks of slices are laid out
``[slice, length]``, whatever the dim, so that one line is contiguous.

[Note: raw writes] The kernels write below autograd. Whoever lets them write a parameter bumps its version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.runtime.adam_rule import PaddedTail, StepCoefficients
from zenflow_compile.torch_internals import torch_private

# Elements that the references work on at a time, so that what they make in between stays small and in a core's cache.
# Transposed, a piece should also have many rows: pieces of a quarter of this size gain nothing.
_CHUNK_ELEMENTS = 1 << 20
_SQUARES_ELEMENTS = 1 << 18
# Up to this size the number of operator calls is what counts, not how they go through memory.
_SMALL_ELEMENTS = 1 << 14
_CUDA_CHUNK_ELEMENTS = 1 << 24  # fewer launches, for 64 MB of fp32 per temporary


@dataclass(frozen=True, slots=True)
class Selection:
    """Which slices the device updates.

    Attributes:
        selected: i32[k], in the order of the device's state.
        rest: i32[slices - k], the others, in the order of the host's state.
        position: i32[slices], where slice i stands in ``selected`` followed by ``deferred``.
    """

    selected: Tensor
    deferred: Tensor
    position: Tensor

    @classmethod
    def of(cls, selected: Tensor, slices: int, device: torch.device, deferred: Tensor | None = None) -> Selection:
        """A selection of ``slices`` slices; ``deferred`` in ascending order unless given.

        It is put together on the host: indices that are on a CUDA device are waited for.

        Raises:
            ValueError: a slice is out of range, missing, or there twice.
        """
        chosen = selected.cpu().long()
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < slices:
            raise ValueError(f"selected has slices outside [0, {slices - 1}]: {selected.tolist()[:8]}...")
        if deferred is None:
            others = torch.ones(slices, dtype=torch.bool)
            others[chosen] = False
            deferred = torch.nonzero(others).flatten()
        order = torch.cat([chosen, deferred.cpu().long()])
        if not torch.equal(order.sort().values, torch.arange(slices)):
            raise ValueError(
                f"selected ({chosen.numel()}) and deferred ({deferred.numel()}) must hold {slices} slices once each; "
                "some slice is missing or there twice"
            )
        position = torch.empty(slices, dtype=torch.int32)
        position[order] = torch.arange(slices, dtype=torch.int32)
        return cls(
            selected=chosen.to(device=device, dtype=torch.int32),
            deferred=deferred.to(device=device, dtype=torch.int32),
            position=position.to(device),
        )

    @property
    def slices(self) -> int:
        """Number of slices of the matrix."""
        return self.position.numel()

    @property
    def mask(self) -> Tensor:
        """bool[slices], a new tensor: which slices are selected, whatever the order of the state's rows."""
        return self.position < self.selected.numel()

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self.selected.nbytes + self.deferred.nbytes + self.position.nbytes


def norms_and_split(
    matrix: Tensor, dim: int, selection: Selection, selected_out: Tensor, deferred_out: Tensor
) -> Tensor:
    """Copy the selected slices into ``selected_out`` [k, length] and the others into ``rest_out`` [deferred, length].

    Args:
        matrix: [rows, columns], any floating dtype and strides; read once.
        selected_out, rest_out: contiguous, of the matrix's dtype.

    Returns:
        Squared L2 norm of every slice, f32[slices], accumulated in fp32 in an order that depends on the shape alone.

    Raises:
        ValueError: a block's shape or dtype does not fit.
    """
    _check_blocks(matrix, dim, selection, selected_out, deferred_out)
    if kernels := _kernels_for(matrix):
        norms: Tensor = kernels.norms_and_split(matrix, dim, selection, selected_out, deferred_out)
        return norms
    reference_split_columns(matrix, dim, selection, selected_out, deferred_out)
    return reference_column_norms(matrix, dim)


def unsplit_columns(
    matrix_out: Tensor, dim: int, selection: Selection, selected_in: Tensor, deferred_in: Tensor
) -> None:
    """Inverse of :func:`norms_and_split`: put the slices of both blocks back into ``matrix_out`` [rows, columns].

    Raises:
        ValueError: a block's shape or dtype does not fit.
    """
    _check_blocks(matrix_out, dim, selection, selected_in, deferred_in)
    if kernels := _kernels_for(matrix_out):
        kernels.unsplit_columns(matrix_out, dim, selection, selected_in, deferred_in)
    else:
        reference_merge_columns(matrix_out, dim, selection.selected, selected_in)
        reference_merge_columns(matrix_out, dim, selection.deferred, deferred_in)


def merge_columns(matrix: Tensor, dim: int, slices: Tensor, values: Tensor) -> None:
    """Write ``values`` [n, length] into ``slices`` i32[n] of ``matrix``, in place; the others keep their bits.

    Args:
        slices: no slice twice.
        values: contiguous, of the matrix's dtype.

    Raises:
        ValueError: the shape or dtype of ``values`` does not fit.
    """
    _check_block("values", values, matrix, dim, slices.numel())
    if kernels := _kernels_for(matrix):
        kernels.merge_columns(matrix, dim, slices, values)
    else:
        reference_merge_columns(matrix, dim, slices, values)


class SliceState(NamedTuple):
    """The selected slices of one parameter, for :func:`adam_columns_`.

    Attributes:
        matrix: [rows, columns], fp32, bf16 or fp16; only its selected slices are written, none is read.
        gradient: [k, length] in any floating dtype; not written.
        master, exp_avg, exp_avg_sq: f32[k, length], contiguous, updated in place.
        step: gradients that the moments have taken after this one.
    """

    matrix: Tensor
    dim: int
    selection: Selection
    gradient: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int


def adam_columns_(params: Sequence[SliceState], slot: StepCoefficients, *, eps: float) -> None:
    """One AdamW step on the selected slices of parameters that share coefficients, cast into their matrices.

    What comes out for one of them does not depend on the others.
    """
    params = [each for each in params if each.gradient.numel()]
    if params and (kernels := _kernels_for(params[0].matrix)):
        for matrix, dim, selection, gradient, master, exp_avg, exp_avg_sq, step in params:
            kernels.adam_columns_(
                matrix, dim, selection.selected, gradient, master, exp_avg, exp_avg_sq, slot, step=step, eps=eps
            )
    else:
        reference_adam_columns_(params, slot, eps=eps)


@torch.no_grad()
def quantize_slices_(
    gradient: Tensor, residual: Tensor, grad_scale: float, scales_out: Tensor, values_out: Tensor
) -> None:
    """Write ``gradient * grad_scale + residual`` as int8 with a scale per slice; ``residual`` takes what that loses.

    Rounded to the nearest multiple of a slice's scale, 1/127 of its maximum magnitude. A slice with inf or NaN becomes
    NaN as a whole. PyTorch's own operations, on CUDA too: it runs once per parameter and step, and not in a backward.

    Args:
        gradient: [deferred, length], any floating dtype; not written.
        residual: [deferred, length], fp32 or bf16, in units of the scaled gradient; updated in place.
        scales_out: f32[deferred]; values_out: int8[deferred, length]. ``values_out * scales_out`` is what was written.
    """
    slices = max(1, (_CUDA_CHUNK_ELEMENTS if gradient.is_cuda else _CHUNK_ELEMENTS) // max(1, gradient.shape[1]))
    for first in range(0, gradient.shape[0], slices):
        part = slice(first, first + slices)
        exact = (gradient[part].float() * grad_scale).add_(residual[part])
        scales = scales_out[part]
        torch.div(exact.abs().amax(1), 127.0, out=scales)
        quantized = exact.div(scales.unsqueeze(1)).round_()
        # A slice of zeros was divided by zero. Of a slice with NaN only the scale counts: its int8 are any.
        quantized.nan_to_num_(nan=0.0).clamp_(-127.0, 127.0)
        values_out[part].copy_(quantized)
        residual[part].copy_(exact.sub_(quantized.mul_(scales.unsqueeze(1))))


# The references, which the tests hold against the kernels.


def reference_adam_columns_(params: Sequence[SliceState], slot: StepCoefficients, *, eps: float) -> None:
    """:func:`adam_columns_` in PyTorch: one call for the arithmetic of many, which takes them one after the other."""
    for batch in _batches(params):
        grads = [each.gradient.float() for each in batch]
        if slot.grad_scale != 1.0:
            grads = list(torch._foreach_mul(grads, slot.grad_scale))
        steps = {count: torch.tensor(float(count)) for count in {each.step for each in batch}}
        # Rows are stored in any order, so that no element's result may depend on its place.
        cuts = [
            PaddedTail.of([block.reshape(-1) for block in (each.master, each.exp_avg, each.exp_avg_sq, grad)])
            for each, grad in zip(batch, grads, strict=True)
        ]
        counts = [steps[each.step] for each in batch]
        parts = [(*cut.vectors, count) for cut, count in zip(cuts, counts, strict=True)]
        parts += [(*cut.padded, count) for cut, count in zip(cuts, counts, strict=True) if cut.tail]
        masters, exp_avgs, exp_avg_sqs, gradients, counts = (list(each) for each in zip(*parts, strict=True))
        torch_private.fused_adamw_multi_(
            masters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            counts,
            lr=slot.lr,
            beta1=slot.beta1,
            beta2=slot.beta2,
            weight_decay=slot.weight_decay,
            eps=eps,
        )
        for cut in cuts:
            cut.put_back(3)
        for each in batch:
            master = each.master.to(each.matrix.dtype)
            reference_merge_columns(each.matrix, each.dim, each.selection.selected, master)


def _batches(params: Sequence[SliceState]) -> Iterator[list[SliceState]]:
    """Few enough at a time to bound the casts of their gradients."""
    batch: list[SliceState] = []
    elements = 0
    for each in params:
        batch.append(each)
        elements += each.gradient.numel()
        if elements >= _CHUNK_ELEMENTS:
            yield batch
            batch, elements = [], 0
    if batch:
        yield batch


def reference_column_norms(matrix: Tensor, dim: int) -> Tensor:
    """The norms of :func:`norms_and_split` in PyTorch."""
    matrix, dim = row_major(matrix, dim)
    if matrix.numel() <= _SQUARES_ELEMENTS:
        small = matrix if matrix.dtype == torch.float32 else matrix.to(torch.float32)
        return small.square().sum(1 - dim)
    if dim == 0:
        norms: Tensor = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32)
        return norms.square_()
    # Down the columns that is 7 to 20 times slower than this. PyTorch's sums over one axis of equal shapes run in equal
    # order, on CPU and CUDA: there are no atomics in them.
    partials = []
    for chunk in torch.split(matrix, _rows_per_chunk(matrix, _SQUARES_ELEMENTS)):
        squares = chunk.square() if chunk.dtype == torch.float32 else chunk.to(torch.float32).square_()
        partials.append(squares.sum(0))
    return partials[0] if len(partials) == 1 else torch.stack(partials).sum(0)


def reference_split_columns(
    matrix: Tensor, dim: int, selection: Selection, selected_out: Tensor, deferred_out: Tensor
) -> None:
    """The blocks of :func:`norms_and_split` in PyTorch."""
    matrix, dim = row_major(matrix, dim)
    blocks = [(selection.selected, selected_out), (selection.deferred, deferred_out)]
    blocks = [(slices, out) for slices, out in blocks if slices.numel()]
    if dim == 0 or matrix.numel() <= _SMALL_ELEMENTS:
        whole = matrix if dim == 0 else matrix.t().contiguous()
        for slices, out in blocks:
            torch.index_select(whole, 0, slices, out=out)
        return
    rows = _rows_per_chunk(matrix, _CHUNK_ELEMENTS)
    for first in range(0, matrix.shape[0], rows):
        # Whole rows at a time: only then does PyTorch's copy transpose in blocks instead of striding through memory.
        transposed = matrix[first : first + rows].t().contiguous()
        for slices, out in blocks:
            torch.index_select(transposed, 0, slices, out=out[:, first : first + rows])


@torch.no_grad()
def reference_merge_columns(matrix: Tensor, dim: int, slices: Tensor, values: Tensor) -> None:
    """:func:`merge_columns` in PyTorch."""
    if not slices.numel():
        return
    matrix, dim = row_major(matrix, dim)
    index = slices.long()
    if dim == 0:
        matrix.index_copy_(0, index, values)
    elif matrix.numel() <= _SMALL_ELEMENTS:
        matrix.t().index_copy_(0, index, values)  # against the grain, but in few calls
    elif 2 * slices.numel() < matrix.shape[1]:
        matrix.index_copy_(1, index, values.t().contiguous())
    else:
        rows = _rows_per_chunk(matrix, _CHUNK_ELEMENTS)
        for first in range(0, matrix.shape[0], rows):
            chunk = matrix[first : first + rows]
            transposed = chunk.t().contiguous()
            transposed.index_copy_(0, index, values[:, first : first + rows])
            chunk.copy_(transposed.t())


def row_major(matrix: Tensor, dim: int) -> tuple[Tensor, int]:
    """The same slices with the elements of a row adjacent, if one of its two axes allows that."""
    if matrix.stride(1) != 1 and matrix.stride(0) == 1:
        return matrix.t(), 1 - dim
    return matrix, dim


def _rows_per_chunk(matrix: Tensor, elements: int) -> int:
    return max(1, elements // max(1, matrix.shape[1]))


def _check_blocks(matrix: Tensor, dim: int, selection: Selection, selected: Tensor, deferred: Tensor) -> None:
    if selection.slices != matrix.shape[dim]:
        raise ValueError(
            f"the selection is of {selection.slices} slices, but the matrix {list(matrix.shape)} "
            f"has {matrix.shape[dim]} along dim {dim}"
        )
    _check_block("the selected block", selected, matrix, dim, selection.selected.numel())
    _check_block("the block of the rest", deferred, matrix, dim, selection.deferred.numel())


def _check_block(name: str, block: Tensor, matrix: Tensor, dim: int, slices: int) -> None:
    # The kernels would cast silently, and write beyond a block that is too small.
    expected = (slices, matrix.shape[1 - dim])
    if block.shape != expected or block.dtype != matrix.dtype or not block.is_contiguous():
        raise ValueError(
            f"{name} is {block.dtype}{list(block.shape)} with strides {list(block.stride())}; "
            f"it must be contiguous {matrix.dtype}{list(expected)}"
        )


def _kernels_for(matrix: Tensor) -> ModuleType | None:
    return _kernels() if matrix.is_cuda else None


@cache
def _kernels() -> ModuleType | None:
    """The Triton kernels, or None where there is no Triton: its wheels are for Linux only."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from zenflow_compile.runtime.device import triton_kernels

    return triton_kernels
