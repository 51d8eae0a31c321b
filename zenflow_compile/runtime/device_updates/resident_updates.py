"""Updates on the device of parameters whose state is there during the update: resident or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.plan import STACKED_ELEMENTS
from zenflow_compile.rules.eager import accumulate_window, apply_window, update_matrices_
from zenflow_compile.rules.rule import Rule
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates.column_ops import (
    bounded_batches,
    fused_adamw_,
    has_kernels,
    step_counts,
    update_columns_,
)
from zenflow_compile.runtime.device_updates.selection import SliceState
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter, WriteMark, bump_versions
from zenflow_compile.runtime.state_forms import PLAIN, StateForm
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_, window_numbers

# Elements of cast or scaled gradients that exist at a time, unless one parameter has more: 256 MiB.
_SCRATCH_ELEMENTS = 1 << 26
_MOST_ELEMENTS = 1 << 31  # of a kernel for slices: offsets in a row have 32 bits, and a vector is one row


@dataclass(slots=True)
class ResidentState:
    """Arrays of one parameter, and an fp32 master if the weights have 16 bits.

    Attributes:
        arrays: of the rule, of the parameter's shape, fp32, or fp64 for fp64 weights; if ``form`` is not plain, one row
            per row of the parameter.
        step: number of gradients in the arrays.
        master: of the parameter's shape, fp32 or fp64; None for fp32 and fp64 weights.
        mark: the parameter after the engine's last write, if there is a master; None if unknown, as after loading.
        counter: the parameter's version counter, which other parameters may share.
    """

    arrays: Sequence[Tensor]
    step: int
    master: Tensor | None
    mark: WriteMark | None = None
    counter: VersionCounter = field(default_factory=VersionCounter)
    form: StateForm = PLAIN

    @classmethod
    def zeros_like(cls, param: Tensor, counter: VersionCounter | None = None, form: StateForm = PLAIN) -> ResidentState:
        """Make the state of a parameter before its first gradient: in the parameter's memory layout, or in rows."""
        dtype = _state_dtype(param)
        counter = VersionCounter() if counter is None else counter
        mastered, layout = has_master(param), torch.preserve_format
        if form.plain:
            arrays = [torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format) for _ in form.arrays]
        else:
            layout = torch.contiguous_format  # rows are consecutive, whatever the parameter's layout is
            _, *stored = form.tensors(param.numel() // max(1, form.length))
            arrays = [torch.zeros(shape, dtype=of_array, device=param.device) for shape, of_array in stored]
        return cls(
            arrays=arrays,
            step=0,
            master=param.detach().to(dtype, copy=True, memory_format=layout) if mastered else None,
            mark=counter.mark(param) if mastered else None,
            counter=counter,
            form=form,
        )

    def tensors(self) -> list[Tensor]:
        return [*self.arrays, *([] if self.master is None else [self.master])]

    def reseed_master(self, param: Tensor) -> None:
        """Copy the weights into the master where they are not its cast: there was an external write."""
        if self.master is not None:
            same = self.master.to(param.dtype) == param.detach()
            self.master.copy_(torch.where(same, self.master, param.detach().to(self.master.dtype)))
            self.mark = self.counter.mark(param)

    def load(self, state: ResidentState, param: Tensor) -> None:
        """Copy a checkpoint's state of ``param``, in fp32 or fp64.

        The next update compares the weights with the master, so that weights may be loaded before or after the state.

        Raises:
            ValueError: a tensor of the state has another shape than the parameter, or the master is missing.
        """
        if (self.master is None) != (state.master is None):
            raise ValueError(
                f"the state of a {param.dtype} parameter must {'not ' if self.master is None else ''}have a master; "
                "load the state of an optimizer over weights of this dtype"
            )
        for source in (*state.arrays, state.master):
            if source is not None and source.shape != param.shape:
                raise ValueError(
                    f"state of shape {list(source.shape)} for a parameter of shape {list(param.shape)}; "
                    "load the state of an optimizer over the same model"
                )
        arrays = state.arrays
        if not self.form.plain:
            # Where the checkpoint is: the device may have no room for fp32 arrays.
            rows = (each.float().reshape(-1, self.form.length) for each in arrays)
            arrays = self.form.compress(*rows)
        loaded = [*arrays, *([] if state.master is None else [state.master])]
        for target, source in zip(self.tensors(), loaded, strict=True):
            target.copy_(source)  # keeps the parameter's memory layout, which the fused kernel requires
        self.step, self.mark = state.step, None


Update = tuple[Tensor, Tensor, ResidentState]
"""A parameter or a view of its memory, its gradient, of the same shape, and its state."""


class ResidentUpdates:
    """Updates of parameters and their gradients: AdamW's in one multi-tensor call, matrices in stacks, others singly.

    Attributes:
        states: made with a parameter's first gradient. A parameter without a gradient keeps its step count.
        counters: version counters of the parameters; one that is missing here shares its counter with no other.
        forms: how the parameters' moments are stored. One that is missing here has fp32 moments.
    """

    def __init__(self) -> None:
        self.states: dict[Parameter, ResidentState] = {}
        self.counters: dict[Parameter, VersionCounter] = {}
        self.forms: dict[Parameter, StateForm] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for state in self.states.values() for tensor in state.tensors())

    def list_memory(self, found: MemoryList) -> None:
        for state in self.states.values():
            found.content(*state.tensors())

    @torch.no_grad()
    def update(self, params: Sequence[Parameter], grads: Sequence[Tensor], coefficients: StepCoefficients) -> None:
        for param in params:
            if param not in self.states:
                self.states[param] = self._new(param)
        states = [self.states[param] for param in params]
        update_on_device(list(zip(params, grads, states, strict=True)), coefficients)

    def load(self, param: Parameter, state: ResidentState) -> None:
        like = self._new(param)
        like.load(state, param)
        self.states[param] = like

    def _new(self, param: Parameter) -> ResidentState:
        return ResidentState.zeros_like(param, self.counters.get(param), self.forms.get(param, PLAIN))


