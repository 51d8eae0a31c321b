"""State in fewer bytes: how it is stored, and its conversion from and to fp32.

[Note: state forms] Each tensor of a parameter's state has one row per slice: a slice that changes sides moves alone.
Without slices, a row is one of the parameter. ``native/state_forms.h`` and the Triton kernels compute the same bits as
this file.

- **Split master**, on the host. The fp32 master is the bf16 weight, which the upload buffer that was written last has,
  and an int16 of what rounding took away. Two fp32 numbers have the same weight and the same int16 only if one is
  halfway between two bf16 numbers and rounded down (to even): such a master is stored one fp32 ulp lower. So PyTorch's
  cast of a master is the weight, as for fp32 masters.
- **bf16 moments.** Of the 16 bits that are cut off, rounding up has the probability: the mean of the error is zero. A
  second moment changes by 0.1% per step, which rounding to nearest (0.2 to 0.4%) would lose.
- **8-bit moments.** 32 consecutive elements of a slice share a scale, a power of two in one byte, as in the OCP
  Microscaling formats (MX, version 1.0). A code has 4 bits of exponent: with a sign and 3 bits of mantissa for the
  first moment, with 4 bits of mantissa for the second one. Between two codes, rounding is as random as for bf16. A
  second moment above zero never becomes zero: the update would divide by eps.

The random bits are a hash of both moments and of the number of gradients in them. So they do not depend on threads, on
the order of slices, or on whether training was resumed. A value that was stored one time is stored again without an
error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count

import torch
from torch import Tensor

from zenflow_compile.native.library import DTYPES, StoredState
from zenflow_compile.planning.plan import QUANTIZATION_BLOCK, ParamPlan
from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.rules.rule import MOST_ARRAYS, Array

_MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.int8}
_MANTISSA, _MANTISSA_SQUARE = 3, 4  # bits of codes
_LOST = 255  # the scale of a block with a number that is too large or not finite
_WORD = 0xFFFFFFFF
_PIECE_ELEMENTS = 1 << 22  # that are converted at a time, unless one row has more


class State(tuple[Tensor, ...]):
    """Tensors of one parameter's state, with a row per slice: the master, f32[slices, length] or as stored, and the
    arrays of the rule."""

    __slots__ = ()

    @property
    def master(self) -> Tensor:
        return self[0]


@dataclass(frozen=True, slots=True)
class StateForm:
    """How the state of one parameter is stored; see [Note: state forms].

    Attributes:
        split: masters are split.
        moments: ``"fp32"``, ``"bf16"`` or ``"fp8"``.
        length: elements of a slice. fp32 and bf16 moments do not depend on it.
        arrays: of the rule.
    """

    split: bool = False
    moments: str = "fp32"
    length: int = 1
    arrays: tuple[Array, ...] = field(default=ADAMW.arrays, repr=False)

    @classmethod
    def of_deferred(cls, plan: ParamPlan) -> StateForm:
        return cls(plan.split_master, plan.moments, plan.length, plan.rule.arrays)

    @classmethod
    def of_selected(cls, plan: ParamPlan) -> StateForm:
        return cls(moments=plan.moments, length=plan.length, arrays=plan.rule.arrays)

    @classmethod
    def of_whole(cls, plan: ParamPlan) -> StateForm:
        """The form of the state of a parameter without slices, whose rows are the slices."""
        return cls(moments=plan.moments, length=plan.whole_rows[1], arrays=plan.rule.arrays)

    @property
    def plain(self) -> bool:
        return not self.split and self.moments == "fp32"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        moments = _MOMENTS[self.moments]
        of_arrays = (moments if array.rounded else torch.float32 for array in self.arrays)
        return torch.int16 if self.split else torch.float32, *of_arrays

    @property
    def row_elements(self) -> tuple[int, ...]:
        """Elements of a row of each stored tensor. A row of 8-bit moments begins with its scales."""
        scales = self.blocks if self.moments == "fp8" else 0
        return self.length, *(self.length + (scales if array.rounded else 0) for array in self.arrays)

    @property
    def rounded(self) -> int:
        """How many arrays may be rounded: the first ones."""
        return sum(array.rounded for array in self.arrays)

    @property
    def blocks(self) -> int:
        """Quantization blocks of a slice; the last one may be shorter."""
        return -(-self.length // QUANTIZATION_BLOCK)

    def tensors(self, slices: int) -> list[tuple[tuple[int, int], torch.dtype]]:
        return [((slices, elements), dtype) for elements, dtype in zip(self.row_elements, self.dtypes, strict=True)]

    def expand(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        """fp32 arrays, [n, length], of rows as they are stored: copies, unless they are stored in fp32."""
        if self.moments == "fp32" or not self.rounded:
            return arrays
        return *self._in_pieces(self._expand, arrays[: self.rounded]), *arrays[self.rounded :]

    def compress(self, *arrays: Tensor, step: int = 0) -> tuple[Tensor, ...]:
        """Rows of arrays as they are stored, of fp32 arrays [n, length]; ``step`` decides how they are rounded."""
        if self.moments == "fp32" or not self.rounded:
            return arrays
        return *self._in_pieces(partial(self._compress, step=step), arrays[: self.rounded]), *arrays[self.rounded :]

    def _expand(self, *moments: Tensor) -> list[Tensor]:
        if self.moments == "bf16":
            return [each.float() for each in moments]
        return [
            _expanded(self, each, signed=not array.nonnegative)
            for each, array in zip(moments, self.arrays, strict=False)
        ]

    def _compress(self, *moments: Tensor, step: int) -> list[Tensor]:
        random = _random_bits(moments, step)
        if self.moments == "bf16":
            return [_rounded(each, bits) for each, bits in zip(moments, (random & 0xFFFF, random >> 16), strict=False)]
        return [
            _rows(self, each, random >> 13 if array.nonnegative else random & 0xFFFFF, signed=not array.nonnegative)
            for each, array in zip(moments, self.arrays, strict=False)
        ]

    def _in_pieces(self, convert: Callable[..., list[Tensor]], moments: Sequence[Tensor]) -> list[Tensor]:
        """Convert rows piece by piece: temporaries are int64, and some ten times as large as what is converted."""
        rows = max(1, _PIECE_ELEMENTS // max(1, self.length))
        if len(moments[0]) <= rows:
            return convert(*moments)
        parts = (convert(*each) for each in zip(*(torch.split(moment, rows) for moment in moments), strict=True))
        first = next(parts)
        wholes = [each.new_empty((len(moments[0]), each.shape[1])) for each in first]
        for at, made in zip(count(0, rows), chain([first], parts), strict=False):
            for whole, part in zip(wholes, made, strict=True):
                whole[at : at + rows] = part
        return wholes

    def rows(self, state: Sequence[Tensor], weights: Tensor | None) -> StateRows:
        """Access to stored tensors and weights of any contiguous shape."""
        stored = (each.view(-1, elements) for each, elements in zip(state, self.row_elements, strict=True))
        return StateRows(self, State(stored), None if weights is None else weights.view(-1, self.length))

    def describe(self, state: Sequence[Tensor], weights: Tensor | None) -> StoredState:
        """Describe stored tensors for native code. The result keeps none of them alive."""
        master, *arrays = (each.data_ptr() for each in state)
        return StoredState(
            master=master,
            arrays=(ctypes.c_void_p * MOST_ARRAYS)(*arrays),
            weights=None if weights is None else weights.data_ptr(),
            length=self.length,
            split=self.split,
            moments=DTYPES[_MOMENTS[self.moments]],
            count=len(self.arrays),
            rounded=self.rounded,
            nonnegative=sum(1 << number for number, array in enumerate(self.arrays) if array.nonnegative),
        )


PLAIN = StateForm()
"""fp32 masters and moments."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """Reads and writes rows of one parameter's state in fp32, whatever its form.

    Attributes:
        stored: one row per slice.
        weights: [slices, length] in the model's dtype, which get the cast of each master that is written; split
            masters are completed by them. None writes none.
    """

    form: StateForm
    stored: State
    weights: Tensor | None = None

    def read(self, rows: Tensor | slice = slice(None)) -> State:
        """fp32 master and arrays of ``rows``, [n, length]: copies, unless ``rows`` is a slice of fp32 state."""
        form = self.form
        master, *arrays = (each[rows] for each in self.stored)
        if form.split:
            assert self.weights is not None
            master = _joined(self.weights[rows], master)
        return State((master, *form.expand(*arrays)))

    def write(self, state: Sequence[Tensor], rows: Tensor | slice = slice(None), *, step: int = 0) -> None:
        """Store fp32 master and arrays [n, length] as ``rows``, each one time; ``step`` decides the rounding."""
        form, (master, *arrays) = self.form, state
        if self.weights is not None:
            self.weights[rows] = master.to(self.weights.dtype)
        made = _rest(master) if form.split else master, *form.compress(*arrays, step=step)
        for target, values in zip(self.stored, made, strict=True):
            target[rows] = values

    def write_master(self, master: Tensor) -> None:
        """Store fp32 masters of all rows, and leave the moments."""
        if self.weights is not None:
            self.weights.copy_(master)
        self.stored.master.copy_(_rest(master) if self.form.split else master)


# Random bits: 32-bit words in int64 tensors.


def _random_bits(moments: Sequence[Tensor], step: int) -> Tensor:
    """The hash "lowbias32" of C. Wellons, Prospecting for Hash Functions (2018)."""
    bits = _bits(moments[0]) + step * 0x9E3779B9
    for other in map(_bits, moments[1:]):
        bits = bits + (other << 16 | other >> 16)
    bits = bits & _WORD
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & _WORD
    bits = bits ^ (bits >> 15)
    bits = (bits * 0x846CA68B) & _WORD
    return bits ^ (bits >> 16)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).long() & _WORD


# Split masters.


def _joined(weights: Tensor, rest: Tensor) -> Tensor:
    return ((weights.view(torch.int16).int() << 16) + rest).view(torch.float32)


def _rest(master: Tensor) -> Tensor:
    weights = master.to(torch.bfloat16).view(torch.int16).int() << 16
    # Above it is a tie that was rounded down.
    rest = (master.contiguous().view(torch.int32) - weights).clamp_(max=32767)
    return torch.where(master.isnan(), 0, rest).to(torch.int16)


# Moments.


def _rounded(values: Tensor, half: Tensor) -> Tensor:
    # Infinite numbers stay so: the bits that are cut off are zeros.
    rounded = ((_bits(values) + half) & _WORD) >> 16
    rounded = torch.where(values.isnan(), 0x7FC0, rounded)
    return torch.where(rounded > 0x7FFF, rounded - 0x10000, rounded).to(torch.int16).view(torch.bfloat16)


def _in_blocks(form: StateForm, values: Tensor) -> Tensor:
    """[n, length] as [n, blocks, QUANTIZATION_BLOCK], with zeros behind the end."""
    padding = form.blocks * QUANTIZATION_BLOCK - form.length
    return torch.nn.functional.pad(values, (0, padding)).view(len(values), form.blocks, QUANTIZATION_BLOCK)


def _out_of_blocks(form: StateForm, blocks: Tensor) -> Tensor:
    return blocks.flatten(1)[:, : form.length]


def _rows(form: StateForm, values: Tensor, random: Tensor, *, signed: bool) -> Tensor:
    """Rows of a stored 8-bit moment: i8[n, blocks + length]."""
    bits, random = _in_blocks(form, _bits(values)), _in_blocks(form, random)
    largest = (bits & 0x7FFFFFFF).amax(-1, keepdim=True)
    scale = (largest + 0x7FFFFF) >> 23  # exponent bits of the power of two that is not below it
    scale = torch.where(scale >= 254, _LOST, torch.where(largest < 0x00800000, 0, scale))
    any_ = (scale > 0) & (scale < _LOST)
    inverse = torch.where(any_, _floats((254 - scale) << 23), 0.0)
    bits = torch.where(scale == _LOST, 0, bits)
    relative = _floats(bits & 0x7FFFFFFF) * inverse
    code = _code(relative, random, _MANTISSA if signed else _MANTISSA_SQUARE)
    if signed:
        code |= bits >> 31 << 7
    else:
        code = torch.where((code == 0) & (relative > 0.0), 1, code)  # zero divides the first moment by eps alone
    row = torch.cat([scale.squeeze(-1), _out_of_blocks(form, code)], dim=1)
    return torch.where(row > 127, row - 256, row).to(torch.int8)


def _code(relative: Tensor, random: Tensor, mantissa: int) -> Tensor:
    """Codes of numbers in [0, 1], rounded up if the bits of ``random`` below the last bit of a code carry."""
    smallest_normal = (127 - 14) << 23
    # Below the smallest normal number, the sum has the number in its last bits, and is the larger one.
    subnormal = _bits(relative + 2.0**-14) - smallest_normal
    normal = _bits(relative) - ((127 - 15) << 23)
    return (torch.maximum(subnormal, normal) + random) >> (23 - mantissa)


def _floats(bits: Tensor) -> Tensor:
    return torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _expanded(form: StateForm, rows: Tensor, *, signed: bool) -> Tensor:
    """f32[n, length] of rows of a stored 8-bit moment."""
    rows = rows.long() & 0xFF
    scale, code = rows[:, : form.blocks].unsqueeze(-1), _in_blocks(form, rows[:, form.blocks :])
    mantissa = _MANTISSA if signed else _MANTISSA_SQUARE
    magnitude = code & 0x7F if signed else code
    bits = magnitude << (23 - mantissa)
    # The smaller one of the two below the smallest normal number.
    subnormal = _floats(bits + ((127 - 14) << 23)) - 2.0**-14
    relative = torch.minimum(subnormal, _floats(bits + ((127 - 15) << 23)))
    values = relative * torch.where(scale == _LOST, torch.nan, _floats(scale << 23))
    # Contiguous: fused updates run over memory, not over elements.
    return _out_of_blocks(form, torch.where(code > magnitude, -values, values)).contiguous()
