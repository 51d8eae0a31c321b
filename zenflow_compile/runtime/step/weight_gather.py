"""Brings the slices that other ranks have updated into the weights of this one, behind an optimizer step.

Only what has changed is sent: the selected slices of each rank, and all slices of its share if an update window was
applied. Every rank knows which slices the others have selected, since a new selection is sent once.

[Note: gather stream] Where the device has streams, all of it runs on one of its own, in one order on all ranks: it
waits for the uploads of this rank's updates, applies and sends them, and writes what comes. The next forward waits for
each parameter at its first use, as it does for uploads on one device. Nothing else uses the weights, the selections and
the upload buffers meanwhile: backwards, steps, ``flush`` and ``close`` begin behind this stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.plan import FlatShare, Share
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device_updates.selection import Selection
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter, bump_versions
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.ranks.packing import Packing, block, cut
from zenflow_compile.runtime.ranks.rank_group import Pending, RankGroup

GATHER_BYTES = 16 << 20
"""Most bytes of a rank's slices that are sent together, unless one parameter has more."""
HOST_GATHER_BYTES = 1 << 20
"""The same where tensors are in host memory: new pages of larger ones would cost more than the further calls."""


class Changed(NamedTuple):
    """A parameter of which all ranks have updated slices.

    Attributes:
        whole: the whole share of each rank, and not the selected slices alone.
    """

    offloaded: OffloadedParam
    whole: bool

    @property
    def most_slices(self) -> int:
        """Slices that a rank sends at most."""
        share = _share(self.offloaded)
        return share.most_slices if self.whole else share.most_selected

    @property
    def row_bytes(self) -> int:
        """Bytes that each rank sends."""
        plan = self.offloaded.plan
        return self.most_slices * plan.length * plan.dtype.itemsize

    def fill(self, row: Tensor, offset: int) -> None:
        """Copy this rank's slices into what it sends."""
        plan, weights = self.offloaded.plan, self.offloaded.weights
        if self.whole:
            block(row, offset, plan, plan.slices).copy_(weights.matrix)
        else:
            block(row, offset, plan, plan.k).copy_(weights.of(self.offloaded.device.selection.selected))


