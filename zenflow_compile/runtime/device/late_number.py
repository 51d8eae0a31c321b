"""Numbers that the device computes in an optimizer step, such as clip factors, before the host knows them.

Kernels and operators read such a number from device memory. The host waits for its copy only where it needs the value:
in a job, whose inputs the copy joins, at a decision of a later step, or in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from zenflow_compile.runtime.device.copy_lanes import Ticket


class LateNumber:
    """A number in device memory, on its way to the host. ``float()`` waits for it.

    It equals no other number, also none of the same value: objects that share one can be grouped by it without a wait.

    Args:
        on_device: f64[], as Python's numbers are, so that arithmetic on the device and on the host has the same bits.
        copies: the copies to the host that ``compute`` reads.
        compute: returns the number when ``copies`` are complete.
    """

    __slots__ = ("_compute", "_value", "copies", "on_device")

    def __init__(self, on_device: Tensor, copies: Sequence[Ticket], compute: Callable[[], float]) -> None:
        self.on_device = on_device
        self.copies = copies
        self._compute = compute
        self._value: float | None = None

    def __float__(self) -> float:
        if self._value is None:
            for copy in self.copies:
                copy.wait()
            self._value = self._compute()  # several threads may do this: they store the same number
        return self._value

    def __neg__(self) -> LateNumber:
        return LateNumber(-self.on_device, self.copies, lambda: -float(self))


Number = float | LateNumber


def on_device(number: Number) -> float | Tensor:
    """``number`` for kernels: a float, or f64[] on the device."""
    return number.on_device if isinstance(number, LateNumber) else number


def for_fp32(number: Number) -> float | Tensor:
    """``number`` for operators on fp32 tensors: a float, which they round to fp32, or f32[] on the device."""
    return number.on_device.float() if isinstance(number, LateNumber) else number
