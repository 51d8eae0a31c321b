"""Numbers that the device computes in an optimizer step, such as clip factors, before the host knows them.

Kernels and operators read such a number from device memory. The host waits for its copy only where it needs the value:
in a job, whose inputs the copy joins, at a decision of a later step, or in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zenflow_compile.runtime.device.copy_lanes import Ticket


@dataclass(eq=False, slots=True)
class LateNumber:
    """A number in device memory, on its way to the host. ``float()`` waits for it.

    It equals no other number, also none of the same value: objects that share one can be grouped by it without a wait.

    Args:
        on_device: f64[], as Python's numbers are, so that arithmetic on the device and on the host has the same bits.
        copies: the copies to the host that write ``cells``.
        cells: f64[] each, in host memory.
        factor: the number is this times the only cell. 0: it is the largest finite magnitude of all cells, or 1 if none
            is above 0.
    """

    on_device: Tensor
    copies: Sequence[Ticket]
    cells: Sequence[Tensor]
    factor: float = 1.0
    _value: float | None = field(default=None, init=False)

    def __float__(self) -> float:
        if self._value is None:
            for copy in self.copies:
                copy.wait()
            # Several threads may do this: they store the same number. Native workers compute it, too: see pool.h.
            values = [cell.item() for cell in self.cells]
            self._value = self.factor * values[0] if self.factor else largest_magnitude(values)
        return self._value

    def __neg__(self) -> LateNumber:
        assert self.factor, "a magnitude is not negated"
        return LateNumber(-self.on_device, self.copies, self.cells, -self.factor)


def largest_magnitude(values: Sequence[float]) -> float:
    """The largest magnitude that can be divided by; 1 if there is none."""
    return max((magnitude for value in values if 0.0 < (magnitude := abs(value)) < math.inf), default=1.0)


Number = float | LateNumber


def on_device(number: Number) -> float | Tensor:
    """``number`` for kernels: a float, or f64[] on the device."""
    return number.on_device if isinstance(number, LateNumber) else number


def for_fp32(number: Number) -> float | Tensor:
    """``number`` for operators on fp32 tensors: a float, which they round to fp32, or f32[] on the device."""
    return number.on_device.float() if isinstance(number, LateNumber) else number