class WeightGather:
    """Sends this rank's slices of all parameters of an engine, and receives the others'."""

    def __init__(self, group: RankGroup, device: Device) -> None:
        self._group = group
        self._device = device
        self._streams = device.streams
        # Urgent, as the lane whose uploads it waits for: see [Note: progress] in stream_flags.
        self._stream = None if self._streams is None else self._streams.acquire(urgent=True)
        self._known: dict[int, Selection] = {}  # this rank's selection, as the others know it
        self._selected: dict[int, list[Tensor]] = {}  # by parameter and part: i64[selected slices of the part]

    def gather(
        self, changed: Sequence[Changed], apply: Callable[[OffloadedParam], object] = lambda offloaded: None
    ) -> None:
        """Bring the weights of ``changed`` up to date on all ranks; ``OffloadedParam.arriving`` says when they are.

        Args:
            changed: the same ones on all ranks, in the same order.
            apply: applies this rank's updates of a parameter that is ``whole``, before it is sent.

        Raises:
            RankError: another rank failed or is gone.
        """
        with self._on_stream():
            self._send_selections([each.offloaded for each in changed if not each.whole])
            dtypes = [each.offloaded.plan.dtype for each in changed]
            most = GATHER_BYTES if self._streams is not None else min(GATHER_BYTES, HOST_GATHER_BYTES)
            pieces = cut(changed, [each.row_bytes for each in changed], dtypes, most)
            under_way: list[tuple[list[Changed], Packing, Pending]] = []
            for piece in pieces:
                plans = [each.offloaded.plan for each in piece]
                packing = Packing.of([each.most_slices * each.offloaded.plan.length for each in piece])
                row = torch.zeros(packing.elements, dtype=plans[0].dtype, device=self._device.torch_device)
                for each, offset in zip(piece, packing.offsets, strict=True):
                    if each.whole:
                        apply(each.offloaded)
                    each.fill(row, offset)
                under_way.append((piece, packing, self._group.all_gather(row)))
                if len(under_way) > 1:
                    self._write(*under_way.pop(0))
            for each_under_way in under_way:
                self._write(*each_under_way)

    def gather_flat(self, params: Sequence[tuple[Parameter, VersionCounter, FlatShare]]) -> None:
        """Bring streamed parameters up to date on all ranks, behind their update and in front of what follows.

        Code without a fetch reads them.

        Raises:
            RankError: another rank failed or is gone.
        """
        under_way: list[tuple[Parameter, FlatShare, Pending]] = []
        for param, _, flat in params:
            row = torch.zeros(flat.most_elements, dtype=param.dtype, device=param.device)
            own = flat.view(param.detach())
            row[: own.numel()] = own
            under_way.append((param, flat, self._group.all_gather(row)))
            if len(under_way) > 1:
                _write_flat(*under_way.pop(0))
        for each in under_way:
            _write_flat(*each)
        bump_versions([param for param, _, _ in params], [counter for _, counter, _ in params])

    def wait(self) -> None:
        """Make the device's current stream wait for all that was gathered."""
        if self._streams is not None and self._stream is not None:
            self._streams.current().wait_stream(self._stream)

    def forget(self) -> None:
        """Send all selections again: a state is about to be loaded, behind a gather that an error may have ended."""
        self.wait()
        self._known.clear()

    def close(self) -> None:
        """Give the stream back. Idempotent."""
        if self._streams is not None and self._stream is not None:
            self.wait()  # before the next owner of the stream frees memory that is used on this one
            self._streams.release(self._stream, urgent=True)
            self._stream = None

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Queue the work of a block on the gather stream, behind all work of the current one."""
        if self._streams is None or self._stream is None:
            yield
            return
        self._stream.wait_stream(self._streams.current())
        with self._streams.use(self._stream), self._group.recorder.behind_the_step():
            yield

    def _write(self, piece: Sequence[Changed], packing: Packing, pending: Pending) -> None:
        """Write the slices of the other ranks into the weights."""
        rows = pending.wait(f"the weights of {piece[0].offloaded.plan.name}, ...")
        for (offloaded, whole), offset in zip(piece, packing.offsets, strict=True):
            plan, share = offloaded.plan, _share(offloaded)
            for part in range(share.parts):  # rank ``part`` has it
                # Hazard: ranks that have the same part may have got sums that differ in the last bit, and so may their
                # updates. The weights of all ranks are those of the first one.
                if part == share.part and share.first_holder:
                    continue
                target = offloaded.weights.of_part(part)
                if whole:
                    target.copy_(block(rows[part], offset, plan, share.count(share.whole.slices, part)))
                else:
                    slices = self._selected[plan.index][part]
                    target.index_copy_(0, slices, block(rows[part], offset, plan, len(slices)))
            offloaded.merged = False
        bump_versions([each.offloaded.param for each in piece], [each.offloaded.weights.counter for each in piece])
        if self._streams is not None:
            event = self._streams.event()
            event.record(self._stream)
            for each in piece:
                each.offloaded.arriving = event

    def _send_selections(self, params: Sequence[OffloadedParam]) -> None:
        """Tell all ranks which slices this one has selected, where that has changed."""
        new = [each for each in params if each.plan.whole.k and self._is_new(each)]
        if not new:
            return
        packing = Packing.of([_share(each).most_selected for each in new])
        row = torch.zeros(packing.elements, dtype=torch.int32, device=self._device.torch_device)
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


def _write_flat(param: Parameter, flat: FlatShare, pending: Pending) -> None:
    rows = pending.wait(f"the weights of {flat.whole.name}")
    for rank, row in enumerate(rows):
        if rank != flat.rank:
            part = flat.view(param.detach(), rank)
            part.data.copy_(row[: part.numel()])


def _share(offloaded: OffloadedParam) -> Share:
    assert offloaded.plan.share is not None
    return offloaded.plan.share
