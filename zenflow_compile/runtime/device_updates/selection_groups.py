"""Selects slices inside groups: slice ``i`` belongs to group ``i % groups`` (``planning/plan.py``).

The same few operators handle all groups, without synchronizing with the device. Scores are arranged as
``[ceil(slices / groups), groups]``, one column per group; the last row is padded.

Ties go to the lower slice: among equal scores it enters first, and leaves first. The selection is a function of the
scores and of the set of selected slices. It depends neither on the order in which their state is stored nor on other
groups. ``torch.topk`` does not guarantee that for equal scores; a stable sort does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zenflow_compile.options.options import AUTO_SELECT_INTERVAL


def best_slices(score: Tensor, k: int, groups: int) -> Tensor:
    """Select the slices with the highest scores of each group.

    Args:
        score: f32[slices].
        k: number of slices to select; group ``g`` gets ``k // groups`` of them, one more where ``g < k % groups``.
        groups: number of groups.

    Returns:
        i32[k], ascending.
    """
    order = torch.sort(_columns(score, groups, -math.inf), dim=0, descending=True, stable=True).indices
    slices = order * groups + torch.arange(groups, device=score.device)
    # Row by row, the first k are k // groups whole rows and the first k % groups groups of the next.
    return slices.flatten()[:k].sort().values.to(torch.int32)


def better_slices(score: Tensor, selected: Tensor, k: int, margin: float, at_most: Tensor) -> Tensor:
    """Make the best swaps inside each group; ``count_swaps`` says which swaps are worth it.

    Args:
        score: f32[slices].
        selected: bool[slices], ``k`` of them true.
        k: number of selected slices, given so that the device need not be asked.
        margin: by how much an entering slice's score must exceed that of the slice it replaces, as a share of it.
        at_most: i64[groups], swaps that each group may make.

    Returns:
        i32[k], ascending. The number per group stays the same.
    """
    groups = at_most.numel()
    enters, leaving, entering = _swaps(score, selected, groups, margin)
    enters &= torch.arange(len(enters), device=score.device).unsqueeze(1) < at_most
    after = _columns(selected, groups, padding=False).clone()
    after.scatter_(0, leaving, after.gather(0, leaving) & ~enters)
    after.scatter_(0, entering, after.gather(0, entering) | enters)
    # nonzero() would synchronize with the device. A stable sort leaves the selected slices in ascending order.
    flat = after.flatten()[: score.numel()].to(torch.uint8)
    return torch.sort(flat, descending=True, stable=True).indices[:k].to(torch.int32)


def count_swaps(score: Tensor, selected: Tensor, groups: int, margin: float) -> Tensor:
    """Count the swaps that are worth it in all groups.

    In each group the best deferred slice is compared with the worst selected one, the second best with the second
    worst, and so on. A swap is worth it if the score of the slice that enters exceeds that of the slice it replaces by
    ``margin``, as a share of it, so that near-ties do not swap back and forth.

    Args:
        score: f32[..., slices], of any number of parameters.
        selected: bool[..., slices].
        groups: number of groups.
        margin: as above.

    Returns:
        f32[...], the count of each parameter.
    """
    enters, _, _ = _swaps(score, selected, groups, margin)
    return enters.sum((-2, -1), dtype=torch.float32)


def swaps_per_group(swaps: int, groups: int, step: int, device: torch.device) -> Tensor:
    """Divide a budget of swaps over groups: i64[groups] that adds up to ``swaps``, and depends on the step alone.

    Where it does not divide evenly, consecutive groups get one more. The first of them advances with the step by the
    golden ratio, as a share of all groups, so that every group gets its turn at any interval of re-selections.
    """
    each, left = divmod(swaps, groups)
    turn = step // AUTO_SELECT_INTERVAL  # the shortest interval of re-selections
    first = (turn * 0x9E3779B1 % (1 << 32)) * groups >> 32
    place = (torch.arange(groups, device=device) - first) % groups
    return each + (place < left).to(torch.int64)


def _swaps(score: Tensor, selected: Tensor, groups: int, margin: float) -> tuple[Tensor, Tensor, Tensor]:
    """Whether the j-th swap of each group is worth it, and the rows of the leaving and the entering slice.

    Padding, and the slices of the other side, sort behind a group's own as infinity. NaN sorts behind them. Neither is
    swapped: no score exceeds infinity or NaN, and negated they exceed no score.

    Returns:
        bool[..., rows, groups], and two i64 tensors of that shape.
    """
    # One sort for both sides, ascending: deferred scores are negated.
    sides = torch.stack([score.masked_fill(~selected, math.inf), score.neg().masked_fill_(selected, math.inf)])
    sides, order = torch.sort(_columns(sides, groups, math.inf), dim=-2, stable=True)
    return -sides[1] > (1.0 + margin) * sides[0], order[0], order[1]


def _columns(values: Tensor, groups: int, padding: float) -> Tensor:
    """View ``values`` [..., slices] as [..., ceil(slices / groups), groups]."""
    missing = -values.shape[-1] % groups
    padded = torch.nn.functional.pad(values, (0, missing), value=padding)
    return padded.view(*values.shape[:-1], -1, groups)
