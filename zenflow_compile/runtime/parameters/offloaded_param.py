"""One offloaded parameter at run time. Its methods tell the life of a gradient from top to bottom:

1. receive: a backward brings a contribution, which is split at once, or added up on the device until it is final;
2. split: norms, selected slices and deferred slices, in one read of the gradient;
3. copy: the deferred slices start for a gradient buffer on the host;
4. commit: the optimizer step makes the gradient final, and it joins the update window;
5. flush: the window's gradients become a job of the host's workers;
6. upload: the job's result starts for the device, ahead of the forward that reads the weight;
7. apply: the result is merged into the weight.

[Note: speculation] A gradient is split and copied as soon as it exists, although a second contribution (another
backward, another graph, ``.grad``) may still arrive. If one does, the dense gradient is rebuilt from its parts, and
from then on this parameter accumulates on the device and is split only when its gradient is final.
"""

from __future__ import annotations

import enum
import os
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.copy_lanes import CopyError, Ticket
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device.staging_ring import StagingBuffer
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.selection import Reselection, Selection, Wanted, reselect
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter
from zenflow_compile.runtime.gradients.engine_gradients import Gradients
from zenflow_compile.runtime.gradients.factors import Factors, multiply_
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient, ShownGradient
from zenflow_compile.runtime.gradients.pending_gradient import Outgoing, PendingGradient
from zenflow_compile.runtime.host.state_store import UploadBuffer
from zenflow_compile.runtime.ops import annotated
from zenflow_compile.runtime.parameters.device_state import DeviceState, exchange_rows
from zenflow_compile.runtime.parameters.host_state import FlushedWindow, GradientBuffer, HostState
from zenflow_compile.runtime.parameters.host_weight import HostWeight, Place
from zenflow_compile.runtime.parameters.transport import Transport
from zenflow_compile.runtime.parameters.weight_sync import Weights
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.timeline import OTHER_RANKS, DeviceEvent
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


@dataclass(slots=True)
class Upload:
    """An update on its way to the device."""

    window: FlushedWindow
    buffer: StagingBuffer
    ticket: Ticket


