"""A deferred gradient that stays on the device until it is final, because it is summed or compressed before its copy.

[Note: transient blocks] These blocks bypass the staging ring: many gradients are final in one optimizer step, and with
two buffers the device would wait for all of their copies. A block comes from the allocator, on the stream of the
update. It is released only after that stream was told to wait for its copy, so that the memory's next user writes
later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.device.device import Stream
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.gradients.compression import Residual
from zenflow_compile.runtime.gradients.window_sum import Scales, WindowSum

Outgoing = tuple[Tensor, Sequence[StepCoefficients]]
"""A block of the plan's ``buffer_shape`` and ``buffer_dtype``, and the coefficients of its gradients."""


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
        """Whether ``new_gradient`` would wait."""
        return self._sent is not None and not self._sent[1].done()

    def new_gradient(self) -> Tensor:
        """Allocate this step's gradient; the device waits for the copy of the last block.

        Raises:
            CopyError: that copy failed.
        """
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
        """Device memory."""
        tensors = [
            self.gradient,
            None if self._sent is None else self._sent[0],
            None if self.window_sum is None else self.window_sum.total,
            None if self.residual is None else self.residual.lost,
        ]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def forget_ended(self) -> None:
        """Release the last block, whose copy has ended."""
        self._sent = None

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory."""
        found.content(self.gradient, None if self._sent is None else self._sent[0])
        if self.window_sum is not None:
            self.window_sum.list_memory(found)
        if self.residual is not None:
            found.content(self.residual.lost)

    def _new_block(self) -> Tensor:
        return torch.empty(self._plan.buffer_shape, dtype=self._plan.buffer_dtype, device=self._device)
