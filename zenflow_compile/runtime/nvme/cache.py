"""State in files behind a bounded window of host memory: read before its job, written back behind it.

A *block* is the fp32 state of one parameter. Two kinds of threads move blocks. A reader takes the block that is needed
next and is not in the window: first those that a job or the training thread waits for, by step and deadline, the order
in which workers take jobs; then, ahead of time, those whose windows will close next. A writer takes blocks that
were changed, oldest first.

[Note: window space] A block that was changed keeps its space until it is written. One that is as the file has it gives
way to a block that is needed earlier, the one that is needed last first, unless a job or the training thread holds it.
A job holds its block only once its gradients have arrived, so it runs without waiting for anything and its end is
certain: space for the earliest job always comes, in whatever order gradients arrive.

[Note: lost blocks] A block that could not be read or written leaves the window, and whoever needs it gets the error,
until a loaded state overwrites it. So nobody waits for space or for a block that does not come.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise, product

import torch
from torch import Tensor

from zenflow_compile.checks.printable import printable
from zenflow_compile.planning.plan import ParamPlan, file_window_bytes
from zenflow_compile.runtime.errors import refuse_threads
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.nvme.cached_state import CachedState, CachedStateLock, Place, block_bytes
from zenflow_compile.runtime.nvme.state_file import ScratchDirectory, StateFileError, memory_of, whole_pages
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline.events import DISK

THREADS_PER_DIRECTION = 2
"""Readers, and writers: the checksum of one block is computed while another is on its way. One core takes the checksum
of 2 GB/s (zlib 1.2.13), which is what a common disk moves."""


def window_bytes(plans: Sequence[ParamPlan], given: int | None) -> int:
    """Size of the window for all parameters in files.

    Args:
        plans: of these parameters; at least one.
        given: ``host_window_bytes``.

    Raises:
        ValueError: the largest parameter's state does not fit into ``given``.
    """
    largest = max(plans, key=block_bytes)
    if given is not None and given < largest.file_bytes:
        raise ValueError(
            f"host_window_bytes={given} must be at least {largest.file_bytes}, the optimizer state of {largest.name}, "
            "which passes through the window whole; raise it, or leave it at None for twice that or more"
        )
    return file_window_bytes([block_bytes(plan) for plan in plans], None if given is None else whole_pages(given))


class NvmeCache:
    """The files of one optimizer, the memory that their blocks pass through, and the threads that move them.

    Args:
        path: ``nvme_path``.

    Raises:
        ValueError: the directory cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], recorder: Recorder) -> None:
        self._recorder = recorder
        self._arena = HostArena(0)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._blocks: list[CachedState] = []
        self._changed_order: list[CachedState] = []
        self._lock = threading.RLock()
        # Whom a change concerns: each of them looks at many blocks when it wakes, and asks for the GIL.
        self._readers, self._writers, self._users = (threading.Condition(self._lock) for _ in range(3))
        self._threads: list[threading.Thread] = []
        self._complete = False  # as many threads as wanted, or as the system has
        self._closing = False
        self._directory = ScratchDirectory(path)  # last: nothing after it can fail and leave the directory locked

    @property
    def nbytes(self) -> int:
        """Host memory of the window."""
        return self._memory.numel()

    @property
    def file_bytes(self) -> int:
        """Bytes in files, all blocks."""
        return sum(block.size for block in self._blocks)

    def add(self, plans: Sequence[ParamPlan], fingerprint: str, size: int) -> dict[int, CachedState]:
        """Homes for further parameters, by index, all zero; nothing may be in flight.

        Args:
            fingerprint: of the plan, for the file's header.
            size: of the window from now on; see ``window_bytes``.

        Raises:
            ValueError: the disk has not enough space.
            MemoryError: the machine has not enough memory.
            RuntimeError: the system does not start a thread.
        """
        needed = sum(block_bytes(plan) for plan in plans)
        self._fit(size)
        file = self._directory.create(needed, {"plan": fingerprint, "blocks": len(plans)})
        homes, offset = {}, 0
        for plan in plans:
            homes[plan.index] = CachedState(self, plan, file, offset)
            offset += block_bytes(plan)
        with self._lock:
            self._blocks += homes.values()
        self._start()
        return homes

    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's lock and files without removing them."""
        self._directory.close_in_child()

    def remove(self, homes: Collection[CachedState]) -> None:
        """Forget blocks that one ``add`` made, and their file: nobody will use them."""
        with self._lock:
            self._users.wait_for(lambda: all(self._at_rest(block) for block in homes))
            self._blocks = [block for block in self._blocks if block not in homes]
            for block in homes:
                self._leave(block)
            self._readers.notify_all()
        for file in {block.file for block in homes}:
            self._directory.remove(file)

    def queue(self, lease: CachedStateLock) -> None:
        """The lease waits for its turn."""
        with self._lock:
            lease.block.leases.append(lease)
            lease.block.order()
            self._readers.notify_all()

    def hold(self, lease: CachedStateLock) -> bool:
        """Give the lease its turn, if it can have it now; True also if the block is lost."""
        block = lease.block
        if block.place is not Place.WINDOW and block.error is None:
            return False  # idle workers ask this of all queued jobs a thousand times a second: without the lock
        with self._lock:
            if block.error is not None:
                if not lease.fresh:
                    return True
                block.error, block.checksum = None, None
                self._readers.notify_all()
            if block.holder is None and block.place is Place.WINDOW:
                block.holder = lease
            return block.holder is lease

    def wait_for(self, lease: CachedStateLock) -> None:
        """Block the calling thread until it is the lease's turn, or the block is lost."""
        with self._lock:
            while not self.hold(lease):
                self._users.wait()

    def end(self, lease: CachedStateLock) -> None:
        """The turn is over, or will not come; what an earlier call has done already is left as it is."""
        with self._lock:
            block = lease.block
            if lease in block.leases:
                block.leases.remove(lease)
            block.next_use = lease.next_use or block.next_use
            block.order()
            if block.holder is lease:
                block.holder = None
                if lease.writes and not block.changed:
                    block.changed = True
                    self._changed_order.append(block)
            if block.changed:
                self._writers.notify()
            else:
                self._readers.notify_all()
            self._users.notify_all()

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is one of the window's, so that it cannot wait for their work."""
        return thread in self._threads

    def close(self) -> None:
        """Stop the threads, remove the files, free the memory. Nobody needs a block any more."""
        self._stop()
        self._directory.close()
        for block in self._blocks:
            block.hide()
        self._blocks = []
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._arena.close()

    def _start(self) -> None:
        """Start the threads that are missing. See [Note: interrupted starts] in ``workers``."""
        if self._complete:
            return
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        kinds = (("reader", self._read_blocks), ("writer", self._write_blocks))
        for number, (name, run) in list(product(range(THREADS_PER_DIRECTION), kinds))[len(self._threads) :]:
            thread = threading.Thread(target=run, name=f"zenflow-{name}-{number}", daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no further thread: one of each kind serves all blocks
                if number:
                    self._threads.pop()
                    break
                self._stop()
                refuse_threads(error)
        self._complete = True

    def _stop(self) -> None:
        with self._lock:
            self._closing = True
            self._readers.notify_all()
            self._writers.notify_all()
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in self._threads:
            thread.join()
        self._threads, self._complete, self._closing = [], False, False

    def _fit(self, size: int) -> None:
        """Be at least ``size`` bytes: what is in the window is written first.

        Raises:
            MemoryError: the machine has not enough memory; the window is as it was.
        """
        if size <= self.nbytes:
            return
        arena = HostArena(size)
        memory = arena.take((size,), torch.uint8)
        with self._lock:
            self._users.wait_for(lambda: all(self._at_rest(block) for block in self._blocks))
        self._stop()
        for block in self._blocks:
            self._leave(block)
        self._arena.close()
        self._arena, self._memory = arena, memory
        if self._blocks:
            self._start()

    @staticmethod
    def _at_rest(block: CachedState) -> bool:
        return block.place in (Place.FILE, Place.WINDOW) and not block.changed and block.holder is None

    # Threads.

    def _read_blocks(self) -> None:
        while (block := self._next(self._readers, self._place_next)) is not None:
            blank = block.checksum is None
            memory = self._memory[block.begin : block.begin + block.size]
            error: BaseException | None = None
            try:
                if blank:
                    memory.zero_()
                else:
                    self._read(block, memory)
            except BaseException as raised:
                error = raised
            with self._lock:
                if error is None:
                    block.show(memory)
                    block.place = Place.WINDOW
                else:
                    self._lose(block, "read", error)
                self._readers.notify_all()
                self._users.notify_all()

    def _read(self, block: CachedState, memory: Tensor) -> None:
        begin = time.perf_counter_ns()
        checksum = block.file.read(block.offset, memory_of(memory))
        self._record("read", begin, block)
        if checksum != block.checksum:
            raise StateFileError(
                f"the checksum is {checksum:08x}, that of what was written {block.checksum:08x}: the disk has lost or "
                "changed it, or somebody else wrote to the file"
            )

    def _write_blocks(self) -> None:
        while (block := self._next(self._writers, self._take_changed)) is not None:
            memory = self._memory[block.begin : block.begin + block.size]
            error: BaseException | None = None
            begin = time.perf_counter_ns()
            try:
                block.checksum = block.file.write(block.offset, memory_of(memory))
                self._record("write", begin, block)
            except BaseException as raised:
                error = raised
            with self._lock:
                block.place = Place.WINDOW
                if error is not None:
                    self._lose(block, "written", error)
                self._readers.notify_all()
                self._users.notify_all()

    def _next(self, change: threading.Condition, choose: Callable[[], CachedState | None]) -> CachedState | None:
        """What ``choose`` finds, asked again at every ``change`` until it finds something; None at the end."""
        with self._lock:
            while not self._closing and threading.current_thread() in self._threads:
                if (block := choose()) is not None:
                    return block
                change.wait()
        return None

    def _record(self, kind: str, begin: int, block: CachedState) -> None:
        if (timeline := self._recorder.timeline) is not None:
            end = time.perf_counter_ns()
            timeline.add(DISK, kind, begin, end, step=self._recorder.step, param=block.name, bytes=block.size)

    # Under the lock.

    def _take_changed(self) -> CachedState | None:
        """The oldest changed block that nobody holds."""
        for number, block in enumerate(self._changed_order):
            if block.holder is None and block.place is Place.WINDOW:
                del self._changed_order[number]
                block.place, block.changed = Place.WRITING, False
                return block
        return None

    def _place_next(self) -> CachedState | None:
        """The block that is needed first of those in files, with space of its own; None if it has none now."""
        absent = (block for block in self._blocks if block.place is Place.FILE and block.error is None)
        needed = [block for block in absent if block.leases or block.checksum is not None]
        if not needed:
            return None
        block = min(needed, key=lambda each: each.key)
        begin = self._space_for(block)
        if begin is None:
            return None
        if any(lease.fresh for lease in block.leases):
            block.checksum = None
        block.begin, block.place = begin, Place.READING
        return block

    def _space_for(self, block: CachedState) -> int | None:
        """Where the block can go; others that are needed later make room, if that is enough."""
        present = [each for each in self._blocks if each.place is not Place.FILE]
        leaving = [each for each in present if self._may_leave(each) and each.key > block.key]
        staying = [each for each in present if each not in leaving]
        if self._gap(staying, block.size) is None:
            return None
        leaving.sort(key=lambda each: each.key)
        while (begin := self._gap(staying + leaving, block.size)) is None:
            self._leave(leaving.pop())
        return begin

    def _gap(self, present: Sequence[CachedState], size: int) -> int | None:
        """The first free piece of the window of ``size`` bytes."""
        taken = sorted((each.begin, each.begin + each.size) for each in present)
        edges = [(0, 0), *taken, (self.nbytes, self.nbytes)]
        return next((end for (_, end), (begin, _) in pairwise(edges) if begin - end >= size), None)

    @staticmethod
    def _may_leave(block: CachedState) -> bool:
        return block.place is Place.WINDOW and block.holder is None and not block.changed

    @staticmethod
    def _leave(block: CachedState) -> None:
        block.place = Place.FILE
        block.hide()

    def _lose(self, block: CachedState, what: str, cause: BaseException) -> None:
        self._leave(block)
        block.error = StateFileError(
            f"the optimizer state of {block.name} could not be {what} ({printable(block.file.path)}): {cause}; load "
            "the last saved state (the last checkpoint), after making room on the disk if that is what is missing"
        )
        block.error.__cause__ = cause
