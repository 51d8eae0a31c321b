"""A deferred gradient that stays on the device until it is final, because it is summed or compressed before its copy.

[Note: transient blocks] These blocks bypass the staging ring: many gradients are final in one optimizer step, and with
two buffers the device would wait for all of their copies. A block comes from the allocator, on the stream of the
update. It is released only after that stream was told to wait for its copy, so that the memory's next user writes
later.

[Note: sums] A gradient is added to the sum at the optimizer step, with that step's clip factor and loss scale. The sum
is in fp32. For random bf16 gradients, the mean of 4 (8) has a relative error of 2.7e-3 (3.7e-3) if they are summed in
bf16, and 1.7e-3 (1.7e-3) if they are summed in fp32 and rounded one time, which is the error of a bf16 number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.device.device import Stream
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.host.host_kernel import scales_and_values
from zenflow_compile.runtime.update_rule import StepCoefficients

Outgoing = tuple[Tensor, Sequence[StepCoefficients]]
"""A block like one of the plan's ``gradient_buffers``, and the coefficients of its gradients."""


class PendingGradient:
    """The deferred gradient of one parameter between its backward and the optimizer step.

    Attributes:
        gradient: [deferred, length] in the model's dtype: written by the split, released with the update.
        window_sum: sum of the update window's gradients; None unless the plan says ``summed``.
        residual: error of the compression so far; None unless the plan says ``compressed``.
    """

    def __init__(self, plan: ParamPlan, device: torch.device, scales: Scales) -> None:
        self.gradient: Tensor | None = None
        self.window_sum = WindowSum.allocate(plan, device, scales) if plan.summed else None
        self.residual = Residual.allocate(plan, device) if plan.compressed else None
        self._plan = plan
        self._device = device
        self._sent: tuple[Tensor, Ticket] | None = None
        self._streams = device_of(device).streams
        self._owner: Stream | None = None  # on which the sent block was allocated

    @property
    def busy(self) -> bool:
        return self._sent is not None and not self._sent[1].done()

    def new_gradient(self) -> Tensor:
        """Allocate this step's gradient; the device waits for the copy of the last block. Raises its CopyError."""
        if self._sent is not None:
            self._sent[1].wait_on_device()
            if self._streams is None or self._streams.current() == self._owner:
                self._sent = None
        self.gradient = torch.empty(
            (self._plan.deferred, self._plan.length), dtype=self._plan.dtype, device=self._device
        )
        return self.gradient

    def finalize(self, coefficients: StepCoefficients) -> Outgoing | None:
        """Sum or compress the final gradient. Returns the block to copy now; a sum is copied at the flush."""
        assert self.gradient is not None
        if self._sent is not None:
            # ``new_gradient`` ran on another stream. The allocator gives the block to its next user on the stream of
            # the update, which must have been told to wait.
            self._sent[1].wait_on_device()
            self._sent = None
        if self.window_sum is not None:
            self.window_sum.add(self.gradient, coefficients)
        if self.residual is None:
            return None
        block = self._new_block()
        return block, [self.residual.compress(self.gradient, coefficients, block)]

    def end_window(self) -> Outgoing | None:
        """Take the sum of an update window that flushes. Returns the block to copy; None without sum or gradients."""
        if self.window_sum is None or not self.window_sum.coefficients:
            return None
        block = self._new_block()
        return block, self.window_sum.take_mean(block)

    def sent(self, block: Tensor, ticket: Ticket) -> None:
        """Keep ``block`` until its copy is over. See [Note: transient blocks]."""
        if self._sent is not None:  # first: the block before it may be released only behind its own copy
            self._sent[1].wait_on_device()
        self._owner = None if self._streams is None else self._streams.current()
        self._sent = block, ticket

    def slices_changed(self, changed: Tensor) -> None:
        """Drop the residual of the slices at ``changed``, bool[deferred] on the device; a sum must be empty."""
        if self.residual is not None:
            self.residual.drop(changed)

    def abandon(self) -> None:
        """Drop gradient, update window and copies, failed ones too, before a state is loaded."""
        self.gradient = None
        if self._sent is not None:
            # Before the block goes back to the allocator, which does not know of the copy on the lane's stream.
            self._sent[1].settle()
            self._sent = None
        self.drop_window()

    def drop_window(self) -> int:
        """Forget the gradients that the update window sums up, and return how many there were."""
        if self.window_sum is None:
            return 0
        count = len(self.window_sum.coefficients)
        self.window_sum.coefficients.clear()
        return count

    @property
    def nbytes(self) -> int:
        tensors = [
            self.gradient,
            None if self._sent is None else self._sent[0],
            None if self.window_sum is None else self.window_sum.total,
            None if self.residual is None else self.residual.lost,
        ]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def forget_ended(self) -> None:
        self._sent = None

    def list_memory(self, found: MemoryList) -> None:
        found.content(self.gradient, None if self._sent is None else self._sent[0])
        if self.window_sum is not None:
            self.window_sum.list_memory(found)
        if self.residual is not None:
            found.content(self.residual.lost)

    def _new_block(self) -> Tensor:
        buffers = self._plan.gradient_buffers
        return torch.empty(buffers.shape, dtype=buffers.dtype, device=self._device)


