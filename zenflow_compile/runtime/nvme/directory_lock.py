"""The lock of a scratch directory, and opening files in it: only plain files of this user.

[Note: traps] Other users may be able to create names in the directory. A symbolic or hard link there would redirect a
write to another file of the user, and a FIFO would block the process. So names are opened without following links and
without waiting, and the opened file is checked before it is read or written.
"""

from __future__ import annotations

import fcntl
import io
import os
import reprlib
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from zenflow_compile.checks.printable import printable

_LOCK_NAME = "zenflow.lock"
_PID_BYTES = 32  # read of a lock file, which another process may have written
_LARGEST_PID = 2**31 - 1
_SHOWN_CHARACTERS = 200
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class DirectoryLock:
    """Exclusive use of a directory until ``release``, or until the process ends.

    The lock is an ``flock`` on a file that contains the process's id. A forked child inherits it, so it must call
    ``release_in_child``.

    Args:
        directory: an existing directory.

    Raises:
        ValueError: another optimizer has the lock, or the file cannot be made, locked or written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / _LOCK_NAME
        try:
            self._file = self._locked()
        except OSError as error:
            raise unusable(directory, error) from error

    def release(self) -> None:
        """Release the lock. Idempotent, and completes a call that was interrupted."""
        if not self._file.closed:
            with suppress(OSError):
                # While the lock is held: afterwards the name may belong to another optimizer's file.
                self._path.unlink()
            self._file.close()

    def release_in_child(self) -> None:
        """In a forked child: close the inherited file, which would keep the lock after the parent's end."""
        self._file.close()

    def _locked(self) -> io.FileIO:
        while True:
            try:
                file = _opened(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                try:
                    file = open_plain(self._path, os.O_RDWR)
                except FileNotFoundError:  # the process that held it has just removed it
                    continue
            with ExitStack() as undo:
                undo.callback(file.close)
                if not _try_lock(file.fileno()):
                    raise self._in_use(file)
                # The process that held it may have removed the name meanwhile: then others lock another file.
                if not _has_name(file, self._path):
                    continue
                undo.callback(self._path.unlink, missing_ok=True)  # runs before close(), under the lock
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
                undo.pop_all()
                return file

    def _in_use(self, file: io.FileIO) -> ValueError:
        """The error if another process, or another optimizer of this one, has the lock."""
        text = os.pread(file.fileno(), _PID_BYTES, 0).decode("ascii", errors="replace").strip()
        where = f"nvme_path={shown(self._path.parent)}"
        remedy = "or give each optimizer a directory of its own"
        if not _has_ended(text):
            this = " (this one)" if text == str(os.getpid()) else ""
            return ValueError(
                f"{where} is in use by another optimizer, of process {printable(text) or 'unknown'}{this}; close that "
                f"one first, {remedy}"
            )
        if children := _processes_with(self._path):
            pids = " ".join(map(str, children))
            return ValueError(
                f"{where} is in use by a child that process {text} left behind when it ended: process {pids}; "
                f"end that first (kill {pids}), {remedy}"
            )
        return ValueError(
            f"{where} is in use by another optimizer, of process {text}, which is not among the processes of this "
            "machine that this user can see: it runs on another machine or in another container, or has left a child "
            f"behind; end that first, {remedy}"
        )


def open_plain(path: Path, flags: int) -> io.FileIO:
    """Open an existing plain file of this user with one name. See [Note: traps].

    Raises:
        ValueError: it is not such a file; the message says what it is.
        OSError: it cannot be opened.
    """
    _refuse_unusual(path, os.lstat(path))
    file = _opened(path, flags)
    try:
        _refuse_unusual(path, os.fstat(file.fileno()))  # another file may have got the name meanwhile
    except BaseException:
        file.close()
        raise
    return file


def writable_by_others(directory: Path) -> bool:
    """Whether every user may remove and replace files in the directory."""
    mode = directory.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX  # sticky, as /tmp: only their owners may


def unusable(directory: Path, error: OSError) -> ValueError:
    """The error if an operation on the directory failed."""
    return ValueError(
        f"nvme_path={shown(directory)} cannot be used: {error.strerror or error}; name a directory on a local disk "
        "that this process may write to and that has space left"
    )


def shown(path: str | os.PathLike[str]) -> str:
    """A path in quotes, without control characters, shortened for an error."""
    short = reprlib.Repr()
    short.maxstring = _SHOWN_CHARACTERS
    return short.repr(os.fspath(path))


def _opened(path: Path, flags: int) -> io.FileIO:
    # A file object: its close() is one call that no interrupt divides, and that may be repeated.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    return io.FileIO(descriptor, "r+" if flags & os.O_RDWR else "r")


def _refuse_unusual(path: Path, found: os.stat_result) -> None:
    what = _KINDS.get(stat.S_IFMT(found.st_mode))
    if what is None and found.st_nlink > 1:
        what = "a hard link to a file that has other names"
    if what is None and found.st_uid != os.geteuid():
        what = f"a file of another user (uid {found.st_uid})"
    if what is not None:
        raise ValueError(
            f"nvme_path={shown(path.parent)} cannot be used: {path.name!r} in it is {what}, and the optimizer uses "
            "only plain files that this user wrote; remove it, or name another directory"
        )


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_name(file: io.FileIO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    return False


def _has_ended(text: str) -> bool:
    """Whether ``text`` is the id of a process that has ended; False for a lock file without an id."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= _LARGEST_PID):
        return False
    return not psutil.pid_exists(int(text))


def _processes_with(path: Path) -> list[int]:
    """Ids of the other processes that have the file open, as far as this user may see."""
    found = []
    for process in psutil.process_iter(["open_files"]):
        files = process.info["open_files"] or ()  # None: a process of another user
        if process.pid != os.getpid() and any(file.path == str(path) for file in files):
            found.append(process.pid)
    return found
