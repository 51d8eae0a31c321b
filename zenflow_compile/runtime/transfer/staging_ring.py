"""Device buffers that copies pass through, between memory of the compiler's and memory of the host."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.runtime.transfer.copy_lanes import Ticket


class StagedBlock(NamedTuple):
    """A buffer of a ring, in use."""

    number: int
    tensor: Tensor


class StagingRing:
    """A few equal device buffers that copies pass through.

    Compiler-owned memory never takes part in an asynchronous copy, since the compiler reuses it while the copy runs.
    A buffer that was read by a copy is handed out again only once the device has waited for that copy.

    [Note: one assignment] An interrupt comes behind a call. So who takes a buffer, or gives it back, notes that in its
    own record and in ``unused`` by one assignment, of values that were made before: no buffer is lost, or used twice.

    Attributes:
        unused: number of each buffer that can be taken, and the last copy that read it; first the one that was free
            longest.
    """

    def __init__(self, slots: int, buffer_bytes: int, device: torch.device) -> None:
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        self.unused: deque[tuple[int, Ticket | None]] = deque((number, None) for number in range(slots))
        # Three operators make a view; the same few blocks come again and again.
        self._views: dict[tuple[int, tuple[int, int], torch.dtype], Tensor] = {}

    def fit(self, slots: int, buffer_bytes: int) -> None:
        """Be ``slots`` buffers of at least ``slot_bytes``; none may be in use."""
        buffer_bytes = max(buffer_bytes, self._buffers[0].numel())
        if slots != len(self._buffers) or buffer_bytes > self._buffers[0].numel():
            self.settle()
            self._views.clear()
            device = self._buffers[0].device
            self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
            self.unused = deque((number, None) for number in range(slots))

    @property
    def free(self) -> int:
        """Buffers that can be taken now."""
        return len(self.unused)

    @property
    def nbytes(self) -> int:
        """Device memory of the ring."""
        return sum(buffer.numel() for buffer in self._buffers)

    @property
    def busy(self) -> bool:
        """Whether ``first_free`` would wait."""
        ticket = self.unused[0][1]
        return ticket is not None and not ticket.done()

    def first_free(self, shape: tuple[int, int], dtype: torch.dtype) -> StagedBlock:
        """The buffer that was free longest, as ``[slice, length]``; it is unused until ``without`` it is assigned.

        Raises:
            CopyError: the last copy that read it failed.
        """
        number, ticket = self.unused[0]
        if ticket is not None:
            ticket.wait_on_device()
        view = self._views.get((number, shape, dtype))
        if view is None:
            size = shape[0] * shape[1] * dtype.itemsize
            view = self._views[number, shape, dtype] = self._buffers[number][:size].view(dtype).view(shape)
        return StagedBlock(number, view)

    def without(self, block: StagedBlock) -> deque[tuple[int, Ticket | None]]:
        """What is unused once ``block`` is taken. See [Note: one assignment]."""
        return deque(entry for entry in self.unused if entry[0] != block.number)

    def with_back(self, block: StagedBlock, after: Ticket | None = None) -> deque[tuple[int, Ticket | None]]:
        """What is unused once ``block`` is given back: it is free when ``after`` (a copy that reads it) is done."""
        return deque([*self.unused, (block.number, after)])

    def settle(self) -> None:
        """Wait for the copies that read free buffers, forget how they ended, and have every buffer free.

        Nobody uses one: that includes buffers that were not given back.
        """
        for _, ticket in self.unused:
            if ticket is not None:
                ticket.settle()
        self.unused = deque((number, None) for number in range(len(self._buffers)))