class Scales:
    """Arithmetic with the scales of gradients, cached: parameters share scales, and late ones cost some launches."""

    def __init__(self) -> None:
        self.largest = lru_cache(maxsize=64)(Number.largest)
        self.quotient = lru_cache(maxsize=64)(Number.quotient)

    def forget(self) -> None:
        self.largest.cache_clear()
        self.quotient.cache_clear()


@dataclass(slots=True)
class WindowSum:
    """The open update window of one parameter.

    Attributes:
        total: f32[deferred, length], the sum of ``gradient * grad_scale`` over the window, divided by ``unit``;
            arbitrary while the window is empty.
        coefficients: of each gradient, oldest first; a missing gradient has none.
    """

    total: Tensor
    scales: Scales
    coefficients: list[StepCoefficients] = field(default_factory=list)

    @classmethod
    def allocate(cls, plan: ParamPlan, device: torch.device, scales: Scales) -> WindowSum:
        return cls(torch.zeros((plan.deferred, plan.length), dtype=torch.float32, device=device), scales)

    @property
    def unit(self) -> Number:
        """Scale of the update window's first gradient: while it stays the same, raw gradients are summed unscaled."""
        return self.scales.largest(self.coefficients[0].grad_scale)

    def list_memory(self, found: MemoryList) -> None:
        (found.content if self.coefficients else found.scratch)(self.total)
        found.numbers(each.grad_scale for each in self.coefficients)

    def add(self, gradient: Tensor, coefficients: StepCoefficients) -> None:
        """Add a final gradient ``[deferred, length]``, of any floating dtype."""
        # First: the unit is the scale of the update window's first gradient, which may be this one.
        self.coefficients.append(coefficients)
        factor = self.scales.quotient(coefficients.grad_scale, self.unit)
        unscaled = isinstance(factor, float) and factor == 1.0
        if len(self.coefficients) == 1:
            self.total.copy_(gradient)
            if not unscaled:
                self.total.mul_(factor)
        elif unscaled:
            self.total.add_(gradient)
        else:
            # Not ``add_(alpha=)``, which takes no factor from device memory: one operator for all factors, so that none
            # rounds otherwise. Its bits are those of ``add_(alpha=)`` where the CPU has fused multiply-adds.
            if isinstance(factor, float):
                factor = torch.full((), factor, dtype=torch.float32, device=self.total.device)
            self.total.addcmul_(gradient, factor)

    def take_mean(self, out: Tensor) -> list[StepCoefficients]:
        """Empty the update window, and write the mean gradient into ``out`` [deferred, length] of the model's dtype.

        The mean is divided by the window's largest scale, so that it overflows no more than the raw gradients did. The
        returned coefficients of the window's gradients apply to the mean and have that scale.
        """
        scale = self.scales.largest(*(each.grad_scale for each in self.coefficients))
        torch.mul(self.total, self.scales.quotient(self.unit, scale, len(self.coefficients)), out=out)
        coefficients, self.coefficients = [each._replace(grad_scale=scale) for each in self.coefficients], []
        return coefficients


@dataclass(slots=True)
class Residual:
    """The rounding error of a parameter's compressed gradients, which is added to the next one.

    Attributes:
        lost: [deferred, length], without loss scale and after clipping, because both change from step to step. fp32, or
            bf16 if the model's dtype has 16 bits: fp16 would underflow.
    """

    lost: Tensor

    @classmethod
    def allocate(cls, plan: ParamPlan, device: torch.device) -> Residual:
        dtype = torch.float32 if plan.dtype == torch.float32 else torch.bfloat16
        return cls(torch.zeros((plan.deferred, plan.length), dtype=dtype, device=device))

    def compress(self, gradient: Tensor, coefficients: StepCoefficients, block: Tensor) -> StepCoefficients:
        """Write a final gradient [deferred, length] plus the residual into ``block``, and keep the new rounding error.

        Returns the coefficients for the written gradient, which is scaled already.
        """
        scales, values = scales_and_values(block)
        column_ops.quantize_slices_(gradient, self.lost, coefficients.grad_scale.for_kernels(), scales, values)
        return coefficients._replace(grad_scale=Number.known(1.0))

    def drop(self, changed: Tensor) -> None:
        """Clear the residual of rows at ``changed``, bool[deferred] on the device, that now hold other slices."""
        self.lost.masked_fill_(changed.unsqueeze(1), 0.0)
