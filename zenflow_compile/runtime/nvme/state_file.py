"""Scratch files for optimizer state: exclusive use of their directory, and checked reads and writes of chunks.

[Note: scratch] These files are of no use after their process: a checkpoint is a ``state_dict``, which reads them. So a
crash leaves files that only take space, and the next run on the directory removes them. The checksum of every chunk is
kept in memory, not next to the chunk: so it also finds a write that never reached the disk, whose old chunk and old
checksum would agree.

[Note: direct I/O] Where the file system supports it (``O_DIRECT``), chunks go between memory and disk without a second
copy in the page cache, which would only evict useful pages: state is read once per step. Buffers, offsets and lengths
are whole pages then. Elsewhere the page cache's copy is written out and dropped after each chunk, which also raises
errors that a buffered write would hide.

[Note: traps] Other users may be able to create names in the directory. A symbolic or hard link there would redirect a
write to another file of the user, and a FIFO would block the process. So names are opened without following links and
without waiting, and the opened file is checked before it is read or written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import itertools
import json
import mmap
import os
import reprlib
import stat
import warnings
from pathlib import Path

from torch import Tensor

from zenflow_compile.checks.validate import printable, user_stacklevel
from zenflow_compile.native.library import OTHER_CHECKSUM, FileChunk, Transfer, library
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.recorder import Recorder

PAGE_BYTES = 4096
"""The alignment of direct I/O; a multiple of the logical block of every common disk."""

PIECE_BYTES = 8 << 20
"""Bytes per system call: enough for a disk's full rate, and few enough that a checksum finds them in the cache."""

FILE_THREADS = 4
"""Threads that read and write: while some move chunks, others compute checksums. One core does so at 4.9 GB/s (EPYC),
which is the rate of a fast disk."""

_POLL_NS = 500_000
"""How often one idle thread looks whether jobs that others wait for have ended. Moving a large chunk takes longer."""

FORMAT = 1
MAGIC = b"zenflow-compile optimizer state\n"

_FILES = "zenflow-*.state"
_LOCK = "zenflow.lock"
_PID_BYTES = 32  # read of a lock file, which another process may have written
_SHOWN_CHARACTERS = 200


class StateFileError(RuntimeError):
    """State in a file is lost: its checksum differs, or it could not be read or written."""


def whole_pages(size: int) -> int:
    """``size`` bytes, rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class ScratchDirectory:
    """A directory with the state files of one optimizer at a time.

    Args:
        path: ``nvme_path``.

    Raises:
        ValueError: it does not exist, is not a directory, cannot be written to, is in use by another optimizer, or has
            under one of our names something that is not a plain file of this user.

    Attributes:
        files: those that were made and not removed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = existing_directory(path)
        mode = self.path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # sticky, as /tmp: only their owners may replace files
            warnings.warn(
                f"nvme_path={_shown(self.path)} lets every user replace the files in it, and training stops where that "
                "happens; remove that permission (chmod o-w), or name another directory",
                stacklevel=user_stacklevel(),
            )
        self.files: list[StateFile] = []
        self._numbers = itertools.count()
        try:
            # An ``flock`` on a file with this process's id, until ``close``, or until the process ends.
            self._lock = _locked(self.path / _LOCK)
        except OSError as error:
            raise self.unusable(error) from error
        try:
            for left in self.path.glob(_FILES):
                if _is_ours(left):  # of a run that has ended, since the lock was free
                    left.unlink()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise self.unusable(error) from error
            raise

    def free_bytes(self) -> int:
        """Free bytes of the file system for this process.

        Raises:
            ValueError: the directory is gone.
        """
        try:
            stats = os.statvfs(self.path)
        except OSError as error:
            raise self.unusable(error) from error
        return stats.f_bavail * stats.f_frsize

    def create(self, size: int, about: dict[str, object], *, purpose: str, otherwise: str) -> StateFile:
        """Create a file with ``size`` bytes for chunks, all allocated on the disk now.

        Args:
            about: the fields of its header, for humans.
            purpose: what the space is for, and otherwise: a remedy that needs none; for the error.

        Raises:
            ValueError: there is too little space, or the directory cannot be written to.
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
        # Before the general handler, which removes the file: this one is not ours.
        except FileExistsError as error:
            raise ValueError(
                f"nvme_path={_shown(self.path)} cannot be used: {path.name!r} in it was not written by this optimizer; "
                "remove it, or name another directory"
            ) from error
        except BaseException as error:
            path.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise too_small("less") from error
            raise self.unusable(error) from error
        self.files.append(file)
        return file

    def remove(self, file: StateFile) -> None:
        """Remove one of the files; no read or write may be in flight. Completes a call that was interrupted."""
        with contextlib.suppress(OSError):  # the next optimizer on the directory removes one that stays
            file.path.unlink()
        with contextlib.suppress(OSError):
            file.close()
        if file in self.files:
            self.files.remove(file)

    def close(self) -> None:
        """Remove the files and release the directory. Completes a call that was interrupted."""
        for file in list(self.files):
            self.remove(file)
        if not self._lock.closed:
            with contextlib.suppress(OSError):
                # While the lock is held: afterwards the name may belong to another optimizer's file.
                (self.path / _LOCK).unlink()
            self._lock.close()

    def close_in_child(self) -> None:
        """In a forked child: close the parent's files and its lock, which would outlive it. Removes nothing."""
        for file in self.files:
            file.close()
        self.files = []
        self._lock.close()

    def unusable(self, error: OSError) -> ValueError:
        return _unusable(self.path, error)


