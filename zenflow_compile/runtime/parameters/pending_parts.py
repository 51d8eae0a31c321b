"""The parts of a gradient whose deferred slices stay on the device until it is final, to be summed or compressed.

See ``gradients/pending_gradient.py`` for the sums, the compression and their memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord
from zenflow_compile.runtime.gradients.pending_gradient import Outgoing, PendingGradient, Scales
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.gradient_parts import GradientParts
from zenflow_compile.runtime.parameters.host_state import GradientBuffer, HostState
from zenflow_compile.runtime.parameters.transport import Transport
from zenflow_compile.runtime.update_rule import StepCoefficients


class PendingParts(GradientParts):
    """Parts that are copied when the gradient is final, or when its update window is flushed."""

    pending = True

    def __init__(
        self, host: HostState, device: DeviceState, transport: Transport, on: torch.device, scales: Scales
    ) -> None:
        super().__init__(host, device, transport, on)
        self._pending = PendingGradient(self.plan, on, scales)
        self.window_sum, self.residual = self._pending.window_sum, self._pending.residual

    def _room_for_deferred(self) -> Tensor:
        with self.transport.recorder.stall(self._pending.busy, param=self.plan.name):
            return self._pending.new_gradient()

    def _deferred_on_device(self, record: GradientRecord) -> Tensor:
        return super()._deferred_on_device(record) if self._pending.gradient is None else self._pending.gradient

    def release(self) -> None:
        super().release()
        self._pending.gradient = None

    def commit(self, coefficients: StepCoefficients | None) -> None:
        if coefficients is not None and self._pending.gradient is not None:
            self._send_block(self._pending.finalize(coefficients))
        super().commit(coefficients)

    def _send_block(self, outgoing: Outgoing | None) -> None:
        """Copy a sum or a compressed gradient into a buffer of the update window, for every gradient in it."""
        if outgoing is not None:
            block, coefficients = outgoing
            index, ticket = self._send(block)
            self._pending.sent(block, ticket)
            for each in coefficients:
                self.host.open.append(GradientBuffer(index, each, ticket))

    def end_window(self) -> None:
        self._send_block(self._pending.end_window())

    def drop_window(self) -> int:
        return self._pending.drop_window()

    def slices_changed(self, before: Tensor, now: Tensor) -> None:
        self._pending.slices_changed(before != now)

    def abandon(self) -> None:
        super().abandon()
        self._pending.abandon()

    def list_memory(self, found: MemoryList, *, summed: bool) -> None:
        self._pending.forget_ended()
        self._pending.list_memory(found)
        super().list_memory(found, summed=summed)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._pending.nbytes
