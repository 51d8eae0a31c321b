"""Brings the slices that other ranks have updated into the weights of this one, behind an optimizer step.

Only what has changed is sent: the selected slices of each rank, and all slices of its share if an update window was
applied. Every rank knows which slices the others have selected, since a new selection is sent once.

[Note: gather stream] Where the device has streams, the gather runs on a stream of its own, in one order on all ranks.
It waits for the uploads of this rank's updates, applies and sends them, and writes the slices of the other ranks. The
next forward waits for each parameter at its first use, as it does for uploads on one device. Nothing else uses the
weights, the selections and the upload buffers meanwhile: backwards, steps, ``flush`` and ``close`` begin behind this
stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from zenflow_compile.planning.plan import FlatShare, Share
from zenflow_compile.runtime.device.device import Device, Stream, Streams
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device_updates.selection import Selection
from zenflow_compile.runtime.device_updates.streamed_updates import StreamedParam
from zenflow_compile.runtime.device_updates.version_counter import bump_versions
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.ranks.rank_group import Pending, RankGroup, RowLayout, block, cut
from zenflow_compile.runtime.recorder import Recorder

_Piece = TypeVar("_Piece")


class Changed(NamedTuple):
    """A parameter of which all ranks have updated slices: the ``whole`` share of each, or the selected slices alone."""

    offloaded: OffloadedParam
    whole: bool

    @property
    def most_slices(self) -> int:
        share = _share(self.offloaded)
        return share.most_slices if self.whole else share.most_selected

    @property
    def row_bytes(self) -> int:
        plan = self.offloaded.plan
        return self.most_slices * plan.length * plan.dtype.itemsize

    def fill(self, row: Tensor, offset: int) -> None:
        plan, weights = self.offloaded.plan, self.offloaded.weights
        if self.whole:
            block(row, offset, plan, plan.slices).copy_(weights.matrix)
        else:
            block(row, offset, plan, plan.k).copy_(weights.of(self.offloaded.device.selection.selected))


class CallersStream:
    """Where a gather runs on a device without streams: in the caller's order.

    Attributes:
        most_bytes: of a rank's slices that are sent together, unless one parameter has more.
    """

    most_bytes = 1 << 20  # in host memory, new pages of larger tensors would cost more than the further calls

    def run(self) -> AbstractContextManager[None]:
        """Queue the work of a block after all work of the current stream."""
        return nullcontext()

    def wait(self) -> None:
        """Make the device's current stream wait for the last gather."""

    def written(self, params: Sequence[OffloadedParam]) -> None:
        """Note that the queued work brings ``params`` up to date."""

    def close(self) -> None:
        """Give the stream back."""


class OwnStream(CallersStream):
    """A stream of the gather's own, beside the training's."""

    most_bytes = 16 << 20

    def __init__(self, streams: Streams, recorder: Recorder) -> None:
        self._streams = streams
        self._recorder = recorder
        # Urgent, as the lane whose uploads it waits for: see [Note: progress] in stream_flags.
        self.raw: Stream | None = streams.acquire(urgent=True)

    @contextmanager
    def run(self) -> Iterator[None]:
        if (stream := self.raw) is None:
            yield
            return
        stream.wait_stream(self._streams.current())
        with self._streams.use(stream), self._recorder.behind_the_step():
            yield

    def wait(self) -> None:
        if self.raw is not None:
            self._streams.current().wait_stream(self.raw)

    def written(self, params: Sequence[OffloadedParam]) -> None:
        event = self._streams.event()
        event.record(self.raw)
        for each in params:
            each.arriving = event

    def close(self) -> None:
        if self.raw is not None:
            self.wait()  # before the next owner of the stream frees memory that is used on this one
            self._streams.release(self.raw, urgent=True)
            self.raw = None


