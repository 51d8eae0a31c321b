"""What the device does to a gradient and a parameter, line by line: dispatch to Triton on CUDA, PyTorch elsewhere.

A *line* is a column (``dim`` 1) or a row (``dim`` 0) of a matrix ``[rows, columns]``. Blocks of lines are laid out
``[line, length]``, whatever the dim, so that one line is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_compile.runtime.adam import SlotCoefficients, rule_p_


@dataclass(frozen=True, slots=True)
class Selection:
    """Which lines the device updates.

    Attributes:
        selected: i32[k], in the order of the device's state.
        rest: i32[lines - k], the others, in the order of the host's state.
        position: i32[lines], where line i stands in ``selected`` followed by ``rest``.
    """

    selected: Tensor
    rest: Tensor
    position: Tensor

    @classmethod
    def of(cls, selected: Tensor, lines: int, device: torch.device, rest: Tensor | None = None) -> Selection:
        """A selection of ``lines`` lines; ``rest`` in ascending order unless given."""
        if rest is None:
            others = torch.ones(lines, dtype=torch.bool)
            others[selected.cpu().long()] = False
            rest = torch.nonzero(others).flatten()
        order = torch.cat([selected.cpu().long(), rest.cpu().long()])
        position = torch.empty(lines, dtype=torch.int32)
        position[order] = torch.arange(lines, dtype=torch.int32)
        return cls(
            selected=selected.to(device=device, dtype=torch.int32),
            rest=rest.to(device=device, dtype=torch.int32),
            position=position.to(device),
        )

    @property
    def lines(self) -> int:
        """Number of lines of the matrix."""
        return self.position.numel()

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self.selected.nbytes + self.rest.nbytes + self.position.nbytes


def column_norms(matrix: Tensor, dim: int) -> Tensor:
    """Squared L2 norm of every line, f32[lines], accumulated in fp32 in a fixed order.

    Args:
        matrix: [rows, columns], any floating dtype and strides.
    """
    return torch.linalg.vector_norm(matrix, dim=1 - dim, dtype=torch.float32).square_()


def split_columns(matrix: Tensor, dim: int, selection: Selection, selected_out: Tensor, rest_out: Tensor) -> None:
    """Copy the selected lines into ``selected_out`` [k, length] and the others into ``rest_out`` [rest, length]."""
    lines = matrix if dim == 0 else matrix.t()
    if selected_out.shape[0]:
        torch.index_select(lines, 0, selection.selected, out=selected_out)
    if rest_out.shape[0]:
        torch.index_select(lines, 0, selection.rest, out=rest_out)


def unsplit_columns(
    matrix_out: Tensor, dim: int, selection: Selection, selected_in: Tensor, rest_in: Tensor
) -> None:
    """Inverse of :func:`split_columns`: put the lines of both blocks back into ``matrix_out`` [rows, columns]."""
    merge_columns(matrix_out, dim, selection.selected, selected_in)
    merge_columns(matrix_out, dim, selection.rest, rest_in)


def merge_columns(matrix: Tensor, dim: int, lines: Tensor, values: Tensor) -> None:
    """Write ``values`` [n, length] into the lines ``lines`` i32[n] of ``matrix``, in place; the others stay."""
    if lines.numel():
        matrix.index_copy_(dim, lines.long(), values if dim == 0 else values.t())


def adam_columns_(
    matrix: Tensor,
    dim: int,
    selection: Selection,
    gradient: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    slot: SlotCoefficients,
    *,
    step: int,
    eps: float,
) -> None:
    """One AdamW step on the selected lines' fp32 state ``[k, length]``, cast into the matrix.

    Args:
        gradient: [k, length] in the matrix's dtype.
        step: gradients that the moments have taken after this one.
    """
    if selection.selected.numel():
        rule_p_(master, exp_avg, exp_avg_sq, [gradient], [slot], step=step, eps=eps)
        merge_columns(matrix, dim, selection.selected, master.to(matrix.dtype))
