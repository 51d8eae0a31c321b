"""fp32 arithmetic that rounds each operation one time, as printed code does, on tensors of any shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Exact:
    """A tensor for the functions of a rule. PyTorch's root of fp32 may be off by one unit; it divides by a number by
    its reciprocal, which rounds two times."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def _with(self, operation: Any, other: Any, *, swapped: bool = False) -> Exact:
        pair = (self.value, other.value if isinstance(other, Exact) else torch.full_like(self.value, other))
        return Exact(operation(*(reversed(pair) if swapped else pair)))

    def __add__(self, other: Any) -> Exact:
        return self._with(torch.add, other)

    def __sub__(self, other: Any) -> Exact:
        return self._with(torch.sub, other)

    def __rsub__(self, other: Any) -> Exact:
        return self._with(torch.sub, other, swapped=True)

    def __mul__(self, other: Any) -> Exact:
        return self._with(torch.mul, other)

    def __truediv__(self, other: Any) -> Exact:
        return self._with(torch.div, other)

    def __rtruediv__(self, other: Any) -> Exact:
        return self._with(torch.div, other, swapped=True)

    def __neg__(self) -> Exact:
        return Exact(-self.value)

    def maximum(self, other: Any) -> Exact:
        return self._with(torch.maximum, other)

    def abs(self) -> Exact:
        return Exact(self.value.abs())

    def sign(self) -> Exact:
        return Exact(self.value.sign())

    def sqrt(self) -> Exact:
        return Exact(self.value.double().sqrt().float())

    __radd__, __rmul__ = __add__, __mul__
