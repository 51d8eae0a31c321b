"""The parameters that the device updates as a whole: resident ones, and those whose state is streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates.resident_updates import ResidentState, ResidentUpdates
from zenflow_compile.runtime.device_updates.streamed_updates import StreamedUpdates
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter
from zenflow_compile.runtime.parameters.host_weights import HostWeights
from zenflow_compile.runtime.state_forms import StateForm
from zenflow_compile.runtime.update_rule import StepCoefficients


@dataclass(eq=False)
class DeviceUpdated:
    """Parameters without host updates, and their optimizer state.

    Args:
        streamed: serves those whose state is in host memory between updates.
        weights: that are in host memory between uses: an update loads them.
    """

    _streamed: StreamedUpdates
    _weights: HostWeights
    _group_numbers: Sequence[int]
    _coefficients_of: Callable[[int, Number], StepCoefficients]
    resident: ResidentUpdates = field(default_factory=ResidentUpdates)
    _params: dict[int, Parameter] = field(default_factory=dict)

    def add(self, plan: ParamPlan, param: Parameter, counter: VersionCounter) -> None:
        self._params[plan.index] = param
        if (streamed := self._streamed.params.get(plan.index)) is not None:
            streamed.state.counter = counter
        else:
            self.resident.counters[param] = counter
            self.resident.forms[param] = StateForm.of_whole(plan)

    @property
    def nbytes(self) -> int:
        """Device bytes of state, and of the buffers that state is streamed through."""
        return self.resident.nbytes + self._streamed.device_bytes

    def gradients(self) -> list[tuple[Parameter, Tensor]]:
        """Those parameters that have a gradient, with it."""
        return [(param, grad) for param in self._params.values() if (grad := param.grad) is not None]

    def check_gradients(self, plans: Sequence[ParamPlan]) -> bool:
        """Whether any of the parameters has a gradient.

        Raises:
            TypeError: a gradient is sparse, or of a dtype that cannot be optimized.
        """
        present = False
        for index, param in self._params.items():
            if (grad := param.grad) is not None:
                present = True
                if not plans[index].trained:
                    raise TypeError(
                        f"{plans[index].name} has a gradient, and its dtype {plans[index].dtype} cannot be optimized; "
                        "set requires_grad=False again, or train weights of another dtype and cast them in the forward"
                    )
                if grad.is_sparse:
                    errors.refuse_sparse_grad(param, plans[index].name)
        return present

    def update(self) -> None:
        """Do one step on the parameters that have a gradient.

        The resident ones come last: their update overlaps the copies of streamed state (Deep Optimizer States, section
        4.1).
        """
        if self._streamed.params:
            self._streamed.update(self._coefficients)
        by_group: dict[int, list[tuple[int, Parameter, Tensor]]] = {}
        for index, param in self._params.items():
            if (grad := param.grad) is not None and index not in self._streamed.params:
                by_group.setdefault(self._group_numbers[index], []).append((index, param, grad))
        for members in by_group.values():
            coefficients = self._coefficients(members[0][0])
            updates = {index: (param, grad) for index, param, grad in members}
            for turn in self._weights.in_turns(list(updates)):
                params, grads = zip(*(updates[index] for index in turn), strict=True)
                with self._weights.loaded(turn):
                    self.resident.update(params, grads, coefficients)

    def _coefficients(self, index: int) -> StepCoefficients:
        return self._coefficients_of(index, Number.known(1.0))

    def state(self, index: int) -> ResidentState | None:
        """The state of parameter ``index``, wherever it is; None before its first gradient."""
        if (streamed := self._streamed.params.get(index)) is not None:
            return streamed.state if streamed.ever_updated else None
        return self.resident.states.get(self._params[index])

    def compare(self, index: int) -> None:
        """Compare the weight of parameter ``index``, which has a state, with its master at the next update."""
        if (state := self.state(index)) is not None:
            state.mark = None

    def load(self, index: int, state: ResidentState | None) -> None:
        """Put back a checkpoint's state of parameter ``index``. Raises: see :meth:`ResidentState.load`."""
        if index in self._streamed.params:
            self._streamed.load(index, state)
        elif state is None:
            self.resident.states.pop(self._params[index], None)
        else:
            with self._weights.loaded([index]):
                self.resident.load(self._params[index], state)
