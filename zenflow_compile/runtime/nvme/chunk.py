"""A chunk: one parameter's state in a file, or its new weights, what the cache knows of it, and jobs that move it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from zenflow_compile.checks.validate import printable
from zenflow_compile.native.library import OTHER_CHECKSUM, READ, WRITE, FileChunk, HostJob, Record, Transfer
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device.stream_flags import Flag, HostFlags
from zenflow_compile.runtime.host.arena import carved_bytes
from zenflow_compile.runtime.host.workers import Bounds, Job, MemoryUser, Work
from zenflow_compile.runtime.nvme.state_file import StateFile, StateFileError, whole_pages
from zenflow_compile.runtime.state_forms import State, StateForm
from zenflow_compile.timeline import DISK


class Content(NamedTuple):
    """What the chunks of a cache have in them.

    Attributes:
        what: its name in errors, in front of the parameter's.
        remedy: what needs no file for it.
        size: bytes of a parameter's chunk: whole pages, in the cache and in a file.
        view: its tensors in the memory of a chunk, u8[size].
    """

    what: str
    remedy: str
    size: Callable[[ParamPlan], int]
    view: Callable[[Tensor, ParamPlan], State | Tensor]


@dataclass(eq=False, slots=True)
class CacheSpan:
    """Memory of the cache, from offset ``begin`` to ``end``, that a chunk has or had.

    Attributes:
        memory: u8[end - begin].
        content: the tensors in it.
        users: jobs and copies that may still read or write this memory, for this chunk or for those that were here
            before.
        read: the job that fills it; None: it is filled.
        writer: the last job that fills or changes it; None: it has the content.
    """

    begin: int
    end: int
    memory: Tensor
    content: Any
    users: list[MemoryUser]
    read: Job | None = None
    writer: Job | None = None

    def unsettled(self) -> list[MemoryUser]:
        """Forget the users that are settled. Returns the others."""
        self.users = [user for user in self.users if not user.is_settled]
        return self.users


@dataclass(eq=False, slots=True)
class Chunk:
    """A part of a file that belongs to one parameter. Only the training thread uses this object.

    Attributes:
        offset: where it begins in the file.
        description: of the same part of the file, for jobs; it has the checksum of the last write.
        place: its memory in the cache; None while it has none.
        changed: its memory is newer than the file, and no job is queued to write it.
        changed_by: the last job that changes it; None if the training thread did, or if the job has succeeded.
        in_file: the file has its content, or gets it from ``write``. Until then all of it is zero.
        write: the last job that writes it to the file.
        transfers: jobs that may still read or write its part of the file.
        fresh: memory for a job that overwrites all of it, and that is made next.
        flags: counters for streams that wait for reads, and the index of its own; None: only threads wait.
        next_use: when it is needed next: a step, and a number that orders uses within a step.
    """

    plan: ParamPlan
    file: StateFile
    offset: int
    content: Content
    flags: tuple[HostFlags, int] | None = None
    size: int = field(init=False)
    description: FileChunk = field(init=False)
    place: CacheSpan | None = None
    changed: bool = False
    changed_by: Job | None = None
    in_file: bool = False
    write: Job | None = None
    transfers: list[Job] = field(default_factory=list)
    fresh: CacheSpan | None = None
    _flags_given: int = 0
    next_use: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.content.size(self.plan)
        self.description = self.file.describe(self.offset, self.size)
        self.next_use = (self.plan.phase, self.plan.index)

    def next_flag(self) -> Flag | None:
        """The flag of the next read, which follows all others of this chunk: all raise one counter, in turn."""
        if self.flags is None:
            return None
        self._flags_given += 1
        return Flag(*self.flags, self._flags_given)

    @property
    def error(self) -> StateFileError | None:
        """The failure of the disk that lost its content; None while it is intact."""
        for job in (self.write, None if self.place is None else self.place.read):
            error = job.error if job is not None and job.is_set else None
            while error is not None:  # a job that was not written has failed with the one that could not read
                if isinstance(error, StateFileError):
                    return error
                error = error.__cause__
        return None


def chunk_bytes(plan: ParamPlan) -> int:
    return whole_pages(carved_bytes(StateForm.of_deferred(plan).tensors(plan.deferred)))


def state_in(memory: Tensor, plan: ParamPlan) -> State:
    """The stored tensors in the memory of a chunk, u8[size], aligned as in an arena."""
    tensors, begin = [], 0
    for shape, dtype in StateForm.of_deferred(plan).tensors(plan.deferred):
        end = begin + shape[0] * shape[1] * dtype.itemsize
        tensors.append(memory[begin:end].view(dtype).view(shape))
        begin += carved_bytes([(shape, dtype)])
    return State(tensors)


def weight_chunk_bytes(plan: ParamPlan) -> int:
    return whole_pages(plan.upload_bytes)


def _weight_in(memory: Tensor, plan: ParamPlan) -> Tensor:
    return memory[: plan.upload_bytes].view(plan.dtype).view(plan.deferred, plan.length)


STATE = Content(
    "the optimizer state",
    'keep more state in memory (policy="zero_offload", or zenflow with a larger topk_ratio)',
    chunk_bytes,
    state_in,
)
WEIGHTS = Content("the weight", 'keep weights in memory (offload_device="nvme")', weight_chunk_bytes, _weight_in)


def make_transfer(
    chunk: Chunk,
    kind: str,
    memory: Tensor,
    pool: ctypes.c_void_p,
    *,
    after: Sequence[Job],
    behind: Sequence[MemoryUser],
    step: int,
    deadline: int,
    flag: Flag | None = None,
) -> Job:
    """A job that moves ``chunk`` between its file and ``memory``, u8[size]. It fails with a ``StateFileError``.

    ``kind`` is ``"read"`` or ``"write"``. The others are as in :class:`Job`.
    """
    work = _TransferWork(chunk, kind, memory)
    return _FileJob(
        work, (), after, pool, behind=behind, deadline=deadline, step=step, param=chunk.plan.name, flag=flag
    )


class _FileJob(Job):
    lane = DISK

    def failure(self, error: BaseException) -> RuntimeError:
        """An error of the disk says itself what was lost."""
        if not isinstance(error, StateFileError):
            return super().failure(error)
        again = StateFileError(str(error))
        again.__cause__ = error.__cause__
        return again


class _TransferWork(Work):
    """See file_transfers.h."""

    bounds: Bounds = (ctypes.c_int64 * 2)(0, 1)

    def __init__(self, chunk: Chunk, kind: str, memory: Tensor) -> None:
        self.kind = kind  # type: ignore[misc]  # of the class in other work
        self._chunk = chunk
        self._memory = memory
        self._transfer = Transfer(ctypes.pointer(chunk.description), memory.data_ptr())

    def describe(self, memory: HostJob) -> object:
        memory.kind = READ if self.kind == "read" else WRITE
        memory.transfer = ctypes.pointer(self._transfer)
        # Hazard: the file stays open as long as a thread may use its number, which another file would get.
        return self._transfer, self._chunk.description, self._memory, self._chunk.file.opened

    def touched_bytes(self, task: int, record: Record) -> int:
        return self._chunk.size

    def failure(self, error: int) -> Exception:
        chunk = self._chunk
        if error == OTHER_CHECKSUM:
            cause: Exception = StateFileError(
                f"the checksum is {self._transfer.checksum:08x}, that of what was written "
                f"{chunk.description.checksum:08x}: the disk has lost or changed it, or another process wrote to the "
                "file"
            )
        else:
            cause = OSError(error, os.strerror(error))
        lost = StateFileError(
            f"{chunk.content.what} of {chunk.plan.name} could not be {'read' if self.kind == 'read' else 'written'} "
            f"({printable(chunk.file.path)}): {cause}; load the last saved state (the last checkpoint), after freeing "
            "space on the disk if it is full"
        )
        lost.__cause__ = cause
        return lost
