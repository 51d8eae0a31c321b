"""Brings the slices that other ranks have updated into the weights of this one, at the end of an optimizer step.

Only what has changed is sent: the selected slices of each rank, and all slices of its share if an update window was
applied. Every rank knows which slices the others have selected, since a new selection is sent once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan, Share
from zenflow_compile.runtime.device_updates.selection import Selection
from zenflow_compile.runtime.device_updates.version_counter import bump_versions
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.ranks.packing import Packing, block, cut
from zenflow_compile.runtime.ranks.rank_group import Pending, RankGroup

GATHER_BYTES = 16 << 20
"""Most bytes of a rank's slices that are sent together, unless one parameter has more."""


class WeightGather:
    """Sends this rank's slices of all parameters of an engine, and receives the others'."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._known: dict[int, Selection] = {}  # this rank's selection, as the others know it
        self._selected: dict[int, list[Tensor]] = {}  # by parameter and part: i64[selected slices of the part]

    def gather(self, params: Sequence[OffloadedParam]) -> None:
        """Bring the weights of ``params``, of which all ranks have updated slices, up to date on all ranks.

        Raises:
            RankError: another rank failed or is gone.
        """
        self._send_selections(params)
        pieces = cut(params, [_row_bytes(each) for each in params], [each.plan.dtype for each in params], GATHER_BYTES)
        under_way: list[tuple[list[OffloadedParam], Packing, Pending]] = []
        for piece in pieces:
            packing = Packing.of([_most_slices(each) * each.plan.length for each in piece])
            row = torch.zeros(packing.elements, dtype=piece[0].plan.dtype, device=self._device)
            for offloaded, offset in zip(piece, packing.offsets, strict=True):
                _fill(row, offset, offloaded)
            under_way.append((piece, packing, self._group.all_gather(row)))
            if len(under_way) > 1:
                self._write(*under_way.pop(0))
        for each in under_way:
            self._write(*each)

    def forget(self) -> None:
        """Send all selections again: a state was loaded."""
        self._known.clear()

    def _write(self, piece: Sequence[OffloadedParam], packing: Packing, pending: Pending) -> None:
        rows = pending.wait(f"the weights of {piece[0].plan.name}, ...")
        for offloaded, offset in zip(piece, packing.offsets, strict=True):
            plan, share = offloaded.plan, _share(offloaded)
            for part in range(share.parts):  # rank ``part`` has it
                # Hazard: ranks that have the same part may have got sums that differ in the last bit, and so may their
                # updates. The weights of all ranks are those of the first one.
                if part == share.part and share.first_holder:
                    continue
                target = offloaded.weights.of_part(part)
                if offloaded.merged:
                    target.copy_(block(rows[part], offset, plan, share.count(share.whole.slices, part)))
                else:
                    slices = self._selected[plan.index][part]
                    target.index_copy_(0, slices, block(rows[part], offset, plan, len(slices)))
            offloaded.merged = False
        bump_versions([each.param for each in piece], [each.weights.counter for each in piece])

    def _send_selections(self, params: Sequence[OffloadedParam]) -> None:
        """Tell all ranks which slices this one has selected, where that has changed."""
        new = [each for each in params if each.plan.whole.k and self._is_new(each)]
        if not new:
            return
        packing = Packing.of([_share(each).most_selected for each in new])
        row = torch.zeros(packing.elements, dtype=torch.int32, device=self._device)
        for offloaded, offset in zip(new, packing.offsets, strict=True):
            row[offset : offset + offloaded.plan.k] = offloaded.device.selection.selected
        rows = self._group.all_gather(row).wait("the selections of the other ranks").long()
        for offloaded, offset in zip(new, packing.offsets, strict=True):
            share = _share(offloaded)
            self._known[offloaded.plan.index] = offloaded.device.selection
            self._selected[offloaded.plan.index] = [
                rows[part, offset : offset + share.count(share.whole.k, part)] for part in range(share.parts)
            ]

    def _is_new(self, offloaded: OffloadedParam) -> bool:
        return self._known.get(offloaded.plan.index) is not offloaded.device.selection


def _share(offloaded: OffloadedParam) -> Share:
    assert offloaded.plan.share is not None
    return offloaded.plan.share


def _most_slices(offloaded: OffloadedParam) -> int:
    """Slices that a rank sends at most."""
    share = _share(offloaded)
    return share.most_slices if offloaded.merged else share.most_selected


def _row_bytes(offloaded: OffloadedParam) -> int:
    return _most_slices(offloaded) * offloaded.plan.length * offloaded.plan.dtype.itemsize


def _fill(row: Tensor, offset: int, offloaded: OffloadedParam) -> None:
    plan: ParamPlan = offloaded.plan
    if offloaded.merged:
        block(row, offset, plan, plan.slices).copy_(offloaded.weights.matrix)
    else:
        block(row, offset, plan, plan.k).copy_(offloaded.weights.of(offloaded.device.selection.selected))
