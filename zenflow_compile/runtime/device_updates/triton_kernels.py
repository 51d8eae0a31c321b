"""Triton kernels of the device operations; ``column_ops`` documents them and has the references.

All kernels use one tile shape: a tile is ``[rows, columns]`` of the matrix, read or written along its rows. In the
blocks ``[slice, length]`` it is transposed if slices are columns, so that both sides access whole memory sectors. A
position per slice says which block the slice belongs to, and where: a gradient is read once, in its own order, however
scattered its selected slices are.

[Note: bits] Contraction to fused multiply-adds is off: with it, results would depend on Triton's version, whose default
changes in 3.10, and differ from the references' more than they must.

[Note: offsets] A row index times a stride, and a position times a length, are 64-bit: a gradient may have more
than 2**31 elements. Offsets within a row are 32-bit.

This module imports Triton, so it is imported only where Triton is installed.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals, as Triton's users expect.

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from zenflow_compile.runtime.adam_rule import StepCoefficients, window_coefficients
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.late_number import on_device
from zenflow_compile.runtime.device_updates.selection import Selection, row_major

if TYPE_CHECKING:
    # Under these names mypy sees plain functions; the decorators of Triton are untyped.
    from collections.abc import Callable
    from typing import Any

    def _jit(function: Callable[..., None]) -> Any: ...
else:
    _jit = triton.jit

_BLOCK_SLICES = 64
_BLOCK_LENGTH = 64
_BLOCK_STATE_SLICES = 32  # gradient, master and moments of a tile are all in registers
# A program reduces this many tiles along its slices: partial sums are then 1/512 of a gradient's elements.
_TILES_PER_PARTIAL = 8
_BLOCK_SUMS = 128


@_jit
def _norms_and_split_kernel(  # type: ignore[no-untyped-def]
    matrix,
    stride_row,
    stride_column,
    position,
    selected_out,
    deferred_out,
    partials,
    slices,
    length,
    k,
    DIM: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    """A strip of BLOCK_SLICES slices by TILES * BLOCK_LENGTH elements: into the blocks, and its sums into ``partials``.

    partials: f32[strips along the length, slices]; every program owns its elements, so no atomics are needed.
    """
    slice_blocks = tl.cdiv(slices, BLOCK_SLICES)
    strip = tl.program_id(0) // slice_blocks
    slice_index = (tl.program_id(0) % slice_blocks) * BLOCK_SLICES + tl.arange(0, BLOCK_SLICES)
    is_slice = slice_index < slices
    place = tl.load(position + slice_index, mask=is_slice, other=0)
    selected_row = place.to(tl.int64) * length
    deferred_row = (place - k).to(tl.int64) * length
    is_selected = is_slice & (place < k)
    is_deferred = is_slice & (place >= k)
    sums = tl.zeros([BLOCK_SLICES], dtype=tl.float32)
    for tile in range(TILES):
        element = (strip * TILES + tile) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
        is_element = element < length
        # values: [slice, element], whichever of the two is the matrix's row.
        if DIM == 0:
            row = matrix + slice_index.to(tl.int64)[:, None] * stride_row
            values = tl.load(
                row + element[None, :] * stride_column, mask=is_slice[:, None] & is_element[None, :], other=0.0
            )
        else:
            row = matrix + element.to(tl.int64)[:, None] * stride_row
            values = tl.trans(
                tl.load(
                    row + slice_index[None, :] * stride_column, mask=is_element[:, None] & is_slice[None, :], other=0.0
                )
            )
        tl.store(
            selected_out + selected_row[:, None] + element[None, :],
            values,
            mask=is_selected[:, None] & is_element[None, :],
        )
        tl.store(
            deferred_out + deferred_row[:, None] + element[None, :],
            values,
            mask=is_deferred[:, None] & is_element[None, :],
        )
        wide = values.to(tl.float32)
        sums += tl.sum(wide * wide, axis=1)
    tl.store(partials + strip.to(tl.int64) * slices + slice_index, sums, mask=is_slice)


@_jit
def _sum_partials_kernel(partials, out, strips, slices, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[slice] = sum of partials[strip, slice], strip after strip."""
    slice_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    row = partials + slice_index
    for _strip in range(strips):
        sums += tl.load(row, mask=slice_index < slices, other=0.0)
        row += slices
    tl.store(out + slice_index, sums, mask=slice_index < slices)


