"""Split gradients into slices, merge slices into weights, and update slices: in Triton if the device has it.

A *slice* is a column (``dim`` 1) or a row (``dim`` 0) of a matrix ``[rows, columns]``. Blocks of slices are laid out
``[slice, length]``, whatever the dim, so that one slice is contiguous.

[Note: raw writes] The kernels write below autograd. A caller that lets them write a parameter must bump its version.

[Note: unchecked blocks] The kernels take shapes and layouts on trust: a block that is too small would be written past
its end. Blocks are made from the plan, and ``IncomingGradient.matrix_of`` and ``Weights.matrix`` check what comes from
outside: gradients, and the parameter's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device_updates.selection import Selection, SliceState, row_major
from zenflow_compile.runtime.update_rule import VECTOR_ELEMENTS, PaddedTail, StepCoefficients, update_window_
from zenflow_compile.torch_internals import torch_private

_T = TypeVar("_T")

# Elements that the references process at a time: temporaries fit into a core's cache. A chunk that is transposed should
# also have many rows: a quarter of this size gains nothing.
_CHUNK_ELEMENTS = 1 << 20
_SQUARES_ELEMENTS = 1 << 18
# Up to this size an operation costs as much as its operator calls, whatever its order of memory accesses.
_SMALL_ELEMENTS = 1 << 14
_LAUNCH_ELEMENTS = 1 << 24  # fewer launches, for 64 MB of fp32 per temporary


def norms_and_split(
    matrix: Tensor, dim: int, selection: Selection, selected_out: Tensor, deferred_out: Tensor
) -> Tensor:
    """Copy the selected slices into ``selected_out`` [k, length], the others into ``deferred_out`` [deferred, length].

    Reads ``matrix`` [rows, columns], of any floating dtype and strides, once, and returns its ``column_norms``. The
    blocks are contiguous, of the matrix's dtype.
    """
    if (kernels := _kernels(matrix.device)) is not None:
        norms: Tensor = kernels.norms_and_split(matrix, dim, selection, selected_out, deferred_out)
        return norms
    reference_split_columns(matrix, dim, selection, selected_out, deferred_out)
    return reference_column_norms(matrix, dim)


def column_norms(matrix: Tensor, dim: int) -> Tensor:
    """Return the squared L2 norm of every slice: f32[slices], accumulated in fp32.

    The order of the sums depends on the shape, and on whether the elements of a row or those of a column are adjacent.
    """
    if (kernels := _kernels(matrix.device)) is not None:
        norms: Tensor = kernels.column_norms(matrix, dim)
        return norms
    return reference_column_norms(matrix, dim)


def norms_of_slices(squared_norms: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm f32[] of each matrix from its ``column_norms``, in few operators for all of them.

    [Note: order of a norm] Clipping passes the last bit of a norm on to the weights. So a norm depends on the values of
    the gradient alone, and not on what no state dict has: whether it has arrived in one piece, was split, or became
    dense. It is the root of a sum in the order of the slices, of the sums of squares in each slice, which
    ``column_norms`` adds up in an order that follows from the shape.
    """
    norms = list(torch._foreach_norm(list(squared_norms), 1))  # squares are not negative: this is their sum
    torch._foreach_sqrt_(norms)
    return norms


def unsplit_columns(
    matrix_out: Tensor, dim: int, selection: Selection, selected_in: Tensor, deferred_in: Tensor
) -> None:
    """Inverse of :func:`norms_and_split`: put the slices of both blocks back into ``matrix_out`` [rows, columns]."""
    if (kernels := _kernels(matrix_out.device)) is not None:
        kernels.unsplit_columns(matrix_out, dim, selection, selected_in, deferred_in)
    else:
        reference_merge_columns(matrix_out, dim, selection.selected, selected_in)
        reference_merge_columns(matrix_out, dim, selection.deferred, deferred_in)


def merge_columns(matrix: Tensor, dim: int, selection: Selection, values: Tensor) -> None:
    """Write contiguous ``values`` [deferred, length] of its dtype into the deferred slices of ``matrix``, in place."""
    if (kernels := _kernels(matrix.device)) is not None:
        kernels.merge_columns(matrix, dim, selection, values)
    else:
        reference_merge_columns(matrix, dim, selection.deferred, values)


def update_columns_(params: Sequence[SliceState], coefficients: StepCoefficients) -> None:
    """Do one step on the selected slices of parameters that share coefficients, and cast it into their matrices.

    The result of one parameter does not depend on the others.
    """
    params = [each for each in params if each.gradient.numel()]
    if params and (updates := _updates(params[0].matrix.device)) is not None:
        for each in params:
            updates.update_slices_(each, coefficients)
    else:
        reference_update_columns_(params, coefficients)


