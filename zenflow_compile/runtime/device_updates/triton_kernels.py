"""Triton kernels that split, merge and compress gradients; ``column_ops`` documents them and has the references.

A tile is ``[rows, columns]`` of the matrix, read or written along its rows. In the blocks ``[slice, length]`` it is
transposed if slices are columns, so that both sides access whole memory sectors. A position per slice says which block
the slice belongs to, and where: a gradient is read once, in its own order, however scattered its selected slices are.

[Note: bits] Contraction to fused multiply-adds is off: with it, results would depend on Triton's version, whose default
changes in 3.10, and differ from the references' more than they must.

[Note: offsets] A row index times a stride, and a position times a length, are 64-bit: a gradient may have more
than 2**31 elements. Offsets within a row are 32-bit.

[Note: shapes] Tiles and grids follow from a matrix's shape and dtype, never from the device: they decide in which order
a kernel adds up squares, and the number of multiprocessors must not change a bit.

This module imports Triton, so it is imported only where Triton is installed. ``triton_updates`` has the updates.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals, as Triton's users expect.

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device_updates.selection import Selection, row_major

if TYPE_CHECKING:
    # Under these names mypy sees plain functions; the decorators of Triton are untyped.
    from collections.abc import Callable

    def _jit(function: Callable[..., None]) -> Any: ...

    _jit_for_any_k = _jit
else:
    _jit = triton.jit
    _jit_for_any_k = triton.jit(do_not_specialize=["k"])  # else norms without a split come from other machine code

_BLOCK_SLICES = 64
_BLOCK_LENGTH = 64
# A program of the split reduces at most this many tiles along its slices: partial sums are then 1/512 of a gradient's
# elements.
_MOST_TILES = 8
_FEWEST_TILES = 2
# Bytes of a row of the split's tiles where slices are columns: at most whole lines of the cache, at least a sector.
_MOST_BYTES, _FEWEST_BYTES = 128, 32
# Programs that keep a large device busy: 8 on each of 128 multiprocessors. A constant: see [Note: shapes].
_PROGRAMS = 1024
_BLOCK_SUMS = 64
_BLOCK_STRIPS = 16  # partial sums of a slice that are read at a time
_QUANTIZED_ELEMENTS = 1024  # of one program at a time: 8 of each thread


@_jit_for_any_k
def _norms_and_split_kernel(  # type: ignore[no-untyped-def]
    matrix, stride_row, stride_column, position, selected_out, deferred_out, partials, slices, length, k,
    DIM: tl.constexpr, TILES: tl.constexpr, BLOCK_SLICES: tl.constexpr, BLOCK_LENGTH: tl.constexpr,
):  # fmt: skip
    """A strip of BLOCK_SLICES slices by TILES * BLOCK_LENGTH elements: into the blocks, and its sums into ``partials``.

    partials: f32[strips along the length, slices]; every program owns its elements, so no atomics are needed.
    A slice whose position is none is in neither block.
    """
    slice_blocks = tl.cdiv(slices, BLOCK_SLICES)
    strip = tl.program_id(0) // slice_blocks
    slice_index = (tl.program_id(0) % slice_blocks) * BLOCK_SLICES + tl.arange(0, BLOCK_SLICES)
    is_slice = slice_index < slices
    place = tl.load(position + slice_index, mask=is_slice, other=0)
    selected_row = place.to(tl.int64) * length
    deferred_row = (place - k).to(tl.int64) * length
    is_selected = is_slice & (place < k)
    is_deferred = is_slice & (place >= k) & (place < slices)
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
def _sum_partials_kernel(  # type: ignore[no-untyped-def]
    partials, out, strips, slices, BLOCK_STRIPS: tl.constexpr, BLOCK: tl.constexpr
):
    """out[slice] = sum of partials[strip, slice] over the strips."""
    slice_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_slice = slice_index < slices
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, strips, BLOCK_STRIPS):
        strip = first + tl.arange(0, BLOCK_STRIPS)
        row = partials + strip.to(tl.int64)[:, None] * slices
        part = tl.load(row + slice_index[None, :], mask=(strip < strips)[:, None] & is_slice[None, :], other=0.0)
        sums += tl.sum(part, axis=0)
    tl.store(out + slice_index, sums, mask=is_slice)


@_jit
def _place_slices_kernel(  # type: ignore[no-untyped-def]
    matrix, stride_row, stride_column, position, first_in, second_in, slices, length, k,
    DIM: tl.constexpr, BOTH: tl.constexpr, BLOCK_SLICES: tl.constexpr, BLOCK_LENGTH: tl.constexpr,
):  # fmt: skip
    """matrix slice <- second_in[position - k], from position k on; with BOTH, first_in[position] before it."""
    slice_blocks = tl.cdiv(slices, BLOCK_SLICES)
    slice_index = (tl.program_id(0) % slice_blocks) * BLOCK_SLICES + tl.arange(0, BLOCK_SLICES)
    element = (tl.program_id(0) // slice_blocks) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
    is_element = element < length
    place = tl.load(position + slice_index, mask=slice_index < slices, other=-1)
    is_placed = place >= k
    values = tl.load(
        second_in + (place - k).to(tl.int64)[:, None] * length + element[None, :],
        mask=is_placed[:, None] & is_element[None, :],
        other=0.0,
    )
    if BOTH:
        in_first = (place >= 0) & (place < k)
        others = tl.load(
            first_in + place.to(tl.int64)[:, None] * length + element[None, :],
            mask=in_first[:, None] & is_element[None, :],
            other=0.0,
        )
        values = tl.where(in_first[:, None], others, values)
        is_placed = place >= 0
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
def scale_of(grad_scale, ON_DEVICE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A factor on gradients, f32: an argument of the launch, or f64[] in memory."""
    if ON_DEVICE:
        scale = tl.load(grad_scale).to(tl.float32)
    else:
        scale = grad_scale
    return scale


