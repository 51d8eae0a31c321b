"""The gradient of one offloaded parameter as ``.grad`` shows it."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.gradients.engine_gradients import Gradients
from zenflow_compile.runtime.gradients.factors import Factors
from zenflow_compile.runtime.gradients.gradient_record import (
    GradientLike,
    GradientRecord,
    GradientSource,
    GradientState,
)
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient
from zenflow_compile.runtime.parameters.gradient_parts import GradientParts

_PARTS, _ON_DEVICE = GradientState.PARTS, GradientState.ON_DEVICE


class ShownGradient(GradientSource):
    """The gradient of one parameter as ``.grad`` shows it.

    Attributes:
        record: the engine's gradient, or the one that the last optimizer step has consumed; None without one.
        parts: its values.
        visible: gradients are shown in ``.grad``; False for the optimizer in backward, which consumes them there.
        like: shape, dtype and device of the gradient.
        me: by which records refer to it.
    """

    def __init__(self, plan: ParamPlan, param: Parameter, gradients: Gradients, parts: GradientParts) -> None:
        self.plan = plan
        self.param = param
        self.parts = parts
        self.record: GradientRecord | None = None
        self.visible = gradients.visible
        self.like = GradientLike(plan.name, tuple(param.shape), plan.dtype, param.device)
        self._gradients = gradients
        self.me: weakref.ref[GradientSource] = weakref.ref(self)
        self._in_backward: OffloadedGradient | None = None

    @property
    def state(self) -> GradientState | None:
        return None if self.record is None else self.record.state

    def grad_of_user(self) -> Tensor | None:
        """The tensor in ``.grad``, unless the optimizer-in-backward form has put it there."""
        grad = self.param.grad
        if isinstance(grad, OffloadedGradient) and grad._record.state is GradientState.IN_BACKWARD:
            return None
        return grad

    def check_gradient(self) -> bool:
        """Return whether there is a gradient for the step, or one that a step inside of the backward has consumed.

        Raises TypeError for a sparse gradient, RuntimeError for one in ``.grad`` that no optimizer step can use.
        """
        grad, record = self.param.grad, self.record
        if record is not None and type(grad) is OffloadedGradient and grad._record is record and record.state.away:
            return True
        consumed_in_backward = not self.visible and record is not None
        if (grad := self.grad_of_user()) is None:
            return consumed_in_backward
        if isinstance(grad, OffloadedGradient):
            grad._record.check_usable()
        errors.refuse_sparse_grad(self.param, self.plan.name)
        if consumed_in_backward:
            raise RuntimeError(
                f"{self.plan.name} has a gradient from a backward and another in .grad, which was written by hand or "
                "by DistributedDataParallel; a model compiled without an optimizer object cannot use both: create a "
                "ZenFlowAdamW and call its step()"
            )
        return True

    @property
    def leaves_to_autograd(self) -> bool:
        """Return whether autograd must see the next gradient itself.

        So it must for hooks, and to add it to a tensor in ``.grad`` that is not the engine's.
        """
        if self.param._backward_hooks:
            return True
        grad = self.param.grad
        if grad is None or not self.visible:
            return False
        return self.look() is None and not self.zeroed(grad)

    def takes_more(self, record: GradientRecord) -> bool:
        """Return whether the engine itself adds a gradient of autograd's to the gradient ``record``."""
        if record.state is GradientState.IN_BACKWARD:
            return True
        grad = self.param.grad
        if not isinstance(grad, OffloadedGradient) or grad._record is not record:
            return False
        return record is self.look() or self.zeroed(grad)

    def zeroed(self, grad: Tensor) -> bool:
        """Return whether ``grad`` is a gradient of the engine's that was zeroed."""
        if not isinstance(grad, OffloadedGradient):
            return False
        return grad._record.state is GradientState.ZERO and grad._record.belongs_to(self)

    def look(self) -> GradientRecord | None:
        """The engine's gradient if it is in ``.grad``. Otherwise drop it, and return None."""
        record = self.record
        if record is not None and self.visible:
            grad = self.param.grad
            # An interrupt may come after a gradient became dense or zero and before the engine gave it up.
            given_up = record.state in (GradientState.DENSE, GradientState.ZERO)
            if given_up or type(grad) is not OffloadedGradient or grad._record is not record:
                if record.state is GradientState.CONSUMED:  # its parts went into the update window
                    self.record = None
                else:
                    self.drop()
                return None
        return record

    def drop(self) -> None:
        """Drop a gradient that was cleared or replaced. It becomes dense if a tensor of it is alive.

        Not where other ranks have parts of it: whether a tensor is alive may differ between them.
        """
        if self.record is not None:
            # First: if a tensor of the gradient is alive, its values are copied out of the parts.
            self.record.dropped(keep=self.plan.share is None)
            self.record = None
        self.parts.release()

    def leave_gradient(self) -> None:
        """Make an unused gradient in ``.grad`` dense. One whose copy has failed is discarded, which its use tells."""
        grad = self.param.grad
        if isinstance(grad, OffloadedGradient) and grad._record.state.away:
            with suppress(RuntimeError):
                grad._record.make_dense()

    def release_gradient(self, *, keep: bool) -> None:
        """Leave nothing in ``.grad`` that needs the engine; with ``keep``, an unused gradient becomes dense."""
        grad = self.param.grad
        if isinstance(grad, OffloadedGradient):
            self.param.grad = grad._record.values_at_close(keep=keep)
        self.drop()

    def show_consumed(self) -> None:
        """Put a tensor without values into ``.grad``, whose gradient the backward has consumed; reading it raises."""
        if self._in_backward is None or self._in_backward._record.state is not GradientState.IN_BACKWARD:
            record = GradientRecord(self.like, self.me)
            record.state = GradientState.IN_BACKWARD
            self._in_backward = OffloadedGradient.of(record)
        if self.param.grad is None:
            self.param.grad = self._in_backward

    @property
    def squared_norms(self) -> Tensor:
        """f32[slices], of the gradient without factors; of this rank's share, if there are several."""
        if self.state is _ON_DEVICE:
            return column_ops.column_norms(self.parts.sum(), self.plan.dim)
        return self.parts.device.norms

    def leave_parts(self) -> None:
        """Rebuild a gradient that is in parts of a selection that changes: of a forward that ran ahead of the step."""
        if (record := self.record) is not None and record.state is _PARTS:
            self.parts.rebuild(record)

    # ``GradientSource``, for the record.

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
        if (order := self.parts.transport.order) is not None:
            order.follow()
        self.parts.transport.device_memory.bring_back()
        values = torch.empty(self.like.shape, dtype=self.like.dtype, device=self.like.device)
        whole, share = values.view(self.plan.of_weight.matrix_shape), self.plan.share
        if share is None:
            self._copy_out(whole, record)
            return values
        own = torch.zeros((share.most_slices, self.plan.length), dtype=values.dtype, device=values.device)
        with self._gradients.of_all_ranks(self.plan.name, record.state) as ranks:
            self._copy_out(own[: self.plan.slices], record)
            rows = ranks.all_gather(own).wait(f"the gradient of {self.plan.name}")
        for slices, of_parts in share.in_parts(share.by_slice(whole), rows[: share.parts]):
            slices.copy_(of_parts)
        return values

    def _copy_out(self, target: Tensor, record: GradientRecord) -> None:
        if record.state is _ON_DEVICE:
            assert self.parts.accumulated is not None
            target.copy_(self.parts.accumulated)
        else:
            self.parts.assemble(target, record)

    def norm_of(self, record: GradientRecord) -> Tensor | None:
        """f32[], L2 norm without factors, also of the gradient that was consumed last."""
        if record is not self.record:
            return None
        if (order := self.parts.transport.order) is not None:
            order.follow()
        self.parts.transport.device_memory.bring_back()
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
        plan = self.plan.of_weight
        matrix = values.reshape(plan.matrix_shape)
        (norm,) = column_ops.norms_of_slices([column_ops.column_norms(matrix.contiguous(), plan.dim)])
        return norm

    def give_up(self, record: GradientRecord) -> None:
        if record is self.record:
            self.record = None
            self.parts.release()

    def accumulate(self, record: GradientRecord, grad: Tensor) -> None:
        if (engine := self._gradients.engine()) is None:
            record.refuse("add to")
        engine.intake.accumulate_grad(self.plan.index, record, grad)

    def became_dense(self) -> None:
        self._gradients.became_dense()

    @property
    def averaged(self) -> bool:
        return self.plan.share is not None

    @property
    def factors(self) -> Factors:
        """See :class:`Gradients`. The caller multiplies factors, which may be in the device's memory."""
        self.parts.transport.device_memory.bring_back()
        return self._gradients.factors