def quantize_slices_(
    gradient: Tensor, residual: Tensor, grad_scale: float | Tensor, scales_out: Tensor, values_out: Tensor
) -> None:
    """Write ``gradient * grad_scale + residual`` as int8 with a scale per slice; ``residual`` takes the rounding error.

    Values are rounded to the nearest multiple of the slice's scale, 1/127 of its maximum magnitude. A slice with inf or
    NaN becomes NaN as a whole. The Triton kernel gives the bits of the reference on the CPU.

    Args:
        gradient: [deferred, length], contiguous, of any floating dtype; not written.
        residual: [deferred, length], contiguous, fp32 or bf16, in units of the scaled gradient; updated in place.
        grad_scale: a number, or f64[] on the gradient's device; rounded to fp32.
        scales_out: f32[deferred]. The written gradient is ``values_out * scales_out``.
        values_out: int8[deferred, length], contiguous.
    """
    if (kernels := _kernels(gradient.device)) is not None:
        kernels.quantize_slices_(gradient, residual, grad_scale, scales_out, values_out)
    else:
        reference_quantize_slices_(gradient, residual, grad_scale, scales_out, values_out)


# The references: what runs without Triton, and what the tests compare the kernels with.


def reference_update_columns_(params: Sequence[SliceState], coefficients: StepCoefficients) -> None:
    """:func:`update_columns_` in PyTorch: for AdamW one multi-tensor call for a batch of parameters."""
    update = _update_by_adamw if coefficients.rule.fused else _update_by_rule
    for batch in bounded_batches(params, [each.gradient.numel() for each in params], _CHUNK_ELEMENTS):
        parts = [[each for each in batch if each.form.moments == "fp32"]]
        if cut := [piece for each in batch if each.form.moments != "fp32" for piece in each.pieces(_CHUNK_ELEMENTS)]:
            parts += bounded_batches(cut, [each.gradient.numel() for each in cut], _CHUNK_ELEMENTS)
        for part in parts:
            if not part:
                continue
            wide = [each.arrays if each.form.moments == "fp32" else each.form.expand(*each.arrays) for each in part]
            update(part, wide, coefficients)
            for each, arrays in zip(part, wide, strict=True):
                if each.form.moments != "fp32":
                    for stored, values in zip(each.arrays, each.form.compress(*arrays, step=each.step), strict=True):
                        stored.copy_(values)
        for each in batch:
            dtype = each.matrix.dtype
            master = each.master if dtype == torch.float32 else each.master.to(dtype)
            if each.selection is not None:
                reference_merge_columns(each.matrix, each.dim, each.selection.selected_i64, master)
            elif each.matrix is not each.master:
                each.matrix.copy_(master if each.dim == 0 else master.t())


def _update_by_rule(
    batch: Sequence[SliceState], wide: Sequence[Sequence[Tensor]], coefficients: StepCoefficients
) -> None:
    """Update masters, and arrays ``wide`` in fp32."""
    for each, arrays in zip(batch, wide, strict=True):
        update_window_((each.master, *arrays), [each.gradient], [coefficients], step=each.step)


def _update_by_adamw(
    batch: Sequence[SliceState], wide: Sequence[Sequence[Tensor]], coefficients: StepCoefficients
) -> None:
    """As :func:`_update_by_rule`, for AdamW."""
    grads = [each.gradient.float() for each in batch]
    if coefficients.grad_scale.value != 1.0:
        grads = list(torch._foreach_mul(grads, coefficients.grad_scale.for_fp32()))
    counts = step_counts([each.step for each in batch], batch[0].master.device)
    parts: list[tuple[Tensor, ...]] = []
    cuts: list[PaddedTail] = []
    for each, of_it, grad in zip(batch, wide, grads, strict=True):
        tensors, count = (each.master, *of_it, grad), counts[each.step]
        if each.master.numel() % VECTOR_ELEMENTS == 0:
            parts.append((*tensors, count))
            continue
        # Rows of the state are stored in any order, so that no element's result may depend on its place.
        cut = PaddedTail.of([tensor.view(-1) for tensor in tensors])
        parts += [(*cut.vectors, count), (*cut.padded, count)]
        cuts.append(cut)
    fused_adamw_(parts, coefficients)
    for cut in cuts:
        cut.put_back(3)


def step_counts(steps: Iterable[int], device: torch.device) -> dict[int, Tensor]:
    """Numbers of gradients as the fused kernel takes them: f32[] on the parameters' device."""
    return {step: torch.full((), float(step), device=device) for step in {*steps}}


def fused_adamw_(parts: Sequence[tuple[Tensor, ...]], coefficients: StepCoefficients) -> None:
    """Do one AdamW step, without the gradients' scale, on weights, first and second moments, gradients and steps."""
    weights, exp_avgs, exp_avg_sqs, grads, steps = (list(each) for each in zip(*parts, strict=True))
    tensors = weights, grads, exp_avgs, exp_avg_sqs, steps
    torch_private.fused_adamw_multi_(*tensors, **coefficients.options._asdict())


