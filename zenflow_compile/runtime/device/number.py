"""Factors on gradients, such as clip factors. The host knows them, or the device computes them in an optimizer step.

Kernels and operators read a late number from device memory. The host waits for its copy only where it needs the value:
in a job, whose inputs the copy joins, at a decision of a later step, or in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from zenflow_compile.runtime.device.copy_lanes import Ticket


@dataclass(eq=False, slots=True)
class Number:
    """A number that the host knows, or a late one: in device memory, on its way to the host. ``float()`` waits for it.

    It equals only itself, so that objects that share one are grouped by it without a wait. ``known`` shares numbers.

    Args:
        on_device: f64[], as Python's numbers are, so that arithmetic on the device and on the host has the same bits.
            None for a known number.
        copies: the copies to the host that write ``cells``.
        cells: f64[] each, in host memory; none for a known number.
        factor: a late number is this times the only cell. 0: it is the largest finite magnitude of all cells, or 1 if
            none is above 0.
        value: NaN for a late number.
    """

    on_device: Tensor | None = None
    copies: Sequence[Ticket] = ()
    cells: Sequence[Tensor] = ()
    factor: float = 1.0
    value: float = math.nan

    @staticmethod
    @lru_cache(maxsize=256)
    def known(value: float) -> Number:
        """Return the number ``value``: one object for equal ones among those used last."""
        return Number(value=value)

    def __float__(self) -> float:
        if not self.cells:
            return self.value
        for copy in self.copies:
            copy.wait()
        # Native workers compute it, too: see pool.h.
        values = [cell.item() for cell in self.cells]
        return self.factor * values[0] if self.factor else _largest_magnitude(values)

    def __neg__(self) -> Number:
        assert self.factor, "a magnitude is not negated"
        if self.on_device is None and self.value:  # -0.0 equals 0.0, which has another sign
            return Number.known(-self.value)
        on_device = None if self.on_device is None else -self.on_device
        return Number(on_device, self.copies, self.cells, -self.factor, -self.value)

    def for_kernels(self) -> float | Tensor:
        """Return a float, or f64[] on the device."""
        return self.value if self.on_device is None else self.on_device

    def for_fp32(self) -> float | Tensor:
        """Return a float, which operators on fp32 tensors round to fp32, or f32[] on the device."""
        return self.value if self.on_device is None else self.on_device.float()

    def on(self, device: torch.device) -> Tensor:
        """Return f64[] on ``device``, where late numbers are; a known one is written there without a copy."""
        if self.on_device is None:
            return torch.full((), self.value, dtype=torch.float64, device=device)
        return self.on_device

    def quotient(self, by: Number, count: int = 1) -> float | Tensor:
        """Return it divided by ``by`` and ``count``, as ``for_fp32`` does."""
        tensors = [each.on_device for each in (self, by) if each.on_device is not None]
        if not tensors:
            return self.value / by.value / count
        # Tensors only: with a float on either side, PyTorch may multiply by a reciprocal, which rounds two times.
        dividend, divisor, last = (each.on(tensors[0].device) for each in (self, by, Number(value=float(count))))
        return (dividend / divisor / last).float()

    @staticmethod
    def largest(*numbers: Number) -> Number:
        """Return the largest magnitude that can be divided by; 1 if there is none.

        Clipping by an infinite norm makes a scale 0, by a NaN norm NaN. ``maximize`` makes scales negative.
        """
        tensors = [each.on_device for each in numbers if each.on_device is not None]
        if not tensors:
            return Number.known(_largest_magnitude([each.value for each in numbers]))
        assert all(each.factor for each in numbers), "a magnitude has more than one cell"
        magnitudes = torch.stack([each.on(tensors[0].device) for each in numbers]).abs_()
        usable = torch.where((magnitudes > 0.0) & (magnitudes < math.inf), magnitudes, 0.0).amax()
        copies = list(dict.fromkeys(copy for each in numbers for copy in each.copies))
        cells = [cell for each in numbers for cell in each.cells or (each.on(torch.device("cpu")),)]
        return Number(torch.where(usable > 0.0, usable, 1.0), copies, cells, factor=0.0)


def _largest_magnitude(values: Sequence[float]) -> float:
    return max((magnitude for value in values if 0.0 < (magnitude := abs(value)) < math.inf), default=1.0)
