"""Which slices of a matrix the device updates, and which view of a matrix has adjacent elements.

[Note: groups] Slices are selected inside groups: slice ``i`` belongs to group ``i % groups`` (``planning/plan.py``).
The same few operators handle all groups, without synchronizing with the device. Scores are arranged as
``[ceil(slices / groups), groups]``, one column per group; the last row is padded.

Ties go to the lower slice: among equal scores it enters first, and leaves first. The selection is a function of the
scores and of the set of selected slices. It depends neither on the order in which their state is stored nor on other
groups. ``torch.topk`` does not guarantee that for equal scores; a stable sort does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.options.options import AUTO_SELECT_INTERVAL
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.state_forms import PLAIN, StateForm


@dataclass(frozen=True)
class Selection:
    """Which slices the device updates.

    Attributes:
        selected: i32[k], in the order of the device's state.
        deferred: i32[slices - k], the others, in the order of the host's state.
        position: i32[slices], the index of slice i in ``selected`` followed by ``deferred``.
    """

    selected: Tensor
    deferred: Tensor
    position: Tensor

    @classmethod
    def of(cls, selected: Tensor, slices: int, device: torch.device, deferred: Tensor | None = None) -> Selection:
        """Make a selection of ``slices`` slices; ``deferred`` is in ascending order unless given.

        Runs on the host, and synchronizes with the device if the indices are there. Raises ValueError if a slice is out
        of range, missing, or listed twice.
        """
        chosen = selected.cpu().long()
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < slices:
            raise ValueError(f"selected has slices outside [0, {slices - 1}]: {selected.tolist()[:8]}...")
        if deferred is None:
            others = torch.ones(slices, dtype=torch.bool, device="cpu")
            others[chosen] = False
            deferred = torch.nonzero(others).flatten()
        order = torch.cat([chosen, deferred.cpu().long()])
        if not torch.equal(order.sort().values, torch.arange(slices, device="cpu")):
            raise ValueError(
                f"selected ({chosen.numel()}) and deferred ({deferred.numel()}) must list each of {slices} slices "
                "once; a slice is missing or listed twice"
            )
        position = torch.empty(slices, dtype=torch.int32, device="cpu")
        position[order] = torch.arange(slices, dtype=torch.int32, device="cpu")
        return cls(
            selected=chosen.to(device=device, dtype=torch.int32),
            deferred=deferred.to(device=device, dtype=torch.int32),
            position=position.to(device),
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.selected, self.deferred, self.position

    @property
    def slices(self) -> int:
        return self.position.numel()

    @cached_property
    def selected_i64(self) -> Tensor:
        """``selected`` as PyTorch's operators index with it; cached, because the references need it at every step."""
        return self.selected.long()

    @property
    def mask(self) -> Tensor:
        """bool[slices], a new tensor: which slices are selected, independent of the order of the state's rows."""
        return self.position < self.selected.numel()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def list_memory(self, found: MemoryList) -> None:
        found.content(*self.tensors(), vars(self).get("selected_i64"))


class Wanted(NamedTuple):
    """A selection to come.

    Attributes:
        slices: i32[k] on the device, without duplicates.
        swaps: most slices of it that are not selected yet. The host knows this bound without asking the device.
    """

    slices: Tensor
    swaps: int


class Reselection(NamedTuple):
    """A new selection, and the rows of state that it swaps: row ``device_rows[i]`` with row ``host_rows[i]``.

    Attributes:
        selection: entering slices have the rows of leaving ones on either side, so no other row moves.
        device_rows: i64[swaps], all different: ascending rows of leaving slices, then some others.
        host_rows: i32[swaps]: ascending rows of entering slices, then -1 for the others, whose state stays.
    """

    selection: Selection
    device_rows: Tensor
    host_rows: Tensor