class WeightGather:
    """Sends this rank's slices of all parameters of an engine, and receives the others'."""

    def __init__(self, group: RankGroup, device: Device) -> None:
        self._group = group
        self._device = device
        self.stream = CallersStream() if device.streams is None else OwnStream(device.streams, group.recorder)
        self._known: dict[int, Selection] = {}  # this rank's selection, as the others know it
        self._selected: dict[int, list[Tensor]] = {}  # by parameter: i64[n], slices of all parts
        self._streamed: tuple[int, ...] = ()  # indices of the streamed parameters that ``_layouts`` are of
        self._layouts: list[FlatLayout] = []

    def gather(
        self, changed: Sequence[Changed], apply: Callable[[OffloadedParam], object] = lambda offloaded: None
    ) -> None:
        """Bring the weights of ``changed`` up to date on all ranks; ``OffloadedParam.arriving`` says when they are.

        Args:
            changed: the same ones on all ranks, in the same order.
            apply: applies this rank's updates of a parameter that is ``whole``, before it is sent.
        """
        with self.stream.run():
            self._send_selections([each.offloaded for each in changed if not each.whole])
            self._exchange(self._rows(changed, apply), self._write)

    def gather_flat(self, params: Sequence[StreamedParam]) -> None:
        """Bring streamed parameters up to date on all ranks, in the current stream: no fetch would wait for them."""
        self._exchange(self._flat_rows(params), _write_flat)
        bump_versions([each.param for each in params], [each.state.counter for each in params])

    def _exchange(self, rows: Iterable[tuple[_Piece, Tensor]], write: Callable[[_Piece, Pending], None]) -> None:
        """Send ``rows``, and ``write`` the rows of all ranks while the next ones are on their way."""
        under_way: deque[tuple[_Piece, Pending]] = deque()
        for piece, row in rows:
            under_way.append((piece, self._group.all_gather(row)))
            if len(under_way) > 1:
                write(*under_way.popleft())
        while under_way:
            write(*under_way.popleft())

    def _rows(
        self, changed: Sequence[Changed], apply: Callable[[OffloadedParam], object]
    ) -> Iterator[tuple[list[tuple[Changed, int]], Tensor]]:
        """Fill the rows that this rank sends: parameters with their offsets, and the row."""
        dtypes = [each.offloaded.plan.dtype for each in changed]
        for piece in cut(changed, [each.row_bytes for each in changed], dtypes, self.stream.most_bytes):
            packing = RowLayout.of([each.most_slices * each.offloaded.plan.length for each in piece])
            row = torch.zeros(packing.elements, dtype=piece[0].offloaded.plan.dtype, device=self._device.torch_device)
            for each, offset in zip(piece, packing.offsets, strict=True):
                if each.whole:
                    apply(each.offloaded)
                each.fill(row, offset)
            yield list(zip(piece, packing.offsets, strict=True)), row

    def _flat_rows(self, params: Sequence[StreamedParam]) -> Iterator[tuple[RowChunk, Tensor]]:
        """Fill the rows of streamed parameters, in chunks: the parts that a rank has are consecutive in its row."""
        for row_layout in self._layouts_of(params):
            dtype = row_layout.params[0].plan.dtype
            most = self.stream.most_bytes // dtype.itemsize
            for first in range(0, row_layout.elements, most):
                chunk = RowChunk(row_layout, range(first, min(first + most, row_layout.elements)))
                row = torch.zeros(len(chunk.elements), dtype=dtype, device=self._device.torch_device)
                for part, place in chunk.parts_of(self._group.rank):
                    row[place] = part
                yield chunk, row

    def _layouts_of(self, params: Sequence[StreamedParam]) -> list[FlatLayout]:
        """Return the layout of the rows of each dtype; computed again if other parameters have gradients."""
        indices = tuple(each.plan.index for each in params)
        if indices != self._streamed:
            dtypes = dict.fromkeys(each.plan.dtype for each in params)
            alike = ([each for each in params if each.plan.dtype == dtype] for dtype in dtypes)
            self._streamed, self._layouts = indices, [FlatLayout.of(each, self._group.size) for each in alike]
        return self._layouts

    def forget(self) -> None:
        """Send all selections again: a state is about to be loaded, behind a gather that an error may have ended."""
        self.stream.wait()
        self._known.clear()

    def list_memory(self, found: MemoryList) -> None:
        for selection in self._known.values():
            selection.list_memory(found)
        for slices in self._selected.values():
            found.content(*slices)

    def _write(self, piece: list[tuple[Changed, int]], pending: Pending) -> None:
        members = [each.offloaded for (each, _) in piece]
        rows = pending.wait(f"the weights of {members[0].plan.name}, ...")
        for (offloaded, whole), offset in piece:
            plan, share = offloaded.plan, _share(offloaded)
            most = share.most_slices if whole else share.most_selected
            # Hazard: ranks that have the same part may have got sums that differ in the last bit, and so may their
            # updates. The weights of all ranks are those of the first one: they are written over its own, too.
            parts = rows[: share.parts, offset : offset + most * plan.length].view(share.parts, most, plan.length)
            weights = offloaded.weights.of_all_ranks
            if whole:
                for target, of_parts in share.in_parts(weights, parts):
                    target.copy_(of_parts)
            else:
                for slices, of_parts in zip(
                    self._selected[plan.index], share.of_parts(share.whole.k, parts), strict=True
                ):
                    weights.index_copy_(0, slices, of_parts.reshape(-1, plan.length))
            offloaded.updates.merged = False
        bump_versions([each.param for each in members], [each.weights.counter for each in members])
        self.stream.written(members)

    def _send_selections(self, params: Sequence[OffloadedParam]) -> None:
        new = [each for each in params if each.plan.whole.k and self._is_new(each)]
        if not new:
            return
        packing = RowLayout.of([_share(each).most_selected for each in new])
        row = torch.zeros(packing.elements, dtype=torch.int32, device=self._device.torch_device)
        for offloaded, offset in zip(new, packing.offsets, strict=True):
            row[offset : offset + offloaded.plan.k] = offloaded.device.selection.selected
        rows = self._group.all_gather(row).wait("the selections of the other ranks").long()
        parts = torch.arange(len(rows), device=rows.device).unsqueeze(1)
        for offloaded, offset in zip(new, packing.offsets, strict=True):
            share = _share(offloaded)
            self._known[offloaded.plan.index] = offloaded.device.selection
            of_parts = rows[: share.parts, offset : offset + share.most_selected]
            of_whole = of_parts * share.parts + parts[: share.parts]
            self._selected[offloaded.plan.index] = [each.flatten() for each in share.of_parts(share.whole.k, of_whole)]

    def _is_new(self, offloaded: OffloadedParam) -> bool:
        return self._known.get(offloaded.plan.index) is not offloaded.device.selection