@torch.no_grad()
def update_on_device(updates: Sequence[Update], coefficients: StepCoefficients) -> None:
    """Do one step for parameters that share coefficients, all on one device. Gradients are not written.

    For AdamW and fp32 weights this is ``torch.optim.AdamW(fused=True)`` bit for bit, on gradients that were multiplied
    by ``coefficients.grad_scale`` before. 16-bit gradients are cast to fp32 first and scaled then.
    """
    for param, _, state in updates:
        if state.master is not None and state.counter.written_since(param, state.mark):
            state.reseed_master(param)
        state.step += 1
    if coefficients.rule.of_matrix:
        _update_matrices(updates, coefficients)
    else:
        by_rows: list[Update] = []
        whole: list[Update] = []
        for update in updates:
            (by_rows if _by_rows(update, coefficients.rule) else whole).append(update)
        _update_rows(by_rows, coefficients)
        _update_whole(whole, coefficients)
    bump_versions([param for param, _, _ in updates], [state.counter for _, _, state in updates])


def _update_matrices(updates: Sequence[Update], coefficients: StepCoefficients) -> None:
    """Update matrices of one shape, dtype and step together, as many as have little scratch."""
    alike: dict[tuple[torch.Size, torch.dtype, int], list[Update]] = {}
    for param, grad, state in updates:
        if param.numel():  # else another rank updates it
            alike.setdefault((param.shape, param.dtype, state.step), []).append((param, grad, state))
    for each in alike.values():
        for batch in bounded_batches(each, [param.numel() for param, _, _ in each], STACKED_ELEMENTS):
            _update_stack(batch, coefficients)


def _update_stack(batch: Sequence[Update], coefficients: StepCoefficients) -> None:
    rule, step = coefficients.rule, batch[0][2].step
    numbers = window_numbers([coefficients], step)
    weights = [param.data if state.master is None else state.master for param, _, state in batch]

    def accumulated(weight: Tensor, grad: Tensor, state: ResidentState) -> list[Tensor]:
        arrays = state.arrays if state.form.plain else state.form.expand(*state.arrays)
        gradient = coefficients.scaled(grad.detach(), weight.dtype)
        return accumulate_window(rule, weight, arrays, [gradient], numbers.of_gradient)

    values = [accumulated(weight, grad, state) for weight, (_, grad, state) in zip(weights, batch, strict=True)]
    update_matrices_(rule, values, coefficients.options)
    for weight, (param, _, state), new in zip(weights, batch, values, strict=True):
        weight.copy_(apply_window(rule, weight, new, numbers.of_window))
        arrays = new[: len(rule.arrays)]
        stored = arrays if state.form.plain else state.form.compress(*arrays, step=step)
        for target, each in zip(state.arrays, stored, strict=True):
            target.copy_(each)
        if state.master is not None:
            param.data.copy_(state.master)