@_jit
def _exact_gradient(gradient, residual, offset, mask, scale):  # type: ignore[no-untyped-def]
    """Load gradient * scale + residual in fp32, which a compressed gradient stands for."""
    scaled = tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32) * scale
    return scaled + tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)


@_jit
def _quantize_slices_kernel(  # type: ignore[no-untyped-def]
    gradient, residual, grad_scale, scales_out, values_out, slices, length,
    SCALE_ON_DEVICE: tl.constexpr, WORDS: tl.constexpr, BLOCK_SLICES: tl.constexpr, BLOCK_LENGTH: tl.constexpr,
):  # fmt: skip
    """Read BLOCK_SLICES slices two times: for their scales, and for values and residuals. The second time is cached."""
    slice_index = tl.program_id(0) * BLOCK_SLICES + tl.arange(0, BLOCK_SLICES)
    is_slice = slice_index < slices
    row = slice_index.to(tl.int64)[:, None] * length
    scale = scale_of(grad_scale, SCALE_ON_DEVICE)

    # The bits of magnitudes, as integers: they are in the order of the numbers, and NaN is the largest one.
    largest = tl.zeros([BLOCK_SLICES, BLOCK_LENGTH], dtype=tl.int32)
    for first in range(0, length, BLOCK_LENGTH):
        element = first + tl.arange(0, BLOCK_LENGTH)
        mask = is_slice[:, None] & (element < length)[None, :]
        exact = _exact_gradient(gradient, residual, row + element[None, :], mask, scale)
        # Elements that are not there count as zero even if the factor is inf or NaN.
        largest = tl.maximum(largest, tl.where(mask, exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
    # Correctly rounded quotients, as the reference has.
    scales = tl.math.div_rn(tl.max(largest, axis=1).to(tl.float32, bitcast=True), 127.0)
    tl.store(scales_out + slice_index, scales, mask=is_slice)

    for first in range(0, length, BLOCK_LENGTH):
        element = first + tl.arange(0, BLOCK_LENGTH)
        mask = is_slice[:, None] & (element < length)[None, :]
        offset = row + element[None, :]
        exact = _exact_gradient(gradient, residual, offset, mask, scale)
        quotient = tl.math.div_rn(exact, scales[:, None])
        # NaN is 0 / 0 in a slice of zeros. In a slice with inf or NaN the scale says so, and any int8 values do.
        quotient = tl.where(quotient == quotient, quotient, 0.0)
        quotient = tl.minimum(tl.maximum(quotient, -127.0), 127.0)
        # Rounds to nearest, ties to even: numbers of this size have no fraction bits. Zeros keep their sign.
        rounded = tl.where(quotient == 0.0, quotient, (quotient + 12582912.0) - 12582912.0)
        tl.store(residual + offset, (exact - rounded * scales[:, None]).to(residual.dtype.element_ty), mask=mask)
        target = values_out + offset
        if WORDS:
            target = tl.multiple_of(target, (1, 4))  # the values follow f32 scales, so 4 is all that is known
        tl.store(target, rounded.to(tl.int8), mask=mask)


def norms_and_split(
    matrix: Tensor, dim: int, selection: Selection, selected_out: Tensor, deferred_out: Tensor
) -> Tensor:
    return _norms(matrix, dim, selection.position, selection.selected.numel(), selected_out, deferred_out)


def column_norms(matrix: Tensor, dim: int) -> Tensor:
    """The kernel of the split adds up the squares, in the same order, and splits off nothing."""
    slices, nothing = matrix.shape[dim], matrix.new_empty(0)
    nowhere = torch.full((slices,), slices, dtype=torch.int32, device=matrix.device)
    return _norms(matrix, dim, nowhere, 0, nothing, nothing)


def _norms(matrix: Tensor, dim: int, position: Tensor, k: int, selected_out: Tensor, deferred_out: Tensor) -> Tensor:
    matrix, dim = row_major(matrix, dim)
    slices, length = matrix.shape[dim], matrix.shape[1 - dim]
    block_slices, tiles = _split_shape(slices, length, matrix.element_size())
    strips = triton.cdiv(length, tiles * _BLOCK_LENGTH)
    sums = torch.empty(slices, dtype=torch.float32, device=matrix.device)
    partials = sums if strips <= 1 else sums.new_empty(strips, slices)
    if not matrix.numel():
        return sums.zero_()
    launch(
        _norms_and_split_kernel, strips * triton.cdiv(slices, block_slices),
        matrix, *matrix.stride(), position, selected_out, deferred_out, partials, slices, length, k,
        DIM=dim, TILES=tiles, BLOCK_SLICES=block_slices, BLOCK_LENGTH=_BLOCK_LENGTH, enable_fp_fusion=False,
    )  # fmt: skip
    if strips > 1:
        launch(
            _sum_partials_kernel, triton.cdiv(slices, _BLOCK_SUMS),
            partials, sums, strips, slices, BLOCK_STRIPS=_BLOCK_STRIPS, BLOCK=_BLOCK_SUMS,
        )  # fmt: skip
    return sums


@cache
def _split_shape(slices: int, length: int, element_size: int) -> tuple[int, int]:
    """Slices of a tile, and tiles of a program of the split: fewer of them for a small matrix, to have enough programs.

    A length that one program covers stays with one program: a second launch, for the sums, would cost more than it
    gains.
    """
    block_slices = _MOST_BYTES // element_size
    tiles = min(_MOST_TILES, triton.next_power_of_2(triton.cdiv(length, _BLOCK_LENGTH)))
    several = length > tiles * _BLOCK_LENGTH

    def programs() -> int:
        return int(triton.cdiv(slices, block_slices) * triton.cdiv(length, tiles * _BLOCK_LENGTH))

    while several and tiles > _FEWEST_TILES and programs() < _PROGRAMS:
        tiles //= 2
    while block_slices * element_size > _FEWEST_BYTES and programs() < _PROGRAMS // 2:
        block_slices //= 2
    return block_slices, tiles


def unsplit_columns(
    matrix_out: Tensor, dim: int, selection: Selection, selected_in: Tensor, deferred_in: Tensor
) -> None:
    _place_slices(matrix_out, dim, selection, selected_in, deferred_in)


def merge_columns(matrix: Tensor, dim: int, selection: Selection, values: Tensor) -> None:
    if values.numel():
        _place_slices(matrix, dim, selection, None, values)


def _place_slices(matrix: Tensor, dim: int, selection: Selection, first_in: Tensor | None, second_in: Tensor) -> None:
    if not matrix.numel():
        return
    matrix, dim = row_major(matrix, dim)
    slices, length = matrix.shape[dim], matrix.shape[1 - dim]
    launch(
        _place_slices_kernel, triton.cdiv(length, _BLOCK_LENGTH) * triton.cdiv(slices, _BLOCK_SLICES),
        matrix, *matrix.stride(), selection.position, first_in, second_in, slices, length, selection.selected.numel(),
        DIM=dim, BOTH=first_in is not None, BLOCK_SLICES=_BLOCK_SLICES, BLOCK_LENGTH=_BLOCK_LENGTH,
    )  # fmt: skip


def quantize_slices_(
    gradient: Tensor, residual: Tensor, grad_scale: float | Tensor, scales_out: Tensor, values_out: Tensor
) -> None:
    slices, length = gradient.shape
    block_length = min(_QUANTIZED_ELEMENTS, triton.next_power_of_2(length))
    block_slices = _QUANTIZED_ELEMENTS // block_length
    if not gradient.numel():
        return
    launch(
        _quantize_slices_kernel, triton.cdiv(slices, block_slices),
        gradient, residual, grad_scale, scales_out, values_out, slices, length,
        SCALE_ON_DEVICE=on_device(grad_scale), WORDS=(values_out.data_ptr() | length) % 4 == 0,
        BLOCK_SLICES=block_slices, BLOCK_LENGTH=block_length, enable_fp_fusion=False,
    )  # fmt: skip


def on_device(grad_scale: float | Tensor) -> bool:
    return isinstance(grad_scale, Tensor)


def launch(kernel: Any, programs: int, tensor: Tensor, *arguments: object, **constants: object) -> None:
    """Launch ``programs`` of ``kernel`` on the device of ``tensor``, its first argument.

    If it is on the "meta" device, the kernel is compiled for the current device, and not launched.
    """
    if tensor.is_meta:
        kernel.warmup(tensor, *arguments, grid=(programs,), **constants)
        return
    # Triton launches on the current device, which may be another one in autograd's threads.
    with device_of(tensor.device).use():
        kernel[(programs,)](tensor, *arguments, **constants)
