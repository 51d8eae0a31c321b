"""What an AdamW step on selected slices reads and writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.runtime.device_updates.selection import Selection
from zenflow_compile.runtime.state_forms import PLAIN, StateForm


class SliceState(NamedTuple):
    """The selected slices of one parameter, for ``column_ops.adam_columns_``.

    Attributes:
        matrix: [rows, columns], fp32, bf16 or fp16; only its selected slices are written, none is read. It may be
            ``master``.
        selection: None: all slices, in their order.
        gradient: [k, length], contiguous, of any floating dtype; not written.
        master: f32[k, length], contiguous, updated in place.
        exp_avg, exp_avg_sq: rows of moments, contiguous, as ``form`` stores them; updated in place.
        step: number of gradients in the moments, this one included.
    """

    matrix: Tensor
    dim: int
    selection: Selection | None
    gradient: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int
    form: StateForm = PLAIN

    def pieces(self, elements: int) -> list[SliceState]:
        """Cut the state into rows of ``elements`` elements together, or of one slice if that is longer."""
        most = max(1, elements // max(1, self.gradient.shape[1]))
        parts = (torch.split(each, most) for each in (self.gradient, self.master, self.exp_avg, self.exp_avg_sq))
        return [
            self._replace(gradient=gradient, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
            for gradient, master, exp_avg, exp_avg_sq in zip(*parts, strict=True)
        ]
