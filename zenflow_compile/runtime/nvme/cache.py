"""State or weights in files behind a bounded cache in host memory: read before a job, written back behind it.

The training thread decides what is read, and where to, when it queues the jobs that need it. So a few threads only do
what they are told: jobs that read, and jobs that write.

[Note: cache space] Some chunks have a home in the cache: they are read once, and written when the cache is rebuilt. The
others share a ring: each gets the memory behind the one before, from the beginning again at the end, and takes it from
those that were there. Whatever fills that memory waits until all jobs that use it are settled, and each job waits only
for jobs that were queued before it: so memory for the earliest one always comes free, in whatever order gradients
arrive, and every job ends.

[Note: copies] A lane copies weights out of the cache. The copy waits for the job that fills or changes the memory, and
is a user of the memory from then on: whatever takes the memory next waits for the copy, too.

[Note: one transfer] A chunk may be read into one place while jobs overwrite it in another. Each read or write of a
chunk follows the one before, since both use the same part of the file.

[Note: lost chunks] A chunk that could not be read or written raises in the training thread, and in every job that needs
it, until a loaded state overwrites it. The next use tries a failed read again. A job fails with the read that it
needs, and the write with the job: what was not read or not updated is never written.

[Note: interrupted calls] An interrupt may come between any two lines. Memory that was given to a chunk is remembered,
with its users, until they are settled; a chunk gets it together with the job that fills it; a changed chunk is written
before its memory is given away, unless a job is queued to do it; and jobs that were not queued are withdrawn by the
next call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from zenflow_compile.planning.cached_state import file_window_bytes, resident_in_window, weight_window_bytes
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.stream_flags import make_flags
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.host.state_store import Waits
from zenflow_compile.runtime.host.workers import Job
from zenflow_compile.runtime.nvme.chunk import (
    STATE,
    CacheSpan,
    Chunk,
    Content,
    chunk_bytes,
    make_transfer,
    weight_chunk_bytes,
)
from zenflow_compile.runtime.nvme.state_file import ScratchFiles, StateFileError, whole_pages
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.state_forms import State

_T = TypeVar("_T", State, Tensor)

_FIRST = -1  # deadline of what the training thread waits for
_AHEAD = 1 << 40  # first deadline of what no job waits for yet


class CacheBytes(NamedTuple):
    """Host memory of the caches of state and of weights in files."""

    state: int
    weights: int


NO_CACHES = CacheBytes(0, 0)


def cache_bytes(plans: Sequence[ParamPlan], given: int | None) -> CacheBytes:
    """Sizes of the caches for all parameters in files; ``given``: ``host_window_bytes``.

    Raises:
        ValueError: the largest parameter's state, and its weight if weights are in files, do not fit into ``given``.
    """
    largest = max(plans, key=chunk_bytes)
    state = [chunk_bytes(plan) for plan in plans]
    weights = [weight_chunk_bytes(plan) for plan in plans if plan.weight_in_file for _ in range(plan.uploads)]
    least = largest.file_bytes + max(weights, default=0)
    if given is not None and given < least:
        also = "" if not weights else " and the largest weight"
        raise ValueError(
            f"host_window_bytes={given} must be at least {least}, the optimizer state of {largest.name}{also}, "
            "which passes through this memory whole; raise it, or leave it at None for twice that or more"
        )
    window = None if given is None else whole_pages(given - max(weights, default=0)) + max(weights, default=0)
    of_weights = weight_window_bytes(weights, state, window)
    return CacheBytes(file_window_bytes(state, None if window is None else window - of_weights), of_weights)


class _Layout(NamedTuple):
    """Which part of the cache is whose: ``homes`` of chunks that do not take turns, and the ``ring`` of the others."""

    homes: dict[Chunk, int]
    ring: range


class NvmeCache:
    """Chunks in files, and the memory that they pass through.

    Only the training thread calls it.

    Args:
        files: where chunks are, and the threads that move them.
        device: that copies from this memory asynchronously; None: no device does.

    Attributes:
        pinned: whether a device can copy from this memory asynchronously.
    """

    def __init__(
        self, files: ScratchFiles, recorder: Recorder, content: Content = STATE, device: Device | None = None
    ) -> None:
        self.files = files
        self.pinned = False
        self._recorder = recorder
        self._content = content
        self._device = device
        self._arena = HostArena(0)
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.chunks: list[Chunk] = []
        self._layout = _Layout({}, range(0))
        self._in_ring: list[CacheSpan] = []  # that a chunk has, or whose users may not be settled
        self._head = 0  # where the next chunk of the ring goes, if there is room
        self._uses = 0
        self._unqueued: list[Job] = []  # made, and not known to be queued

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    # Files.

    def add(self, plans: Sequence[ParamPlan], fingerprint: str, size: int, remedies: str | None = None) -> list[Chunk]:
        """Make a file with a chunk for each of ``plans``, all zero; no update may be in flight.

        Args:
            fingerprint: of the plan, for the file's header.
            size: bytes of the cache from now on, unless it is larger already; see ``cache_bytes``.
            remedies: settings that need less host memory, for a warning if it cannot be pinned; None: no warning.

        Raises:
            ValueError: the disk has not enough space.
            MemoryError: the machine has not enough memory.
            RuntimeError: the system does not start a thread.
        """
        arena = HostArena(size, self._device) if size > self.nbytes else None
        self.write_back()
        content, about = self._content, {"plan": fingerprint, "chunks": len(plans)}
        purpose = f"for {content.what} of parameters"
        file = self.files.directory.create(
            sum(map(content.size, plans)), about, purpose=purpose, otherwise=content.remedy
        )
        chunks: list[Chunk] = []
        offset = 0
        for plan in plans:
            chunks.append(chunk := Chunk(plan, file, offset, content))
            offset += chunk.size
        if arena is not None:
            pinned = self._device is not None and arena.pin(self._device, remedies)
            old, memory = self._arena, arena.take((size,), torch.uint8)
            self._arena, self._memory, self.pinned = arena, memory, pinned
            old.close()
        # Hazard: a copy from unpinned memory reads it when it is queued. A wait of the stream would come too late.
        if self._device is not None and self.pinned:
            flags = make_flags(len(chunks), self._device)
            for number, chunk in enumerate(chunks):
                chunk.flags = None if flags is None else (flags, number)
        self.chunks += chunks
        self._layout = self._laid_out()
        return chunks

    def write_back(self) -> None:
        """Write all changed chunks, and take their memory from all, unless a write fails.

        Raises:
            RuntimeError: one has failed.
        """
        self._withdraw()
        for chunk in self.chunks:
            if chunk.changed:
                self._write(chunk, step=self._recorder.step, deadline=_FIRST)
        self._settle_all()
        for chunk in self.chunks:
            if chunk.write is not None and chunk.write.error is not None:
                chunk.changed = chunk.place is not None  # only its memory has it, if any
                chunk.write.wait()
        for chunk in self.chunks:
            chunk.place = None
        self._in_ring = []

    def _settle_all(self) -> None:
        """Wait until no job uses memory or files."""
        for chunk in self.chunks:
            _settle(chunk.place)
            _settle_file(chunk)
        for place in self._in_ring:
            _settle(place)

    def _laid_out(self) -> _Layout:
        """The layout for all chunks, which must be without memory."""
        homes, begin = {}, 0
        resident = resident_in_window([chunk.size for chunk in self.chunks], self.nbytes)
        for chunk, stays in zip(self.chunks, resident, strict=True):
            if stays:
                homes[chunk] = begin
                begin += chunk.size
        return _Layout(homes, range(begin, self.nbytes))

    def remove(self, chunks: Collection[Chunk]) -> None:
        """Remove chunks of one ``add``, and their file. No update of them may be in flight."""
        self._withdraw()
        self._settle_all()
        for chunk in chunks:
            chunk.place = None
        self.chunks = [chunk for chunk in self.chunks if chunk not in chunks]
        for file in {chunk.file for chunk in chunks}:
            self.files.directory.remove(file)

    def close(self) -> None:
        """Free the memory. No update may be in flight, and no copy. Idempotent."""
        self._withdraw()
        self._settle_all()
        self.chunks, self._in_ring = [], []
        self._layout = _Layout({}, range(0))
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._arena.close()

    # Uses of chunks.

    def prepare(self, chunk: Chunk, *, step: int, deadline: int) -> Waits:
        interval, phase = chunk.plan.interval, chunk.plan.phase
        self._uses += 1
        chunk.next_use = step + 1 + (phase - step - 1) % interval, self._uses
        return self._bring(chunk, step=step, deadline=deadline)

    def used_by(self, chunk: Chunk, job: Job, *, last: bool) -> None:
        place = chunk.place if chunk.fresh is None else chunk.fresh
        assert place is not None
        place.users.append(job)
        place.writer = chunk.changed_by = job  # before the place is the chunk's: it has no content without the job
        if chunk.fresh is not None:
            chunk.place, chunk.write, place.read = place, None, None  # a failed write has lost what is overwritten
        chunk.changed, chunk.fresh = True, None
        if last and chunk not in self._layout.homes:
            self._write(chunk, step=job.step, deadline=job.deadline)

    def prepare_fresh(self, chunk: Chunk) -> Waits:
        """Give memory to ``chunk`` for a job that overwrites all of it, and is made next."""
        self._withdraw()
        place = chunk.place or self._take(chunk)
        # It becomes the chunk's together with the job: until then the file has the content.
        chunk.fresh = place
        return Waits((), tuple(place.unsettled()))

    def bring(self, chunk: Chunk, *, step: int) -> Job | None:
        """Have ``chunk`` in memory for a copy, which is queued next.

        Returns the job that fills or changes its memory, which the copy waits for; None: it has the content.
        """
        self._bring(chunk, step=step, deadline=_FIRST)
        place = chunk.place
        assert place is not None
        if place.writer is not None and place.writer.succeeded:
            place.writer = None
        return place.writer

    def read_by(self, chunk: Chunk, copy: Ticket) -> None:
        """Keep ``chunk`` in memory for ``copy``, which ``bring`` was called for; see [Note: copies]."""
        assert chunk.place is not None
        chunk.place.users.append(copy)

    def forget(self, chunk: Chunk) -> None:
        """Drop the content of ``chunk``, lost or not, once no job and no copy uses it. It is zero from then on."""
        self._withdraw()
        _settle(chunk.place)
        _settle_file(chunk)
        chunk.place, chunk.changed, chunk.changed_by, chunk.write, chunk.in_file = None, False, None, None, False

    @contextmanager
    def acquire(self, chunk: Chunk, *, write: bool, fresh: bool) -> Iterator[CacheSpan]:
        self._withdraw()
        step = self._recorder.step
        if fresh:
            place = self._overwritten(chunk)
        else:
            needs = self._bring(chunk, step=step, deadline=_FIRST)
            assert chunk.place is not None
            place = chunk.place
            for job in needs.after:
                job.wait()
            for user in needs.behind:
                user.settle()
            if chunk.changed_by is not None:
                chunk.changed_by.wait()
            if (error := chunk.error) is not None:  # of a write that was under way
                raise StateFileError(str(error)) from error.__cause__
        if write:
            chunk.changed_by, chunk.changed = None, True
            place.writer = None
        try:
            yield place
        finally:
            if write and chunk not in self._layout.homes:
                self._write(chunk, step=step, deadline=_FIRST)

    def read_ahead(self, order: Iterable[Chunk] | None = None) -> None:
        """Read chunks ahead, in ``order`` of use. None: that of the next steps, when this one's jobs are queued."""
        self._withdraw()
        homes = self._layout.homes
        ahead: list[CacheSpan] = []
        in_order = sorted(self.chunks, key=lambda each: each.next_use) if order is None else order
        for number, chunk in enumerate(in_order):
            if chunk in homes or not chunk.in_file or chunk.error is not None:
                continue
            if chunk.place is None:
                begin = self._next_begin(chunk)
                if any(_overlap(place, begin, begin + chunk.size) for place in ahead):
                    return
                self._fill(chunk, step=self._recorder.step, deadline=_AHEAD + number)
            assert chunk.place is not None
            ahead.append(chunk.place)

    # Memory of chunks.

    def _bring(self, chunk: Chunk, *, step: int, deadline: int) -> Waits:
        """Queue a job that reads ``chunk``, unless it is in memory. Returns the jobs that its next user waits for."""
        self._withdraw()
        place, chunk.fresh = chunk.place, None  # memory of a job that an interrupt kept from being made
        if place is None or (place.read is not None and place.read.is_set and place.read.error is not None):
            place = self._fill(chunk, step=step, deadline=deadline)
        if place.read is not None and place.read.succeeded:
            place.read = None
        if chunk.changed_by is not None and chunk.changed_by.succeeded:
            chunk.changed_by = None
        after = [] if place.read is None else [place.read]
        if chunk.write is not None and chunk.error is not None:
            after.append(chunk.write)
        return Waits(after, tuple(place.unsettled()))

    def _fill(self, chunk: Chunk, *, step: int, deadline: int) -> CacheSpan:
        """Give memory to ``chunk``, and queue the job that reads it."""
        place = self._take(chunk)
        if not chunk.in_file:  # the training thread writes each chunk before jobs use it: none is to be queued
            _settle(place)
            place.memory.zero_()
            chunk.place = place
            return place
        after = () if chunk.write is None else (chunk.write,)
        job = self._transfer(chunk, "read", place, after=after, step=step, deadline=deadline)
        place.read = place.writer = job
        chunk.place = place
        self._queue(job, chunk, place)
        return place

    def _overwritten(self, chunk: Chunk) -> CacheSpan:
        """Memory for ``chunk``, whose old content is not read. Waits until no job uses the memory, or writes it."""
        place = chunk.place or self._take(chunk)
        _settle(place)
        _settle_file(chunk)  # from or to another place: see [Note: one transfer]
        chunk.fresh = None
        chunk.place, place.read, place.writer, chunk.changed_by, chunk.write = place, None, None, None, None
        return place

    def _take(self, chunk: Chunk) -> CacheSpan:
        """Take memory for ``chunk`` from those that have it, which are written if they must."""
        begin = self._next_begin(chunk)
        end = begin + chunk.size
        memory = self._memory[begin:end]
        if chunk in self._layout.homes:
            users = [] if chunk.place is None else chunk.place.unsettled()
            return CacheSpan(begin, end, memory, self._content.view(memory, chunk.plan), users)
        owners = {id(each.place): each for each in self.chunks}
        overlapped = [place for place in self._in_ring if _overlap(place, begin, end)]
        for place in overlapped:
            if (other := owners.get(id(place))) is not None:
                if other.changed:
                    self._write(other, step=self._recorder.step, deadline=_FIRST)
                other.place = None
        users = list(dict.fromkeys(user for place in overlapped for user in place.unsettled()))
        taken = CacheSpan(begin, end, memory, self._content.view(memory, chunk.plan), users)
        kept = [each for each in self._in_ring if each.unsettled() or (id(each) in owners and each not in overlapped)]
        self._in_ring, self._head = [*kept, taken], end
        return taken

    def _next_begin(self, chunk: Chunk) -> int:
        """Where ``chunk`` goes if it needs memory now."""
        if (home := self._layout.homes.get(chunk)) is not None:
            return home
        ring = self._layout.ring
        return self._head if self._head in ring and self._head + chunk.size <= ring.stop else ring.start

    def _write(self, chunk: Chunk, *, step: int, deadline: int) -> None:
        """Queue a job that writes ``chunk``, behind all users of its memory. It fails with what failed to change it."""
        place = chunk.place
        assert place is not None, f"{chunk.plan.name} was changed, and has no memory"
        after = [job for job in (place.read, chunk.changed_by) if job is not None]
        job = self._transfer(chunk, "write", place, after=after, step=step, deadline=deadline)
        chunk.write, chunk.in_file = job, True
        self._queue(job, chunk, place)
        chunk.changed = False  # last: see [Note: interrupted calls]

    def _transfer(
        self, chunk: Chunk, kind: str, place: CacheSpan, *, after: Sequence[Job], step: int, deadline: int
    ) -> Job:
        """A job that moves ``chunk``; it is one of the users of ``place`` from here on."""
        chunk.transfers = [each for each in chunk.transfers if not each.is_settled]
        behind = list(dict.fromkeys((*place.unsettled(), *chunk.transfers)))  # see [Note: one transfer]
        job = make_transfer(
            chunk, kind, place.memory, self.files.threads.handle, after=after, behind=behind,
            step=step, deadline=deadline, flag=chunk.next_flag() if kind == "read" else None,
        )  # fmt: skip
        self._unqueued = [*self._unqueued, job]
        place.users.append(job)
        chunk.transfers.append(job)
        return job

    def _queue(self, job: Job, chunk: Chunk, place: CacheSpan) -> None:
        self.files.threads.submit(job)
        # It is settled behind all others. Not before it is queued: a withdrawn job waits for none.
        place.users, chunk.transfers = [job], [job]
        self._unqueued = []

    def _withdraw(self) -> None:
        """Fail jobs that an interrupt kept from being queued, so that no job waits for them."""
        if self._unqueued:
            self.files.threads.withdraw(self._unqueued)
            self._unqueued = []


def _settle(place: CacheSpan | None) -> None:
    for user in () if place is None else place.users:
        user.settle()


def _settle_file(chunk: Chunk) -> None:
    for job in chunk.transfers:
        job.settle()


def _overlap(place: CacheSpan, begin: int, end: int) -> bool:
    return place.begin < end and begin < place.end


class Cached(Generic[_T]):
    """The state, or new weights, of one parameter in a file, in memory only while they are used; see :class:`Store`."""

    def __init__(self, cache: NvmeCache, chunk: Chunk) -> None:
        self.chunk = chunk
        self._cache = cache

    @property
    def error(self) -> StateFileError | None:
        return self.chunk.error

    def content(self) -> _T:
        place = self.chunk.fresh or self.chunk.place
        assert place is not None, f"{self.chunk.content.what} of {self.chunk.plan.name} is not in memory"
        content: _T = place.content
        return content

    def prepare(self, *, step: int, deadline: int, fresh: bool = False) -> Waits:
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
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[_T]:
        with self._cache.acquire(self.chunk, write=write, fresh=fresh) as place:
            yield place.content

    def forget(self) -> None:
        self._cache.forget(self.chunk)
