"""Sums of gradients over ranks, in one order that all ranks keep.

A gradient is packed into a bucket when a backward brings it, and the bucket is sent when it is complete and its turn
has come. The one before it is received then, and this rank's part of it is what the rest of the engine sees: its share.
What a rank lacks at the end of the backward is sent as zeros. One message per backward tells all ranks which
parameters any of them has a gradient of, so that no rank waits for a collective that another one does not start.

A contribution that comes after its bucket was sent (a tied weight in a second graph) is sent at the end of the
backward. From then on all ranks send this parameter there, and likewise one that some rank had no gradient of.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.ranks.attendance import RankError
from zenflow_compile.runtime.ranks.rank_group import (
    Call,
    Pending,
    RankGroup,
    RowLayout,
    block,
    bytes_by_rank,
    cut,
    rows_of_parts,
)

BUCKET_BYTES = 4 << 20
"""Gradients of up to this size in total are sent together; a larger one has its own bucket. A link of 100 GB/s takes
40 us for it, the time of a few launches."""

FLAT_BYTES = 32 << 20
"""Most bytes of resident parameters' gradients that are sent together, at the end of the backward."""

_PRESENT, _LATE = 1, 2  # bits of a parameter in the message of a backward


class Bucket:
    """Gradients that are sent together.

    Attributes:
        arrived: indices of the parameters that have a contribution of this rank.
        of_backward: those of them that had one in the backward that runs.
        sent: in this round of sums; ``pending`` is the mean over ranks, while it is under way: first over those that
            divide parameters, then, if it ``is_across``, of the share over those that have it.
    """

    def __init__(self, members: Sequence[OffloadedParam], group: RankGroup, dtype: torch.dtype) -> None:
        self.members = tuple(members)
        self.arrived: set[int] = set()
        self.of_backward: set[int] = set()
        self.sent = False
        self.pending: Pending | None = None
        self.is_across = group.replicas == 1
        self._group = group
        self._dtype = dtype
        packing = RowLayout.of([_most_elements(member) for member in members])
        self._elements = packing.elements
        self._offset = dict(zip([member.plan.index for member in members], packing.offsets, strict=True))
        self._packed: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether every gradient has a contribution of the backward that runs: it is presumed to get no other one."""
        return len(self.of_backward) == len(self.members)

    def add(self, offloaded: OffloadedParam, matrix: Tensor) -> None:
        """Add a contribution [rows, columns] of one of the members."""
        packed, plan = self._memory(matrix.device), offloaded.plan
        assert plan.share is not None
        first = plan.index not in self.arrived
        rows = rows_of_parts(packed, self._offset[plan.index], plan)
        for source, target in plan.share.in_parts(plan.share.by_slice(matrix), rows):
            target.copy_(source) if first else target.add_(source)
        self.arrived.add(plan.index)
        self.of_backward.add(plan.index)

    def drop(self, offloaded: OffloadedParam) -> None:
        if offloaded.plan.index in self.arrived and self._packed is not None:
            self.arrived.discard(offloaded.plan.index)
            self.of_backward.discard(offloaded.plan.index)
            rows_of_parts(self._packed, self._offset[offloaded.plan.index], offloaded.plan).zero_()

    def start(self, device: torch.device) -> None:
        """Send it. The contributions that are missing are zeros."""
        self.pending = self._group.reduce_scatter(self._memory(device))
        self._packed, self.sent = None, True

    @property
    def ready(self) -> bool:
        """Return whether ``go_across`` and ``receive`` do not block the host."""
        return self.pending is None or self.pending.ready

    def go_across(self) -> None:
        """Start the mean over replicas, if there are any and it has not begun."""
        if self.pending is not None and not self.is_across:
            share = self.pending.wait(self._what)
            self.pending, self.is_across = self._group.mean_across(share), True

    @property
    def _what(self) -> str:
        return f"the gradients of {self.members[0].plan.name}, ..."

    def receive(self, present: Container[int] | None = None) -> None:
        """Receive it, if it was sent: each member takes its share; of ``present`` ones, if that is given."""
        if self.pending is None:
            return
        self.go_across()
        row, self.pending = self.pending.wait(self._what), None
        for member in self.members:
            plan = member.plan
            if present is None or plan.index in present:
                share = block(row, self._offset[plan.index], plan, plan.slices)
                member.gradient.receive_share(share.to(plan.dtype))

    def reset(self) -> None:
        self._packed = self.pending = None
        self.sent, self.is_across = False, self._group.replicas == 1
        self.arrived.clear()
        self.of_backward.clear()

    def list_memory(self, found: MemoryList) -> None:
        found.content(self._packed)

    def _memory(self, device: torch.device) -> Tensor:
        if self._packed is None:
            shape = (self._group.size, self._elements)
            self._packed = torch.zeros(shape, dtype=self._dtype, device=device)
        return self._packed


class GradientReduction:
    """Sends the gradients of one engine, and hands each rank's share to the engine.

    Sums have ``dtype``, or that of each gradient.
    """

    def __init__(
        self, group: RankGroup, registry: ParamRegistry, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._group = group
        self._registry = registry
        self._device = device
        self._dtype = dtype
        self._order: dict[int, int] | None = None  # by parameter: place of its arrival on rank 0, in the first backward
        self._arrivals: dict[int, None] = {}  # in order, each parameter once
        self._at_end: set[int] = set()  # parameters that are sent when the backward is over
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._early = 0  # buckets that may be sent before the backward is over
        self._sent = 0  # buckets of this round
        self._received = 0
        self._late: dict[int, Bucket] = {}
        self.on_device: set[int] = set()  # parameters without a share, whose gradient has reached ``.grad``
        self._failed = False

    def list_memory(self, found: MemoryList) -> None:
        for bucket in (*self._buckets, *self._late.values()):
            bucket.list_memory(found)

    def first_use(self, index: int) -> int:
        """Where a parameter comes in an order of first uses that all ranks have: gradients come in the reverse one."""
        order = self._order or {}
        return -order.get(index, -1)

    def has_unsent(self) -> bool:
        """Whether this rank has contributions that were not sent, and not cleared in ``.grad`` since."""
        self._drop_cleared()
        waiting = any(bucket.arrived and not bucket.sent for bucket in self._buckets)
        return bool(self.on_device or self._late or waiting)

    def begin_backward(self) -> None:
        """A backward begins; RankError if the one before it failed after some of its gradients had been sent."""
        if self._in_round():
            self.reset()
        self._check_not_failed()
        for bucket in self._buckets:
            bucket.of_backward.clear()

    def contribute(self, offloaded: OffloadedParam, grad: Tensor, *, send: bool) -> None:
        """Take a contribution of this rank; ``send``: of the last backward before the optimizer step."""
        self._begin()
        index = offloaded.plan.index
        bucket = self._bucket_of[index]
        if index in bucket.arrived and offloaded.gradient.local_was_dropped:
            bucket.drop(offloaded)
        matrix = offloaded.gradient.matrix_of(grad)
        offloaded.gradient.receive_local(matrix)
        self._arrivals[index] = None
        if bucket.sent:
            bucket = self._late.setdefault(index, self._bucket([offloaded]))
        bucket.add(offloaded, matrix)
        if send:
            self._send_complete()

    def finish(self) -> None:
        """Send what is left, and receive everything: a backward is over, and no further one comes before the step.

        Raises RankError if another rank failed, is gone, or does not end a backward.
        """
        self._begin()
        self._drop_cleared()
        order_was_known = self._order is not None
        flags = self._exchange_flags()
        present = {*_numbers((flags & _PRESENT).amax(0))}
        lacking = present - {*_numbers((flags & _PRESENT).amin(0))}
        late = _numbers((flags & _LATE).amax(0))
        for bucket in self._buckets[self._sent :]:
            if any(member.plan.index in present for member in bucket.members):
                bucket.start(self._device)
        for bucket in self._buckets[self._received :]:
            bucket.go_across()
        for bucket in self._buckets[self._received :]:
            bucket.receive(present)
        for index in late:
            self._send_late(self._registry.offloaded[index])
        self._reduce_on_device(present)
        self._measure()
        for bucket in self._buckets:
            bucket.reset()
        self._sent = self._received = 0
        at_end = self._at_end | ({*late, *lacking} & self._registry.offloaded.keys())
        if at_end != self._at_end or not order_was_known:
            self._at_end = at_end
            self._make_buckets()

    def reset(self) -> None:
        """Forget contributions: they were discarded.

        If some were sent, the backward has failed in between, and the other ranks wait for its end.
        """
        if self._in_round():
            self._failed = True
            self._group.announce(_FAILED_BACKWARD)
        for bucket in self._buckets:
            bucket.reset()
        self._late.clear()
        self.on_device.clear()
        self._arrivals.clear()

    def parameters_changed(self) -> None:
        """Serve the parameters that the registry has now. Call it between steps."""
        self._buckets, self._bucket_of = [], {}
        self._group.make_room(5 * len(self._registry.params))

    # Buckets.

    def _begin(self) -> None:
        self._check_not_failed()
        if not self._buckets:
            self._make_buckets()

    def _in_round(self) -> bool:
        return any(bucket.sent for bucket in self._buckets)

    def _check_not_failed(self) -> None:
        if self._failed:
            raise RankError(_FAILED_BACKWARD)

    def _drop_cleared(self) -> None:
        """Forget contributions whose gradient was cleared or replaced in ``.grad`` before they were sent."""
        for bucket in self._buckets:
            for member in bucket.members:
                if not bucket.sent and member.plan.index in bucket.arrived and member.gradient.local_was_dropped:
                    bucket.drop(member)
        self.on_device = {index for index in self.on_device if self._registry.params[index].grad is not None}

    def _make_buckets(self) -> None:
        offloaded = self._registry.offloaded
        known = self._order or {}
        # Gradients come in the reverse order of parameters, until it is known better.
        order = sorted(offloaded, key=lambda index: (index in self._at_end, known.get(index, len(known)), -index))
        members = [offloaded[index] for index in order]
        dtypes = [self._dtype or member.plan.dtype for member in members]
        pairs = zip(members, dtypes, strict=True)
        sizes = [_most_elements(each) * self._group.size * dtype.itemsize for each, dtype in pairs]
        early = sum(index not in self._at_end for index in order)
        pieces = [
            piece
            for part in (slice(0, early), slice(early, None))
            for piece in cut(members[part], sizes[part], dtypes[part], BUCKET_BYTES)
        ]
        self._early = sum(piece[0].plan.index not in self._at_end for piece in pieces)
        self._buckets = [self._bucket(piece) for piece in pieces]
        self._bucket_of = {member.plan.index: bucket for bucket in self._buckets for member in bucket.members}

    def _send_complete(self) -> None:
        while self._sent < self._early and (bucket := self._buckets[self._sent]).complete:
            bucket.start(self._device)
            self._sent += 1
        # Hazard: a rank that is in another call sends nothing, and notices at the message of this backward. So the host
        # does not wait before that one, and the device is one bucket behind. What goes across is received at the next
        # look, so that it has begun by then.
        for bucket in self._buckets[self._received : max(0, self._sent - 1)]:
            if not bucket.ready:
                break
            if bucket.is_across and bucket is self._buckets[self._received]:
                bucket.receive()
                self._received += 1
            else:
                bucket.go_across()

    def _send_late(self, offloaded: OffloadedParam) -> None:
        bucket = self._late.pop(offloaded.plan.index, None) or self._bucket([offloaded])
        bucket.start(self._device)
        bucket.receive()

    def _bucket(self, members: Sequence[OffloadedParam]) -> Bucket:
        return Bucket(members, self._group, self._dtype or members[0].plan.dtype)

    # What all ranks must know.

    def _exchange_flags(self) -> Tensor:
        """Tell all ranks what this one has. Returns the flags u8[ranks, parameters]."""
        count = len(self._registry.params)
        flags = bytearray(count)
        for index in self.on_device:
            flags[index] = _PRESENT
        for bucket in self._buckets:
            for index in bucket.arrived:
                flags[index] |= _PRESENT
        for index in self._late:
            flags[index] |= _LATE | _PRESENT
        order = b""
        if self._order is None:
            order = b"".join(index.to_bytes(4, "little") for index in self._arrivals).ljust(4 * count, b"\xff")
        self._arrivals.clear()
        rows = self._group.exchange(Call.BACKWARD, bytes(flags) + order)
        if order:
            numbers = (int.from_bytes(rows[0][at : at + 4], "little") for at in range(count, 5 * count, 4))
            self._order = {number: place for place, number in enumerate(numbers) if number < count}
        return bytes_by_rank(rows)[:, :count]

    # Parameters without a share.

    def _reduce_on_device(self, present: set[int]) -> None:
        """Replace the gradients of resident and streamed parameters by their mean over ranks."""
        self.on_device.clear()
        params = [self._registry.params[index] for index in sorted(present) if index not in self._registry.offloaded]
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        grads = [param.grad for param in params if param.grad is not None]
        dtypes = [self._dtype_of_sum(grad) for grad in grads]
        sizes = [grad.numel() * dtype.itemsize for grad, dtype in zip(grads, dtypes, strict=True)]
        for piece in cut(grads, sizes, [grad.dtype for grad in grads], FLAT_BYTES):
            flat = torch.cat([grad.reshape(-1) for grad in piece]).to(self._dtype_of_sum(piece[0]))
            flat = self._group.all_reduce(flat, mean=True).wait("the gradients of resident parameters")
            parts = torch.split(flat.to(piece[0].dtype), [grad.numel() for grad in piece])
            torch._foreach_copy_(piece, [part.view_as(grad) for part, grad in zip(parts, piece, strict=True)])

    def _dtype_of_sum(self, grad: Tensor) -> torch.dtype:
        """gloo adds up before it divides, in the dtype that it gets: a sum in fp16 may be infinite."""
        wide = torch.promote_types(grad.dtype, torch.float32) if grad.device.type == "cpu" else grad.dtype
        return self._dtype or wide

    # Norms.

    def _measure(self) -> None:
        """Set the norms of all gradients that have none yet: of the whole gradients, from one message."""
        found = []
        for offloaded in self._registry.offloaded.values():
            record = offloaded.shown.record
            if record is not None and record.norm is None and record.state in _WITH_NORM:
                found.append((offloaded, record))
        if not found:
            return
        zero = torch.zeros((), device=self._device)
        squares = [
            each.shown.squared_norms.sum() if (share := each.plan.share) and share.first_holder else zero
            for each, _ in found
        ]
        norms = self._group.all_reduce(torch.stack(squares)).wait("the norms of the gradients").sqrt_()
        for (_, record), norm in zip(found, norms.unbind(), strict=True):
            record.norm, record.spare = norm, None


_FAILED_BACKWARD = (
    "a backward failed, or another one ran inside it (torch.utils.checkpoint with use_reentrant=True), after some of "
    "its gradients had been sent to the other ranks, which cannot go on without the rest: start all ranks again from "
    "the last saved state"
)
_WITH_NORM = (GradientState.PARTS, GradientState.ON_DEVICE)


def _numbers(flags: Tensor) -> list[int]:
    """The parameters with a flag that is not 0, of u8[parameters]."""
    found: list[int] = flags.nonzero().flatten().tolist()
    return found


def _most_elements(offloaded: OffloadedParam) -> int:
    """Elements of the largest part, for which each row of a bucket has room."""
    share = offloaded.plan.share
    assert share is not None
    return share.most_slices * offloaded.plan.length
