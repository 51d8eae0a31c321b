"""The state store of a parameter whose state is in a file."""

from __future__ import annotations

from contextlib import AbstractContextManager

from zenflow_compile.runtime.host.state_forms import State
from zenflow_compile.runtime.host.state_store import Needs
from zenflow_compile.runtime.host.workers import Job
from zenflow_compile.runtime.nvme.cache import NvmeCache
from zenflow_compile.runtime.nvme.chunk import Chunk
from zenflow_compile.runtime.nvme.state_file import StateFileError


class CachedState:
    """The state of one parameter in a file; see :class:`StateInFile`."""

    def __init__(self, cache: NvmeCache, chunk: Chunk) -> None:
        self.chunk = chunk
        self._cache = cache

    @property
    def error(self) -> StateFileError | None:
        return self.chunk.error

    def state(self) -> State:
        assert self.chunk.place is not None, f"the state of {self.chunk.name} is not in memory"
        return self.chunk.place.tensors

    def prepare(self, *, step: int, deadline: int) -> Needs:
        return self._cache.prepare(self.chunk, step=step, deadline=deadline)

    def used_by(self, job: Job, *, last: bool = True) -> None:
        self._cache.used_by(self.chunk, job, last=last)

    def acquire(self, *, write: bool = False, fresh: bool = False) -> AbstractContextManager[State]:
        return self._cache.acquire(self.chunk, write=write, fresh=fresh)
