"""What ``.grad`` of an offloaded parameter shows, and what the engine makes of it.

[Note: .grad is the truth] The engine's gradient is the one whose ``OffloadedGradient`` is in ``.grad``. Clearing or
replacing ``.grad`` changes what the next step uses, as with any optimizer. The engine looks where a gradient arrives
and at the optimizer step, and nowhere else: ``look``. With the optimizer in backward, ``.grad`` stays None.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod

from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.late_number import Number
from zenflow_compile.runtime.gradients.engine_gradients import Gradients
from zenflow_compile.runtime.gradients.factors import Factors
from zenflow_compile.runtime.gradients.gradient_record import (
    GradientLike,
    GradientRecord,
    GradientSource,
    GradientState,
)
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient


class ShownGradient(ABC):
    """The gradient of one parameter as ``.grad`` shows it.

    Attributes:
        record: the engine's gradient, or the one that the last optimizer step has consumed; None without one.
    """

    def __init__(self, plan: ParamPlan, param: Parameter, gradients: Gradients) -> None:
        self.plan = plan
        self.param = param
        self.record: GradientRecord | None = None
        self._gradients = gradients
        self._me: weakref.ref[GradientSource] = weakref.ref(self)
        self._like = GradientLike(plan.name, tuple(param.shape), plan.dtype, param.device)
        self._in_backward: OffloadedGradient | None = None

    @abstractmethod
    def _release_parts(self) -> None:
        """Forget the parts of a gradient."""

    @abstractmethod
    def values_of(self, record: GradientRecord) -> Tensor:
        """See :meth:`GradientSource.values_of`."""

    @abstractmethod
    def norm_of(self, record: GradientRecord) -> Tensor | None:
        """See :meth:`GradientSource.norm_of`."""

    @abstractmethod
    def norm_of_values(self, values: Tensor) -> Tensor:
        """See :meth:`GradientSource.norm_of_values`."""

    @property
    def state(self) -> GradientState | None:
        """The state of the engine's gradient; None without one."""
        return None if self.record is None else self.record.state

    @property
    def unscale(self) -> Number:
        """The factor that undoes loss scaling, in the optimizer step that has begun."""
        return 1.0 if self.record is None else self.record.final_unscale

    def _grad_of_user(self) -> Tensor | None:
        """The tensor in ``.grad``, unless the optimizer-in-backward form has put it there."""
        grad = self.param.grad
        if isinstance(grad, OffloadedGradient) and grad._record.state is GradientState.IN_BACKWARD:
            return None
        return grad

    def check_gradient(self) -> bool:
        """Whether there is a gradient for the optimizer step, or one that a step inside of the backward has consumed.

        Raises:
            TypeError: the gradient is sparse.
            RuntimeError: no optimizer step can use the gradient in ``.grad``.
        """
        grad, record = self.param.grad, self.record
        if record is not None and type(grad) is OffloadedGradient and grad._record is record and record.state.away:
            return True
        consumed_in_backward = not self._gradients.visible and record is not None
        if (grad := self._grad_of_user()) is None:
            return consumed_in_backward
        if isinstance(grad, OffloadedGradient):
            grad._record.check_usable()
        errors.refuse_sparse_grad(self.param, self.plan.name)
        if consumed_in_backward:
            errors.refuse_second_grad(self.plan.name)
        return True

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

    def takes_more(self, record: GradientRecord) -> bool:
        """Whether the engine itself adds a gradient of autograd's to the gradient ``record``."""
        if record.state is GradientState.IN_BACKWARD:
            return True
        grad = self.param.grad
        if not isinstance(grad, OffloadedGradient) or grad._record is not record:
            return False
        return record is self.look() or self._zeroed(grad)

    def _zeroed(self, grad: Tensor) -> bool:
        """Whether ``grad`` is a gradient of this parameter that was zeroed."""
        if not isinstance(grad, OffloadedGradient):
            return False
        return grad._record.state is GradientState.ZERO and grad._record.belongs_to(self)

    def look(self) -> GradientRecord | None:
        """The engine's gradient if it is in ``.grad``. Otherwise drop it, and return None."""
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
        """Drop a gradient that was cleared or replaced. It becomes dense if a tensor of it is alive.

        Not where other ranks have parts of it: whether a tensor is alive may differ between them.
        """
        if self.record is not None:
            # First: if a tensor of the gradient is alive, its values are copied out of the parts.
            self.record.dropped(keep=self.plan.share is None)
            self.record = None
        self._release_parts()

    def discard(self) -> None:
        """Forget what no optimizer step will use: visible gradients that are not in ``.grad``, and all others."""
        if self._gradients.visible:
            if self.record is not None:
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
            record = GradientRecord(self._like, self._me)
            record.state = GradientState.IN_BACKWARD
            self._in_backward = OffloadedGradient.of(record)
        if self.param.grad is None:
            self.param.grad = self._in_backward

    # ``GradientSource``, for the record.

    def give_up(self, record: GradientRecord) -> None:
        """Free the parts of a gradient that is no longer the engine's."""
        if record is self.record:
            self.record = None
            self._release_parts()

    def accumulate(self, record: GradientRecord, grad: Tensor) -> None:
        """Add ``grad``, which autograd accumulates into ``.grad``."""
        if (engine := self._gradients.engine()) is None:
            record.refuse("add to")
        engine.accumulate_grad(self.plan.index, record, grad)

    def became_dense(self) -> None:
        """Count a gradient that became dense."""
        self._gradients.became_dense()

    @property
    def averaged(self) -> bool:
        return self.plan.share is not None

    @property
    def factors(self) -> Factors:
        return self._gradients.factors