@_jit
def _place_slices_kernel(  # type: ignore[no-untyped-def]
    matrix,
    stride_row,
    stride_column,
    position,
    first_in,
    second_in,
    slices,
    length,
    k,
    DIM: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    """matrix slice <- first_in[position], or second_in[position - k] from k on; slices at negative positions stay."""
    slice_blocks = tl.cdiv(slices, BLOCK_SLICES)
    slice_index = (tl.program_id(0) % slice_blocks) * BLOCK_SLICES + tl.arange(0, BLOCK_SLICES)
    element = (tl.program_id(0) // slice_blocks) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
    is_element = element < length
    place = tl.load(position + slice_index, mask=slice_index < slices, other=-1)
    is_placed = place >= 0
    if BOTH:
        in_first = is_placed & (place < k)
        in_second = place >= k
        values = tl.load(
            first_in + place.to(tl.int64)[:, None] * length + element[None, :],
            mask=in_first[:, None] & is_element[None, :],
            other=0.0,
        )
        others = tl.load(
            second_in + (place - k).to(tl.int64)[:, None] * length + element[None, :],
            mask=in_second[:, None] & is_element[None, :],
            other=0.0,
        )
        values = tl.where(in_first[:, None], values, others)
    else:
        values = tl.load(
            first_in + place.to(tl.int64)[:, None] * length + element[None, :],
            mask=is_placed[:, None] & is_element[None, :],
            other=0.0,
        )
    if DIM == 0:
        row = matrix + slice_index.to(tl.int64)[:, None] * stride_row
        tl.store(row + element[None, :] * stride_column, values, mask=is_placed[:, None] & is_element[None, :])
    else:
        # Slices that keep their values are read and written back: a masked store would go element by element.
        target = matrix + element.to(tl.int64)[:, None] * stride_row + slice_index[None, :] * stride_column
        inside = is_element[:, None] & (slice_index < slices)[None, :]
        kept = tl.load(target, mask=inside, other=0.0)
        tl.store(target, tl.where(is_placed[None, :], tl.trans(values), kept), mask=inside)


@_jit
def _adam_columns_kernel(  # type: ignore[no-untyped-def]
    matrix,
    stride_row,
    stride_column,
    selected,
    gradient,
    master,
    exp_avg,
    exp_avg_sq,
    k,
    length,
    grad_scale,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    decay,
    step_size,
    bias_correction2_sqrt,
    eps,
    DIM: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    """AdamW on the state of BLOCK_SLICES selected slices, in place, and its cast into the matrix's slices."""
    slice_blocks = tl.cdiv(k, BLOCK_SLICES)
    number = (tl.program_id(0) % slice_blocks) * BLOCK_SLICES + tl.arange(0, BLOCK_SLICES)
    element = (tl.program_id(0) // slice_blocks) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
    is_slice = number < k
    is_element = element < length
    mask = is_slice[:, None] & is_element[None, :]
    offset = number.to(tl.int64)[:, None] * length + element[None, :]

    grad = tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32) * grad_scale
    first = tl.load(exp_avg + offset, mask=mask, other=0.0)
    second = tl.load(exp_avg_sq + offset, mask=mask, other=0.0)
    weight = tl.load(master + offset, mask=mask, other=0.0)
    first += one_minus_beta1 * (grad - first)
    second = beta2 * second + one_minus_beta2 * (grad * grad)
    # Correctly rounded root and quotients, as the references have: the kernel waits for memory anyway.
    denominator = tl.math.div_rn(tl.math.sqrt_rn(second), bias_correction2_sqrt) + eps
    weight = weight * decay - tl.math.div_rn(step_size * first, denominator)
    tl.store(exp_avg + offset, first, mask=mask)
    tl.store(exp_avg_sq + offset, second, mask=mask)
    tl.store(master + offset, weight, mask=mask)

    slice_index = tl.load(selected + number, mask=is_slice, other=0)
    cast = weight.to(matrix.dtype.element_ty)
    if DIM == 0:
        row = matrix + slice_index.to(tl.int64)[:, None] * stride_row
        tl.store(row + element[None, :] * stride_column, cast, mask=mask)
    else:
        row = matrix + element.to(tl.int64)[:, None] * stride_row
        tl.store(
            row + slice_index[None, :] * stride_column, tl.trans(cast), mask=is_element[:, None] & is_slice[None, :]
        )


def norms_and_split(
    matrix: Tensor, dim: int, selection: Selection, selected_out: Tensor, deferred_out: Tensor
) -> Tensor:
    """See ``column_ops.norms_and_split``."""
    matrix, dim = row_major(matrix, dim)
    slices, length = matrix.shape[dim], matrix.shape[1 - dim]
    strips = triton.cdiv(length, _TILES_PER_PARTIAL * _BLOCK_LENGTH)
    sums = torch.empty(slices, dtype=torch.float32, device=matrix.device)
    partials = sums if strips <= 1 else sums.new_empty(strips, slices)
    if not matrix.numel():
        return sums.zero_()
    with _on(matrix):
        _norms_and_split_kernel[(strips * triton.cdiv(slices, _BLOCK_SLICES),)](
            matrix,
            *matrix.stride(),
            selection.position,
            selected_out,
            deferred_out,
            partials,
            slices,
            length,
            selection.selected.numel(),
            DIM=dim,
            TILES=min(_TILES_PER_PARTIAL, triton.next_power_of_2(triton.cdiv(length, _BLOCK_LENGTH))),
            BLOCK_SLICES=_BLOCK_SLICES,
            BLOCK_LENGTH=_BLOCK_LENGTH,
            enable_fp_fusion=False,
        )
        if strips > 1:
            _sum_partials_kernel[(triton.cdiv(slices, _BLOCK_SUMS),)](partials, sums, strips, slices, BLOCK=_BLOCK_SUMS)
    return sums


def unsplit_columns(
    matrix_out: Tensor, dim: int, selection: Selection, selected_in: Tensor, deferred_in: Tensor
) -> None:
    """See ``column_ops.unsplit_columns``."""
    _place_slices(matrix_out, dim, selection.position, selected_in, deferred_in)


def merge_columns(matrix: Tensor, dim: int, slices: Tensor, values: Tensor) -> None:
    """See ``column_ops.merge_columns``."""
    if not slices.numel():
        return
    # Tiles run over the matrix, not over ``slices``, which are in any order: writes should be in memory order.
    position = torch.full((matrix.shape[dim],), -1, dtype=torch.int32, device=matrix.device)
    position[slices.long()] = torch.arange(slices.numel(), dtype=torch.int32, device=matrix.device)
    _place_slices(matrix, dim, position, values, None)


def _place_slices(matrix: Tensor, dim: int, position: Tensor, first_in: Tensor, second_in: Tensor | None) -> None:
    if not matrix.numel():
        return
    matrix, dim = row_major(matrix, dim)
    slices, length = matrix.shape[dim], matrix.shape[1 - dim]
    with _on(matrix):
        _place_slices_kernel[(triton.cdiv(length, _BLOCK_LENGTH) * triton.cdiv(slices, _BLOCK_SLICES),)](
            matrix,
            *matrix.stride(),
            position,
            first_in,
            second_in,
            slices,
            length,
            first_in.shape[0],
            DIM=dim,
            BOTH=second_in is not None,
            BLOCK_SLICES=_BLOCK_SLICES,
            BLOCK_LENGTH=_BLOCK_LENGTH,
        )


def adam_columns_(
    matrix: Tensor,
    dim: int,
    selected: Tensor,
    gradient: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coefficients: StepCoefficients,
    *,
    step: int,
    eps: float,
) -> None:
    """See ``column_ops.adam_columns_``.

    Raises:
        ValueError: a state tensor or the gradient is not contiguous, not [k, length], or the state is not fp32.
    """
    matrix, dim = row_major(matrix, dim)
    shape = (selected.numel(), matrix.shape[1 - dim])
    state = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in {"gradient": gradient, **state}.items():
        wrong_dtype = name in state and tensor.dtype != torch.float32
        if tensor.shape != shape or not tensor.is_contiguous() or wrong_dtype:
            raise ValueError(
                f"{name} is {tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}; "
                f"it must be contiguous {list(shape)}, and fp32 unless it is the gradient"
            )
    if not gradient.numel():
        return
    window = window_coefficients([coefficients], step)
    with _on(matrix):
        _adam_columns_kernel[(triton.cdiv(shape[1], _BLOCK_LENGTH) * triton.cdiv(shape[0], _BLOCK_STATE_SLICES),)](
            matrix,
            *matrix.stride(),
            selected,
            gradient,
            master,
            exp_avg,
            exp_avg_sq,
            *shape,
            on_device(coefficients.grad_scale),
            1.0 - coefficients.beta1,
            coefficients.beta2,
            1.0 - coefficients.beta2,
            window.decay,
            window.step_size,
            window.bias_correction2_sqrt,
            eps,
            DIM=dim,
            BLOCK_SLICES=_BLOCK_STATE_SLICES,
            BLOCK_LENGTH=_BLOCK_LENGTH,
            enable_fp_fusion=False,
        )


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current one, which may differ in autograd's threads."""
    return device_of(tensor.device).use()
