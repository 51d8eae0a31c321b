"""A chunk: the fp32 state of one parameter in a file, and what the cache knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from zenflow_compile.planning.plan import FP32_BYTES, STATE_TENSORS, ParamPlan
from zenflow_compile.runtime.host.arena import carved_bytes
from zenflow_compile.runtime.host.state_store import State
from zenflow_compile.runtime.nvme.state_file import StateFile, StateFileError, whole_pages

WANTED, AHEAD = 0, 1  # readers serve waiting locks first, then read ahead
Key = tuple[int, int, int]
"""When a chunk is needed: WANTED or AHEAD, then step, then deadline."""


class ChunkState(Enum):
    """Where the newest content of a chunk is, and which thread is moving it."""

    ON_DISK = auto()  # no memory in the cache
    READING = auto()  # a reader fills its memory
    CACHED = auto()  # in the cache, the same as on the disk: may be evicted
    CHANGED = auto()  # in the cache, newer than on the disk: keeps its memory until it is written
    WRITING = auto()  # a writer reads its memory, so that no lock can acquire it


@dataclass(eq=False, slots=True)
class LockRequest:
    """A request for exclusive use of a chunk.

    Attributes:
        key: when it needs the chunk.
        next_use: when the chunk is needed after it; None: as before.
        writes: the state will be changed.
        fresh: all of the state will be overwritten, so that its old content is not read, and may be lost.
    """

    chunk: Chunk
    key: Key
    next_use: Key | None
    writes: bool = True
    fresh: bool = False


@dataclass(eq=False, slots=True)
class Chunk:
    """The state of one parameter in a file. All attributes that change are guarded by the cache's lock.

    Attributes:
        name: of the parameter.
        size: bytes in the file and in the cache, whole pages.
        offset: where it begins in the file.
        begin: where it begins in the cache, if it has memory there.
        tensors: the state in that memory; None while it is not there.
        checksum: of the last write; None: never written, and all zero.
        requests: locks that wait for the chunk, and the one that has it.
        holder: the lock that has it.
        key: when it is needed next. next_use: the same if no lock waits for it.
        error: the failure that lost its content; None while it is intact.
    """

    plan: ParamPlan
    file: StateFile
    offset: int
    size: int = field(init=False)
    state: ChunkState = ChunkState.ON_DISK
    begin: int = 0
    tensors: State | None = None
    checksum: int | None = None
    requests: list[LockRequest] = field(default_factory=list)
    holder: LockRequest | None = None
    key: Key = field(init=False)
    next_use: Key = field(init=False)
    error: StateFileError | None = None

    def __post_init__(self) -> None:
        self.size = chunk_bytes(self.plan)
        self.key = self.next_use = (AHEAD, self.plan.phase, self.plan.index)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def at_rest(self) -> bool:
        """Whether the chunk is as it is on disk, and no thread uses it."""
        return self.state in (ChunkState.ON_DISK, ChunkState.CACHED) and self.holder is None

    def evict(self) -> None:
        self.state, self.tensors = ChunkState.ON_DISK, None

    def update_key(self) -> None:
        self.key = min((request.key for request in self.requests), default=self.next_use)


def chunk_bytes(plan: ParamPlan) -> int:
    """Bytes that the parameter's state takes in the cache and in a file: whole pages."""
    return whole_pages(STATE_TENSORS * _tensor_stride_bytes(plan))


def state_in(memory: Tensor, plan: ParamPlan) -> State:
    """The state tensors in the memory of a chunk, u8[size]."""
    stride, shape = _tensor_stride_bytes(plan), (plan.deferred, plan.length)
    size = FP32_BYTES * plan.deferred * plan.length
    parts = (memory[i * stride : i * stride + size] for i in range(STATE_TENSORS))
    return State(*(part.view(torch.float32).view(shape) for part in parts))


def _tensor_stride_bytes(plan: ParamPlan) -> int:
    """Bytes from the beginning of one state tensor to the next: aligned as in an arena."""
    return carved_bytes([((plan.deferred, plan.length), torch.float32)])