def reselect(selection: Selection, wanted: Wanted) -> Reselection:
    """Make ``wanted`` the selection, without synchronizing with the device.

    All shapes follow from ``wanted.swaps``: how many slices really change sides is known on the device alone.
    """
    swaps = min(wanted.swaps, selection.selected.numel(), selection.deferred.numel())
    chosen = torch.zeros(selection.slices, dtype=torch.uint8, device=selection.position.device)
    chosen.index_fill_(0, wanted.slices.long(), 1)
    stays, enters = chosen.index_select(0, selection.selected), chosen.index_select(0, selection.deferred)
    # nonzero() would synchronize with the device. A stable sort lists rows in the same, ascending order.
    device_rows = torch.sort(stays, stable=True).indices[:swaps]
    host_rows = torch.sort(enters, descending=True, stable=True).indices[:swaps]
    swapped = enters.index_select(0, host_rows).bool()
    leaving, entering = selection.selected.index_select(0, device_rows), selection.deferred.index_select(0, host_rows)
    # New tensors: the schedule may still have the old ones.
    selected = torch.index_copy(selection.selected, 0, device_rows, torch.where(swapped, entering, leaving))
    deferred = torch.index_copy(selection.deferred, 0, host_rows, torch.where(swapped, leaving, entering))
    order = torch.arange(selection.slices, dtype=torch.int32, device=selected.device)
    position = torch.empty_like(order).index_copy_(0, torch.cat([selected, deferred]).long(), order)
    padded = torch.where(swapped, host_rows, -1).to(torch.int32)
    return Reselection(Selection(selected, deferred, position), device_rows, padded)


def row_major(matrix: Tensor, dim: int) -> tuple[Tensor, int]:
    """View the same slices with the elements of a row adjacent, if one of the two axes has stride 1."""
    if matrix.stride(1) != 1 and matrix.stride(0) == 1:
        return matrix.t(), 1 - dim
    return matrix, dim


def best_slices(score: Tensor, k: int, groups: int) -> Tensor:
    """Select the slices with the highest scores of each group: i32[k], ascending.

    Args:
        score: f32[slices].
        k: number of slices; group ``g`` gets ``k // groups`` of them, one more where ``g < k % groups``.
    """
    order = torch.sort(_columns(score, groups, -math.inf), dim=0, descending=True, stable=True).indices
    slices = order * groups + torch.arange(groups, device=score.device)
    # Row by row, the first k are k // groups whole rows and the first k % groups groups of the next.
    return slices.flatten()[:k].sort().values.to(torch.int32)


def better_slices(score: Tensor, selected: Tensor, k: int, margin: float, at_most: Tensor) -> Tensor:
    """Make the best swaps inside each group: i32[k], ascending; ``count_swaps`` says which swaps are worth it.

    Args:
        score: f32[slices].
        selected: bool[slices], ``k`` of them true, which is given so that the device need not be asked.
        margin: by how much an entering slice's score must exceed that of the slice it replaces, as a share of it.
        at_most: i64[groups], swaps that each group may make.
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
    """Count the swaps that are worth it in all groups: f32[...], for each parameter.

    In each group the best deferred slice is compared with the worst selected one, the second best with the second
    worst, and so on. A swap is worth it if the score of the slice that enters exceeds that of the slice it replaces by
    ``margin``, as a share of it, so that near-ties do not swap back and forth.

    Args:
        score: f32[..., slices], of any number of parameters.
        selected: bool[..., slices].
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
    missing = -values.shape[-1] % groups
    padded = torch.nn.functional.pad(values, (0, missing), value=padding)
    return padded.view(*values.shape[:-1], -1, groups)


class SliceState(NamedTuple):
    """The selected slices of one parameter, for ``column_ops.update_columns_``.

    Attributes:
        matrix: [rows, columns], fp32, bf16 or fp16; only its selected slices are written, none is read. It may be
            ``master``.
        selection: None: all slices, in their order.
        gradient: [k, length], contiguous, of any floating dtype; not written.
        master: f32[k, length], contiguous, updated in place.
        arrays: of the rule, contiguous, as ``form`` stores them; updated in place.
        step: number of gradients in the moments, this one included.
    """

    matrix: Tensor
    dim: int
    selection: Selection | None
    gradient: Tensor
    master: Tensor
    arrays: tuple[Tensor, ...]
    step: int
    form: StateForm = PLAIN

    def pieces(self, elements: int) -> list[SliceState]:
        """Cut the state into rows of ``elements`` elements together, or of one slice if that is longer."""
        most = max(1, elements // max(1, self.gradient.shape[1]))
        parts = (torch.split(each, most) for each in (self.gradient, self.master, *self.arrays))
        return [
            self._replace(gradient=gradient, master=master, arrays=tuple(arrays))
            for gradient, master, *arrays in zip(*parts, strict=True)
        ]
