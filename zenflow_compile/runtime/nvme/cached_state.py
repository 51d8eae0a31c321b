"""What a parameter has in files: its state, and buffers of its new weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.host.state_store import Needs
from zenflow_compile.runtime.host.workers import Job
from zenflow_compile.runtime.nvme.cache import NvmeCache
from zenflow_compile.runtime.nvme.chunk import Chunk
from zenflow_compile.runtime.nvme.state_file import StateFileError
from zenflow_compile.runtime.state_forms import State


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
        return State(*self.chunk.place.tensors)

    def prepare(self, *, step: int, deadline: int) -> Needs:
        return self._cache.prepare(self.chunk, step=step, deadline=deadline)

    def used_by(self, job: Job, *, last: bool = True) -> None:
        self._cache.used_by(self.chunk, job, last=last)

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[State]:
        with self._cache.acquire(self.chunk, write=write, fresh=fresh) as place:
            yield State(*place.tensors)


class CachedUpload:
    """New weights of one parameter in a file; see :class:`UploadBuffer`."""

    def __init__(self, cache: NvmeCache, chunk: Chunk) -> None:
        self.chunk = chunk
        self._cache = cache

    @property
    def error(self) -> StateFileError | None:
        return self.chunk.error

    def tensor(self) -> Tensor:
        place = self.chunk.fresh or self.chunk.place
        assert place is not None, f"the weight of {self.chunk.name} is not in memory"
        return place.tensors[0]

    def prepare(self, *, step: int, deadline: int, fresh: bool) -> Needs:
        if fresh:
            return self._cache.prepare_fresh(self.chunk)
        return self._cache.prepare(self.chunk, step=step, deadline=deadline)

    def used_by(self, job: Job, *, last: bool = True) -> None:
        self._cache.used_by(self.chunk, job, last=last)

    def bring(self, writer: Job | None, *, step: int) -> Job | None:
        return self._cache.bring(self.chunk, step=step)

    def read_by(self, copy: Ticket) -> None:
        self._cache.read_by(self.chunk, copy)

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[Tensor]:
        with self._cache.acquire(self.chunk, write=write, fresh=fresh) as place:
            yield place.tensors[0]

    def forget(self) -> None:
        self._cache.forget(self.chunk)
