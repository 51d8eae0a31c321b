"""State in files behind a bounded cache in host memory: read before a job, written back behind it.

The training thread decides what is read, and where to, when it queues the jobs that need it. So a few threads only do
what they are told: jobs that read, and jobs that write.

[Note: cache space] Some chunks have a home in the cache: they are read once, and written when the cache is rebuilt. The
others share a ring: each gets the memory behind the one before, from the beginning again at the end, and takes it from
those that were there. Whatever fills that memory waits until all jobs that use it are settled, and each job waits only
for jobs that were queued before it: so memory for the earliest one always comes free, in whatever order gradients
arrive, and every job ends.

[Note: lost chunks] A chunk that could not be read or written raises in the training thread, and in every job that needs
it, until a loaded state overwrites it. The next use tries a failed read again. A job fails with the read that it
needs, and the write with the job: what was not read or not updated is never written.

[Note: interrupted calls] An interrupt may come between any two lines. Memory that was given to a chunk is remembered,
with its users, until they are settled; a chunk gets it together with the job that fills it; a changed chunk is written
before its memory is given away, unless a job is queued to do it; and jobs that were not queued are withdrawn by the
next call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from zenflow_compile.planning.plan import ParamPlan, file_window_bytes, resident_in_window
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.host.native_pool import NativePool
from zenflow_compile.runtime.host.python_pool import PythonPool
from zenflow_compile.runtime.host.state_forms import State
from zenflow_compile.runtime.host.state_store import Needs
from zenflow_compile.runtime.host.workers import Job, Pool
from zenflow_compile.runtime.nvme.chunk import Chunk, Place, chunk_bytes, state_in
from zenflow_compile.runtime.nvme.state_file import ScratchDirectory, StateFileError, whole_pages
from zenflow_compile.runtime.nvme.transfers import make_transfer
from zenflow_compile.runtime.recorder import Recorder

FILE_THREADS = 4
"""Threads that read and write: while some move chunks, others compute checksums. One core does so at 4.9 GB/s (EPYC),
which is the rate of a fast disk."""

_POLL_NS = 500_000
"""How often one idle thread looks whether jobs that others wait for have ended. Moving a large chunk takes longer."""

_FIRST = -1  # deadline of what the training thread waits for
_AHEAD = 1 << 40  # first deadline of what no job waits for yet


def cache_bytes(plans: Sequence[ParamPlan], given: int | None) -> int:
    """Size of the cache for all parameters in files.

    Args:
        plans: of these parameters; at least one.
        given: ``host_window_bytes``.

    Raises:
        ValueError: the largest parameter's state does not fit into ``given``.
    """
    largest = max(plans, key=chunk_bytes)
    if given is not None and given < largest.file_bytes:
        raise ValueError(
            f"host_window_bytes={given} must be at least {largest.file_bytes}, the optimizer state of {largest.name}, "
            "which passes through this memory whole; raise it, or leave it at None for twice that or more"
        )
    return file_window_bytes([chunk_bytes(plan) for plan in plans], None if given is None else whole_pages(given))


class _Layout(NamedTuple):
    """Which part of the cache is whose.

    Attributes:
        homes: where chunks are that do not take turns.
        ring: of the others.
    """

    homes: dict[Chunk, int]
    ring: range


class NvmeCache:
    """The files of one optimizer, the memory that their chunks pass through, and the threads that move them.

    Only the training thread calls it.

    Args:
        path: ``nvme_path``.
        native: native threads move chunks, for native jobs.

    Raises:
        ValueError: the directory cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], recorder: Recorder, *, native: bool) -> None:
        self._recorder = recorder
        self._arena = HostArena(0)
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._chunks: list[Chunk] = []
        self._layout = _Layout({}, range(0))
        self._in_ring: list[Place] = []  # that a chunk has, or whose users may not be settled
        self._head = 0  # where the next chunk of the ring goes, if there is room
        self._uses = 0
        self._unqueued: list[Job] = []  # made, and not known to be queued
        name = "zenflow-file"
        self._native = NativePool(FILE_THREADS, recorder, name=name, poll_ns=_POLL_NS) if native else None
        self._threads: Pool[Any] = self._native or PythonPool(FILE_THREADS, recorder, name=name)
        self._directory = ScratchDirectory(path)  # last: nothing after it can fail and leave the directory locked

    @property
    def nbytes(self) -> int:
        """Host memory of the cache."""
        return self._memory.numel()

    @property
    def failed(self) -> bool:
        """Whether a read or a write has failed."""
        self._threads.land()
        return self._threads.failed

    def land(self) -> None:
        """Record the reads and writes that have ended since."""
        self._threads.land()

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is one of the cache's, so that it cannot wait for their work."""
        return self._threads.runs(thread)

    # Files.

    def add(self, plans: Sequence[ParamPlan], fingerprint: str, size: int) -> dict[int, Chunk]:
        """Make a file with the chunks of further parameters, all zero; no update may be in flight.

        Args:
            fingerprint: of the plan, for the file's header.
            size: bytes of the cache from now on, unless it is larger already; see ``cache_bytes``.

        Returns:
            Chunks by the parameters' indices.

        Raises:
            ValueError: the disk has not enough space.
            MemoryError: the machine has not enough memory.
            RuntimeError: the system does not start a thread.
        """
        arena = HostArena(size) if size > self.nbytes else None
        self._write_back()
        needed_bytes = sum(map(chunk_bytes, plans))
        file = self._directory.create(needed_bytes, {"plan": fingerprint, "chunks": len(plans)})
        chunks, offset = {}, 0
        for plan in plans:
            chunks[plan.index] = chunk = Chunk(plan, file, offset)
            offset += chunk.size
        if arena is not None:
            old, memory = self._arena, arena.take((size,), torch.uint8)
            self._arena, self._memory = arena, memory
            old.close()
        self._chunks += chunks.values()
        self._layout = self._laid_out()
        return chunks

    def _write_back(self) -> None:
        """Write all changed chunks, and take their memory from all, unless a write fails.

        Raises:
            RuntimeError: one has failed.
        """
        self._withdraw()
        for chunk in self._chunks:
            if chunk.changed:
                self._write(chunk, step=self._recorder.step, deadline=_FIRST)
        self._settle_all()
        for chunk in self._chunks:
            if chunk.write is not None and chunk.write.error is not None:
                chunk.changed = chunk.place is not None  # only its memory has it, if any
                chunk.write.wait()
        for chunk in self._chunks:
            chunk.place = None
        self._in_ring = []

    def _settle_all(self) -> None:
        """Wait until no job uses memory or files."""
        for chunk in self._chunks:
            _settle(chunk.place)
            if chunk.write is not None:
                chunk.write.settle()
        for place in self._in_ring:
            _settle(place)

    def _laid_out(self) -> _Layout:
        """The layout for all chunks, which must be without memory."""
        homes, begin = {}, 0
        resident = resident_in_window([chunk.size for chunk in self._chunks], self.nbytes)
        for chunk, stays in zip(self._chunks, resident, strict=True):
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
        self._chunks = [chunk for chunk in self._chunks if chunk not in chunks]
        for file in {chunk.file for chunk in chunks}:
            self._directory.remove(file)

    def close(self) -> None:
        """Stop the threads, remove the files, free the memory. No update may be in flight."""
        self._withdraw()
        self._threads.close()
        self._directory.close()
        self._chunks, self._in_ring = [], []
        self._layout = _Layout({}, range(0))
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._arena.close()

    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's lock and files without removing them."""
        self._directory.close_in_child()

    # Uses of chunks.

    def prepare(self, chunk: Chunk, *, step: int, deadline: int) -> Needs:
        """See :meth:`StateInFile.prepare`."""
        interval, phase = chunk.plan.interval, chunk.plan.phase
        self._uses += 1
        chunk.next_use = step + 1 + (phase - step - 1) % interval, self._uses
        return self._bring(chunk, step=step, deadline=deadline)

    def used_by(self, chunk: Chunk, job: Job, *, last: bool) -> None:
        """See :meth:`StateInFile.used_by`."""
        assert chunk.place is not None
        chunk.place.users.append(job)
        chunk.changed_by, chunk.changed = job, True
        if last and chunk not in self._layout.homes:
            self._write(chunk, step=job.step, deadline=job.deadline)

    @contextmanager
    def acquire(self, chunk: Chunk, *, write: bool, fresh: bool) -> Iterator[State]:
        """See :meth:`StateStore.acquire`."""
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
            for job in needs.behind:
                job.settle()
            if chunk.changed_by is not None:
                chunk.changed_by.wait()
            if (error := chunk.error) is not None:  # of a write that was under way
                raise StateFileError(str(error)) from error.__cause__
        if write:
            chunk.changed_by, chunk.changed = None, True
        try:
            yield place.tensors
        finally:
            if write and chunk not in self._layout.homes:
                self._write(chunk, step=step, deadline=_FIRST)

    def read_ahead(self) -> None:
        """Read the chunks that are needed next into the memory that comes free next.

        Call it when all jobs of an optimizer step are queued.
        """
        self._withdraw()
        homes = self._layout.homes
        ahead: list[Place] = []
        in_turn = [each for each in self._chunks if each not in homes and each.in_file and each.error is None]
        for number, chunk in enumerate(sorted(in_turn, key=lambda each: each.next_use)):
            if chunk.place is None:
                begin = self._next_begin(chunk)
                if any(_overlap(place, begin, begin + chunk.size) for place in ahead):
                    return
                self._fill(chunk, step=self._recorder.step, deadline=_AHEAD + number)
            assert chunk.place is not None
            ahead.append(chunk.place)

    # Memory of chunks.

    def _bring(self, chunk: Chunk, *, step: int, deadline: int) -> Needs:
        """Queue a job that reads ``chunk``, unless it is in memory. Returns the jobs that its next user waits for."""
        self._withdraw()
        place = chunk.place
        if place is None or (place.read is not None and place.read.is_set and place.read.error is not None):
            place = self._fill(chunk, step=step, deadline=deadline)
        if place.read is not None and place.read.succeeded:
            place.read = None
        if chunk.changed_by is not None and chunk.changed_by.succeeded:
            chunk.changed_by = None
        after = [] if place.read is None else [place.read]
        if chunk.write is not None and chunk.error is not None:
            after.append(chunk.write)
        return Needs(after, tuple(place.unsettled()))

    def _fill(self, chunk: Chunk, *, step: int, deadline: int) -> Place:
        """Give memory to ``chunk``, and queue the job that reads it."""
        place = self._take(chunk)
        if not chunk.in_file:  # the training thread writes each chunk before jobs use it: none is to be queued
            _settle(place)
            place.memory.zero_()
            chunk.place = place
            return place
        after = () if chunk.write is None else (chunk.write,)
        job = self._transfer(chunk, "read", place, after=after, step=step, deadline=deadline)
        place.read, chunk.place = job, place
        self._queue(job, place)
        return place

    def _overwritten(self, chunk: Chunk) -> Place:
        """Memory for ``chunk``, whose old content is not read. Waits until no job uses the memory, or writes it."""
        place = chunk.place or self._take(chunk)
        _settle(place)
        if chunk.write is not None:  # from another place: it would come after what is written from here
            chunk.write.settle()
        chunk.place, place.read, chunk.changed_by, chunk.write = place, None, None, None
        return place

    def _take(self, chunk: Chunk) -> Place:
        """Take memory for ``chunk`` from those that have it, which are written if they must."""
        begin = self._next_begin(chunk)
        end = begin + chunk.size
        memory = self._memory[begin:end]
        if chunk in self._layout.homes:
            users = [] if chunk.place is None else chunk.place.unsettled()
            return Place(begin, end, memory, state_in(memory, chunk.plan), users)
        owners = {id(each.place): each for each in self._chunks}
        overlapped = [place for place in self._in_ring if _overlap(place, begin, end)]
        for place in overlapped:
            if (other := owners.get(id(place))) is not None:
                if other.changed:
                    self._write(other, step=self._recorder.step, deadline=_FIRST)
                other.place = None
        users = list(dict.fromkeys(job for place in overlapped for job in place.unsettled()))
        taken = Place(begin, end, memory, state_in(memory, chunk.plan), users)
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
        assert place is not None, f"{chunk.name} was changed, and has no memory"
        after = [job for job in (place.read, chunk.changed_by) if job is not None]
        job = self._transfer(chunk, "write", place, after=after, step=step, deadline=deadline)
        chunk.write, chunk.in_file = job, True
        self._queue(job, place)
        chunk.changed = False  # last: see [Note: interrupted calls]

    def _transfer(
        self, chunk: Chunk, kind: str, place: Place, *, after: Sequence[Job], step: int, deadline: int
    ) -> Job:
        """A job that moves ``chunk``; it is one of the users of ``place`` from here on."""
        behind = tuple(place.unsettled())
        job = make_transfer(
            chunk, kind, place.memory, self._native, after=after, behind=behind, step=step, deadline=deadline
        )
        self._unqueued = [*self._unqueued, job]
        place.users.append(job)
        return job

    def _queue(self, job: Job, place: Place) -> None:
        self._threads.submit(job)
        # It is settled behind all others. Not before it is queued: a withdrawn job waits for none.
        place.users = [job]
        self._unqueued = []

    def _withdraw(self) -> None:
        """Fail jobs that an interrupt kept from being queued, so that no job waits for them."""
        if self._unqueued:
            self._threads.withdraw(self._unqueued)
            self._unqueued = []


def _settle(place: Place | None) -> None:
    for job in () if place is None else place.users:
        job.settle()


def _overlap(place: Place, begin: int, end: int) -> bool:
    return place.begin < end and begin < place.end
