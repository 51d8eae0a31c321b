"""The gradient of one offloaded parameter, from its first contribution until it is in an update window:

1. receive: a backward brings a contribution, which is split at once, or added up on the device until it is final;
2. split: norms, selected slices and deferred slices, in one read of the gradient;
3. copy: the deferred slices start for a gradient buffer on the host;
4. commit: the optimizer step makes the gradient final, and it joins the update window.

[Note: speculation] A gradient is split and copied as soon as it exists, although a second contribution (another
backward, another graph, ``.grad``) may still arrive. If one does, the dense gradient is rebuilt from its parts, and
from then on this parameter accumulates on the device and is split only when its gradient is final.
"""

from __future__ import annotations

import enum
import os

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device.staging_ring import StagingBuffer
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.gradients.engine_gradients import Gradients
from zenflow_compile.runtime.gradients.factors import Factors, multiply_
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient, ShownGradient
from zenflow_compile.runtime.gradients.pending_gradient import Residual, WindowSum
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.host_state import GradientBuffer, HostState
from zenflow_compile.runtime.parameters.transport import Transport
from zenflow_compile.torch_internals import torch_private

_PARTS, _ON_DEVICE, _LOCAL = GradientState.PARTS, GradientState.ON_DEVICE, GradientState.LOCAL


class Arrival(enum.Enum):
    """How the gradients of a parameter have arrived so far, which decides when the next one is split and used."""

    UNKNOWN = enum.auto()
    """No step has told yet, or the last gradient came through autograd, or in several contributions that were added up
    before a split. It is split at once, and final when the backward ends."""
    WHOLE = enum.auto()
    """In the last step it came in one contribution from a graph: it may be final before the backward ends."""
    IN_PIECES = enum.auto()
    """A contribution came after a split, which had to be undone: from now on it is split only when it is final."""


