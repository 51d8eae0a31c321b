"""Device buffers that copies pass through, between memory of the compiler's and memory of the host."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow_compile.runtime.copies import Ticket


class StagedBlock(NamedTuple):
    """A buffer of a ring, in use."""

    number: int
    tensor: Tensor


class StagingRing:
    """A few equal device buffers that copies pass through.

    Compiler-owned memory never takes part in an asynchronous copy, since the compiler reuses it while the copy runs.
    A buffer that was read by a copy is handed out again only once the device has waited for that copy.
    """

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        self._buffers = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._free: deque[tuple[int, Ticket | None]] = deque((number, None) for number in range(slots))
        # Three operators make a view; the same few blocks come again and again.
        self._views: dict[tuple[int, tuple[int, int], torch.dtype], Tensor] = {}

    def fit(self, slots: int, slot_bytes: int) -> None:
        """Be ``slots`` buffers of at least ``slot_bytes``; none may be in use."""
        slot_bytes = max(slot_bytes, self._buffers[0].numel())
        if slots != len(self._buffers) or slot_bytes > self._buffers[0].numel():
            self.settle()
            self._views.clear()
            device = self._buffers[0].device
            self._buffers = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
            self._free = deque((number, None) for number in range(slots))

    @property
    def free(self) -> int:
        """Buffers that can be taken now."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Device memory of the ring."""
        return sum(buffer.numel() for buffer in self._buffers)

    @property
    def busy(self) -> bool:
        """Whether ``take`` would wait."""
        ticket = self._free[0][1]
        return ticket is not None and not ticket.done()

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> StagedBlock:
        """The buffer that was free longest, as ``[line, length]``."""
        number, ticket = self._free[0]
        if ticket is not None:
            ticket.wait_on_device()  # if the copy failed this raises, and the buffer stays where it is
        self._free.popleft()
        view = self._views.get((number, shape, dtype))
        if view is None:
            size = shape[0] * shape[1] * dtype.itemsize
            view = self._views[number, shape, dtype] = self._buffers[number][:size].view(dtype).view(shape)
        return StagedBlock(number, view)

    def give_back(self, block: StagedBlock, after: Ticket | None = None) -> None:
        """The block is free, once ``after`` (a copy that reads it) is done."""
        self._free.append((block.number, after))

    def settle(self) -> None:
        """Wait for the copies that read free buffers, forget how they ended, and have every buffer free.

        Nobody uses one: that includes buffers that an interrupt has kept from being given back.
        """
        for _, ticket in self._free:
            if ticket is not None:
                ticket.settle()
        self._free = deque((number, None) for number in range(len(self._buffers)))
