"""Which slices of a matrix the device updates, and which view of a matrix has adjacent elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.runtime.device.memory_list import MemoryList


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

        Runs on the host, and synchronizes with the device if the indices are there.

        Raises:
            ValueError: a slice is out of range, missing, or listed twice.
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
        """``selected``, ``deferred`` and ``position``."""
        return self.selected, self.deferred, self.position

    @property
    def slices(self) -> int:
        """Number of slices of the matrix."""
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
        """Device memory."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory."""
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
