"""Which slices of a matrix the device updates, and which view of a matrix has adjacent elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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


def row_major(matrix: Tensor, dim: int) -> tuple[Tensor, int]:
    """View the same slices with the elements of a row adjacent, if one of the two axes has stride 1."""
    if matrix.stride(1) != 1 and matrix.stride(0) == 1:
        return matrix.t(), 1 - dim
    return matrix, dim
