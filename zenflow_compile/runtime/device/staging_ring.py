"""Device buffers between compiler-owned memory and host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.device.memory_list import MemoryList

Block = tuple[tuple[int, int], torch.dtype]
"""Shape and dtype of what passes through a buffer."""


@dataclass(eq=False, slots=True)
class StagingBuffer:
    """One buffer of a ring.

    Attributes:
        memory: uint8 on the device.
        read_by: the last copy that reads it; the next user must wait for it on the device.
        tensor: the memory as its user sees it.
        views: of the memory, by block: three operators make one, and the same few shapes come again and again.
    """

    memory: Tensor
    in_use: bool = False
    read_by: Ticket | None = None
    tensor: Tensor = field(init=False)
    views: dict[Block, Tensor] = field(default_factory=dict)


class StagingRing:
    """A few equal device buffers that copies pass through.

    Compiler-owned memory never takes part in an asynchronous copy, since the compiler reuses it while the copy runs.

    [Note: one assignment] ``in_use`` is the only record of who may take a buffer. Its user sets it together with its
    own reference, in one assignment of values that were computed before. An interrupt comes after a call, so it finds
    both done or neither: no buffer is lost, and none has two users.
    """

    def __init__(self, count: int, buffer_bytes: int, device: torch.device) -> None:
        self.buffers = _allocate(count, buffer_bytes, device)
        self._first = 0  # where the search for a free buffer begins: a hint, so that buffers take turns

    def fit(self, buffer_bytes: int) -> None:
        """Make each buffer of at least so many bytes; none may be in use."""
        memory = self.buffers[0].memory
        if buffer_bytes > memory.numel():
            # First: the allocator does not know of copies on a lane's stream, and would reuse the old memory.
            self.settle()
            self.buffers = _allocate(len(self.buffers), buffer_bytes, memory.device)

    @property
    def free(self) -> int:
        """Number of buffers that are not in use."""
        return sum(not buffer.in_use for buffer in self.buffers)

    @property
    def nbytes(self) -> int:
        """Device memory of the ring."""
        return sum(buffer.memory.numel() for buffer in self.buffers)

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory."""
        for buffer in self.buffers:
            (found.content if buffer.in_use else found.scratch)(buffer.memory)

    def next_free(self, block: Block) -> StagingBuffer:
        """The buffer that was free longest, seen as ``block``, until its user takes it: see [Note: one assignment]."""
        count = len(self.buffers)
        for place in range(self._first, self._first + count):
            buffer = self.buffers[place % count]
            if not buffer.in_use:
                self._first = place % count + 1
                if (view := buffer.views.get(block)) is None:
                    (slices, length), dtype = block
                    first = buffer.memory[: slices * length * dtype.itemsize]
                    view = buffer.views[block] = first.view(dtype).view(slices, length)
                buffer.tensor = view
                return buffer
        raise AssertionError("all staging buffers are in use")

    def settle(self) -> None:
        """Wait for the copies that read buffers, whether they failed or not, and mark every buffer free.

        No parameter may use one. Buffers that an interrupt kept from being given back become free, too.
        """
        for buffer in self.buffers:
            if buffer.read_by is not None:
                buffer.read_by.settle()
            buffer.in_use, buffer.read_by = False, None


def _allocate(count: int, buffer_bytes: int, device: torch.device) -> list[StagingBuffer]:
    return [StagingBuffer(torch.empty(buffer_bytes, dtype=torch.uint8, device=device)) for _ in range(count)]