class IncomingGradient(ShownGradient):
    """The gradient of one parameter, from its first contribution until the optimizer step consumes it.

    Attributes:
        through_autograd: a contribution came through autograd, so code without a fetch reads the weight.
        returned: number of the last backward in which a compiled graph returned its gradient to autograd.
        uses: how often the engine was told of a read of the weight since the last optimizer step: by a graph, or FSDP2.
        announced: the engine was told of one before that step. FSDP2 tells of every read.
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
        self.uses = 0
        self.announced = isinstance(param, LocalShard)
        self.accumulate_node = torch_private.accumulate_grad_node(param)
        self.pending = PendingGradient(plan, param.device, gradients.scales) if plan.keeps_gradient else None
        self._block = (plan.deferred, plan.length), plan.dtype  # shape and dtype of a gradient's deferred slices
        self._accumulator: Tensor | None = None
        # Each of the two is the only record of its stage: see [Note: one assignment] in ``staging_ring``.
        self._staged: StagingBuffer | None = None  # split, and its copy has not started
        self._copy: tuple[int, Ticket] | None = None  # index of a gradient buffer, and the copy into it

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

    def take_from_grad(self) -> None:
        """Take the gradient that ``.grad`` shows, for the optimizer step that begins.

        A tensor of the user's, a dense gradient and a zeroed one stay in ``.grad``, and the next step uses them again,
        as with any optimizer; the optimizer-in-backward form clears them.
        """
        record = self.look()
        if record is None and (grad := self._grad_of_user()) is not None:
            self.through_autograd = self.through_autograd or self.uses == 0
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
        if self.pending is not None:
            with self.transport.recorder.stall(self.pending.busy, param=self.plan.name):
                deferred_out = self.pending.new_gradient()
        elif self._block[0][0]:
            buffer = self.transport.down_ring.next_free(self._block)
            if (reader := buffer.read_by) is not None and not reader.done():
                self._wait_on_device(reader)  # the copy out of the buffer must end before the split overwrites it
            deferred_out = buffer.tensor
            self._staged, buffer.in_use = buffer, True  # see [Note: one assignment] in ``staging_ring``
        else:
            deferred_out = device.gradient.new_empty(self._block[0])
        device.norms = column_ops.norms_and_split(
            matrix, self.plan.dim, device.selection, device.gradient, deferred_out
        )

    def _wait_on_device(self, ticket: Ticket) -> None:
        with self.transport.recorder.stall(True, param=self.plan.name):
            ticket.wait_on_device()

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

    def _send_pending(self, pending: PendingGradient, outgoing: Outgoing | None) -> None:
        """Copy a sum or a compressed gradient into a buffer of the update window, for every gradient in it."""
        if outgoing is not None:
            block, coefficients = outgoing
            index, ticket = self._send(block)
            pending.sent(block, ticket)
            for each in coefficients:
                self.host.open.append(GradientBuffer(index, each, ticket))

    def _release_parts(self) -> None:
        """Forget the parts of a gradient. Its buffer was never committed, so the next step's copy uses it again."""
        # The copy may still run: the lane makes the next one into the same gradient buffer behind it. But a small copy
        # into a buffer that shares its memory may overtake it in the lane's queue.
        if self._copy is not None and self.plan.pool is not None:
            self._copy[1].settle()
        self._copy = None
        if self.pending is not None:
            self.pending.gradient = None
        if (staged := self._staged) is not None:  # an error came between split and copy
            self._staged, staged.in_use = None, False

    # The dense gradient, for code that needs it.

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
        elif self.pending is not None and self.pending.gradient is not None:
            deferred_in = self.pending.gradient
        elif self.plan.deferred:
            record.refuse("read")
        else:
            deferred_in = self.device.gradient.new_empty((0, self.plan.length))
        column_ops.unsplit_columns(target, self.plan.dim, self.device.selection, self.device.gradient, deferred_in)

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