class ScratchFiles:
    """A directory, ``nvme_path``, and the threads that read and write its files.

    The threads are native and need no Python, so that a stream may wait for an update whose state is in a file.

    Raises: see ``ScratchDirectory``.
    """

    def __init__(self, path: str | os.PathLike[str], recorder: Recorder) -> None:
        self.threads = Workers(FILE_THREADS, recorder, name="zenflow-file", poll_ns=_POLL_NS)
        self.directory = ScratchDirectory(path)  # last: nothing after it can fail and leave the directory locked

    def close(self) -> None:
        """Stop the threads and remove the files, behind ``close`` of the caches. Idempotent."""
        self.threads.close()
        self.directory.close()


class StateFile:
    """A file with a header of one page, then chunks.

    Attributes:
        direct: whether reads and writes bypass the page cache.
        opened: keeps the file's number, so that no other file gets it.
    """

    def __init__(self, path: Path, size: int, about: dict[str, object]) -> None:
        """
        Raises:
            OSError: the file cannot be made, or there is no space for it.
        """
        self.path = path
        with contextlib.ExitStack() as undo:
            # File objects: their close() is one call that no interrupt splits, and idempotent.
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
            self.opened = direct
            self._file = direct.fileno()

    def describe(self, offset: int, size: int) -> FileChunk:
        """The chunk at ``offset``, for native threads. It is valid while ``opened`` is open."""
        return FileChunk(file=self._file, direct=self.direct, offset=PAGE_BYTES + offset, size=size)

    def write(self, offset: int, memory: Tensor) -> int:
        """Write a chunk of whole pages, u8[size], from page-aligned memory, without the GIL; returns its checksum.

        Raises:
            OSError: it was not written.
        """
        return self._move(offset, memory, write=True)

    def read(self, offset: int, memory: Tensor) -> int:
        """Read a chunk of whole pages into page-aligned memory, u8[size]; returns the checksum of its content.

        Raises:
            OSError: it could not be read, or the file is shorter.
        """
        return self._move(offset, memory, write=False)

    def _move(self, offset: int, memory: Tensor, *, write: bool) -> int:
        chunk = self.describe(offset, memory.numel())
        transfer = Transfer(ctypes.pointer(chunk), memory.data_ptr())
        error = library().zenflow_move_chunk(transfer, write)
        if error not in (0, OTHER_CHECKSUM):
            raise OSError(error, os.strerror(error))
        checksum: int = chunk.checksum if write else transfer.checksum
        return checksum

    def close(self) -> None:
        """Close the file. No read or write may be in flight. Idempotent."""
        self.opened.close()


def _open_direct(path: Path, header: bytes) -> io.FileIO | None:
    """Open the file for direct I/O; None where the file system does not support it, or reads other bytes back."""
    page = mmap.mmap(-1, PAGE_BYTES)
    try:
        file = io.FileIO(path, "r+", opener=lambda name, flags: _private(name, flags | os.O_DIRECT))
    except OSError:
        return None
    with contextlib.ExitStack() as undo:
        undo.callback(file.close)
        with contextlib.suppress(OSError):
            number = file.fileno()
            as_written = os.preadv(number, [page], 0) == PAGE_BYTES and page[:] == header
            if as_written and os.pwritev(number, [page], 0) == PAGE_BYTES:
                undo.pop_all()
                return file
    return None


