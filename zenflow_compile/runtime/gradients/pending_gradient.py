"""A deferred gradient that stays on the device until it is final, because it is summed or compressed before its copy.

[Note: transient blocks] What is copied from here is no ring's: many parameters are final at one moment, and with two
blocks the device would wait for all of their copies. A block is the allocator's, on the stream of the update, and
is let go of only after that stream was told to wait for its copy: whoever gets the memory next writes later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.gradients.compression import Residual
from zenflow_compile.runtime.gradients.window_sum import WindowSum
from zenflow_compile.runtime.transfer.copy_lanes import Ticket

Outgoing = tuple[Tensor, Sequence[StepCoefficients]]
"""A block of the plan's ``buffer_shape`` and ``buffer_dtype``, and the coefficients of its gradients."""


class PendingGradient:
    """The gradient of one parameter between backward and final moment, and what it becomes then.

    Attributes:
        gradient: [deferred, length] in the model's dtype, like ``.grad``: made by the split, gone with the update.
        window_sum: what the open window holds, where the plan says ``summed``; residual: what compression has lost so
            far, where it says ``compressed``. One of the two.
    """

    def __init__(self, plan: ParamPlan, device: torch.device) -> None:
        self.gradient: Tensor | None = None
        self.window_sum = WindowSum.allocate(plan, device) if plan.summed else None
        self.residual = Residual.allocate(plan, device) if plan.compressed else None
        self._plan = plan
        self._device = device
        self._sent: tuple[Tensor, Ticket] | None = None

    @property
    def busy(self) -> bool:
        """Whether ``new_gradient`` would wait."""
        return self._sent is not None and not self._sent[1].done()

    def new_gradient(self) -> Tensor:
        """Memory for this step's gradient; the device waits for the copy of what was sent last.

        Raises:
            CopyError: that copy failed.
        """
        if self._sent is not None:
            self._sent[1].wait_on_device()
            self._sent = None
        self.gradient = torch.empty(
            (self._plan.deferred, self._plan.length), dtype=self._plan.dtype, device=self._device
        )
        return self.gradient

    def finalize(self, slot: StepCoefficients) -> Outgoing | None:
        """The gradient is final. Returns what is to be sent at once: the sum waits for its window."""
        assert self.gradient is not None
        if self.window_sum is not None:
            self.window_sum.add(self.gradient, slot)
        if self.residual is None:
            return None
        block = self._new_block()
        return block, [self.residual.compress(self.gradient, slot, block)]

    def end_window(self) -> Outgoing | None:
        """The window closes. Returns what is to be sent now; None where it was sent before, or nothing waits."""
        if self.window_sum is None or not self.window_sum.slots:
            return None
        block = self._new_block()
        return block, self.window_sum.take_mean(block)

    def sent(self, block: Tensor, ticket: Ticket) -> None:
        """The copy of ``block`` was started. See [Note: transient blocks]."""
        if self._sent is not None:
            self._sent[1].wait_on_device()
        self._sent = block, ticket

    def slices_changed(self, changed: Tensor) -> None:
        """The slices at ``changed``, bool[deferred] on the device, are others now; a sum is empty at such a moment."""
        if self.residual is not None:
            self.residual.drop(changed)

    def abandon(self) -> None:
        """Drop gradient, window and copies, failed ones too: a state is about to be loaded."""
        self.gradient = None
        if self._sent is not None:
            self._sent[1].settle()
            self._sent = None
        self.drop_window()

    def drop_window(self) -> int:
        """Forget the gradients that the open window sums up, and return how many there were."""
        if self.window_sum is None:
            return 0
        count = len(self.window_sum.slots)
        self.window_sum.slots.clear()
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

    def _new_block(self) -> Tensor:
        return torch.empty(self._plan.buffer_shape, dtype=self._plan.buffer_dtype, device=self._device)
