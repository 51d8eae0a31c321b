"""State in files behind a bounded cache in host memory: read before a job, written back behind it.

Two kinds of threads move chunks. A reader takes the chunk that is needed first and is not cached: those that a job or
the training thread waits for, by step and deadline, the order in which workers take jobs; then, ahead of time, those
whose update windows are flushed next. A writer takes changed chunks, oldest first.

[Note: cache space] A changed chunk keeps its memory until it is written. An unchanged one that no lock holds is evicted
for a chunk that is needed earlier; the one that is needed last goes first. A job acquires its chunk only after its
gradients have arrived, so it runs without waiting and surely ends: memory for the earliest job always comes free, in
whatever order gradients arrive.

[Note: lost chunks] A chunk that could not be read or written leaves the cache, and the threads that need it get the
error, until a loaded state overwrites it. So no thread waits for memory or for a chunk that does not come.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zenflow_compile.checks.printable import printable
from zenflow_compile.planning.plan import ParamPlan, file_window_bytes
from zenflow_compile.runtime.errors import refuse_threads
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.nvme.chunk import Chunk, ChunkState, LockRequest, chunk_bytes, state_in
from zenflow_compile.runtime.nvme.state_file import ScratchDirectory, StateFileError, memory_of, whole_pages
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline.events import DISK

THREADS_PER_DIRECTION = 2
"""Readers, and writers: one takes the checksum of a chunk while the other moves one. One core takes the checksum of
2 GB/s (zlib 1.2.13), which is what a common disk moves."""


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


class NvmeCache:
    """The files of one optimizer, the memory that their chunks pass through, and the threads that move them.

    Args:
        path: ``nvme_path``.

    Raises:
        ValueError: the directory cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], recorder: Recorder) -> None:
        self._recorder = recorder
        self._arena = HostArena(0)
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._chunks: list[Chunk] = []
        self._to_write: list[Chunk] = []  # those in state CHANGED, oldest first
        self._lock = threading.RLock()
        # One condition for each kind of waiting thread: a thread that wakes looks at many chunks, and asks for the GIL.
        self._readers, self._writers, self._users = (threading.Condition(self._lock) for _ in range(3))
        self._threads: list[threading.Thread] = []
        self._complete = False  # all wanted threads run, or as many as the system allows
        self._closing = False
        self._directory = ScratchDirectory(path)  # last: nothing after it can fail and leave the directory locked

    @property
    def nbytes(self) -> int:
        """Host memory of the cache."""
        return self._memory.numel()

    def add(self, plans: Sequence[ParamPlan], fingerprint: str, size: int) -> dict[int, Chunk]:
        """Make a file with the chunks of further parameters, all zero; nothing may be in flight.

        Args:
            fingerprint: of the plan, for the file's header.
            size: bytes of the cache from now on; see ``cache_bytes``.

        Returns:
            Chunks by the parameters' indices.

        Raises:
            ValueError: the disk has not enough space.
            MemoryError: the machine has not enough memory.
            RuntimeError: the system does not start a thread.
        """
        self._grow(size)
        needed_bytes = sum(map(chunk_bytes, plans))
        file = self._directory.create(needed_bytes, {"plan": fingerprint, "chunks": len(plans)})
        chunks, offset = {}, 0
        for plan in plans:
            chunks[plan.index] = chunk = Chunk(plan, file, offset)
            offset += chunk.size
        with self._lock:
            self._chunks += chunks.values()
        self._start()
        return chunks

    def remove(self, chunks: Collection[Chunk]) -> None:
        """Remove chunks of one ``add``, and their file. No thread may use them any more."""
        with self._lock:
            # A reader or a writer may be at work on them, and their file is closed below.
            self._users.wait_for(lambda: all(chunk.at_rest for chunk in chunks))
            self._chunks = [chunk for chunk in self._chunks if chunk not in chunks]
            for chunk in chunks:
                chunk.evict()
            self._readers.notify_all()
        for file in {chunk.file for chunk in chunks}:
            self._directory.remove(file)

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is one of the cache's, so that it cannot wait for their work."""
        return thread in self._threads

    def close(self) -> None:
        """Stop the threads, remove the files, free the memory. No thread may use a chunk any more."""
        self._stop()
        self._directory.close()
        for chunk in self._chunks:
            chunk.evict()
        self._chunks = []
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._arena.close()

    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's lock and files without removing them."""
        self._directory.close_in_child()

    # Locks on chunks.

    def queue(self, request: LockRequest) -> None:
        """Tell the readers that a lock waits for its chunk."""
        self._start()  # an interrupt may have come when the cache grew, between the end of its threads and new ones
        with self._lock:
            request.chunk.requests.append(request)
            request.chunk.update_key()
            self._readers.notify_all()

    def try_acquire(self, request: LockRequest) -> bool:
        """Acquire the lock if its chunk is cached and free. Also True if the chunk is lost: ``check`` raises then."""
        chunk = request.chunk
        # Idle workers ask this of all queued jobs a thousand times a second: a look without the lock comes first.
        # An outdated answer does no harm: workers ask again, and ``acquire`` asks under the lock.
        if chunk.state not in (ChunkState.CACHED, ChunkState.CHANGED) and chunk.error is None:
            return False
        with self._lock:
            if chunk.error is not None:
                if not request.fresh:
                    return True
                chunk.error, chunk.checksum = None, None
                self._readers.notify_all()
            if chunk.holder is None and chunk.state in (ChunkState.CACHED, ChunkState.CHANGED):
                chunk.holder = request
            return chunk.holder is request

    def acquire(self, request: LockRequest) -> None:
        """Block the calling thread until it has the lock.

        Raises:
            StateFileError: the chunk is lost.
        """
        with self._lock:
            while not self.try_acquire(request):
                self._users.wait()
        self.check(request)

    def check(self, request: LockRequest) -> None:
        """Raise if the chunk of an acquired lock is lost.

        Raises:
            StateFileError: it is; chained to the failure that lost it.
        """
        if request.chunk.holder is not request and (error := request.chunk.error) is not None:
            raise StateFileError(str(error)) from error.__cause__

    def release(self, request: LockRequest) -> None:
        """Release the lock, or withdraw its request. Idempotent, and completes a call that was interrupted."""
        with self._lock:
            chunk = request.chunk
            if request in chunk.requests:
                chunk.requests.remove(request)
            chunk.next_use = request.next_use or chunk.next_use
            chunk.update_key()
            if chunk.holder is request:
                # Only the last line calls: an interrupt finds the chunk locked, or released and in line for its write.
                chunk.holder = None
                if request.writes and chunk.state is not ChunkState.CHANGED:
                    chunk.state = ChunkState.CHANGED
                    self._to_write.append(chunk)
            if chunk.state is ChunkState.CHANGED:
                self._writers.notify()
            else:
                self._readers.notify_all()
            self._users.notify_all()

    # Threads.

    def _start(self) -> None:
        """Start the threads that are missing. See [Note: interrupted starts] in ``workers``."""
        if self._complete:
            return
        if self._closing:  # an interrupt has left a ``_stop``, whose threads will end
            self._stop()
        targets = {}
        for number in range(THREADS_PER_DIRECTION):
            targets[f"zenflow-reader-{number}"] = self._read_chunks
            targets[f"zenflow-writer-{number}"] = self._write_chunks
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        running = {thread.name for thread in self._threads}
        for name, target in targets.items():
            if name in running:
                continue
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)  # before the start, which an interrupt may leave
            try:
                thread.start()
            except RuntimeError as error:  # the system starts no further thread
                self._threads.pop()
                if len(self._threads) >= 2:  # one reader and one writer move all chunks
                    break
                self._stop()
                refuse_threads(error)
        # Last: after an interrupt above, the next call starts the threads that are missing.
        self._complete = True

    def _stop(self) -> None:
        with self._lock:
            self._closing, self._complete = True, False
            self._readers.notify_all()
            self._writers.notify_all()
            # As in ``WorkerPool.close``: a thread that was never started cannot be joined.
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in self._threads:
            thread.join()
        self._threads, self._closing = [], False

    def _grow(self, size: int) -> None:
        """Have at least ``size`` bytes; all cached chunks are written and evicted first.

        Raises:
            MemoryError: the machine has not enough memory; the cache is as it was.
        """
        if size <= self.nbytes:
            return
        arena = HostArena(size)
        memory = arena.take((size,), torch.uint8)
        with self._lock:
            self._users.wait_for(lambda: all(chunk.at_rest for chunk in self._chunks))
        self._stop()
        # Only now: until the readers have stopped, they fill chunks of the old memory ahead of time.
        for chunk in self._chunks:
            chunk.evict()
        self._arena.close()
        self._arena, self._memory = arena, memory
        if self._chunks:
            self._start()

    def _read_chunks(self) -> None:
        self._serve(self._readers, self._next_to_read, self._read)

    def _write_chunks(self) -> None:
        self._serve(self._writers, self._next_to_write, self._write)

    def _serve(
        self, changed: threading.Condition, choose: Callable[[], Chunk | None], move: Callable[[Chunk], None]
    ) -> None:
        """Move the chunks that ``choose`` finds. The thread outlives failures: other threads wait for its chunks."""
        while True:
            chunk: Chunk | None = None
            try:
                if (chunk := self._next(changed, choose)) is None:
                    return
                move(chunk)
                self._end_move(chunk)
            except BaseException as error:
                self._end_move(chunk, error)

    def _end_move(self, chunk: Chunk | None, error: BaseException | None = None) -> None:
        """End the move of a chunk: it is cached, or lost by ``error``.

        Without a chunk, those on disk that other threads wait for are lost.
        """
        with self._lock:
            try:
                if error is not None:
                    wanted = (each for each in self._chunks if each.requests and each.state is ChunkState.ON_DISK)
                    for each in wanted if chunk is None else (chunk,):
                        self._lose(each, error)
                elif chunk is not None:
                    chunk.state = ChunkState.CACHED
            finally:
                self._readers.notify_all()
                self._users.notify_all()

    def _memory_of(self, chunk: Chunk) -> Tensor:
        return self._memory[chunk.begin : chunk.begin + chunk.size]

    def _read(self, chunk: Chunk) -> None:
        memory = self._memory_of(chunk)
        if chunk.checksum is None:
            memory.zero_()
        else:
            begin = time.perf_counter_ns()
            checksum = chunk.file.read(chunk.offset, memory_of(memory))
            self._record("read", begin, chunk)
            if checksum != chunk.checksum:
                raise StateFileError(
                    f"the checksum is {checksum:08x}, that of what was written {chunk.checksum:08x}: the disk has lost "
                    "or changed it, or another process wrote to the file"
                )
        # Before the chunk is CACHED: from then on a job may read the tensors.
        chunk.tensors = state_in(memory, chunk.plan)

    def _write(self, chunk: Chunk) -> None:
        begin = time.perf_counter_ns()
        chunk.checksum = chunk.file.write(chunk.offset, memory_of(self._memory_of(chunk)))
        self._record("write", begin, chunk)

    def _next(self, changed: threading.Condition, choose: Callable[[], Chunk | None]) -> Chunk | None:
        """The chunk that ``choose`` finds, asked again whenever ``changed`` is notified; None at the end."""
        with self._lock:
            # A thread whose start was interrupted is not registered: nothing would join it, so it exits.
            while not self._closing and threading.current_thread() in self._threads:
                if (chunk := choose()) is not None:
                    return chunk
                changed.wait()
        return None

    def _record(self, kind: str, begin_ns: int, chunk: Chunk) -> None:
        if (timeline := self._recorder.timeline) is not None:
            end_ns = time.perf_counter_ns()
            timeline.add(DISK, kind, begin_ns, end_ns, step=self._recorder.step, param=chunk.name, bytes=chunk.size)

    # Transitions of chunks, under the lock.

    def _next_to_read(self) -> Chunk | None:
        """The chunk on disk that is needed first, with memory for it; None if there is none, or no memory for it."""
        on_disk = (chunk for chunk in self._chunks if chunk.state is ChunkState.ON_DISK and chunk.error is None)
        needed = [chunk for chunk in on_disk if chunk.requests or chunk.checksum is not None]
        if not needed:
            return None
        chunk = min(needed, key=lambda each: each.key)
        begin = self._make_space(chunk)
        if begin is None:
            return None
        if any(request.fresh for request in chunk.requests):
            chunk.checksum = None
        # Still under the lock: the other reader must not choose the same chunk, or the same place.
        chunk.begin, chunk.state = begin, ChunkState.READING
        return chunk

    def _next_to_write(self) -> Chunk | None:
        """The oldest changed chunk that no lock holds."""
        for number, chunk in enumerate(self._to_write):
            if chunk.holder is None:
                del self._to_write[number]
                chunk.state = ChunkState.WRITING
                return chunk
        return None

    def _make_space(self, chunk: Chunk) -> int | None:
        """Where the chunk can go in the cache; evicts chunks that are needed later, if that makes enough space."""
        present = [each for each in self._chunks if each.state is not ChunkState.ON_DISK]
        # Not those in state READING or WRITING: a thread uses their memory without the lock.
        evictable = [
            each for each in present if each.state is ChunkState.CACHED and each.holder is None and each.key > chunk.key
        ]
        staying = [each for each in present if each not in evictable]
        if self._first_gap(staying, chunk.size) is None:
            return None
        evictable.sort(key=lambda each: each.key)
        while (begin := self._first_gap(staying + evictable, chunk.size)) is None:
            evictable.pop().evict()
        return begin

    def _first_gap(self, present: Sequence[Chunk], size: int) -> int | None:
        """Offset of the first ``size`` unused bytes of the cache."""
        taken = sorted((each.begin, each.begin + each.size) for each in present)
        edges = [(0, 0), *taken, (self.nbytes, self.nbytes)]
        return next((end for (_, end), (begin, _) in pairwise(edges) if begin - end >= size), None)

    def _lose(self, chunk: Chunk, cause: BaseException) -> None:
        """See [Note: lost chunks]."""
        moved = "written" if chunk.state is ChunkState.WRITING else "read"
        chunk.evict()
        chunk.error = StateFileError(
            f"the optimizer state of {chunk.name} could not be {moved} ({printable(chunk.file.path)}): {cause}; load "
            "the last saved state (the last checkpoint), after freeing space on the disk if it is full"
        )
        chunk.error.__cause__ = cause