@torch.no_grad()
def reference_quantize_slices_(
    gradient: Tensor, residual: Tensor, grad_scale: float | Tensor, scales_out: Tensor, values_out: Tensor
) -> None:
    # Temporaries that fit into a cache, or few launches.
    chunk = _CHUNK_ELEMENTS if device_of(gradient.device).streams is None else _LAUNCH_ELEMENTS
    slices = max(1, chunk // max(1, gradient.shape[1]))
    for first in range(0, gradient.shape[0], slices):
        part = slice(first, first + slices)
        exact = (gradient[part].float() * grad_scale).add_(residual[part])
        scales = scales_out[part]
        torch.div(exact.abs().amax(1), 127.0, out=scales)
        quantized = exact.div(scales.unsqueeze(1)).round_()
        # A slice of zeros was divided by zero. In a slice with inf or NaN the scale says so, and any int8 values do.
        quantized.nan_to_num_(nan=0.0).clamp_(-127.0, 127.0)
        values_out[part].copy_(quantized)
        residual[part].copy_(exact.sub_(quantized.mul_(scales.unsqueeze(1))))


def bounded_batches(items: Sequence[_T], elements: Sequence[int], limit: int) -> list[list[_T]]:
    """Cut ``items`` into consecutive batches of at most ``limit`` ``elements``; a larger item is a batch alone."""
    if sum(elements) <= limit:
        return [list(items)] if items else []
    batches: list[list[_T]] = [[]]
    total = 0
    for item, count in zip(items, elements, strict=True):
        if batches[-1] and total + count > limit:
            batches.append([])
            total = 0
        batches[-1].append(item)
        total += count
    return batches


def reference_column_norms(matrix: Tensor, dim: int) -> Tensor:
    if matrix.stride(1) != 1:
        matrix, dim = row_major(matrix, dim)
    if matrix.numel() <= _SQUARES_ELEMENTS:
        small = matrix if matrix.dtype == torch.float32 else matrix.to(torch.float32)
        return small.square().sum(1 - dim)
    if dim == 0:
        norms: Tensor = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32)
        return norms.square_()
    # vector_norm down the columns is 7 to 20 times slower. PyTorch's sums over one axis of equal shapes run in equal
    # order, on CPU and CUDA: they use no atomics.
    partials = []
    for chunk in torch.split(matrix, _rows_per_chunk(matrix, _SQUARES_ELEMENTS)):
        squares = chunk.square() if chunk.dtype == torch.float32 else chunk.to(torch.float32).square_()
        partials.append(squares.sum(0))
    return partials[0] if len(partials) == 1 else torch.stack(partials).sum(0)


def reference_split_columns(
    matrix: Tensor, dim: int, selection: Selection, selected_out: Tensor, deferred_out: Tensor
) -> None:
    if matrix.stride(1) != 1:
        matrix, dim = row_major(matrix, dim)
    blocks = [(selection.selected, selected_out), (selection.deferred, deferred_out)]
    if dim == 0 or matrix.numel() <= _SMALL_ELEMENTS:
        rows_of_slices = matrix if dim == 0 else matrix.t().contiguous()
        for slices, out in blocks:
            if out.numel():
                torch.index_select(rows_of_slices, 0, slices, out=out)
        return
    rows = _rows_per_chunk(matrix, _CHUNK_ELEMENTS)
    for first in range(0, matrix.shape[0], rows):
        # Whole rows at a time: only then does PyTorch's copy transpose in blocks instead of striding through memory.
        transposed = matrix[first : first + rows].t().contiguous()
        for slices, out in blocks:
            if out.numel():
                torch.index_select(transposed, 0, slices, out=out[:, first : first + rows])


def reference_merge_columns(matrix: Tensor, dim: int, slices: Tensor, values: Tensor) -> None:
    if not values.numel():
        return
    index = slices.long()
    if matrix.numel() <= _SMALL_ELEMENTS:
        matrix.index_copy_(dim, index, values if dim == 0 else values.t())  # in few calls
        return
    matrix, dim = row_major(matrix, dim)
    if dim == 0:
        matrix.index_copy_(0, index, values)
    elif 2 * slices.numel() < matrix.shape[1]:
        matrix.index_copy_(1, index, values.t().contiguous())
    else:
        rows = _rows_per_chunk(matrix, _CHUNK_ELEMENTS)
        for first in range(0, matrix.shape[0], rows):
            chunk = matrix[first : first + rows]
            transposed = chunk.t().contiguous()
            transposed.index_copy_(0, index, values[:, first : first + rows])
            chunk.copy_(transposed.t())


def _rows_per_chunk(matrix: Tensor, elements: int) -> int:
    return max(1, elements // max(1, matrix.shape[1]))


@cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The module of Triton kernels; None where Triton does not compile for ``device``."""
    if not device_of(device).has_triton:
        return None
    from zenflow_compile.runtime.device_updates import triton_kernels

    return triton_kernels


def has_kernels(device: torch.device) -> bool:
    """Whether ``update_columns_`` has a kernel there; it has operators else."""
    return _updates(device) is not None


@cache
def _updates(device: torch.device) -> ModuleType | None:
    """As ``_kernels``, for updates."""
    if not device_of(device).has_triton:
        return None
    from zenflow_compile.runtime.device_updates import triton_updates

    return triton_updates
