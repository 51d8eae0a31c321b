"""One offloaded parameter at run time: its gradient on the way in, its two sides, its updates on the way back.

[Note: speculation] A gradient is split and copied as soon as it exists, although a second contribution (another
backward, another graph, ``.grad``) may still arrive. If one does, the dense gradient is rebuilt from its parts, and
from then on this parameter accumulates on the device and is split only when its gradient is final.

[Note: .grad is the truth] The engine's gradient is the one whose ``OffloadedGradient`` is in ``.grad``. Clearing or
replacing ``.grad`` changes what the next step uses, as with any optimizer. The engine looks where a gradient arrives
and at the optimizer step, and nowhere else: ``look``. The optimizer-in-backward form shows no gradients.
"""

from __future__ import annotations

import os
import time
import weakref

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device import column_ops
from zenflow_compile.runtime.device.version_counter import VersionCounter
from zenflow_compile.runtime.gradients.engine_gradients import Gradients
from zenflow_compile.runtime.gradients.gradient_record import (
    Factors,
    GradientLike,
    GradientRecord,
    GradientSource,
    GradientState,
)
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient
from zenflow_compile.runtime.gradients.pending_gradient import Outgoing, PendingGradient
from zenflow_compile.runtime.parameters.device_state import DeviceState, exchange_slices
from zenflow_compile.runtime.parameters.host_state import FlushedWindow, GradientBuffer, HostState
from zenflow_compile.runtime.parameters.weight_sync import Weights
from zenflow_compile.runtime.transfer.copy_lanes import CopyError, Ticket
from zenflow_compile.runtime.transfer.staging_ring import StagedBlock
from zenflow_compile.runtime.transfer.transport import Transport, Upload
from zenflow_compile.torch_internals import torch_private


