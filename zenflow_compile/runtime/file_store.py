"""Scratch files for optimizer state: whose directory it is, and checked reads and writes of blocks in a file.

[Note: scratch] Nothing in these files outlives its process: a checkpoint is a ``state_dict``, which reads them. So a
crash leaves files that only take space, and the next run on the directory removes them. The checksum of every block is
kept in memory, not beside the block: it also finds a write that never reached the disk, whose old block and old
checksum would agree.

[Note: direct I/O] Where the file system has it (``O_DIRECT``), blocks go between memory and disk without a second copy
in the page cache, which for state that is read once per step would only push out what others need. Buffers, offsets
and lengths are whole pages then. Elsewhere the cache's copy is written out and dropped after each block, which also
brings to light errors that a buffered write would report to nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import mmap
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

PAGE_BYTES = 4096
"""What direct I/O is aligned to; a multiple of the logical block of every common disk."""

PIECE_BYTES = 8 << 20
"""Bytes per system call: enough for a disk's full rate, and few enough that a checksum finds them in the cache."""

FORMAT = 1
MAGIC = b"zenflow-compile optimizer state\n"

_LOCK_NAME = "zenflow.lock"
_FILES = "zenflow-*.state"
_ORPHAN_SECONDS = 10.0  # how long children may hold a dead run's lock: DataLoader workers look for it every 5 s


class StateFileError(RuntimeError):
    """State in a file is lost: it was not what had been written, or could not be read or written."""


def whole_pages(size: int) -> int:
    """``size`` bytes, rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def require_directory(path: str | os.PathLike[str]) -> None:
    """
    Raises:
        ValueError: ``nvme_path`` is not a directory.
    """
    if not Path(path).is_dir():
        what = "is not a directory" if Path(path).exists() else "does not exist"
        raise ValueError(f"nvme_path={str(path)!r} {what}; create it, on a local disk, or name one that is there")


class ScratchDirectory:
    """A directory that one optimizer at a time keeps its state in.

    Args:
        path: ``nvme_path``.

    Raises:
        ValueError: it does not exist, is no directory, cannot be written to, or another optimizer has it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_directory(path)
        self.path = Path(path).resolve()  # the working directory may change
        self._files: list[StateFile] = []
        self._numbers = itertools.count()
        self._lock = self._locked()
        try:
            for left in self.path.glob(_FILES):
                if _is_ours(left):  # and, since the lock is free, of a dead run
                    left.unlink()
        except OSError as error:
            self.close()
            raise self.unusable(error) from error

    def free_bytes(self) -> int:
        """What the file system has left for this process."""
        stats = os.statvfs(self.path)
        return stats.f_bavail * stats.f_frsize

    def create(
        self,
        size: int,
        about: dict[str, object],
        *,
        purpose: str = "for the optimizer's state",
        otherwise: str = 'keep more state in memory (policy="zero_offload", or zenflow with a larger topk_ratio)',
    ) -> StateFile:
        """A file with ``size`` bytes for blocks, all of them allocated on the disk now.

        Args:
            about: what its header says of it, readable by humans.
            purpose: what the space is for, otherwise: what needs none of it; for the error.

        Raises:
            ValueError: there is not so much space, or the directory cannot be written to.
        """
        needed = size + PAGE_BYTES

        def too_small(free: str) -> ValueError:
            return ValueError(
                f"nvme_path={str(self.path)!r} has too little space: {needed / 1e9:.3f} GB are needed {purpose}, and "
                f"{free} is free; free some, name a directory on a larger disk, or {otherwise}"
            )

        if (free := self.free_bytes()) < needed:
            raise too_small(f"{free / 1e9:.3f} GB")
        path = self.path / f"zenflow-{os.getpid()}-{next(self._numbers)}.state"
        try:
            file = StateFile(path, size, {"format": FORMAT, "pid": os.getpid(), **about})
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise too_small("less") from error
            raise self.unusable(error) from error
        self._files.append(file)
        return file

    def remove(self, file: StateFile) -> None:
        """Remove one of the files; no read or write may be under way."""
        self._files.remove(file)
        with contextlib.suppress(OSError):  # one that stays is removed by the next optimizer on the directory
            file.close()
        with contextlib.suppress(OSError):
            file.path.unlink()

    def close(self) -> None:
        """Remove the files and let others have the directory."""
        for file in list(self._files):
            self.remove(file)
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                (self.path / _LOCK_NAME).unlink()
            os.close(self._lock)
            self._lock = -1

    def _locked(self) -> int:
        """A descriptor that holds the directory's lock."""
        path, until = self.path / _LOCK_NAME, time.monotonic() + _ORPHAN_SECONDS
        while True:
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise self.unusable(error) from error
            try:
                locked = _try_lock(lock)
            except OSError as error:  # not every file system has locks
                os.close(lock)
                raise self.unusable(error) from error
            if locked:
                # Whoever had it may have removed the file after it was opened here: then others lock another one.
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(path).st_ino == os.fstat(lock).st_ino:
                        os.ftruncate(lock, 0)
                        os.pwrite(lock, str(os.getpid()).encode(), 0)
                        return lock
                os.close(lock)
                continue
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            if _alive(holder) or time.monotonic() > until:
                raise ValueError(
                    f"nvme_path={str(self.path)!r} is in use by another optimizer, of process {holder or 'unknown'}"
                    f"{' (this one)' if holder == str(os.getpid()) else ''}; close that one first, or give each "
                    "optimizer a directory of its own"
                )
            time.sleep(0.05)

    def unusable(self, error: OSError) -> ValueError:
        """What to raise where an operation on the directory failed."""
        return ValueError(
            f"nvme_path={str(self.path)!r} cannot be used: {error.strerror or error}; name a directory on a local disk "
            "that this process may write to"
        )


