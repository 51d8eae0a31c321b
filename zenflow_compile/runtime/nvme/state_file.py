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
import io
import itertools
import json
import mmap
import os
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zenflow_compile.checks.user_frame import user_stacklevel
from zenflow_compile.runtime.nvme.directory_lock import DirectoryLock, open_plain, shown, unusable, writable_by_others

PAGE_BYTES = 4096
"""What direct I/O is aligned to; a multiple of the logical block of every common disk."""

PIECE_BYTES = 8 << 20
"""Bytes per system call: enough for a disk's full rate, and few enough that a checksum finds them in the cache."""

FORMAT = 1
MAGIC = b"zenflow-compile optimizer state\n"

_FILES = "zenflow-*.state"


class StateFileError(RuntimeError):
    """State in a file is lost: it was not what had been written, or could not be read or written."""


def whole_pages(size: int) -> int:
    """``size`` bytes, rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class ScratchDirectory:
    """A directory that one optimizer at a time keeps its state in.

    Args:
        path: ``nvme_path``.

    Raises:
        ValueError: it does not exist, is no directory, cannot be written to, has something under a name of ours that is
            no plain file of this user's, or another optimizer has it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = existing_directory(path)
        if writable_by_others(self.path):
            warnings.warn(
                f"nvme_path={shown(self.path)} lets every user replace the files in it, and training stops where that "
                "happens; take the right from them (chmod o-w), or name a directory of your own",
                stacklevel=user_stacklevel(),
            )
        self._files: list[StateFile] = []
        self._numbers = itertools.count()
        self._lock = DirectoryLock(self.path)
        try:
            for left in self.path.glob(_FILES):
                if _is_ours(left):  # and, since the lock is free, of a dead run
                    left.unlink()
        except OSError as error:
            self.close()
            raise self.unusable(error) from error
        except BaseException:
            self.close()
            raise

    def free_bytes(self) -> int:
        """What the file system has left for this process.

        Raises:
            ValueError: the directory is gone.
        """
        try:
            stats = os.statvfs(self.path)
        except OSError as error:
            raise self.unusable(error) from error
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
        except FileExistsError as error:
            raise ValueError(
                f"nvme_path={shown(self.path)} cannot be used: {path.name!r} in it was not written by this optimizer; "
                "remove it, or name another directory"
            ) from error
        except BaseException as error:
            path.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise too_small("less") from error
            raise self.unusable(error) from error
        self._files.append(file)
        return file

    def remove(self, file: StateFile) -> None:
        """Remove one of the files; no read or write may be under way. May be repeated after an interrupt."""
        with contextlib.suppress(OSError):  # one that stays is removed by the next optimizer on the directory
            file.path.unlink()
        with contextlib.suppress(OSError):
            file.close()
        if file in self._files:
            self._files.remove(file)

    def close(self) -> None:
        """Remove the files and let others have the directory. A second call completes one that was interrupted."""
        for file in list(self._files):
            self.remove(file)
        self._lock.release()

    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's lock and files without removing them."""
        for file in self._files:
            file.close()
        self._files = []
        self._lock.release_in_child()

    def unusable(self, error: OSError) -> ValueError:
        """What to raise where an operation on the directory failed."""
        return unusable(self.path, error)


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
            # File objects: their close() is one call that no interrupt divides, and that may be repeated.
            buffered = io.FileIO(path, "x+", opener=_private)
            undo.callback(buffered.close)
            os.posix_fallocate(buffered.fileno(), 0, PAGE_BYTES + size)
            header = (MAGIC + json.dumps(about).encode() + b"\n")[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
            os.pwrite(buffered.fileno(), header, 0)
            os.fsync(buffered.fileno())
            direct = _open_direct(path, header)
            self.direct = direct is not None
            if direct is None:
                direct = buffered
                undo.pop_all()
            self._owned = direct
            self._file = direct.fileno()

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
        """No read or write may be under way. A second call does nothing."""
        self._owned.close()


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


def _open_direct(path: Path, header: bytes) -> io.FileIO | None:
    """A file for direct I/O; None where the file system has none, or it does not bring back what was written."""
    page = mmap.mmap(-1, PAGE_BYTES)
    try:
        file = io.FileIO(path, "r+", opener=lambda name, flags: _private(name, flags | os.O_DIRECT))
    except OSError:
        return None
    with contextlib.ExitStack() as undo:
        undo.callback(file.close)
        with contextlib.suppress(OSError):
            number = file.fileno()
            if (
                os.preadv(number, [page], 0) == PAGE_BYTES
                and page[:] == header
                and os.pwritev(number, [page], 0) == PAGE_BYTES
            ):
                undo.pop_all()
                return file
    return None


def _private(path: str, flags: int) -> int:
    """Open a file that no other user may read, and through no link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def existing_directory(path: str | os.PathLike[str]) -> Path:
    """The directory's absolute path: the working directory may change.

    Raises:
        ValueError: there is none.
    """
    try:
        resolved = Path(path).resolve()
        is_directory = resolved.is_dir()
    except OSError as error:  # for example, a name that is too long
        raise unusable(Path(path), error) from error
    except ValueError:
        raise ValueError(f"nvme_path={shown(path)} has a null character; name a directory on a local disk") from None
    if not is_directory:
        what = "is not a directory" if resolved.exists() else "does not exist"
        raise ValueError(f"nvme_path={shown(path)} {what}; create it, on a local disk, or name one that is there")
    return resolved


def _is_ours(path: Path) -> bool:
    """
    Raises:
        ValueError: it is something that no optimizer of this user made.
        OSError: it cannot be read.
    """
    with open_plain(path, os.O_RDONLY) as file:
        return file.read(len(MAGIC)) == MAGIC