class OffloadedParam(IncomingGradient):
    """Runtime state of one parameter whose optimizer state lives, in part or completely, on the host.

    Attributes:
        deadline: position among the first uses of the next forward; jobs and uploads run in this order.
        merged: an update window was applied that other ranks have not seen yet.
        arriving: when the device has the slices of this parameter that other ranks have updated; None: it has them, or
            the stream that asked last waits for them.
        written: an external write was noticed that other ranks have not been told of.
    """

    def __init__(
        self,
        plan: ParamPlan,
        param: Parameter,
        host: HostState,
        device: DeviceState,
        transport: Transport,
        gradients: Gradients,
        counter: VersionCounter,
    ) -> None:
        super().__init__(plan, param, host, device, transport, gradients)
        self.weights = Weights(plan, param, counter)
        self.deadline = plan.index
        self.upload: Upload | None = None
        self.merged = False
        self.arriving: DeviceEvent | None = None
        self.written = False
        self._kept: tuple[Wanted, Selection] | None = None  # of the last re-selection, see ``_reselect``
        self._partially_applied: BaseException | None = None
        self.weights.reseed(device, host)

    # 4. Commit.

    def commit(self, coefficients: StepCoefficients | None) -> None:
        """Add the final gradient to the update window; None: this step has none of this parameter."""
        if coefficients is not None:
            if self._copy is not None:
                index, ticket = self._copy
                self.host.open.append(GradientBuffer(index, coefficients, ticket))
                self._copy = None
            elif self.pending is not None and self.pending.gradient is not None:
                self._send_pending(self.pending, self.pending.finalize(coefficients))
        if (record := self.record) is not None:
            record.state = GradientState.CONSUMED
        if self.arrival is not Arrival.IN_PIECES:
            whole = record is not None and record.contributions == 1 and not self.through_autograd
            self.arrival = Arrival.WHOLE if whole else Arrival.UNKNOWN
        if self._staged is not None or self._copy is not None or self.pending is not None:
            self._release_parts()

    # 5. Flush.

    @annotated("flush", lambda offloaded, **_: (offloaded.plan.name,))
    def flush(self, *, at: int, eps: float, selection: Wanted | None, promptly: bool) -> FlushedWindow | None:
        """Flush the update window; the caller submits the job. A window of missing gradients does nothing.

        Args:
            at: the optimizer step, from 0.
            selection: the slices to select from here on; None: the selection stays.
            promptly: visible in the next forward, whatever the staleness.
        """
        try:
            if self.pending is not None:
                self._send_pending(self.pending, self.pending.end_window())
        except BaseException as error:  # the sum may have been taken, and not all of its gradients be in the window
            self._note_half_done(error)
            raise
        if not self.host.open:
            return None
        if not self.host.flushed and (self.weights.counter.shared or self.weights.counter.exposed):
            self.weights.remember(self.device.selection)
        try:
            window = self.host.flush_window(at=at, eps=eps, deadline=self.deadline)
        except BaseException as error:  # the gradients have left the update window, and may have no job
            self._note_half_done(error)
            raise
        if self.transport.recorder.timeline is not None:
            window.final = self.transport.recorder.now()
        if selection is not None:
            window.selection = selection
            self.device.selected_at = at
            promptly = True  # state that changes sides must be the newest on both
        if promptly:
            window.visible_at = at + 1
        return window

    @property
    def window_gradients(self) -> int:
        """Number of gradients in the update window, in buffers or as a sum."""
        window_sum = None if self.pending is None else self.pending.window_sum
        return len(self.host.open) + (0 if window_sum is None else len(window_sum.coefficients))

    def unapplied(self, now: int) -> int:
        """How many gradients at most a flush after ``now`` steps would apply, held back updates included."""
        return self.window_gradients + self.plan.interval * (len(self.host.flushed) - self.due(now))

    def drop_window(self) -> int:
        """Empty the update window without applying its gradients, and return how many there were.

        They stay counted, as the selected slices have counted them: a state dict has one count for both sides.
        """
        count = len(self.host.open)
        self.host.drop_window()
        if self.pending is not None:
            count += self.pending.drop_window()
        self.host.taken += count
        return count

    # 6. Upload.

    def due(self, now: int) -> int:
        """How many of the flushed update windows, oldest first, a forward after ``now`` steps must see."""
        windows = enumerate(self.host.flushed, start=1)
        return max((number for number, window in windows if window.visible_at <= now), default=0)

    def start_upload(self, *, waits: bool = False) -> bool:
        """Queue the upload of the next update window, which is due, behind its job. Returns whether it was queued.

        Where the lane cannot wait for the job, or for the read of a buffer in a file, nothing is queued before that is
        done, unless ``waits``: then the calling thread waits. After a failed job, nothing is queued.

        Raises:
            RuntimeError: the job, or the read, failed, and ``waits``.
        """
        transport, window = self.transport, self.host.flushed[0]
        if (home := self.weights.home) is not None and home.place is Place.SLICES:
            return False  # the next load of the weight brings the update
        job = window.upload.bring(window.job, step=transport.recorder.step)
        if job is not None and (job.error is not None or not (job.is_set or transport.to_device.can_wait_for(job))):
            if not waits:
                return False
            with transport.recorder.compute("wait", param=self.plan.name, on_host=True):
                job.wait()
        buffer = transport.up_ring.next_free(self._block)
        try:
            ticket = transport.to_device.submit(
                buffer.tensor, window.upload.content(), step=transport.recorder.step, param=self.plan.name, after=job
            )
            if window.buffer is not None:
                self.host.note_upload(window, ticket)
            if self.plan.weight_in_file:
                self.host.copied_by(window.upload, ticket, job)
            upload = Upload(window, buffer, ticket)
        except BaseException:
            transport.to_device.settle()  # an interrupt may have come after the submission, and the buffer stays free
            self.host.note_upload(window, None)
            raise
        self.upload, buffer.in_use = upload, True
        return True

    # 7. Apply.

    def receive_weights(self) -> None:
        """Make the device's current stream wait for the slices that other ranks have updated."""
        if (event := self.arriving) is not None:
            self.weights.guard.allow()
            streams = device_of(self.param.device).streams
            assert streams is not None
            with self.transport.recorder.stall(True, param=OTHER_RANKS):
                streams.current().wait_event(event)
            self.arriving = None
            if (sample := self.weights.sample) is not None and sample.kept is not None:
                sample.kept.copy_(sample.sample)

    def apply_next(self) -> FlushedWindow:
        """Apply the oldest flushed update window, which is due, to the weight, waiting for it. Returns the window."""
        recorder = self.transport.recorder
        window = self.host.flushed[0]
        if window.final is not None:
            recorder.slack(window.final, step=window.flushed_at, param=self.plan.name)
        if self.weights.home is not None:
            self.weights.guard.allow()  # first: this may copy the weight to the host
            if (home := self.weights.put_into_slices()) is not None:
                self._apply_in_host_memory(window, home)
                return window
        if self.upload is None:
            self.start_upload(waits=True)
        upload = self.upload
        assert upload is not None
        try:
            if not upload.ticket.done():
                self._wait_on_device(upload.ticket)
        except CopyError:
            self._drop_upload()
            window.job.wait()  # re-raise the job's error if it failed: it is the root cause
            raise
        try:
            self._merge(window, upload)
        except BaseException as error:
            self._note_half_done(error)
            raise
        return window

    @annotated("apply", lambda offloaded, *_: (offloaded.plan.name,))
    def _merge(self, window: FlushedWindow, upload: Upload) -> None:
        """Write the update into the weight; the update window and the selection follow it."""
        recorder, weights = self.transport.recorder, self.weights
        if weights.home is not None:
            weights.home.begin_write()
        # Not before the wait for the update: an interrupt there leaves the update in flight, and reads refused.
        weights.guard.allow()
        with recorder.compute("merge", param=self.plan.name):
            column_ops.merge_columns(weights.matrix, self.plan.dim, self.device.selection, upload.buffer.tensor)
            weights.written()
        self.merged = True
        # The device may not have merged yet: the next copy into the buffer waits for the stream that is current here.
        self.upload, upload.buffer.in_use = None, False
        self.host.applied = upload.ticket
        self._end_window(window)

    @annotated("apply", lambda offloaded, *_: (offloaded.plan.name,))
    def _apply_in_host_memory(self, window: FlushedWindow, home: HostWeight) -> None:
        """Have the next load of the weight bring the update, which nothing waits for here."""
        try:
            self._drop_upload()  # of the time when the device had the weight
            self.host.note_applied(window)
            self.weights.written()
            self._end_window(window)
            if home.loaded:
                home.load()
        except BaseException as error:
            self._note_half_done(error)
            raise

    def _end_window(self, window: FlushedWindow) -> None:
        """Let the selection follow an update window whose update is visible."""
        recorder, host, weights = self.transport.recorder, self.host, self.weights
        host.flushed.pop(0)
        # The job is kept: if a stream has waited for it, and no thread, its error is still to be raised.
        host.applied_job = window.job
        if host.flushed and (weights.counter.shared or weights.counter.exposed):
            weights.remember(self.device.selection)
        if window.selection is not None:
            with recorder.compute("select", param=self.plan.name):
                self._reselect(window, window.selection)

    def _reselect(self, window: FlushedWindow, wanted: Wanted) -> None:
        if (record := self.record) is not None and record.state is _PARTS:
            self._rebuild(record)  # a forward that ran ahead of the step: its gradient is in parts of the old selection
        device, before, exchange = self.device, self.device.selection, self.transport.exchange
        try:
            # Hazard: this may run in another stream than the optimizer step, whose stream owns the memory of both and
            # would reuse it before this stream has read it. The next re-selection drops them: until then the stream of
            # a step has waited for this one.
            self._kept = wanted, before
            change = reselect(before, wanted)
            home = self.weights.home
            uploads = self.host.applied_upload if home is not None and home.place is Place.SLICES else None
            if self.host.form.split:
                # The masters that change sides are completed by them. No later window is in flight at a re-selection.
                assert uploads is None or uploads is self.host.newest_upload
                uploads = self.host.newest_upload
            if exchange is None:
                self._exchange_now(change, uploads)
            else:
                reads, before_it = None if uploads is None else self.host.applied, self.host.last_job
                exchange.start(
                    device, self.host, change,
                    step=window.flushed_at, deadline=self.deadline, weights=uploads, reads=reads,
                )  # fmt: skip
                if uploads is not None and self.host.last_job is not before_it:
                    self.host.upload_writer = self.host.last_job
            device.selection = change.selection
        except BaseException as error:
            self._note_half_done(error)
            raise
        if self.pending is not None:
            self.pending.slices_changed(before.deferred != device.selection.deferred)

    def _exchange_now(self, change: Reselection, weights: UploadBuffer | None) -> None:
        """Move state of slices that change sides in the calling thread, and new masters into ``weights``."""
        # A job of this parameter may still update the rows that change sides.
        self.host.wait()
        if weights is not None and self.host.applied is not None:
            self.host.applied.settle()  # a load reads the weights
        begin = time.perf_counter_ns()
        host_rows = device_of(change.host_rows.device).to_host(change.host_rows, "selection")
        of_weights = nullcontext() if weights is None else weights.acquire(write=True)
        with self.host.acquire(write=True) as state, of_weights as rows:
            host_side = replace(state, weights=rows)
            moved = exchange_rows(self.device.rows, host_side, change.device_rows, host_rows)
        self.transport.recorder.moved_state(moved, begin, param=self.plan.name)

    def _wait_for_state(self) -> None:
        """Wait until no job uses the state; device operators that follow find its device side complete."""
        self.host.wait()
        if (exchange := self.transport.exchange) is not None:
            exchange.finish()

    def _drop_upload(self) -> None:
        if (upload := self.upload) is not None:
            # Before the buffer is free: the copy may still write it.
            upload.ticket.settle()
            self.upload, upload.buffer.in_use = None, False

    # External writes, and failures.

    def notice_external_write(self, now: int) -> bool:
        """Re-seed the masters if the weights were written elsewhere since the engine's last write.

        An update in flight at that moment is dropped: it was computed from weights that no longer exist. It stays if
        the weights are as they were remembered: then only a parameter that shares the version counter was written.
        Unverified weights are compared with the loaded state instead.

        Returns:
            Whether there was such a write, and it has changed a weight.

        Raises:
            LostUpdateError: an update that the writer should have seen was dropped.
        """
        if not self.weights.written_by_others:
            return False
        self.weights.guard.allow()
        self.transport.device_memory.bring_back()
        arriving, flushed_at_load = self.arriving is not None, self.weights.flushed_at_load
        self.receive_weights()
        # Jobs, and exchanges of slices, write the masters that are compared and re-seeded below.
        self._wait_for_state()
        if self.weights.are_as_expected(self.device):
            self.weights.accept()
            return False
        lost = self.due(now) > 0
        held_back = bool(self.host.flushed) and not lost
        changed = self.drop_updates()
        counter = self.weights.counter
        if lost or (arriving and (changed or not (counter.shared or counter.exposed))):
            raise errors.LostUpdateError(
                f"{self.plan.name} was written while an update of it was on its way, which is lost now; call "
                "optimizer.synchronize() before weights are read or written outside of the compiled model, and create "
                "the optimizer with overlap_step=False if the compiled forward itself writes them"
            )
        if changed and flushed_at_load:
            raise errors.LostUpdateError(
                f"{self.plan.name} was written or loaded after a state that another number of ranks had saved in the "
                "middle of an update window. That window was flushed at loading, and its update is lost now: load the "
                "model's weights first and the optimizer's state after them, as by set_model_state_dict() and "
                "set_optimizer_state_dict(); before weights are written by hand, call optimizer.synchronize()"
            )
        if held_back:
            warnings.warn(
                "updates that staleness=1 had held back are dropped, because their weights were written in the "
                "meantime; call optimizer.flush() before weights are written, or pass staleness=0",
                stacklevel=user_stacklevel(),
            )
        return changed

    def drop_updates(self) -> bool:
        """Drop the updates in flight, and re-seed the masters from the weights. Returns whether that had an effect."""
        self._wait_for_state()
        self.weights.guard.allow()
        dropped = bool(self.host.flushed)
        self._drop_upload()
        for window in self.host.flushed:
            if window.selection is not None:
                self._reselect(window, window.selection)
        if (home := self.weights.home) is not None:
            home.updates_dropped()
        self.host.flushed.clear()
        self._wait_for_state()  # for the exchanges that were started above
        differs = self.weights.reseed(self.device, self.host)
        self.written = self.written or differs or dropped
        return differs or dropped

    def raise_failures(self) -> None:
        """Raise the error of background work that has failed by now; does not wait.

        Raises:
            RuntimeError: a job or a copy failed, or see ``raise_if_partially_applied``; chained to the original error.
        """
        self.raise_if_partially_applied()
        self.host.raise_failures()
        if self._copy is not None and self._copy[1].error is not None:
            self._copy[1].wait()
        if self.upload is not None and self.upload.ticket.error is not None:
            self.upload.ticket.wait()

    def _note_half_done(self, error: BaseException) -> None:
        """Note that an update, or an exchange of slices, failed or was interrupted half-way."""
        self._partially_applied, self.transport.interrupted = error, True

    def raise_if_partially_applied(self) -> None:
        """Raise if an update, or an exchange of slices between the sides, failed or was interrupted half-way.

        Raises:
            RuntimeError: so it was; chained to the original error.
        """
        if self._partially_applied is None and (error := self.host.applied_failure) is not None:
            # A failed job raises its flag, too. A stream that waited for it has gone on with what was in the buffer.
            self._note_half_done(error)
        if self._partially_applied is not None:
            raise RuntimeError(
                f"an update of {self.plan.name} failed or was interrupted half-way; load the last saved state"
            ) from self._partially_applied

    def abandon(self) -> None:
        """Drop gradients, update windows and uploads, failed ones too, before a state is loaded."""
        if self._copy is not None:
            self._copy[1].settle()  # it would write into a gradient buffer that is loaded next
        if (record := self.record) is not None:
            if record.state.away:
                record.state = GradientState.DISCARDED
            self.give_up(record)
        self._release_parts()
        self._partially_applied = None
        self.weights.guard.allow()
        self.receive_weights()
        self._drop_upload()
        if self.pending is not None:
            self.pending.abandon()
        if (home := self.weights.home) is not None:
            home.reads_failed()
            home.updates_dropped()
        self.host.clear_windows()

    def list_memory(self, found: MemoryList) -> None:
        """Add this parameter's device memory. All work in flight must have ended."""
        self.host.forget_ended()
        self._kept = None
        if self.pending is not None:
            self.pending.forget_ended()
            self.pending.list_memory(found)
        self.device.list_memory(found, has_gradient=self.state is _PARTS)
        (found.content if self.state is _ON_DEVICE else found.scratch)(self._accumulator)
        if self.record is not None:
            self.record.list_memory(found)
        found.numbers(buffer.coefficients.grad_scale for buffer in self.host.open)

    @property
    def nbytes(self) -> int:
        """Device memory of this parameter's optimizer state."""
        accumulator = 0 if self._accumulator is None else self._accumulator.nbytes
        return self.device.nbytes + accumulator + (0 if self.pending is None else self.pending.nbytes)