class StateFile:
    """A header of one page, then blocks.

    Attributes:
        direct: whether the page cache is passed by.
    """

    def __init__(self, path: Path, size: int, about: dict[str, object]) -> None:
        """
        Raises:
            OSError: the file cannot be made, or there is no space for it.
        """
        self.path = path
        with contextlib.ExitStack() as undo:
            buffered = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, buffered)
            os.posix_fallocate(buffered, 0, PAGE_BYTES + size)
            header = (MAGIC + json.dumps(about).encode() + b"\n")[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
            os.pwrite(buffered, header, 0)
            os.fsync(buffered)
            direct = _open_direct(path, header)
            self.direct = direct is not None
            self._file = os.dup(buffered) if direct is None else direct

    def write(self, offset: int, memory: memoryview) -> int:
        """Write a block of whole pages, from memory that begins at one; returns its checksum.

        Raises:
            OSError: it was not written.
        """
        checksum = 0
        for begin in range(0, len(memory), PIECE_BYTES):
            piece = memory[begin : begin + PIECE_BYTES]
            checksum = zlib.crc32(piece, checksum)
            _move(os.pwritev, self._file, piece, PAGE_BYTES + offset + begin)
        if not self.direct:
            os.fdatasync(self._file)
            self._drop_cached(offset, len(memory))
        return checksum

    def read(self, offset: int, memory: memoryview) -> int:
        """Read a block of whole pages into memory that begins at one; returns the checksum of what came.

        Raises:
            OSError: it could not be read, or the file is shorter.
        """
        checksum = 0
        for begin in range(0, len(memory), PIECE_BYTES):
            piece = memory[begin : begin + PIECE_BYTES]
            _move(os.preadv, self._file, piece, PAGE_BYTES + offset + begin)
            checksum = zlib.crc32(piece, checksum)
        if not self.direct:
            self._drop_cached(offset, len(memory))
        return checksum

    def _drop_cached(self, offset: int, size: int) -> None:
        os.posix_fadvise(self._file, PAGE_BYTES + offset, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """No read or write may be under way."""
        os.close(self._file)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor, writable. The tensor must outlive the view."""
    content = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    assert tensor.dtype == torch.uint8
    return memoryview(content).cast("B")


def _move(call: Callable[..., int], file: int, memory: memoryview, offset: int) -> None:
    """Read or write all of ``memory``; calls may move less, and release the GIL."""
    while len(memory):
        moved = call(file, [memory], offset)
        if moved <= 0:
            raise OSError(errno.EIO, "the file ends before the block does")
        memory, offset = memory[moved:], offset + moved


def _open_direct(path: Path, header: bytes) -> int | None:
    """A descriptor for direct I/O; None where the file system has none, or it does not bring back what was written."""
    page = mmap.mmap(-1, PAGE_BYTES)
    try:
        file = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.preadv(file, [page], 0) == PAGE_BYTES and page[:] == header and os.pwritev(file, [page], 0) == PAGE_BYTES:
            return file
    except OSError:
        pass
    os.close(file)
    return None


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _alive(pid: str) -> bool:
    """Whether there is such a process; a lock whose holder has not signed yet is somebody's."""
    if not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
