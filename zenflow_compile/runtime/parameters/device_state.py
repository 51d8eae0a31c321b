"""The device's side of one parameter: which slices are selected, their state, and the score that selects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device import column_ops, selection_groups

# Weight of the past in the score. A one-batch score is mostly noise: the choice made by an average over about ten steps
# keeps a Jaccard overlap of 0.70 after 16 steps, that of a single batch 0.29 (the project's convergence study).
SCORE_DECAY = 0.9


@dataclass(slots=True)
class DeviceState:
    """fp32 state ``[k, length]`` of the selected slices, the selection in force and its score.

    Attributes:
        selection: which slices the device updates and which are the host's, in the order of the state's rows.
        gradient: ``[k, length]`` in the model's dtype, the selected gradient that waits for its update.
        norms: f32[slices], squared norms of the gradient that waits.
        score: f32[slices], moving average of the squared norms of unscaled gradients.
        steps: gradients that the moments have taken.
        selected_at: step of the last re-selection; None before the first.
    """

    plan: ParamPlan
    selection: column_ops.Selection
    gradient: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    norms: Tensor
    score: Tensor
    steps: int = 0
    selected_at: int | None = None

    @classmethod
    def allocate(cls, plan: ParamPlan, device: torch.device) -> DeviceState:
        """All zero; the first ``k`` slices, as many of each group as later, are selected until there are gradients."""
        block = (plan.k, plan.length)
        state = [torch.zeros(block, dtype=torch.float32, device=device) for _ in range(3)]
        return cls(
            plan=plan,
            selection=column_ops.Selection.of(torch.arange(plan.k, dtype=torch.int32), plan.slices, device),
            gradient=torch.zeros(block, dtype=plan.dtype, device=device),
            master=state[0],
            exp_avg=state[1],
            exp_avg_sq=state[2],
            norms=torch.zeros(plan.slices, dtype=torch.float32, device=device),
            score=torch.zeros(plan.slices, dtype=torch.float32, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Device memory of state, selection, score and the waiting gradient."""
        tensors = (self.gradient, self.master, self.exp_avg, self.exp_avg_sq, self.norms, self.score)
        return sum(tensor.nbytes for tensor in tensors) + self.selection.nbytes

    def best_slices(self) -> Tensor:
        """i32[k], ascending: the slices with the highest scores of each group."""
        return selection_groups.best_slices(self.score, self.plan.k, self.plan.groups)

    def better_slices(self, margin: float, swaps: int, step: int) -> Tensor:
        """i32[k], ascending: the selection after the best swaps of each group, at most ``swaps`` of all groups.

        Args:
            margin: by how much an entering slice's score must exceed that of the slice it replaces.
            swaps: divided over the groups.
            step: which groups get the remainder depends on it.
        """
        at_most = selection_groups.swaps_per_group(swaps, self.plan.groups, step, self.score.device)
        return selection_groups.better_slices(self.score, self.selection.mask, self.plan.k, margin, at_most)

    def count_leaving(self, margin: float, out: Tensor) -> None:
        """Write into ``out``, f32[] on the device, how many selected slices would leave if swaps cost nothing."""
        selection_groups.count_swaps(self.score, self.selection.mask, self.plan.groups, margin, out)

    def selected_norm(self, out: Tensor | None = None) -> Tensor:
        """f32[], squared norm of the selected slices' gradient, in ``out`` if given.

        It is a sum in the order of slices, not of the state's rows: its rounding depends on the set of slices alone.
        """
        return torch.sum(self.norms.masked_fill(~self.selection.mask, 0.0), 0, out=out)

    def next_step(self, matrix: Tensor) -> column_ops.SliceState:
        """One more gradient counts: the waiting one, for an AdamW step on the selected slices of the 2-D view."""
        self.steps += 1
        return column_ops.SliceState(
            matrix,
            self.plan.dim,
            self.selection,
            self.gradient,
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
            self.steps,
        )

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 master and moments."""
        return self.master, self.exp_avg, self.exp_avg_sq


def feed_scores(sides: Sequence[DeviceState], unscale: Sequence[float]) -> None:
    """Take the norms of the gradients that a step uses into the scores.

    Args:
        unscale: of each, one over the loss scale of its gradient.
    """
    scores, norms = [side.score for side in sides], [side.norms for side in sides]
    if any(factor != 1.0 for factor in unscale):
        norms = list(torch._foreach_mul(norms, [factor * factor for factor in unscale]))
    torch._foreach_lerp_(scores, norms, 1.0 - SCORE_DECAY)


def exchange_slices(
    device_side: tuple[Tensor, ...],
    host_side: tuple[Tensor, ...],
    selection: column_ops.Selection,
    wanted: Tensor,
) -> tuple[column_ops.Selection, int]:
    """Make ``wanted`` the selection: slices that change sides take their state with them, both ways.

    Joining slices take the rows of leaving ones on either side, so nothing else moves.

    Args:
        device_side: f32[k, length] tensors.
        host_side: f32[deferred, length] tensors of the same meaning.
        selection: the one in force.
        wanted: i32[k], no slice twice.

    Returns:
        The new selection and the bytes that were moved in one direction.
    """
    device = selection.selected.device
    # Copies: on the CPU device .cpu() is the selection itself, which a loaded state dict may share.
    selected, deferred = selection.selected.cpu().clone(), selection.deferred.cpu().clone()
    wanted = wanted.cpu()
    device_rows = torch.nonzero(torch.isin(selected, wanted, invert=True)).flatten()
    host_rows = torch.nonzero(torch.isin(deferred, wanted)).flatten()
    if not len(device_rows):
        return selection, 0
    rows = device_rows.to(device)
    moved = 0
    for on_device, on_host in zip(device_side, host_side, strict=True):
        leaving = on_device[rows].cpu()
        on_device[rows] = on_host[host_rows].to(device)
        on_host[host_rows] = leaving
        moved += leaving.nbytes
    leaving_slices = selected[device_rows]
    selected[device_rows] = deferred[host_rows]
    deferred[host_rows] = leaving_slices
    return column_ops.Selection.of(selected, selection.slices, device, deferred=deferred), moved
