"""The values of one parameter's gradient that is not dense: in parts, of which the host gets one, or summed up.

[Note: speculation] A gradient is split and copied as soon as it exists, although a second contribution (another
backward, another graph, ``.grad``) may still arrive. If one does, the dense gradient is rebuilt from its parts, and
from then on this parameter accumulates on the device and is split only when its gradient is final.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device.staging_ring import StagingBuffer
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.gradients.pending_gradient import Residual, WindowSum
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.host_state import GradientBuffer, HostState
from zenflow_compile.runtime.parameters.transport import Transport
from zenflow_compile.runtime.update_rule import StepCoefficients


class GradientParts:
    """Norms, selected slices and deferred slices of a gradient, and the copy of the deferred ones; or its sum so far.

    Attributes:
        staged: split, and its copy has not started.
        copy: index of a gradient buffer, and the copy into it.
        accumulated: the contributions so far, [rows, columns]; None: no gradient was summed up yet.
        pending: deferred slices stay on the device until the gradient is final.
        window_sum, residual: of gradients that stay on the device for their update window, see ``PendingParts``.
    """

    pending: ClassVar[bool] = False
    window_sum: WindowSum | None = None
    residual: Residual | None = None

    def __init__(self, host: HostState, device: DeviceState, transport: Transport, on: torch.device) -> None:
        self.plan = plan = host.plan
        self.host = host
        self.device = device
        self.transport = transport
        self.accumulated: Tensor | None = None
        # Each of the two is the only record of its stage: see [Note: one assignment] in ``staging_ring``.
        self.staged: StagingBuffer | None = None
        self.copy: tuple[int, Ticket] | None = None
        self._on = on
        self._block = (plan.deferred, plan.length), plan.dtype  # shape and dtype of a gradient's deferred slices

    # Split.

    def split(self, matrix: Tensor) -> None:
        """Write norms, selected slices and deferred slices in one read of the gradient.

        The selection does not depend on this gradient's norms: it changes between steps.
        """
        if self.copy is not None or self.staged is not None:
            self.release()  # an interrupt left them, before a record had them
        device = self.device
        device.norms = column_ops.norms_and_split(
            matrix, self.plan.dim, device.selection, device.gradient, self._room_for_deferred()
        )

    def _room_for_deferred(self) -> Tensor:
        """Memory of the device for the deferred slices, until they are copied."""
        if not self._block[0][0]:
            return self.device.gradient.new_empty(self._block[0])
        buffer = self.transport.down_ring.next_free(self._block)
        if (reader := buffer.read_by) is not None and not (reader.completed or reader.done()):
            # The copy out of the buffer must end before the split overwrites it.
            self.transport.wait_on_device(reader, self.plan.name)
        self.staged, buffer.in_use = buffer, True  # see [Note: one assignment] in ``staging_ring``
        return buffer.tensor

    # Copy.

    def copy_to_host(self) -> None:
        """Start the copy of the split gradient into a buffer of the update window; a pending one is copied later."""
        if (staged := self.staged) is None:
            return
        try:
            copy = self._send(staged.tensor)
        except BaseException:
            self.transport.to_host.settle()  # an interrupt may have come after the submission, whose copy reads it
            raise
        # The buffer is free while the copy still reads it: the next split into it waits for ``read_by``.
        self.copy, self.staged, staged.in_use, staged.read_by = copy, None, False, copy[1]

    def _send(self, block: Tensor) -> tuple[int, Ticket]:
        host, transport = self.host, self.transport
        step, name = transport.recorder.step, self.plan.name
        index = host.indices[step % len(host.indices)]
        users, updates = host.users_of(index)  # the job of an earlier update window, and those of sharers
        # A lane that can wait for its flag does, and not this thread, which is ahead of the device. That is no
        # deadlock: the job needs only copies that were submitted before.
        waited = [job for job in users.jobs if job.flag is None or job.error is not None]
        if updates or waited:
            with transport.recorder.stall(True, param=name, on_host=True):
                for update in updates:
                    update.leave_buffer()
                for job in waited:
                    job.wait()
                    users.jobs.remove(job)
        return index, transport.to_host.submit(host.gradients[index], block, step=step, param=name, users=users)

    def release(self) -> None:
        """Forget the parts of a gradient. Its buffer was never committed, so the next step's copy uses it again."""
        # The copy may still run: the lane makes the next one into the same gradient buffer behind it. But a small copy
        # into a buffer that shares its memory may overtake it in the lane's queue.
        if self.copy is not None and self.plan.pool is not None:
            self.copy[1].settle()
        self.copy = None
        if (staged := self.staged) is not None:  # an error came between split and copy
            self.staged, staged.in_use = None, False

    # Commit.

    def commit(self, coefficients: StepCoefficients | None) -> None:
        """Add the final gradient to the update window; None: this step has none of this parameter."""
        if coefficients is not None and self.copy is not None:
            index, ticket = self.copy
            self.host.open.append(GradientBuffer(index, coefficients, ticket))
            self.copy = None

    def end_window(self) -> None:
        """Send what the update window, which is flushed, has not sent."""

    def drop_window(self) -> int:
        """Drop the gradients of the update window that were not sent, and return their number."""
        return 0

    def slices_changed(self, before: Tensor, now: Tensor) -> None:
        """Follow a re-selection; ``before`` and ``now``: i32[deferred], the deferred slices, on the device."""

    # The whole gradient.

    def sum(self) -> Tensor:
        """Return the contributions so far, or memory for them."""
        if self.accumulated is None:
            plan = self.plan
            shape = (plan.slices, plan.length) if plan.dim == 0 else (plan.length, plan.slices)
            self.accumulated = torch.empty(shape, dtype=plan.dtype, device=self._on)
        return self.accumulated

    def rebuild(self, record: GradientRecord) -> None:
        """Put the parts together again, in the accumulator."""
        self.assemble(self.sum(), record)
        # Before the parts are released: parts that an interrupt leaves behind are released by the next split.
        record.state = GradientState.ON_DEVICE
        self.release()

    def assemble(self, target: Tensor, record: GradientRecord) -> None:
        """Write the values of a split gradient, without factors, into ``target`` [rows, columns]."""
        if self.copy is not None:
            index, ticket = self.copy
            # The lane writes the buffer, and nothing else orders that before the read below.
            ticket.wait()
            deferred_in = device_of(target.device).from_host(self.host.gradients[index], "gradient")
        elif self.staged is not None:
            deferred_in = self.staged.tensor
        else:
            deferred_in = self._deferred_on_device(record)
        column_ops.unsplit_columns(target, self.plan.dim, self.device.selection, self.device.gradient, deferred_in)

    def _deferred_on_device(self, record: GradientRecord) -> Tensor:
        """The deferred slices where no copy of them is made: those that are kept, or none if none are deferred."""
        if self.plan.deferred:
            record.refuse("read")
        return self.device.gradient.new_empty((0, self.plan.length))

    # Failures, and memory.

    def raise_failures(self) -> None:
        """Raise the error of the copy if it has failed by now."""
        if self.copy is not None and self.copy[1].error is not None:
            self.copy[1].wait()

    def abandon(self) -> None:
        """Forget the parts before a state is loaded. Their copy must have ended."""
        self.release()

    def list_memory(self, found: MemoryList, *, summed: bool) -> None:
        """Add the device's memory of gradients. All work in flight must have ended; ``summed``: it has one now."""
        (found.content if summed else found.scratch)(self.accumulated)

    @property
    def nbytes(self) -> int:
        """Device memory of the sum of contributions."""
        return 0 if self.accumulated is None else self.accumulated.nbytes
