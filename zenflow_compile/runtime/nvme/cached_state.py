"""The state store of a parameter whose state is in a file: locks on its chunk in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zenflow_compile.runtime.host.state_store import State
from zenflow_compile.runtime.nvme.cache import NvmeCache
from zenflow_compile.runtime.nvme.chunk import AHEAD, WANTED, Chunk, Key, LockRequest
from zenflow_compile.runtime.nvme.state_file import StateFileError

_NOW: Key = (WANTED, -1, -1)


class CachedState:
    """The state of one parameter in a file; see :class:`StateStore`."""

    def __init__(self, cache: NvmeCache, chunk: Chunk) -> None:
        self.chunk = chunk
        self._cache = cache

    @property
    def error(self) -> StateFileError | None:
        return self.chunk.error

    def state(self) -> State:
        assert self.chunk.tensors is not None, f"the state of {self.chunk.name} is not in memory"
        return self.chunk.tensors

    def lock(self, *, step: int, deadline: int) -> CachedStateLock:
        plan = self.chunk.plan
        following = step + 1 + (plan.phase - step - 1) % plan.interval
        request = LockRequest(self.chunk, (WANTED, step, deadline), next_use=(AHEAD, following, deadline))
        try:
            self._cache.queue(request)
        except BaseException:  # an interrupt: no job would release the lock
            self._cache.release(request)
            raise
        return CachedStateLock(self._cache, request)

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[State]:
        request = LockRequest(self.chunk, _NOW, next_use=None, writes=write, fresh=fresh)
        try:
            self._cache.queue(request)
            self._cache.acquire(request)
            yield self.state()
        finally:
            try:
                self._cache.release(request)
            except BaseException:  # an interrupt on the way: a chunk that stays locked stops its jobs, and others'
                self._cache.release(request)
                raise


class CachedStateLock:
    """The lock of one job on a chunk; see :class:`StateLock`."""

    def __init__(self, cache: NvmeCache, request: LockRequest) -> None:
        self._cache = cache
        self._request = request

    def try_acquire(self) -> bool:
        return self._cache.try_acquire(self._request)

    def check(self) -> None:
        self._cache.check(self._request)

    def release(self) -> None:
        self._cache.release(self._request)