class OffloadedParam:
    """Runtime state of one parameter whose optimizer state lives, in part or whole, on the host.

    Attributes:
        record: the gradient that the engine has, or has consumed in the last optimizer step; None without one.
        accumulates: several contributions per step were seen: split at the final moment only.
        eager: a contribution came through autograd, so first uses are unknown and updates land inside ``step()``.
        returned: number of the last backward in which a compiled graph returned its gradient to autograd.
        uses: how often a graph was about to read it in this step.
        single: in the last step its gradient came in one piece from a graph, so it may be final before the backward is.
        held: its deferred gradient, where that stays on the device until it is final.
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
        self.plan = plan
        self.param = param
        self.weights = Weights(plan, param, counter)
        self.host = host
        self.device = device
        self.deadline = plan.index
        self.record: GradientRecord | None = None
        self.accumulates = False
        self.eager = False
        self.returned: int | None = None
        self.uses = 0
        self.single = False
        self.pending = PendingGradient(plan, param.device) if plan.keeps_gradient else None
        self.transport = transport
        self._gradients = gradients
        self._me: weakref.ref[GradientSource] = weakref.ref(self)
        self._like = GradientLike(plan.name, tuple(param.shape), plan.dtype, param.device)
        self._accumulate_grad = torch_private.accumulate_grad_node(param)
        self._in_backward: OffloadedGradient | None = None
        self._accumulator: Tensor | None = None
        self._staged: StagedBlock | None = None
        self._copy: tuple[int, Ticket] | None = None
        self._upload: Upload | None = None
        self._partially_applied: BaseException | None = None
        self.weights.reseed(device, host)

    # Gradients in.

    @property
    def state(self) -> GradientState | None:
        """Of the gradient that the engine has."""
        return None if self.record is None else self.record.state

    @property
    def unscale(self) -> float:
        """The factor that undoes loss scaling; ``Factors.read`` must have run."""
        unscale = 1.0 if self.record is None else self.record.unscale
        assert isinstance(unscale, float)
        return unscale

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient for the optimizer step, or one that a step has consumed."""
        consumed_in_backward = not self._gradients.visible and self.record is not None
        return consumed_in_backward or self._grad_of_others() is not None

    def _grad_of_others(self) -> Tensor | None:
        """What is in ``.grad`` unless the optimizer-in-backward form has put it there."""
        grad = self.param.grad
        if isinstance(grad, OffloadedGradient) and grad._record.state is GradientState.IN_BACKWARD:
            return None
        return grad

    def check_gradient(self) -> None:
        """
        Raises:
            TypeError: the gradient is sparse.
            RuntimeError: no optimizer step can use the gradient in ``.grad``.
        """
        grad, name = self._grad_of_others(), self.plan.name
        if grad is None:
            return
        if isinstance(grad, OffloadedGradient):
            grad._record.check_usable()
        errors.refuse_sparse_grad(self.param, name)
        if not self._gradients.visible and self.record is not None:
            errors.refuse_second_grad(name)

    def asked_for(self) -> torch_private.Asked:
        """What autograd does with the gradient in the backward that runs now."""
        asked = torch_private.asked_for(self._accumulate_grad)
        if asked is torch_private.Asked.NO:
            # ``param.data = ...`` of another dtype or device gives the parameter another node: look again before a
            # gradient is dropped.
            node = torch_private.accumulate_grad_node(self.param)
            if node is not self._accumulate_grad:
                self._accumulate_grad = node
                asked = torch_private.asked_for(node)
        return asked

    @property
    def leaves_to_autograd(self) -> bool:
        """Whether autograd must see the next gradient itself: for hooks, or to add it to a tensor in ``.grad`` that is
        not the engine's.
        """
        if self.param._backward_hooks:
            return True
        grad = self.param.grad
        if grad is None or not self._gradients.visible:
            return False
        return self.look() is None and not self._zeroed(grad)

    def _zeroed(self, grad: Tensor | None) -> bool:
        """Whether ``grad`` is a gradient of this parameter that was zeroed."""
        if not isinstance(grad, OffloadedGradient):
            return False
        return grad._record.state is GradientState.ZERO and grad._record.belongs_to(self)

    def takes_more(self, record: GradientRecord) -> bool:
        """Whether the engine itself adds what autograd brings to the gradient ``record``."""
        if record.state is GradientState.IN_BACKWARD:
            return True
        grad = self.param.grad
        if not isinstance(grad, OffloadedGradient) or grad._record is not record:
            return False
        return record is self.look() or self._zeroed(grad)

    def look(self) -> GradientRecord | None:
        """The engine's gradient if it is in ``.grad``; else it is dropped, and there is none.

        See [Note: .grad is the truth].
        """
        record = self.record
        if record is not None and self._gradients.visible:
            grad = self.param.grad
            # An interrupt may come after a gradient became dense or zero and before the engine gave it up.
            given_up = record.state in (GradientState.DENSE, GradientState.ZERO)
            if given_up or type(grad) is not OffloadedGradient or grad._record is not record:
                self.drop()
                return None
        return record

    def drop(self) -> None:
        """The gradient was cleared or replaced. It becomes dense if a tensor of it is alive."""
        if self.record is not None:
            self.record.dropped()
            self.record = None
        self._release_parts()

    def discard(self) -> None:
        """Forget what no optimizer step will use: of visible gradients what is not in ``.grad``, of others all."""
        if self._gradients.visible:
            self.look()
        elif self.state is not GradientState.CONSUMED:
            self.drop()

    def release_gradient(self, *, keep: bool) -> None:
        """Leave nothing in ``.grad`` that needs the engine.

        Args:
            keep: a gradient that no step has used becomes a dense tensor there.
        """
        grad = self.param.grad
        if isinstance(grad, OffloadedGradient):
            self.param.grad = grad._record.values_at_close(keep=keep)
        self.drop()

    def show_consumed(self) -> None:
        """Put a tensor without values into ``.grad``, whose gradient the backward has consumed; reading it raises."""
        if self._in_backward is None or self._in_backward._record.state is not GradientState.IN_BACKWARD:
            record = self._new_record()
            record.state = GradientState.IN_BACKWARD
            self._in_backward = OffloadedGradient.of(record)
        if self.param.grad is None:
            self.param.grad = self._in_backward

    def offload(self, grad: Tensor, *, split_now: bool) -> None:
        """Take one contribution and start its copy, if it is split now. Raises: see ``receive``."""
        self.receive(grad, split_now=split_now)
        self.copy_to_host()

    def receive(self, grad: Tensor, *, split_now: bool) -> None:
        """Take one contribution: its norms and parts if it is split now, else it accumulates.

        What is in ``.grad`` must be the engine's, zero, or nothing: see ``leaves_to_autograd``.

        Raises:
            RuntimeError: the update of this step has already run, so this contribution would be lost.
            TypeError: the gradient is sparse, or of another dtype than the parameter had at construction.
        """
        if grad.is_sparse:
            errors.refuse_sparse(self.plan.name)
        record = self.look()
        if record is not None and not record.state.away:
            if not self._gradients.visible:
                self.single = False
                raise RuntimeError(
                    f"a second gradient for {self.plan.name} arrived after its update had run in this backward; "
                    "pass an optimizer object to the loop instead of options, or declare no shared use"
                )
            record.state = GradientState.SPOILED  # DCGAN: the next zero_grad() drops the sum, and no code reads it
            return
        matrix = self._matrix(grad)
        if record is None:
            self._begin(matrix, split=split_now and not self.accumulates)
            return
        self._add(record, matrix)
        if split_now and not self.accumulates:
            self._split(record, self._accumulator_like(matrix))

    def _matrix(self, grad: Tensor) -> Tensor:
        if grad.dtype != self.plan.dtype:
            errors.refuse_other_dtype(self.plan.name, grad.dtype, self.plan.dtype)
        matrix = grad.detach() if grad.requires_grad else grad
        return matrix if matrix.dim() == 2 else matrix.reshape(self.param.shape[0], -1)

    def _begin(self, matrix: Tensor, *, split: bool) -> None:
        """The first contribution of a gradient. One that was zeroed stays the object that it is in ``.grad``."""
        grad = self.param.grad if self._gradients.visible else None
        zeroed = isinstance(grad, OffloadedGradient) and self._zeroed(grad)
        record = grad._record if isinstance(grad, OffloadedGradient) and zeroed else self._new_record()
        if split:
            self._take(matrix)
        else:
            self._accumulator_like(matrix).copy_(matrix)
        # No call from here on: an interrupt finds that all of it is done or nothing, see [Note: one assignment].
        state = GradientState.PARTS if split else GradientState.ON_DEVICE
        self.record, record.state, record.contributions, record.norm = record, state, 1, None
        record.clip = record.unscale = 1.0
        if self._gradients.visible and not zeroed:
            self.param.grad = OffloadedGradient.of(record)

    def _new_record(self) -> GradientRecord:
        return GradientRecord(self._like, self._me)

    def _add(self, record: GradientRecord, matrix: Tensor) -> None:
        """A further contribution."""
        if record.state is GradientState.PARTS:
            self.accumulates = True
            self._rebuild(record)
        accumulator = self._accumulator_like(matrix)
        factor = record.factor
        if not isinstance(factor, float) or factor != 1.0:
            accumulator.mul_(factor)  # what was scaled is what was there then, not what comes now
            record.forget_factors()
        accumulator.add_(matrix)
        record.contributions += 1
        record.norm = None

    def take_from_grad(self) -> None:
        """Have the gradient for the optimizer step that begins: what ``.grad`` says.

        A tensor of the user's, a dense gradient and one of zeros stay in ``.grad``, and the next step uses them again,
        as with any optimizer; the optimizer-in-backward form clears them.
        """
        record = self.look()
        if record is None and (grad := self._grad_of_others()) is not None:
            self.eager = self.eager or self.uses == 0
            values = grad._record.read() if isinstance(grad, OffloadedGradient) else grad
            record = self._new_record()
            self._take(self._matrix(values))
            self.record, record.state, record.contributions = record, GradientState.PARTS, 1
            if not self._gradients.visible:
                self.param.grad = None
        if (record := self.record) is not None and record.state is GradientState.ON_DEVICE:
            assert self._accumulator is not None
            self._split(record, self._accumulator)
        self.copy_to_host()

    def _split(self, record: GradientRecord, matrix: Tensor) -> None:
        """Norms, selected slices and the rest in one read of the gradient: its own norms do not choose its slices."""
        self._take(matrix)
        record.state = GradientState.PARTS

    def _take(self, matrix: Tensor) -> None:
        self._release_parts()  # what an interrupt may have left, before a record had it
        deferred_shape = (self.plan.deferred, self.plan.length)
        if self.pending is not None:
            with self.transport.recorder.stall(self.pending.busy, param=self.plan.name):
                deferred_out = self.pending.new_gradient()
        elif self.plan.deferred:
            ring = self.transport.down_ring
            with self.transport.recorder.stall(ring.busy, param=self.plan.name):
                block = ring.first_free(deferred_shape, self.plan.dtype)
            self._staged, ring.unused = block, ring.without(block)  # see [Note: one assignment] in ``staging``
            deferred_out = block.tensor
        else:
            deferred_out = self.device.gradient.new_empty(deferred_shape)
        self.device.norms = column_ops.norms_and_split(
            matrix, self.plan.dim, self.device.selection, self.device.gradient, deferred_out
        )

    def copy_to_host(self) -> None:
        """Start the copy of the staged block into the window's next slot; what is held is copied when it is final."""
        if (staged := self._staged) is None:
            return
        ring = self.transport.down_ring
        try:
            copy = self._send(staged.tensor)
            unused = ring.with_back(staged, copy[1])
        except BaseException:
            self.transport.to_host.settle()  # an interrupt may have come behind the submission, which reads the block
            raise
        self._copy, self._staged, ring.unused = copy, None, unused

    def _send(self, block: Tensor) -> tuple[int, Ticket]:
        with self.transport.recorder.stall(self.host.slot_busy, param=self.plan.name, on_host=True):
            index, slot = self.host.free_slot()
        step = self.transport.recorder.step
        return index, self.transport.to_host.submit(slot, block, step=step, param=self.plan.name)

    def _send_held(self, pending: PendingGradient, outgoing: Outgoing | None) -> None:
        """Copy what was held into a slot, which belongs to the open window at once, for every gradient in it."""
        if outgoing is not None:
            block, coefficients = outgoing
            index, ticket = self._send(block)
            pending.sent(block, ticket)
            for each in coefficients:
                self.host.commit(GradientBuffer(index, each, ticket))

    def _release_parts(self) -> None:
        """Forget the parts of a gradient. Its slot was never committed, so the next step's copy uses it again."""
        self._copy = None
        if self.pending is not None:
            self.pending.gradient = None
        ring = self.transport.down_ring
        if (staged := self._staged) is not None:  # an error came between split and copy
            self._staged, ring.unused = None, ring.with_back(staged)

    def _rebuild(self, record: GradientRecord) -> None:
        """Put the parts together again, in the accumulator."""
        self._assemble(record, self._accumulator_like(self.weights.matrix))
        record.state, record.norm = GradientState.ON_DEVICE, None
        self._release_parts()

    def _assemble(self, record: GradientRecord, target: Tensor) -> None:
        if self._copy is not None:
            index, ticket = self._copy
            ticket.wait()
            deferred_in = self.host.gradients[index].to(target.device)
        elif self._staged is not None:
            deferred_in = self._staged.tensor
        elif self.pending is not None and self.pending.gradient is not None:
            deferred_in = self.pending.gradient
        elif self.plan.deferred:
            record.refuse("read")
        else:
            deferred_in = self.device.gradient.new_empty((0, self.plan.length))
        column_ops.unsplit_columns(target, self.plan.dim, self.device.selection, self.device.gradient, deferred_in)

    def _accumulator_like(self, matrix: Tensor) -> Tensor:
        if self._accumulator is None:
            self._accumulator = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
        return self._accumulator

    # What a record asks of its parameter: see ``GradientSource``.

    def values_of(self, record: GradientRecord) -> Tensor:
        """A new dense tensor of the gradient without its factors.

        Its dtype and device are the plan's: ``model.to()`` reads ``.grad`` after it has moved the parameter.

        Raises:
            RuntimeError: this process was forked from the one that owns the gradient, and has not its host memory.
        """
        if os.getpid() != self._gradients.process:
            errors.refuse_forked(self.plan.name)
        if record is not self.record:
            record.refuse("read")
        values = torch.empty(self._like.shape, dtype=self._like.dtype, device=self._like.device)
        matrix = values.view(self._like.shape[0], -1)
        if record.state is GradientState.ON_DEVICE:
            assert self._accumulator is not None
            matrix.copy_(self._accumulator)
        else:
            self._assemble(record, matrix)
        return values

    def norm_of(self, record: GradientRecord) -> Tensor | None:
        """f32[], L2 norm without factors, also of the gradient that was consumed last."""
        if record is not self.record:
            return None
        if record.norm is None:
            if record.state is GradientState.ON_DEVICE:
                assert self._accumulator is not None
                record.norm = torch.linalg.vector_norm(self._accumulator, dtype=torch.float32)
            else:
                self._gradients.measure()
        return record.norm

    def give_up(self, record: GradientRecord) -> None:
        """The gradient is not the engine's any more."""
        if record is self.record:
            self.record = None
            self._release_parts()

    def accumulate(self, record: GradientRecord, grad: Tensor) -> None:
        """Autograd adds to the gradient in ``.grad``."""
        if (engine := self._gradients.engine()) is None:
            record.refuse("add to")
        engine.accumulate_grad(self.plan.index, record, grad)

    def became_dense(self) -> None:
        """Count a gradient that took memory of its own."""
        self._gradients.became_dense()

    @property
    def factors(self) -> Factors:
        """Of all gradients of the engine."""
        return self._gradients.factors

    # The final moment.

    def next_step(self) -> column_ops.SliceState:
        """The selected slices for one AdamW step, in place in the parameter; ``bump_versions`` follows."""
        return self.device.next_step(self.weights.matrix)

    def update_on_host(self, slot: StepCoefficients | None) -> None:
        """The gradient is final: its slot joins the open window. None: the step has no gradient of this parameter."""
        if slot is not None and self._copy is not None:
            index, ticket = self._copy
            self.host.commit(GradientBuffer(index, slot, ticket))
        if slot is not None and self.pending is not None and self.pending.gradient is not None:
            self._send_held(self.pending, self.pending.finalize(slot))
        record = self.record
        self.single = record is not None and record.contributions == 1 and not self.eager
        if record is not None:
            record.state = GradientState.CONSUMED
        self._release_parts()

    def finish_step(self) -> None:
        """The optimizer step is over."""
        self.uses = 0
        if not self._gradients.visible:
            self.record = None

    def flush_window(self, *, at: int, eps: float, selection: Tensor | None, promptly: bool) -> FlushedWindow | None:
        """Close the open window, whose job is to be submitted then; a window of missing gradients does nothing.

        Args:
            selection: i32[k] on the device, the slices to select from here on; None where the selection stays.
            promptly: visible in the next forward, whatever the staleness.
        """
        if self.pending is not None:
            self._send_held(self.pending, self.pending.end_window())
        if not self.host.open:
            return None
        if not self.host.flushed:
            self.weights.remember(self.device.selection)
        try:
            close = self.host.flush_window(at=at, eps=eps, deadline=self.deadline)
        except BaseException as error:  # its gradients have left the window, and perhaps no job has them
            self._partially_applied = error
            raise
        close.final = self.transport.recorder.moment()
        if selection is not None:
            close.selection = selection
            self.device.selected_at = at
            promptly = True  # state that changes sides must be the newest on both
        if promptly:
            close.visible_at = at + 1
        return close

    @property
    def window_holds_gradients(self) -> bool:
        """Whether the update window holds gradients, apart or summed."""
        window_sum = None if self.pending is None else self.pending.window_sum
        return bool(self.host.open) or (window_sum is not None and bool(window_sum.slots))

    def drop_window(self) -> int:
        """Empty the open update window without applying its gradients, and return how many there were.

        They stay counted, as the selected slices have counted them: a state dict has one count for both sides.
        """
        count = len(self.host.open)
        self.host.drop_window()
        if self.pending is not None:
            count += self.pending.drop_window()
        self.host.taken += count
        return count

    # The way back.

    def due(self, now: int) -> bool:
        """Whether a closed window is visible to a forward after ``now`` steps and has not landed."""
        flushed = self.host.flushed
        return bool(flushed) and any(close.visible_at <= now for close in flushed)

    def start_upload(self, now: int) -> bool:
        """Queue the upload of the next visible close, behind its job; whether one is on its way.

        Where the lane cannot wait for the job, nothing is queued before it is done; of one that failed, nothing at all.
        """
        if self._upload is not None:
            return True
        lane, ring = self.transport.to_device, self.transport.up_ring
        if not self.due(now):
            return False
        close = self.host.flushed[0]
        if close.job.error is not None or not (close.job.done() or lane.can_wait_for(close.job)):
            return False
        block = ring.first_free((self.plan.deferred, self.plan.length), self.plan.dtype)
        step = self.transport.recorder.step
        try:
            ticket = lane.submit(block.tensor, close.upload, step=step, param=self.plan.name, after=close.job)
            upload, others = Upload(close, block, ticket), ring.without(block)
        except BaseException:
            lane.settle()  # an interrupt may have come behind the submission, and the buffer stays unused
            raise
        self._upload, ring.unused = upload, others
        return True

    def land(self, now: int) -> list[FlushedWindow]:
        """Make everything visible that is due, waiting for it; returns the closes that landed."""
        landed = []
        while self.due(now):
            landed.append(self._land_one(now))
        return landed

    def _land_one(self, now: int) -> FlushedWindow:
        recorder = self.transport.recorder
        next_close = self.host.flushed[0]
        recorder.slack(next_close.final, step=next_close.flushed_at, param=self.plan.name)
        if not self.start_upload(now):
            with recorder.compute("wait", param=self.plan.name, on_host=True):
                next_close.job.wait()
            self.start_upload(now)
        upload = self._upload
        assert upload is not None
        with recorder.stall(not upload.ticket.done(), param=self.plan.name):
            try:
                upload.ticket.wait_on_device()
            except CopyError:
                self._drop_upload()
                next_close.job.wait()  # if that failed, it is what there is to know
                raise
        try:
            self._show(upload)
        except BaseException as error:
            self._partially_applied = error
            raise
        return upload.close

    def _show(self, upload: Upload) -> None:
        """The upload has arrived: weights, window and selection follow it."""
        recorder, ring = self.transport.recorder, self.transport.up_ring
        with recorder.compute("merge", param=self.plan.name):
            deferred = self.device.selection.deferred
            column_ops.merge_columns(self.weights.matrix, self.plan.dim, deferred, upload.block.tensor)
            self.weights.written()
        self._upload, ring.unused = None, ring.with_back(upload.block)
        self.host.flushed.pop(0)
        self.host.landed, self.host.landing = upload.ticket, upload.close.job
        if self.host.flushed:
            self.weights.remember(self.device.selection)
        if upload.close.selection is not None:
            with recorder.compute("select", param=self.plan.name):
                self._reselect(upload.close.selection)

    def _reselect(self, wanted: Tensor) -> None:
        self.host.wait()
        begin = time.perf_counter_ns()
        if (record := self.record) is not None and record.state is GradientState.PARTS:
            self._rebuild(record)  # a forward that ran ahead of the step: its gradient is in parts of the old selection
        before = self.device.selection
        wanted = wanted.cpu()  # before the state is borrowed, as in ``Weights.reseed``
        try:
            with self.host.acquire(write=True) as state:
                self.device.selection, moved = exchange_slices(self.device.state(), state, before, wanted)
        except BaseException as error:
            self._partially_applied = error
            raise
        if self.pending is not None:
            self.pending.slices_changed(before.deferred != self.device.selection.deferred)
        self.transport.recorder.moved_state(moved, begin, param=self.plan.name)

    # Writes of others, and failures.

    def notice_external_write(self, now: int) -> bool:
        """If somebody else wrote the weights since our last write, those weights count: re-seed the masters.

        An update in flight at that moment is dropped: it was computed from weights that are no more. It stays if the
        weights are as they were remembered: then only a parameter that shares the version counter was written. Of
        weights that are to be compared, those count that belong to the loaded state.

        Returns:
            Whether there was such a write, and it has changed a weight.

        Raises:
            LostUpdateError: an update that the writer should have seen was dropped.
        """
        if not self.weights.written_by_others:
            return False
        self.host.wait()
        if self.weights.are_as_expected(self.device):
            self.weights.accept()
            return False
        lost = self.due(now)
        dropped = bool(self.host.flushed)
        self._drop_upload()
        for close in self.host.flushed:
            if close.selection is not None:
                self._reselect(close.selection)
        self.host.flushed.clear()
        differs = self.weights.reseed(self.device, self.host)
        if lost:
            raise errors.LostUpdateError(
                f"{self.plan.name} was written while an update of it was on its way, which is lost now; call "
                "optimizer.synchronize() before weights are read or written outside of the compiled model"
            )
        return differs or dropped

    def raise_failures(self) -> None:
        """Raise what failed in the background by now; waits for nothing.

        Raises:
            RuntimeError: a job or a copy failed, or see ``raise_if_torn``; chained to the original error.
        """
        self.raise_if_partially_applied()
        self.host.raise_failures()
        if self._copy is not None and self._copy[1].error is not None:
            self._copy[1].wait()
        if self._upload is not None and self._upload.ticket.error is not None:
            self._upload.ticket.wait()

    def raise_if_partially_applied(self) -> None:
        """Raise if an update was made half-way, or slices have changed sides half-way.

        Raises:
            RuntimeError: so it was; chained to what interrupted it.
        """
        if self._partially_applied is not None:
            raise RuntimeError(
                f"an update of {self.plan.name} was interrupted half-way; load the last saved state"
            ) from self._partially_applied

    def abandon(self) -> None:
        """Drop gradients, windows and uploads, failed ones too: a state is about to be loaded."""
        if self._copy is not None:
            self._copy[1].settle()  # or it would write into a slot that is loaded next
        if (record := self.record) is not None:
            if record.state.away:
                record.state = GradientState.DISCARDED
            self.give_up(record)
        self._release_parts()
        self._partially_applied = None
        self._drop_upload()
        if self.pending is not None:
            self.pending.abandon()
        self.host.clear_windows()

    def _drop_upload(self) -> None:
        if (upload := self._upload) is not None:
            upload.ticket.settle()
            ring = self.transport.up_ring
            self._upload, ring.unused = None, ring.with_back(upload.block)

    @property
    def nbytes(self) -> int:
        """Device memory of this parameter's optimizer state."""
        accumulator = 0 if self._accumulator is None else self._accumulator.nbytes
        return self.device.nbytes + accumulator + (0 if self.pending is None else self.pending.nbytes)
