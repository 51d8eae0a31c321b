"""Updates of selected or of all slices, in Triton: kernels that ``rules/triton.py`` prints, and what these are made of.

A program updates a tile of the blocks ``[slice, length]``: it loads the gradient, the master and the arrays of the
rule, and stores masters, arrays, and the weights in the matrix. [Note: bits] and [Note: offsets] of ``triton_kernels``
hold here, too. With one rounding per operation, as the definition has, an update has the bits of the host's.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals, as Triton's users expect.

from __future__ import annotations

import linecache
import math
import zlib
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zenflow_compile.planning.plan import QUANTIZATION_BLOCK
from zenflow_compile.rules.rule import Rule
from zenflow_compile.rules.triton import printed
from zenflow_compile.runtime.device_updates.selection import SliceState, row_major
from zenflow_compile.runtime.device_updates.triton_kernels import launch, on_device, scale_of
from zenflow_compile.runtime.update_rule import StepCoefficients, window_numbers

if TYPE_CHECKING:
    # Under this name mypy sees plain functions; the decorator of Triton is untyped.
    from collections.abc import Callable

    def _jit(function: Callable[..., None]) -> Any: ...
else:
    _jit = triton.jit

_BLOCK_SLICES, _BLOCK_ELEMENTS = 16, 1024  # all that a tile has is in registers


# Moments in fewer bytes: see [Note: state forms] in ``state_forms``.

_FP32, _BF16, _FP8 = (tl.constexpr(number) for number in range(3))
_FORMS = {"fp32": _FP32.value, "bf16": _BF16.value, "fp8": _FP8.value}
_BLOCK: tl.constexpr = tl.constexpr(QUANTIZATION_BLOCK)
_LOST = tl.constexpr(255)


@_jit
def _bits(values):  # type: ignore[no-untyped-def]
    return values.to(tl.uint32, bitcast=True)


@_jit
def _floats(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.float32, bitcast=True)


@_jit
def random_bits(exp_avg, exp_avg_sq, step):  # type: ignore[no-untyped-def]
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


# What printed kernels call. ``number`` and ``element`` are the rows and columns of a tile in the blocks.


@_jit
def tile_of(k, BLOCK_SLICES: tl.constexpr, BLOCK_LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    slice_blocks = tl.cdiv(k, BLOCK_SLICES)
    number = (tl.program_id(0) % slice_blocks) * BLOCK_SLICES + tl.arange(0, BLOCK_SLICES)
    element = (tl.program_id(0) // slice_blocks) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
    return number, element


@_jit
def _inside(number, element, k, length):  # type: ignore[no-untyped-def]
    return (number < k)[:, None] & (element < length)[None, :]


@_jit
def _offset(number, element, length):  # type: ignore[no-untyped-def]
    return number.to(tl.int64)[:, None] * length + element[None, :]


@_jit
def load_plain(values, number, element, k, length):  # type: ignore[no-untyped-def]
    return tl.load(values + _offset(number, element, length), mask=_inside(number, element, k, length), other=0.0)


@_jit
def store_plain(target, values, number, element, k, length):  # type: ignore[no-untyped-def]
    tl.store(target + _offset(number, element, length), values, mask=_inside(number, element, k, length))


@_jit
def load_gradient(gradients, scale, number, element, k, length, SCALE_ON_DEVICE: tl.constexpr):  # type: ignore[no-untyped-def]
    return load_plain(gradients, number, element, k, length).to(tl.float32) * scale_of(scale, SCALE_ON_DEVICE)


@_jit
def _codes(number, element, k, length, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of 8-bit codes [slices, elements], and of scales [slices, blocks], which begin a row, with their mask."""
    blocks = tl.cdiv(length, _BLOCK)
    row = number.to(tl.int64)[:, None] * (blocks + length)
    code = tl.multiple_of(row + blocks + element[None, :], (1, ALIGNED))
    in_tile: tl.constexpr = element.shape[0] // _BLOCK
    block = (tl.program_id(0) // tl.cdiv(k, number.shape[0])) * in_tile + tl.arange(0, in_tile)
    return code, row + block[None, :], (number < k)[:, None] & (block < blocks)[None, :]


@_jit
def load_rounded(  # type: ignore[no-untyped-def]
    values, number, element, k, length,
    not_below_zero: tl.constexpr, MOMENTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    if MOMENTS == _FP8:
        code, of_block, is_block = _codes(number, element, k, length, ALIGNED)
        mask = _inside(number, element, k, length)
        loaded = _load_moment(values + code, values + of_block, mask, is_block, not not_below_zero)
    else:
        loaded = load_plain(values, number, element, k, length)
        if MOMENTS == _BF16:
            # Through bits: Triton's interpreter has bf16 as bits.
            loaded = _floats(loaded.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return loaded


@_jit
def store_rounded(  # type: ignore[no-untyped-def]
    target, values, random, number, element, k, length,
    not_below_zero: tl.constexpr, MOMENTS: tl.constexpr, ALIGNED: tl.constexpr, second: tl.constexpr,
):  # fmt: skip
    if MOMENTS == _FP8:
        code, of_block, is_block = _codes(number, element, k, length, ALIGNED)
        mask = _inside(number, element, k, length)
        _store_moment(target + code, target + of_block, values, random, mask, is_block, not not_below_zero)
    elif MOMENTS == _BF16:
        half = random >> 16 if second else random & 0xFFFF
        stored = _rounded_to_bf16(values, half).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        store_plain(target, stored, number, element, k, length)
    else:
        store_plain(target, values, number, element, k, length)


@_jit
def cast_weights(  # type: ignore[no-untyped-def]
    matrix, stride_row, stride_column, selected, weight, number, element, k, length,
    ALL: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    is_slice = number < k
    if ALL:
        slice_index = number
    else:
        slice_index = tl.load(selected + number, mask=is_slice, other=0)
    cast = weight.to(matrix.dtype.element_ty)
    if DIM == 0:
        row_of_matrix = matrix + slice_index.to(tl.int64)[:, None] * stride_row
        tl.store(row_of_matrix + element[None, :] * stride_column, cast, mask=_inside(number, element, k, length))
    else:
        row_of_matrix = matrix + element.to(tl.int64)[:, None] * stride_row
        inside = (element < length)[:, None] & is_slice[None, :]
        tl.store(row_of_matrix + slice_index[None, :] * stride_column, tl.trans(cast), mask=inside)


# What rules compute with: see ``OPERATIONS`` in rules/tracing.py, and the same functions in native/update_rule.h.


@_jit
def quotient(dividend, divisor):  # type: ignore[no-untyped-def]
    return tl.math.div_rn(dividend, divisor)  # rounded one time: the kernel waits for memory anyway


@_jit
def root(values):  # type: ignore[no-untyped-def]
    return tl.math.sqrt_rn(values)


@_jit
def negative(values):  # type: ignore[no-untyped-def]
    return _floats(_bits(values) ^ 0x80000000)  # Triton's is 0 - values, which loses the sign of zeros


@_jit
def magnitude(values):  # type: ignore[no-untyped-def]
    return tl.abs(values)


@_jit
def sign(values):  # type: ignore[no-untyped-def]
    return (values > 0).to(tl.float32) - (values < 0).to(tl.float32)


@_jit
def larger(one, other):  # type: ignore[no-untyped-def]
    return tl.where((one > other) | (one != one), one, other)


@lru_cache(maxsize=64)
def kernel_of(rule: Rule) -> Any:
    """The kernel of a rule. Rules of one text share it."""
    return _kernel_of(f"{type(rule).__name__}.update_slices", printed(rule))


@cache
def _kernel_of(name: str, text: str) -> Any:
    # Triton reads the source of a kernel again. Entries without a time stay, although there is no file.
    file = f"<{name} {zlib.crc32(text.encode()):08x}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names = dict(globals())
    exec(compile(text, file, "exec"), names)
    return triton.jit(names["update_slices"], do_not_specialize=["step"])  # else it is compiled anew at some steps


def update_slices_(state: SliceState, coefficients: StepCoefficients) -> None:
    """Of one parameter. Raises ValueError if state or gradient have another layout, shape or dtype than the form."""
    matrix, dim = row_major(state.matrix, state.dim)
    slices = matrix.shape[dim] if state.selection is None else state.selection.selected.numel()
    shape = (slices, matrix.shape[1 - dim])
    _check("gradient", state.gradient, shape, state.gradient.dtype)
    stored = (state.master, *state.arrays)
    expected = replace(state.form, length=shape[1]).tensors(slices)
    names = ("master", *(array.name for array in state.form.arrays))
    for name, tensor, (of_tensor, dtype) in zip(names, stored, expected, strict=True):
        _check(name, tensor, of_tensor, dtype)
    if not state.gradient.numel():
        return
    numbers, scale = window_numbers([coefficients], state.step), coefficients.grad_scale.for_kernels()
    rounded = state.arrays[: state.form.rounded]
    # A state of few rows, such as that of a part of a parameter, has long tiles.
    block_slices = min(_BLOCK_SLICES, triton.next_power_of_2(slices))
    block_length = _BLOCK_ELEMENTS // block_slices
    launch(
        kernel_of(coefficients.rule), triton.cdiv(shape[1], block_length) * triton.cdiv(slices, block_slices),
        matrix, *matrix.stride(), state.master if state.selection is None else state.selection.selected,
        state.gradient, state.master, *shape, scale, state.step, *state.arrays,
        *numbers.of_gradient[0], *numbers.of_window,
        SCALE_ON_DEVICE=on_device(scale), MOMENTS=_FORMS[state.form.moments],
        ALIGNED=math.gcd(16, shape[1], state.form.blocks, *(each.data_ptr() for each in rounded)),
        ALL=state.selection is None, DIM=dim, BLOCK_SLICES=block_slices, BLOCK_LENGTH=block_length,
        enable_fp_fusion=False,
    )  # fmt: skip


def _check(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}; "
            f"it must be contiguous {dtype}{list(shape)}"
        )
