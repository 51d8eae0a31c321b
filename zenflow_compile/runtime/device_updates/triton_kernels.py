"""Triton kernels of the device operations; ``column_ops`` documents them and has the references.

A tile is ``[rows, columns]`` of the matrix, read or written along its rows. In the blocks ``[slice, length]`` it is
transposed if slices are columns, so that both sides access whole memory sectors. A position per slice says which block
the slice belongs to, and where: a gradient is read once, in its own order, however scattered its selected slices are.

[Note: bits] Contraction to fused multiply-adds is off: with it, results would depend on Triton's version, whose default
changes in 3.10, and differ from the references' more than they must.

[Note: offsets] A row index times a stride, and a position times a length, are 64-bit: a gradient may have more
than 2**31 elements. Offsets within a row are 32-bit.

[Note: shapes] Tiles and grids follow from a matrix's shape and dtype, never from the device: they decide in which order
a kernel adds up squares, and the number of multiprocessors must not change a bit.

This module imports Triton, so it is imported only where Triton is installed.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals, as Triton's users expect.

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zenflow_compile.planning.plan import QUANTIZATION_BLOCK
from zenflow_compile.runtime.adam_rule import StepCoefficients, window_numbers
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device_updates.selection import Selection, SliceState, row_major

if TYPE_CHECKING:
    # Under these names mypy sees plain functions; the decorators of Triton are untyped.
    from collections.abc import Callable

    def _jit(function: Callable[..., None]) -> Any: ...

    _jit_for_any_step = _jit_for_any_k = _jit
else:
    _jit = triton.jit
    _jit_for_any_step = triton.jit(do_not_specialize=["step"])  # else it is compiled anew at some steps
    _jit_for_any_k = triton.jit(do_not_specialize=["k"])  # else norms without a split come from other machine code

_BLOCK_SLICES = 64
_BLOCK_LENGTH = 64
_BLOCK_STATE_SLICES, _BLOCK_STATE_ELEMENTS = 16, 1024  # gradient, master and moments of a tile are all in registers
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
def _scale(grad_scale, ON_DEVICE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A factor on gradients, f32: an argument of the launch, or f64[] in memory."""
    if ON_DEVICE:
        scale = tl.load(grad_scale).to(tl.float32)
    else:
        scale = grad_scale
    return scale


# Moments in fewer bytes: see [Note: state forms] in ``state_forms``.

_FP32, _BF16, _FP8 = (tl.constexpr(number) for number in range(3))
_MOMENTS = {"fp32": _FP32.value, "bf16": _BF16.value, "fp8": _FP8.value}
_BLOCK: tl.constexpr = tl.constexpr(QUANTIZATION_BLOCK)
_LOST = tl.constexpr(255)


@_jit
def _bits(values):  # type: ignore[no-untyped-def]
    return values.to(tl.uint32, bitcast=True)


@_jit
def _floats(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.float32, bitcast=True)


@_jit
def _random_bits(exp_avg, exp_avg_sq, step):  # type: ignore[no-untyped-def]
    of_sq = _bits(exp_avg_sq)
    bits = _bits(exp_avg) + ((of_sq << 16) | (of_sq >> 16)) + step.to(tl.uint32) * 0x9E3779B9
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@_jit
def _rounded_to_bf16(values, half):  # type: ignore[no-untyped-def]
    # Infinite numbers stay so: the bits that are cut off are zeros.
    return tl.where(values == values, (_bits(values) + half) >> 16, 0x7FC0)


