"""The gradient of one offloaded parameter, from its first contribution until it is in an update window:

1. receive: a backward brings a contribution, which is split at once, or added up on the device until it is final;
2. split: norms, selected slices and deferred slices, in one read of the gradient;
3. copy: the deferred slices start for a gradient buffer on the host;
4. commit: the optimizer step makes the gradient final, and it joins the update window.

See [Note: speculation] in ``gradient_parts``.
"""

from __future__ import annotations

import enum

from torch import Tensor

from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.gradients.factors import multiply_
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient
from zenflow_compile.runtime.parameters.gradient_parts import GradientParts
from zenflow_compile.runtime.parameters.shown_gradient import ShownGradient
from zenflow_compile.runtime.update_rule import StepCoefficients
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


class IncomingGradient:
    """The gradient of one parameter, from its first contribution until the optimizer step consumes it.

    Attributes:
        shown: it as ``.grad`` shows it.
        parts: its values.
        through_autograd: a contribution came through autograd, so code without a fetch reads the weight.
        returned: number of the last backward in which a compiled graph returned its gradient to autograd.
    """

    def __init__(self, shown: ShownGradient, parts: GradientParts) -> None:
        self.plan, self.param = shown.plan, shown.param
        self.shown = shown
        self.parts = parts
        self.arrival = Arrival.UNKNOWN
        self.through_autograd = False
        self.returned: int | None = None
        self.accumulate_node = torch_private.accumulate_grad_node(self.param)

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
        if self.shown.record is None or (record := self.shown.look()) is None:
            record, shown = self._new_record()
        elif record.state is not _LOCAL:
            self._receive_more(record, matrix, split_now=split_now)
            self.parts.copy_to_host()
            return
        if split_now:
            self.parts.split(matrix)
        else:
            self.parts.sum().copy_(matrix)
        self._show(record, shown, _PARTS if split_now else _ON_DEVICE)
        self.parts.copy_to_host()

    def receive_share(self, share: Tensor) -> None:
        """Take this rank's share [slices, length] of the mean of a contribution over ranks.

        Raises:
            RuntimeError: ``.grad`` holds a tensor of the user's, to which autograd would have added the gradient if
                this rank had had one. Or see ``receive``.
        """
        grad = self.param.grad if self.shown.visible else None
        if grad is not None and self.shown.look() is None and not self.shown.zeroed(grad):
            errors.refuse_gradient_of_user(self.plan.name)
        self.receive(share, split_now=True)

    def receive_local(self, matrix: Tensor) -> None:
        """Show in ``.grad`` that this rank has a contribution, before its mean over ranks is known.

        Raises: see ``receive``.
        """
        if self.shown.record is None or (record := self.shown.look()) is None:
            self._show(*self._new_record(), _LOCAL)
        elif not record.state.away:
            self._receive_more(record, matrix, split_now=False)

    @property
    def local_was_dropped(self) -> bool:
        """Return whether contributions of this rank were cleared or replaced in ``.grad`` before they were sent.

        With the optimizer in backward ``.grad`` shows none.
        """
        record = self.shown.record
        return record is None or (record.state is _LOCAL and self.shown.look() is None)

    def _new_record(self) -> tuple[GradientRecord, OffloadedGradient | None]:
        """The record of a gradient that begins, and the tensor to put into ``.grad``; None if that one stays."""
        visible = self.shown.visible
        if visible and (before := self.param.grad) is not None and self.shown.zeroed(before):
            assert isinstance(before, OffloadedGradient)
            return before._record, None  # a zeroed gradient stays the object that it is in ``.grad``
        record = GradientRecord(self.shown.like, self.shown.me)
        return record, OffloadedGradient.of(record) if visible else None

    def _show(self, record: GradientRecord, shown: OffloadedGradient | None, state: GradientState) -> None:
        # No call in here: an interrupt finds that all of it is done or nothing, see [Note: one assignment].
        self.shown.record, record.state, record.contributions, record.norm = record, state, 1, None
        record.clip = record.unscale = 1.0
        if shown is not None:
            self.param.grad = shown

    def _receive_more(self, record: GradientRecord, matrix: Tensor, *, split_now: bool) -> None:
        """Add a further contribution to the gradient ``record``."""
        if record.state.away:
            self._add(record, matrix)
            if split_now and self.arrival is not Arrival.IN_PIECES:
                self.parts.split(self.parts.sum())
                # Last: until here an interrupt leaves a valid gradient, in the accumulator.
                record.state = _PARTS
        elif self.shown.visible:
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
        if grad.shape != self.shown.like.shape:  # the kernels would read past its end: [Note: unchecked blocks]
            raise RuntimeError(
                f"the gradient of {self.plan.name} has the shape {list(grad.shape)}, and its parameter had "
                f"{list(self.shown.like.shape)} when its optimizer was made; change the model first, then create the "
                "optimizer and compile the model"
            )
        matrix = grad.detach() if grad.requires_grad else grad
        if matrix.dim() != 2:
            matrix = matrix.reshape(self.plan.of_weight.matrix_shape)
        return matrix if matrix.stride(1) == 1 else matrix.contiguous()

    def _add(self, record: GradientRecord, matrix: Tensor) -> None:
        if record.state is _PARTS:
            self.arrival = Arrival.IN_PIECES
            self.parts.rebuild(record)
        accumulator = self.parts.sum()
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
        record = self.shown.look()
        if record is None and (grad := self.shown.grad_of_user()) is not None:
            self.through_autograd = self.through_autograd or not used
            values = grad._record.read() if isinstance(grad, OffloadedGradient) else grad
            record = GradientRecord(self.shown.like, self.shown.me)
            matrix, share = self.matrix_of(values), self.plan.share
            if share is None:
                self.parts.split(matrix)
            else:  # the whole gradient is here, on each rank
                record.norm = self.shown.norm_of_values(matrix)
                self.parts.split(share.view(matrix))
            self.shown.record, record.state, record.contributions = record, _PARTS, 1
            if not self.shown.visible:
                self.param.grad = None
        if (record := self.shown.record) is not None and record.state is _ON_DEVICE:
            assert self.parts.accumulated is not None
            self.parts.split(self.parts.accumulated)
            record.state = _PARTS
        self.parts.copy_to_host()

    @property
    def copied(self) -> bool:
        """Return whether the gradient in ``.grad`` was split and copied in the backward: the usual case at a step."""
        record, grad = self.shown.record, self.param.grad
        # The state counts, too: an interrupt may have left the parts of a gradient that became dense or zero.
        parts = record is not None and record.state is _PARTS and self.parts.copy is not None
        return parts and type(grad) is OffloadedGradient and grad._record is record

    # 4. Commit.

    def commit(self, coefficients: StepCoefficients | None) -> None:
        """Add the final gradient to the update window; None: this step has none of this parameter."""
        parts = self.parts
        parts.commit(coefficients)
        if (record := self.shown.record) is not None:
            record.state = GradientState.CONSUMED
        if self.arrival is not Arrival.IN_PIECES:
            whole = record is not None and record.contributions == 1 and not self.through_autograd
            self.arrival = Arrival.WHOLE if whole else Arrival.UNKNOWN
        if parts.pending or parts.staged is not None or parts.copy is not None:
            parts.release()

    # Failures, and memory.

    def abandon(self) -> None:
        """Drop the gradient before a state is loaded."""
        if self.parts.copy is not None:
            self.parts.copy[1].settle()  # it would write into a gradient buffer that is loaded next
        if (record := self.shown.record) is not None:
            if record.state.away:
                record.state = GradientState.DISCARDED
            self.shown.give_up(record)
        self.parts.abandon()

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory of gradients. All work in flight must have ended."""
        self.parts.list_memory(found, summed=self.shown.state is _ON_DEVICE)
        if self.shown.record is not None:
            self.shown.record.list_memory(found)
