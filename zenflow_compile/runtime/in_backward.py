"""The optimizer in backward: gradients and updates where a backward steps by itself, without an optimizer object."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.nn import Parameter

from zenflow_compile.runtime import errors
from zenflow_compile.runtime.gradient_intake import GradientIntake
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.parameters.incoming_gradient import Arrival
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.step.slice_updates import Member, members_of
from zenflow_compile.runtime.step_runner import StepRunner
from zenflow_compile.torch_internals import torch_private


class InBackwardIntake(GradientIntake):
    """Takes gradients that no ``zero_grad()`` clears: those of a failed backward are told from the next one's."""

    def prepare(self, arrived: int | None) -> None:
        """Drop the gradients of a failed backward; that of ``arrived`` stays. Updates may follow in this one.

        Raises:
            RuntimeError: parameters were updated in that backward, and others were not. Or see ``StaleGradients``.
        """
        core = self.core
        if torch_private.inside_compiled_autograd():
            raise RuntimeError(
                "a model compiled without an optimizer object steps at the end of its backward, and compiled autograd "
                "does not tell when that is; run the backward without compiled autograd, or create a ZenFlowAdamW and "
                "call its step()"
            )
        self.backward.refuse_concurrent()
        for call in core.moments.begin_updates:  # updates may run before ``begin_update`` does this
            call()
        if self.backward.task is not None:
            core.refuse_half_made_step()
            with self.stale.dropped(arrived):
                self.discard()
                self.backward.task = None  # nothing is left of it
        self._compare_samples()

    def _compare_samples(self) -> None:
        """Notice unseen writes before an update in this backward would undo them."""
        core = self.core
        self.registry.unseen_writes.compare_unfrozen()
        for offloaded in self.offloaded.values():
            if offloaded.weights.unverified:
                offloaded.notice_external_write(core.step)
            if offloaded.host.flushed:  # no forward has fetched it
                self.uploads.apply(offloaded, offloaded.updates.due(core.step))
            if offloaded.arriving is not None:  # nor waited for what other ranks have sent of it
                offloaded.receive_weights()
        self.registry.unseen_writes.begin_step()

    def refuse_nested(self) -> None:
        super().refuse_nested()
        raise RuntimeError(
            "a backward inside another one (torch.utils.checkpoint with use_reentrant=True) does not tell when "
            "the step may run; use use_reentrant=False, or create a ZenFlowAdamW and call its step()"
        )

    def after_backward(self) -> None:
        """Run the optimizer step, and let ``.grad`` of offloaded parameters say that their gradients were used."""
        core = self.core
        if core.on_backward_end is not None and (optimizer := core.optimizer) is not None:
            core.on_backward_end(optimizer)
            for offloaded in self.offloaded.values():
                offloaded.shown.show_consumed()

    def all_accumulate(self, chosen: Sequence[OffloadedParam]) -> bool:
        """Return False: each parameter is asked for its hooks."""
        super().all_accumulate(chosen)
        return False

    def refuse_hooks(self, offloaded: OffloadedParam) -> None:
        errors.refuse_gradient_hooks(offloaded.param, offloaded.plan.name)

    def takes_out_of_grad(self, param: Parameter) -> bool:
        """Return True: users see no gradients."""
        return True

    def accept_on_device(self, p: int, param: Parameter) -> None:
        self.stale.note(p)  # first: an interrupt leaves no gradient in ``.grad`` that the next backward adds to
        super().accept_on_device(p, param)

    def discard(self) -> None:
        """Forget gradients that no update has used. A backward that failed stays known."""
        self.core.updating = False
        self.backward.reset()
        self.stale.forget()
        self.calls.drop_gradients()
        for offloaded in self.offloaded.values():
            if offloaded.shown.state is not GradientState.CONSUMED:
                offloaded.shown.drop()


class InBackwardSteps(StepRunner):
    """Updates parameters whose gradients are final while the backward runs, and the others at its end."""

    def taking_part(self, ps: Sequence[int]) -> list[Member]:
        if self.core.updating:
            return super().taking_part(ps)
        return members_of([each for p in ps if self._is_final(each := self.offloaded[p])], self.registry)

    def _is_final(self, offloaded: OffloadedParam) -> bool:
        """Return whether the parameter's gradient, in a backward that goes on, will get no further contribution.

        So it is only if its gradients were seen to arrive in one piece. If the parameter shares its version counter,
        its update would make the backward of an earlier graph, which saved a sharer, raise.
        """
        record, core = offloaded.shown.record, self.core
        if record is None or record.state is not GradientState.PARTS or not core.finalizes_in_backward:
            return False
        whole = offloaded.gradient.arrival is Arrival.WHOLE and offloaded.uses == 1
        return whole and not offloaded.weights.counter.shared and core.splits_now

    def compare_samples(self) -> None:
        """Do nothing: the backward has compared them when it began, and its updates have changed weights since."""

    def begin_samples(self) -> None:
        """Do nothing: the backward has taken them when it began."""

    def to_update(self, params: Collection[OffloadedParam]) -> Collection[OffloadedParam]:
        return [each for each in params if each.shown.state is not GradientState.CONSUMED]

    def end_gradients(self) -> None:
        super().end_gradients()
        for offloaded in self.offloaded.values():
            offloaded.shown.record = None