def _private(path: str | Path, flags: int) -> int:
    """Open a file that no other user may read, without following links."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def existing_directory(path: str | os.PathLike[str]) -> Path:
    """The directory's absolute path, since the working directory may change.

    Raises:
        ValueError: it does not exist, or is not a directory.
    """
    try:
        resolved = Path(path).resolve()
        is_directory = resolved.is_dir()
    except OSError as error:  # for example, a name that is too long
        raise _unusable(Path(path), error) from error
    except ValueError:
        raise ValueError(f"nvme_path={_shown(path)} has a null character; name a directory on a local disk") from None
    if not is_directory:
        what = "is not a directory" if resolved.exists() else "does not exist"
        raise ValueError(f"nvme_path={_shown(path)} {what}; create it, on a local disk, or name one that is there")
    return resolved


def _unusable(directory: Path, error: OSError) -> ValueError:
    return ValueError(
        f"nvme_path={_shown(directory)} cannot be used: {error.strerror or error}; name a directory on a local disk "
        "that this process may write to and that has space left"
    )


def _shown(path: str | os.PathLike[str]) -> str:
    """A path in quotes, without control characters, shortened for an error."""
    short = reprlib.Repr()
    short.maxstring = _SHOWN_CHARACTERS
    return short.repr(os.fspath(path))


def _is_ours(path: Path) -> bool:
    """Whether a file has the header of a state file. Raises: see ``_open_plain``."""
    with _open_plain(path, os.O_RDONLY) as file:
        return file.read(len(MAGIC)) == MAGIC


def _locked(path: Path) -> io.FileIO:
    """Open and lock a lock file, and write this process's id into it.

    Raises:
        ValueError: another optimizer has the lock, or the file is not a plain file of this user.
        OSError: the file cannot be made, locked or written.
    """
    while True:
        try:
            file = _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            try:
                file = _open_plain(path, os.O_RDWR)
            except FileNotFoundError:  # the process that held it has just removed it
                continue
        with contextlib.ExitStack() as undo:
            undo.callback(file.close)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = os.pread(file.fileno(), _PID_BYTES, 0).decode("ascii", errors="replace").strip()
                this = " (this one)" if text == str(os.getpid()) else ""
                raise ValueError(
                    f"nvme_path={_shown(path.parent)} is in use by another optimizer, of process "
                    f"{printable(text) or 'unknown'}{this}; close that one first, end that process and children that "
                    "it left behind, or give each optimizer a directory of its own"
                ) from None
            # The process that held it may have removed the name meanwhile: then others lock another file.
            if not _has_name(file, path):
                continue
            undo.callback(path.unlink, missing_ok=True)  # runs before close(), under the lock
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
            undo.pop_all()
            return file


def _has_name(file: io.FileIO, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    return False


def _open_plain(path: Path, flags: int) -> io.FileIO:
    """Open an existing plain file of this user with one name. See [Note: traps].

    Raises:
        ValueError: it is not such a file; the message says what it is.
        OSError: it cannot be opened.
    """
    _refuse_unusual(path, os.lstat(path))
    with contextlib.ExitStack() as undo:
        file = undo.enter_context(_opened(path, flags))
        _refuse_unusual(path, os.fstat(file.fileno()))  # another file may have got the name meanwhile
        undo.pop_all()
        return file


def _opened(path: Path, flags: int) -> io.FileIO:
    # A file object: its close() is one call that no interrupt divides, and that may be repeated.
    return io.FileIO(_private(path, flags | os.O_NONBLOCK), "r+" if flags & os.O_RDWR else "r")


def _refuse_unusual(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = "a link, a directory or a special file"
    elif found.st_nlink > 1:
        what = "a hard link to a file that has other names"
    elif found.st_uid != os.geteuid():
        what = f"a file of another user (uid {found.st_uid})"
    else:
        return
    raise ValueError(
        f"nvme_path={_shown(path.parent)} cannot be used: {path.name!r} in it is {what}, and the optimizer uses only "
        "plain files that this user wrote; remove it, or name another directory"
    )
