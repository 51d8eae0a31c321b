"""Device state of one offloaded parameter: the selection, the selected slices' state, and the score of every slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.selection import (
    Selection,
    best_slices,
    better_slices,
    count_swaps,
    swaps_per_group,
)
from zenflow_compile.runtime.state_forms import State, StateForm, StateRows

SCORE_DECAY = 0.9
"""Weight of the past in the score. The score of one batch is mostly noise: a selection by an average over about ten
steps keeps a Jaccard overlap of 0.70 after 16 steps, a selection by a single batch 0.29 (docs/convergence.md)."""

# Scores that ``count_leaving`` sorts at a time: a sort needs about ten times their memory.
_SORTED_ELEMENTS = 1 << 18


@dataclass(slots=True)
class DeviceState:
    """State of the selected slices, a row each, the current selection and the scores.

    Attributes:
        state: f32[k, length] masters, and the arrays as ``form`` stores them.
        gradient: ``[k, length]`` in the model's dtype, the selected slices of the gradient until the optimizer step.
        norms: f32[slices], squared norms of that gradient's slices.
        score: f32[slices], moving average of the squared norms of unscaled gradients; empty if nothing is selected.
        steps: number of gradients in the moments.
        selected_at: step of the last re-selection; None before the first.
    """

    plan: ParamPlan
    form: StateForm
    selection: Selection
    gradient: Tensor
    state: State
    norms: Tensor
    score: Tensor
    selects: bool
    steps: int = 0
    selected_at: int | None = None

    @classmethod
    def allocate(cls, plan: ParamPlan, device: torch.device) -> DeviceState:
        """Make zeros. The first ``k`` slices are selected until there are gradients: as many of each group as later."""
        form = StateForm.of_selected(plan)
        return cls(
            plan=plan,
            form=form,
            selection=Selection.of(torch.arange(plan.k, dtype=torch.int32, device="cpu"), plan.slices, device),
            gradient=torch.zeros((plan.k, plan.length), dtype=plan.dtype, device=device),
            state=State(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in form.tensors(plan.k)),
            norms=torch.zeros(plan.slices, dtype=torch.float32, device=device),
            score=torch.zeros(plan.slices if plan.selects else 0, dtype=torch.float32, device=device),
            selects=plan.selects,
        )

    @property
    def nbytes(self) -> int:
        """Device memory, in bytes."""
        tensors: list[Tensor] = [self.gradient, *self.state, self.norms, self.score]
        return sum(tensor.nbytes for tensor in tensors) + self.selection.nbytes

    def list_memory(self, found: MemoryList, *, has_gradient: bool) -> None:
        """Add the device's memory; ``has_gradient``: ``gradient`` has values that count."""
        (found.content if has_gradient else found.scratch)(self.gradient)
        found.content(*self.state, self.norms, self.score)
        self.selection.list_memory(found)

    def best_slices(self) -> Tensor:
        """Return the slices with the highest scores of each group: i32[k], ascending."""
        return best_slices(self.score, self.plan.k, self.plan.groups)

    def better_slices(self, margin: float, swaps: int, step: int) -> Tensor:
        """Return the selection after the best swaps of each group: i32[k], ascending.

        Args:
            margin: by how much an entering slice's score must exceed that of the slice it replaces, as a share of it.
            swaps: how many to make at most in the whole parameter, divided over its groups.
            step: decides which groups get the remainder.
        """
        share = self.plan.share
        groups = self.plan.groups if share is None else share.whole.groups
        at_most = swaps_per_group(swaps, groups, step, self.score.device)
        if share is not None:
            at_most = at_most[share.part :: share.parts]
        return better_slices(self.score, self.selection.mask, self.plan.k, margin, at_most)

    def selected_norm(self, out: Tensor | None = None) -> Tensor:
        """Sum the squared norms of the selected slices: f32[], in ``out`` if given.

        The sum runs in the order of slices, not of the state's rows: its rounding depends on the set of slices alone.
        """
        return torch.sum(self.norms.masked_fill(~self.selection.mask, 0.0), 0, out=out)

    @property
    def rows(self) -> StateRows:
        """Access to the state in fp32."""
        return StateRows(self.form, self.state)


def feed_scores(states: Sequence[DeviceState], unscale: Sequence[Number]) -> None:
    """Add the norms of the gradients of an optimizer step to the scores. ``unscale``: one over each loss scale."""
    scores, norms = [state.score for state in states], [state.norms for state in states]
    different = dict.fromkeys(unscale)
    if any(factor.on_device is not None for factor in different):
        wide = {factor: factor.on(norms[0].device) for factor in different}
        squares = {factor: (each * each).float() for factor, each in wide.items()}
        each_by = [squares[factor] for factor in unscale]
        norms = list(torch._foreach_mul(norms, each_by[0] if len(squares) == 1 else each_by))
    elif any(factor.value != 1.0 for factor in different):
        norms = list(torch._foreach_mul(norms, [factor.value * factor.value for factor in unscale]))
    torch._foreach_lerp_(scores, norms, 1.0 - SCORE_DECAY)


def count_leaving(states: Sequence[DeviceState], selections: Sequence[Selection], margin: float) -> list[Tensor]:
    """Count the selected slices that would leave if swaps cost nothing: f32[] on the device for each parameter.

    Args:
        states: of parameters with equal numbers of slices and of selected slices.
        margin: see :meth:`DeviceState.better_slices`.
    """
    plan = states[0].plan
    counts: list[Tensor] = []
    pairs = list(zip(states, selections, strict=True))
    for batch in column_ops.bounded_batches(pairs, [plan.slices] * len(pairs), _SORTED_ELEMENTS):
        scores = torch.stack([state.score for state, _ in batch])
        selected = torch.stack([selection.position for _, selection in batch]) < plan.k
        counts += count_swaps(scores, selected, plan.groups, margin).unbind()
    return counts


def exchange_rows(device_side: StateRows, host_side: StateRows, device_rows: Tensor, host_rows: Tensor) -> int:
    """Swap rows of state in the calling thread, with blocking copies. ``StateExchange`` swaps the same rows without.

    No job may use the host's side, and no copy may read its weights.

    Args:
        host_side: of the deferred slices, and weights that get the new masters of swapped rows.
        device_rows, host_rows: as in ``Reselection``, the second one on the host.

    Returns:
        The bytes that were moved in one direction.
    """
    swapped = host_rows[host_rows >= 0].long()
    rows, device = device_rows[: len(swapped)], device_of(device_rows.device)
    # After an interrupt in here the two sides do not match: the caller marks the update as partially applied.
    leaving = [device.to_host(each, "state") for each in device_side.read(rows)]
    entering = host_side.read(swapped)
    device_side.write([device.from_host(each, "state") for each in entering], rows)
    host_side.write(leaving, swapped)
    return sum(each.nbytes for each in entering)