class FlatLayout(NamedTuple):
    """Where the parts of ``params``, which have one dtype, are in the rows that ranks send.

    Attributes:
        places: by rank and parameter, in the order of ``params``.
        elements: of the longest row.
    """

    params: Sequence[StreamedParam]
    places: Sequence[Sequence[range]]
    elements: int

    @classmethod
    def of(cls, params: Sequence[StreamedParam], ranks: int) -> FlatLayout:
        """Put the parts of each rank behind each other."""
        places = []
        for rank in range(ranks):
            ends = accumulate((len(_flat(each).bounds(rank)) for each in params), initial=0)
            places.append([range(first, stop) for first, stop in pairwise(ends)])
        return cls(params, places, max(row[-1].stop for row in places))


class RowChunk(NamedTuple):
    """Consecutive ``elements`` of the rows of all ranks, which are sent together. A part may span several chunks."""

    layout: FlatLayout
    elements: range

    def parts_of(self, rank: int) -> Iterator[tuple[Tensor, slice]]:
        """Yield the pieces of a rank's parts that the chunk holds: a view of the weight, and its place in the chunk."""
        chunk, places = self.elements, self.layout.places[rank]
        # Searched: a model has many chunks, and each of them holds pieces of few parameters.
        for at in range(bisect_right(places, chunk.start, key=_stop_of), len(places)):
            place = places[at]
            if place.start >= chunk.stop:
                break
            first, stop = max(place.start, chunk.start), min(place.stop, chunk.stop)
            if first < stop:
                streamed = self.layout.params[at]
                part = _flat(streamed).view(streamed.param.data, rank)
                yield part[first - place.start : stop - place.start], slice(first - chunk.start, stop - chunk.start)


_stop_of = attrgetter("stop")


def _write_flat(chunk: RowChunk, pending: Pending) -> None:
    first = chunk.layout.params[0]
    rows = pending.wait(f"the weights of {first.plan.name}, ...")
    for rank, row in enumerate(rows):
        if rank != _flat(first).rank:
            for part, place in chunk.parts_of(rank):
                part.copy_(row[place])


def _flat(streamed: StreamedParam) -> FlatShare:
    assert streamed.plan.flat is not None
    return streamed.plan.flat


def _share(offloaded: OffloadedParam) -> Share:
    assert offloaded.plan.share is not None
    return offloaded.plan.share
