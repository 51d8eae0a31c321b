"""A chunk: the state of one parameter in a file, and what the cache knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from zenflow_compile.native.library import FileChunk
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.host.arena import carved_bytes
from zenflow_compile.runtime.host.state_forms import State, StateForm
from zenflow_compile.runtime.host.workers import Job
from zenflow_compile.runtime.nvme.state_file import StateFile, StateFileError, whole_pages


@dataclass(eq=False, slots=True)
class Place:
    """Memory of the cache, from offset ``begin`` to ``end``, that a chunk has or had.

    Attributes:
        memory: u8[end - begin].
        tensors: the state in it.
        users: jobs that may still read or write this memory, for this chunk or for those that were here before.
        read: the job that fills it; None: it is filled.
    """

    begin: int
    end: int
    memory: Tensor
    tensors: State
    users: list[Job]
    read: Job | None = None

    def unsettled(self) -> list[Job]:
        """Forget the users that are settled. Returns the others."""
        self.users = [job for job in self.users if not job.is_settled]
        return self.users


@dataclass(eq=False, slots=True)
class Chunk:
    """The state of one parameter in a file. Only the training thread uses this object.

    Attributes:
        size: bytes in the file and in the cache, whole pages.
        offset: where it begins in the file.
        description: of the same part of the file, for jobs; it has the checksum of the last write.
        place: its memory in the cache; None while it has none.
        changed: its memory is newer than the file, and no job is queued to write it.
        changed_by: the last job that changes it; None if the training thread did, or if the job has succeeded.
        in_file: the file has its content, or gets it from ``write``. Until then all of it is zero.
        write: the last job that writes it to the file.
        next_use: when it is needed next: a step, and a number that orders uses within a step.
    """

    plan: ParamPlan
    file: StateFile
    offset: int
    size: int = field(init=False)
    description: FileChunk = field(init=False)
    place: Place | None = None
    changed: bool = False
    changed_by: Job | None = None
    in_file: bool = False
    write: Job | None = None
    next_use: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.size = chunk_bytes(self.plan)
        self.description = self.file.describe(self.offset, self.size)
        self.next_use = (self.plan.phase, self.plan.index)

    @property
    def name(self) -> str:
        return self.plan.name

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
    """Bytes that the parameter's state takes in the cache and in a file: whole pages."""
    return whole_pages(carved_bytes(StateForm.of(plan).tensors(plan.deferred)))


def state_in(memory: Tensor, plan: ParamPlan) -> State:
    """The stored tensors in the memory of a chunk, u8[size], aligned as in an arena."""
    tensors, begin = [], 0
    for shape, dtype in StateForm.of(plan).tensors(plan.deferred):
        end = begin + shape[0] * shape[1] * dtype.itemsize
        tensors.append(memory[begin:end].view(dtype).view(shape))
        begin += carved_bytes([(shape, dtype)])
    return State(*tensors)