class IncomingGradient(ShownGradient):
    """The gradient of one parameter, from its first contribution until the optimizer step consumes it.

    Attributes:
        through_autograd: a contribution came through autograd, so code without a fetch reads the weight.
        returned: number of the last backward in which a compiled graph returned its gradient to autograd.
    """

    def __init__(
        self,
        plan: ParamPlan,
        param: Parameter,
        host: HostState,
        device: DeviceState,
        transport: Transport,
        gradients: Gradients,
    ) -> None:
        super().__init__(plan, param, gradients)
        self.host = host
        self.device = device
        self.transport = transport
        self.arrival = Arrival.UNKNOWN
        self.through_autograd = False
        self.returned: int | None = None
        self.accumulate_node = torch_private.accumulate_grad_node(param)
        self._block = (plan.deferred, plan.length), plan.dtype  # shape and dtype of a gradient's deferred slices
        self._accumulator: Tensor | None = None
        # Each of the two is the only record of its stage: see [Note: one assignment] in ``staging_ring``.
        self._staged: StagingBuffer | None = None  # split, and its copy has not started
        self._copy: tuple[int, Ticket] | None = None  # index of a gradient buffer, and the copy into it
        self._allocate()

    # 1. Receive.

    def asked_again(self) -> torch_private.Asked:
        """What autograd does with the gradient. A new ``param.data`` may have given the parameter another node."""
        self.accumulate_node = torch_private.accumulate_grad_node(self.param)
        return torch_private.asked_for(self.accumulate_node)

    def receive(self, matrix: Tensor, *, split_now: bool) -> None:
        """Take one contribution: split it if ``split_now``, and start its copy, else add it up on the device.

        ``.grad`` must hold the engine's gradient, a zeroed one, or None: see ``leaves_to_autograd``.

        Args:
            matrix: see ``matrix_of``; where ranks divide the parameter, this rank's share [slices, length] of the mean.

        Raises:
            RuntimeError: the update of this step has already run, so this contribution would be lost.
        """
        split_now = split_now and self.arrival is not Arrival.IN_PIECES
        shown: OffloadedGradient | None = None
        if self.record is None or (record := self.look()) is None:
            record, shown = self._new_record()
        elif record.state is not _LOCAL:
            self._receive_more(record, matrix, split_now=split_now)
            self.copy_to_host()
            return
        if split_now:
            self._split(matrix)
        else:
            self._sum().copy_(matrix)
        self._show(record, shown, _PARTS if split_now else _ON_DEVICE)
        self.copy_to_host()

    def receive_share(self, share: Tensor) -> None:
        """Take this rank's share [slices, length] of the mean of a contribution over ranks.

        Raises:
            RuntimeError: ``.grad`` holds a tensor of the user's, to which autograd would have added the gradient if
                this rank had had one. Or see ``receive``.
        """
        grad = self.param.grad if self._gradients.visible else None
        if grad is not None and self.look() is None and not self._zeroed(grad):
            errors.refuse_gradient_of_user(self.plan.name)
        self.receive(share, split_now=True)

    def receive_local(self, matrix: Tensor) -> None:
        """Show in ``.grad`` that this rank has a contribution, before its mean over ranks is known.

        Raises: see ``receive``.
        """
        if self.record is None or (record := self.look()) is None:
            self._show(*self._new_record(), _LOCAL)
        elif not record.state.away:
            self._receive_more(record, matrix, split_now=False)

    @property
    def local_was_dropped(self) -> bool:
        """Whether contributions of this rank were cleared or replaced in ``.grad`` before they were sent.

        With the optimizer in backward ``.grad`` shows none.
        """
        record = self.record
        return record is None or (record.state is _LOCAL and self.look() is None)

    def _new_record(self) -> tuple[GradientRecord, OffloadedGradient | None]:
        """The record of a gradient that begins, and the tensor to put into ``.grad``; None if that one stays."""
        visible = self._gradients.visible
        if visible and (before := self.param.grad) is not None and self._zeroed(before):
            assert isinstance(before, OffloadedGradient)
            return before._record, None  # a zeroed gradient stays the object that it is in ``.grad``
        record = GradientRecord(self._like, self._me)
        return record, OffloadedGradient.of(record) if visible else None

    def _show(self, record: GradientRecord, shown: OffloadedGradient | None, state: GradientState) -> None:
        # No call in here: an interrupt finds that all of it is done or nothing, see [Note: one assignment].
        self.record, record.state, record.contributions, record.norm = record, state, 1, None
        record.clip = record.unscale = 1.0
        if shown is not None:
            self.param.grad = shown

    def _receive_more(self, record: GradientRecord, matrix: Tensor, *, split_now: bool) -> None:
        """Add a further contribution to the gradient ``record``."""
        if record.state.away:
            self._add(record, matrix)
            if split_now and self.arrival is not Arrival.IN_PIECES:
                self._split(self._sum())
                # Last: until here an interrupt leaves a valid gradient, in the accumulator.
                record.state = _PARTS
        elif self._gradients.visible:
            record.state = GradientState.SPOILED  # DCGAN: the next zero_grad() drops the sum, and no code reads it
        else:
            self.arrival = Arrival.UNKNOWN
            raise RuntimeError(
                f"a second gradient for {self.plan.name} arrived after its update had run in this backward; "
                "pass an optimizer object to the loop instead of options, or declare no shared use"
            )

    def matrix_of(self, grad: Tensor) -> Tensor:
        """View a contribution as [rows, columns], or copy it where the elements of its rows are not adjacent.

        The parameter's are, and autograd, too, leaves gradients in ``.grad`` in that layout. Another one would give the
        norm other bits: see [Note: order of a norm].

        Raises:
            TypeError: the gradient is sparse, or of another dtype than the parameter had at construction.
            RuntimeError: it has another shape.
        """
        if grad.is_sparse:
            errors.refuse_sparse(self.plan.name)
        if grad.dtype != self.plan.dtype:
            raise TypeError(
                f"{self.plan.name} or its gradient is {grad.dtype} now, and was {self.plan.dtype} when its optimizer "
                "was made; change the model's dtype first, then create the optimizer and compile the model"
            )
        if grad.shape != self._like.shape:  # the kernels would read past its end: [Note: unchecked blocks]
            raise RuntimeError(
                f"the gradient of {self.plan.name} has the shape {list(grad.shape)}, and its parameter had "
                f"{list(self._like.shape)} when its optimizer was made; change the model first, then create the "
                "optimizer and compile the model"
            )
        matrix = grad.detach() if grad.requires_grad else grad
        if matrix.dim() != 2:
            matrix = matrix.reshape(matrix.shape[0], -1)
        return matrix if matrix.stride(1) == 1 else matrix.contiguous()

    def _add(self, record: GradientRecord, matrix: Tensor) -> None:
        if record.state is _PARTS:
            self.arrival = Arrival.IN_PIECES
            self._rebuild(record)
        accumulator = self._sum()
        factor = record.factor
        if not isinstance(factor, float) or factor != 1.0:
            multiply_(accumulator, factor)  # the factor belongs to the sum so far, not to the new contribution
            record.forget_factors()
        accumulator.add_(matrix)
        record.contributions += 1
        record.norm = None

    def take_from_grad(self, *, used: bool) -> None:
        """Take the gradient that ``.grad`` shows, for the optimizer step that begins.

        A tensor of the user's, a dense gradient and a zeroed one stay in ``.grad``, and the next step uses them again,
        as with any optimizer; the optimizer-in-backward form clears them.

        Args:
            used: the engine was told of a read of the weight since the last optimizer step.
        """
        record = self.look()
        if record is None and (grad := self._grad_of_user()) is not None:
            self.through_autograd = self.through_autograd or not used
            values = grad._record.read() if isinstance(grad, OffloadedGradient) else grad
            record = GradientRecord(self._like, self._me)
            matrix, share = self.matrix_of(values), self.plan.share
            if share is None:
                self._split(matrix)
            else:  # the whole gradient is here, on each rank
                record.norm = self.norm_of_values(matrix)
                self._split(share.view(matrix))
            self.record, record.state, record.contributions = record, _PARTS, 1
            if not self._gradients.visible:
                self.param.grad = None
        if (record := self.record) is not None and record.state is _ON_DEVICE:
            assert self._accumulator is not None
            self._split(self._accumulator)
            record.state = _PARTS
        self.copy_to_host()

    @property
    def copied(self) -> bool:
        """Whether the gradient in ``.grad`` was split and copied in the backward: the usual case at a step."""
        record, grad = self.record, self.param.grad
        # The state counts, too: an interrupt may have left the parts of a gradient that became dense or zero.
        parts = record is not None and record.state is _PARTS and self._copy is not None
        return parts and type(grad) is OffloadedGradient and grad._record is record

    # 2. Split.

    def _split(self, matrix: Tensor) -> None:
        """Write norms, selected slices and deferred slices in one read of the gradient.

        The selection does not depend on this gradient's norms: it changes between steps.
        """
        if self._copy is not None or self._staged is not None:
            self._release_parts()  # an interrupt left them, before a record had them
        device = self.device
        device.norms = column_ops.norms_and_split(
            matrix, self.plan.dim, device.selection, device.gradient, self._room_for_deferred()
        )

    def _room_for_deferred(self) -> Tensor:
        """Memory of the device for the deferred slices, until they are copied."""
        if not self._block[0][0]:
            return self.device.gradient.new_empty(self._block[0])
        buffer = self.transport.down_ring.next_free(self._block)
        if (reader := buffer.read_by) is not None and not reader.done():
            # The copy out of the buffer must end before the split overwrites it.
            self.transport.wait_on_device(reader, self.plan.name)
        self._staged, buffer.in_use = buffer, True  # see [Note: one assignment] in ``staging_ring``
        return buffer.tensor

    @property
    def squared_norms(self) -> Tensor:
        """f32[slices], of the gradient without factors; of this rank's share, if there are several."""
        if self.state is _ON_DEVICE:
            return column_ops.column_norms(self._sum(), self.plan.dim)
        return self.device.norms

    # 3. Copy.

    def copy_to_host(self) -> None:
        """Start the copy of the split gradient into a buffer of the update window; a pending one is copied later."""
        if (staged := self._staged) is None:
            return
        try:
            copy = self._send(staged.tensor)
        except BaseException:
            self.transport.to_host.settle()  # an interrupt may have come after the submission, whose copy reads it
            raise
        # The buffer is free while the copy still reads it: the next split into it waits for ``read_by``.
        self._copy, self._staged, staged.in_use, staged.read_by = copy, None, False, copy[1]

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

    def _release_parts(self) -> None:
        """Forget the parts of a gradient. Its buffer was never committed, so the next step's copy uses it again."""
        # The copy may still run: the lane makes the next one into the same gradient buffer behind it. But a small copy
        # into a buffer that shares its memory may overtake it in the lane's queue.
        if self._copy is not None and self.plan.pool is not None:
            self._copy[1].settle()
        self._copy = None
        if (staged := self._staged) is not None:  # an error came between split and copy
            self._staged, staged.in_use = None, False

    # 4. Commit.

    def commit(self, coefficients: StepCoefficients | None) -> None:
        """Add the final gradient to the update window; None: this step has none of this parameter."""
        if coefficients is not None and self._copy is not None:
            index, ticket = self._copy
            self.host.open.append(GradientBuffer(index, coefficients, ticket))
            self._copy = None
        if (record := self.record) is not None:
            record.state = GradientState.CONSUMED
        if self.arrival is not Arrival.IN_PIECES:
            whole = record is not None and record.contributions == 1 and not self.through_autograd
            self.arrival = Arrival.WHOLE if whole else Arrival.UNKNOWN
        if self._staged is not None or self._copy is not None:
            self._release_parts()

    # What a gradient that is kept on the device for its update window does besides: see ``KeptGradient``.

    window_sum: WindowSum | None = None
    residual: Residual | None = None

    def _allocate(self) -> None:
        """Allocate what it keeps on the device for its window."""

    def end_window(self) -> None:
        """Send what the update window, which is flushed, has not sent."""

    def drop_window(self) -> int:
        """Drop the gradients of the update window that were not sent, and return their number."""
        return 0

    def slices_changed(self, before: Tensor, now: Tensor) -> None:
        """Other slices are deferred ``now`` than ``before``: i32[deferred], indices on the device."""

    # Failures, and memory.

    def raise_failures(self) -> None:
        """Raise the error of the copy if it has failed by now."""
        if self._copy is not None and self._copy[1].error is not None:
            self._copy[1].wait()

    def abandon(self) -> None:
        """Drop the gradient before a state is loaded."""
        if self._copy is not None:
            self._copy[1].settle()  # it would write into a gradient buffer that is loaded next
        if (record := self.record) is not None:
            if record.state.away:
                record.state = GradientState.DISCARDED
            self.give_up(record)
        self._release_parts()

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory of gradients. All work in flight must have ended."""
        (found.content if self.state is _ON_DEVICE else found.scratch)(self._accumulator)
        if self.record is not None:
            self.record.list_memory(found)

    @property
    def nbytes(self) -> int:
        """Device memory of the sum of contributions."""
        return 0 if self._accumulator is None else self._accumulator.nbytes

    # The dense gradient, for code that needs it.

    def leave_parts(self) -> None:
        """Rebuild a gradient that is in parts of a selection that changes: of a forward that ran ahead of the step."""
        if (record := self.record) is not None and record.state is _PARTS:
            self._rebuild(record)

    def _rebuild(self, record: GradientRecord) -> None:
        """Put the parts together again, in the accumulator."""
        self._assemble(self._sum(), record)
        # Before the parts are released: parts that an interrupt leaves behind are released by the next split.
        record.state = _ON_DEVICE
        self._release_parts()

    def _assemble(self, target: Tensor, record: GradientRecord) -> None:
        if self._copy is not None:
            index, ticket = self._copy
            # The lane writes the buffer, and nothing else orders that before the read below.
            ticket.wait()
            deferred_in = device_of(target.device).from_host(self.host.gradients[index], "gradient")
        elif self._staged is not None:
            deferred_in = self._staged.tensor
        else:
            deferred_in = self._kept_deferred(record)
        column_ops.unsplit_columns(target, self.plan.dim, self.device.selection, self.device.gradient, deferred_in)

    def _kept_deferred(self, record: GradientRecord) -> Tensor:
        """The deferred slices where no copy of them is made: those that are kept, or none if none are deferred."""
        if self.plan.deferred:
            record.refuse("read")
        return self.device.gradient.new_empty((0, self.plan.length))

    def _sum(self) -> Tensor:
        """The contributions so far, or memory for them."""
        if self._accumulator is None:
            plan = self.plan
            shape = (plan.slices, plan.length) if plan.dim == 0 else (plan.length, plan.slices)
            self._accumulator = torch.empty(shape, dtype=self._like.dtype, device=self._like.device)
        return self._accumulator

    def values_of(self, record: GradientRecord) -> Tensor:
        """A new dense tensor of the gradient without its factors.

        Its dtype and device are the plan's: ``model.to()`` reads ``.grad`` after it has moved the parameter.

        Raises:
            RuntimeError: this is a forked process, which does not have the host memory of the gradient.
        """
        if os.getpid() != self._gradients.process:
            raise RuntimeError(
                f"cannot read the gradient of {self.plan.name} in a forked process, which does not have the host "
                "memory of offloaded gradients; read it before the fork, or pass a clone()"
            )
        if record is not self.record:
            record.refuse("read")
        if (order := self.transport.order) is not None:
            order.follow()
        self.transport.device_memory.bring_back()
        values = torch.empty(self._like.shape, dtype=self._like.dtype, device=self._like.device)
        whole, share = values.view(self._like.shape[0], -1), self.plan.share
        if share is None:
            self._copy_out(whole, record)
            return values
        own = torch.zeros((share.most_slices, self.plan.length), dtype=values.dtype, device=values.device)
        with self._gradients.of_all_ranks(self.plan.name, record.state) as ranks:
            self._copy_out(own[: self.plan.slices], record)
            rows = ranks.all_gather(own).wait(f"the gradient of {self.plan.name}")
        for part in range(share.parts):
            share.view(whole, part).copy_(rows[part, : share.count(share.whole.slices, part)])
        return values

    def _copy_out(self, target: Tensor, record: GradientRecord) -> None:
        if record.state is _ON_DEVICE:
            assert self._accumulator is not None
            target.copy_(self._accumulator)
        else:
            self._assemble(target, record)

    @property
    def factors(self) -> Factors:
        """See :class:`Gradients`. The caller multiplies factors, which may be in the device's memory."""
        self.transport.device_memory.bring_back()
        return super().factors

    def norm_of(self, record: GradientRecord) -> Tensor | None:
        """f32[], L2 norm without factors, also of the gradient that was consumed last."""
        if record is not self.record:
            return None
        if (order := self.transport.order) is not None:
            order.follow()
        self.transport.device_memory.bring_back()
        if record.norm is None:
            if self.plan.share is not None:
                errors.refuse_partial_gradient(self.plan.name)
            if record.state is _ON_DEVICE:
                (record.norm,) = column_ops.norms_of_slices([self.squared_norms])
            else:
                self._gradients.measure()
        return record.norm

    def norm_of_values(self, values: Tensor) -> Tensor:
        """f32[], L2 norm of a dense gradient, the same bits as before it became dense."""
        plan, matrix = self.plan if self.plan.share is None else self.plan.share.whole, values.reshape(len(values), -1)
        (norm,) = column_ops.norms_of_slices([column_ops.column_norms(matrix.contiguous(), plan.dim)])
        return norm