def _by_rows(update: Update, rule: Rule) -> bool:
    """Whether an update is one of slices: its state has rows, or the device has a kernel for slices alone."""
    param, _, state = update
    if rule.fused or not state.form.plain:
        return not state.form.plain
    return (
        has_kernels(param.device)
        and 0 < param.numel() < _MOST_ELEMENTS
        and _state_dtype(param) == torch.float32
        and all(each.is_contiguous() for each in (param, *state.tensors()))
    )


def _update_rows(updates: Sequence[Update], coefficients: StepCoefficients) -> None:
    if not updates:
        return
    # Operators that write .data do not move the version: ``bump_versions`` does, and counts it.
    weights = [param.data.contiguous() for param, _, _ in updates]  # of contiguous ones, the parameter's own memory
    rows = []
    for weight, (_, grad, state) in zip(weights, updates, strict=True):
        shape = (-1, state.form.length)
        matrix = weight.view(shape)
        master = matrix if state.master is None else state.master.view(shape)
        gradient = grad.detach().contiguous().view(shape)
        arrays = [each.view(shape) for each in state.arrays] if state.form.plain else state.arrays
        rows.append(SliceState(matrix, 0, None, gradient, master, tuple(arrays), state.step, state.form))
    update_columns_(rows, coefficients)
    for weight, (param, _, _) in zip(weights, updates, strict=True):
        if not param.is_contiguous():
            param.data.copy_(weight)


def _update_whole(updates: Sequence[Update], coefficients: StepCoefficients) -> None:
    def scratch_elements(update: Update) -> int:
        param, grad, _ = update
        return param.numel() if coefficients.grad_scale.value != 1.0 or grad.dtype != _state_dtype(param) else 0

    for dtype in dict.fromkeys(param.dtype for param, _, _ in updates):
        same_dtype = [update for update in updates if update[0].dtype == dtype]
        for batch in bounded_batches(same_dtype, [*map(scratch_elements, same_dtype)], _SCRATCH_ELEMENTS):
            _update(batch, coefficients)


def _update(batch: Sequence[Update], coefficients: StepCoefficients) -> None:
    states = [state for _, _, state in batch]
    weights = [param.data if state.master is None else state.master for param, _, state in batch]
    grads = [_as_kernel_reads(grad, weight) for (_, grad, _), weight in zip(batch, weights, strict=True)]
    if coefficients.grad_scale.value != 1.0:
        grads = list(torch._foreach_mul(grads, coefficients.grad_scale.for_fp32()))
    by_kernel = coefficients.rule.fused
    fused = [i for i, state in enumerate(states) if by_kernel and weights[i].stride() == state.arrays[0].stride()]
    if fused:
        counts = step_counts([states[i].step for i in fused], weights[0].device)
        fused_adamw_([(weights[i], *states[i].arrays, grads[i], counts[states[i].step]) for i in fused], coefficients)
    for i in sorted(set(range(len(batch))) - set(fused)):
        # The fused kernel runs over memory, not over elements: it cannot update a view with holes or overlaps.
        state, plain = states[i], coefficients._replace(grad_scale=Number.known(1.0))
        update_window_((weights[i], *state.arrays), [grads[i]], [plain], step=state.step)
    cast = [(param.data, state.master) for param, _, state in batch if state.master is not None]
    if cast:
        torch._foreach_copy_([param for param, _ in cast], [master for _, master in cast])


def has_master(param: Tensor) -> bool:
    return param.dtype != _state_dtype(param)


def _state_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _as_kernel_reads(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient in the weight's dtype and memory layout: the fused kernel assumes equal layouts."""
    if grad.dtype == weight.dtype and grad.stride() == weight.stride():
        return grad.detach()
    return torch.empty_like(weight, memory_format=torch.preserve_format).copy_(grad.detach())
