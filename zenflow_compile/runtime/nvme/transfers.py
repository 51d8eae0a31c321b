"""Jobs that read chunks from files and write them back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from torch import Tensor

from zenflow_compile.checks.validate import printable
from zenflow_compile.native.library import OTHER_CHECKSUM, READ, WRITE, HostJob, Record, Transfer
from zenflow_compile.runtime.device.stream_flags import Flag
from zenflow_compile.runtime.host.workers import Bounds, Job, MemoryUser, Work
from zenflow_compile.runtime.nvme.chunk import Chunk
from zenflow_compile.runtime.nvme.state_file import StateFileError
from zenflow_compile.timeline import DISK


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