@_jit
def _load_moment(codes_at, scales_at, mask, is_block, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load fp32 numbers of 8-bit codes [slices, elements], with a scale per block [slices, blocks]."""
    mantissa: tl.constexpr = 3 if SIGNED else 4
    codes = tl.load(codes_at, mask=mask, other=0).to(tl.uint8, bitcast=True).to(tl.uint32)
    scales = tl.load(scales_at, mask=is_block, other=0).to(tl.uint8, bitcast=True).to(tl.uint32)
    magnitude = codes & 0x7F if SIGNED else codes
    bits = magnitude << (23 - mantissa)
    # The smaller one of the two below the smallest normal number, 2**-14.
    subnormal = _floats(bits + ((127 - 14) << 23)) - 0.00006103515625
    relative = tl.minimum(subnormal, _floats(bits + ((127 - 15) << 23)))
    power = _floats(tl.where(scales == _LOST, 0x7FC00000, scales << 23))
    in_blocks = tl.reshape(relative, (scales.shape[0], scales.shape[1], _BLOCK)) * power[:, :, None]
    values = tl.reshape(in_blocks, codes.shape)
    return tl.where(codes > magnitude, -values, values)


@_jit
def _store_moment(codes_at, scales_at, values, random, mask, is_block, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store fp32 numbers as :func:`_load_moment` loads them; those that ``mask`` leaves out count as zeros."""
    mantissa: tl.constexpr = 3 if SIGNED else 4
    shape: tl.constexpr = (scales_at.shape[0], scales_at.shape[1], _BLOCK)
    bits = tl.reshape(_bits(tl.where(mask, values, 0.0)), shape)
    random = tl.reshape(random & 0xFFFFF if SIGNED else random >> 13, shape)
    # Without the sign, the bits are in the order of the numbers, as i32 as well.
    largest = tl.max((bits & 0x7FFFFFFF).to(tl.int32), axis=2).to(tl.uint32)
    exponent = (largest + 0x7FFFFF) >> 23  # of the power of two that is not below it
    scales = tl.where(largest < 0x00800000, 0, tl.where(exponent >= 254, _LOST, exponent)).to(tl.uint32)
    tl.store(scales_at, scales.to(tl.uint8).to(tl.int8, bitcast=True), mask=is_block)
    inverse = _floats(tl.where((scales > 0) & (scales < _LOST), (254 - scales) << 23, 0).to(tl.uint32))
    bits = tl.where((scales == _LOST)[:, :, None], 0, bits)
    relative = _floats(bits & 0x7FFFFFFF) * inverse[:, :, None]
    # Below the smallest normal number, 2**-14, the sum has the number in its last bits, and is the larger one.
    subnormal = _bits(relative + 0.00006103515625).to(tl.int32) - ((127 - 14) << 23)
    normal = _bits(relative).to(tl.int32) - ((127 - 15) << 23)
    codes = (tl.maximum(subnormal, normal).to(tl.uint32) + random) >> (23 - mantissa)
    if SIGNED:
        codes = codes | ((bits >> 31) << 7)
    else:
        # Hazard: a second moment of 0 divides the first one by eps alone.
        codes = tl.where((codes == 0) & (relative > 0.0), 1, codes)
    codes = tl.reshape(codes, codes_at.shape)
    tl.store(codes_at, codes.to(tl.uint8).to(tl.int8, bitcast=True), mask=mask)


@_jit_for_any_step
def _adam_columns_kernel(  # type: ignore[no-untyped-def]
    matrix, stride_row, stride_column, selected, gradient, master, exp_avg, exp_avg_sq, k, length,
    grad_scale, one_minus_beta1, beta2, one_minus_beta2, decay, step_size, bias_correction2_sqrt, eps, step,
    SCALE_ON_DEVICE: tl.constexpr, MOMENTS: tl.constexpr, ALIGNED: tl.constexpr, ALL: tl.constexpr,
    DIM: tl.constexpr, BLOCK_SLICES: tl.constexpr, BLOCK_LENGTH: tl.constexpr,
):  # fmt: skip
    """AdamW on the state of BLOCK_SLICES selected slices, in place, and its cast into the matrix's slices."""
    slice_blocks = tl.cdiv(k, BLOCK_SLICES)
    number = (tl.program_id(0) % slice_blocks) * BLOCK_SLICES + tl.arange(0, BLOCK_SLICES)
    element = (tl.program_id(0) // slice_blocks) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
    is_slice = number < k
    is_element = element < length
    mask = is_slice[:, None] & is_element[None, :]
    offset = number.to(tl.int64)[:, None] * length + element[None, :]

    scale = _scale(grad_scale, SCALE_ON_DEVICE)
    grad = tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32) * scale
    weight = tl.load(master + offset, mask=mask, other=0.0)
    if MOMENTS == _FP8:
        # A row of stored moments begins with its scales.
        blocks = tl.cdiv(length, _BLOCK)
        row = number.to(tl.int64)[:, None] * (blocks + length)
        code = tl.multiple_of(row + blocks + element[None, :], (1, ALIGNED))
        block = (tl.program_id(0) // slice_blocks) * (BLOCK_LENGTH // _BLOCK) + tl.arange(0, BLOCK_LENGTH // _BLOCK)
        is_block = is_slice[:, None] & (block < blocks)[None, :]
        of_block = row + block[None, :]
        first = _load_moment(exp_avg + code, exp_avg + of_block, mask, is_block, True)
        second = _load_moment(exp_avg_sq + code, exp_avg_sq + of_block, mask, is_block, False)
    else:
        first = tl.load(exp_avg + offset, mask=mask, other=0.0)
        second = tl.load(exp_avg_sq + offset, mask=mask, other=0.0)
        if MOMENTS == _BF16:
            # Through bits: Triton's interpreter has bf16 as bits.
            first = _floats(first.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
            second = _floats(second.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    first += one_minus_beta1 * (grad - first)
    second = beta2 * second + one_minus_beta2 * (grad * grad)
    # Correctly rounded root and quotients, as the references have: the kernel waits for memory anyway.
    denominator = tl.math.div_rn(tl.math.sqrt_rn(second), bias_correction2_sqrt) + eps
    weight = weight * decay - tl.math.div_rn(step_size * first, denominator)
    tl.store(master + offset, weight, mask=mask)
    if MOMENTS == _FP32:
        tl.store(exp_avg + offset, first, mask=mask)
        tl.store(exp_avg_sq + offset, second, mask=mask)
    else:
        random = _random_bits(first, second, step)
        if MOMENTS == _BF16:
            stored = _rounded_to_bf16(first, random & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
            tl.store(exp_avg + offset, stored, mask=mask)
            stored = _rounded_to_bf16(second, random >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
            tl.store(exp_avg_sq + offset, stored, mask=mask)
        else:
            _store_moment(exp_avg + code, exp_avg + of_block, first, random, mask, is_block, True)
            _store_moment(exp_avg_sq + code, exp_avg_sq + of_block, second, random, mask, is_block, False)

    if ALL:
        slice_index = number
    else:
        slice_index = tl.load(selected + number, mask=is_slice, other=0)
    cast = weight.to(matrix.dtype.element_ty)
    if DIM == 0:
        row_of_matrix = matrix + slice_index.to(tl.int64)[:, None] * stride_row
        tl.store(row_of_matrix + element[None, :] * stride_column, cast, mask=mask)
    else:
        row_of_matrix = matrix + element.to(tl.int64)[:, None] * stride_row
        tl.store(
            row_of_matrix + slice_index[None, :] * stride_column,
            tl.trans(cast),
            mask=is_element[:, None] & is_slice[None, :],
        )


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
    scale = _scale(grad_scale, SCALE_ON_DEVICE)

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
    _launch(
        _norms_and_split_kernel, strips * triton.cdiv(slices, block_slices),
        matrix, *matrix.stride(), position, selected_out, deferred_out, partials, slices, length, k,
        DIM=dim, TILES=tiles, BLOCK_SLICES=block_slices, BLOCK_LENGTH=_BLOCK_LENGTH, enable_fp_fusion=False,
    )  # fmt: skip
    if strips > 1:
        _launch(
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
    _launch(
        _place_slices_kernel, triton.cdiv(length, _BLOCK_LENGTH) * triton.cdiv(slices, _BLOCK_SLICES),
        matrix, *matrix.stride(), selection.position, first_in, second_in, slices, length, selection.selected.numel(),
        DIM=dim, BOTH=first_in is not None, BLOCK_SLICES=_BLOCK_SLICES, BLOCK_LENGTH=_BLOCK_LENGTH,
    )  # fmt: skip


def adam_columns_(state: SliceState, coefficients: StepCoefficients) -> None:
    """Of one parameter. Raises ValueError if state or gradient have another layout, shape or dtype than the form."""
    matrix, dim = row_major(state.matrix, state.dim)
    slices = matrix.shape[dim] if state.selection is None else state.selection.selected.numel()
    shape = (slices, matrix.shape[1 - dim])
    _check("gradient", state.gradient, shape, state.gradient.dtype)
    stored = (state.master, *state.arrays)
    expected = replace(state.form, length=shape[1]).tensors(slices)
    for name, tensor, (of_tensor, dtype) in zip(("master", "exp_avg", "exp_avg_sq"), stored, expected, strict=True):
        _check(name, tensor, of_tensor, dtype)
    if not state.gradient.numel():
        return
    numbers, scale = window_numbers([coefficients], state.step), coefficients.grad_scale.for_kernels()
    # A state of few rows, such as that of a part of a parameter, has long tiles.
    block_slices = min(_BLOCK_STATE_SLICES, triton.next_power_of_2(slices))
    block_length = _BLOCK_STATE_ELEMENTS // block_slices
    _launch(
        _adam_columns_kernel, triton.cdiv(shape[1], block_length) * triton.cdiv(slices, block_slices),
        matrix, *matrix.stride(), state.master if state.selection is None else state.selection.selected,
        state.gradient, *stored, *shape,
        scale, *numbers.of_gradient[0][1:], *numbers.of_window, state.step,
        SCALE_ON_DEVICE=_on_device(scale), MOMENTS=_MOMENTS[state.form.moments],
        ALIGNED=math.gcd(16, shape[1], state.form.blocks, *(each.data_ptr() for each in state.arrays)),
        ALL=state.selection is None, DIM=dim, BLOCK_SLICES=block_slices, BLOCK_LENGTH=block_length,
        enable_fp_fusion=False,
    )  # fmt: skip


def _check(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}; "
            f"it must be contiguous {dtype}{list(shape)}"
        )


def quantize_slices_(
    gradient: Tensor, residual: Tensor, grad_scale: float | Tensor, scales_out: Tensor, values_out: Tensor
) -> None:
    slices, length = gradient.shape
    block_length = min(_QUANTIZED_ELEMENTS, triton.next_power_of_2(length))
    block_slices = _QUANTIZED_ELEMENTS // block_length
    if not gradient.numel():
        return
    _launch(
        _quantize_slices_kernel, triton.cdiv(slices, block_slices),
        gradient, residual, grad_scale, scales_out, values_out, slices, length,
        SCALE_ON_DEVICE=_on_device(grad_scale), WORDS=(values_out.data_ptr() | length) % 4 == 0,
        BLOCK_SLICES=block_slices, BLOCK_LENGTH=block_length, enable_fp_fusion=False,
    )  # fmt: skip


def _on_device(grad_scale: float | Tensor) -> bool:
    return isinstance(grad_scale, Tensor)


def _launch(kernel: Any, programs: int, tensor: Tensor, *arguments: object, **constants: object) -> None:
    """Launch ``programs`` of ``kernel`` on the device of ``tensor``, its first argument.

    If it is on the "meta" device, the kernel is compiled for the current device, and not launched.
    """
    if tensor.is_meta:
        kernel.warmup(tensor, *arguments, grid=(programs,), **constants)
        return
    # Triton launches on the current device, which may be another one in autograd's threads.
    with device_of(tensor.device).use():
        kernel[(programs,)](tensor, *arguments, **constants)
