"""Compiles the package's C++ sources at their first use, and keeps the libraries for later processes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from zenflow_compile.checks.validate import printable, user_stacklevel
from zenflow_compile.torch_internals import torch_private

SOURCES = Path(__file__).parent
# No -ffast-math and no contraction: results would depend on the CPU, and on how ranges are cut. No -fopenmp: PyTorch
# brings its own OpenMP runtime, and a process must not have two.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-march=native"),
    *("-ffp-contract=off", "-fno-math-errno", "-w"),
)
_COMPILE_SECONDS = 120.0


class BuildError(RuntimeError):
    """The C++ source cannot be compiled or loaded here; the message has the reason."""


@cache
def load_library() -> ctypes.CDLL:
    """Return the library of ``native/host_jobs.cpp``. The first process on a kind of CPU compiles it, in about 3 s.

    Raises:
        BuildError: there is no compiler, it fails, or the system does not load what it made.
    """
    path, handle = _load("host_jobs.cpp", FLAGS)
    return ctypes.CDLL(path, handle=handle)


@cache
def load_rule(printed: str) -> ctypes.CDLL:
    """Return the library of ``native/host_rule.cpp`` for a printed rule; compiled as the other one.

    Raises:
        BuildError: see ``load_library``.
    """
    path, handle = _load("host_rule.cpp", FLAGS, {"printed_rule.h": printed})
    return ctypes.CDLL(path, handle=handle)


@cache
def load_storage_reads() -> ctypes.PyDLL:
    """Return the library of ``native/storage_reads.cpp``, which is compiled for the PyTorch that runs, in about 2 s.

    Raises:
        BuildError: see ``load_library``; or PyTorch has no C++ headers.
    """
    path, handle = _load("storage_reads.cpp", torch_private.extension_flags())
    return ctypes.PyDLL(path, handle=handle)  # keeps the GIL


def _load(source: str, flags: Sequence[str], printed: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Load the library of a source, and compile it if that was not done before; return its path and handle.

    Args:
        printed: headers that it includes, by name.
    """
    headers = printed or {}
    compiler = torch_private.cpp_compiler()
    if compiler is None:
        given = f" (CXX is {printable(os.environ['CXX'])})" if os.environ.get("CXX") else ""
        raise BuildError(
            f"no C++ compiler was found{given}: host updates are C++ code, compiled at its first use, as that of "
            "torch.compile is. Install the package g++ (apt-get install g++; dnf install gcc-c++), or set CXX to the "
            "command of a compiler"
        )
    path = cache_folder() / f"{Path(source).stem}-{library_key(compiler, (*flags, *headers.values()))}.so"
    if _is_ours(path.parent, stat.S_ISDIR) and _is_ours(path, stat.S_ISREG):
        try:
            return str(path), ctypes.CDLL(str(path))._handle
        except OSError:  # written by a process that ran out of disk space, or on a file system without execution
            pass
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours(path.parent, stat.S_ISDIR):
            raise PermissionError(0, "another user owns it or can write it, or it is a link")
        folder = tempfile.TemporaryDirectory(dir=path.parent)
    except OSError as error:
        warn_once(f"{path.parent}: {error.strerror}")
        try:
            folder = tempfile.TemporaryDirectory()
        except OSError as unwritable:
            raise BuildError(f"no folder for compiled code can be written: {unwritable}; set TMPDIR") from None
    with folder as name:
        made = Path(name) / path.name
        for header, text in headers.items():
            (Path(name) / header).write_text(text)
        _compile(compiler, (*flags, f"-I{name}"), source, made)
        if Path(name).parent == path.parent:
            # Atomic: another process may compile the same source, and loads the library as soon as it has its name.
            made = made.replace(path)
        try:
            # Never unloaded: threads run its code until the process ends.
            return str(made), ctypes.CDLL(str(made))._handle
        except OSError as error:
            raise BuildError(
                f"the system does not load {made}: {error}; set XDG_CACHE_HOME to another folder"
            ) from None


def cache_folder() -> Path:
    """The folder of compiled libraries: ``zenflow_compile`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "zenflow_compile"
    except RuntimeError:  # there is no home directory
        return Path(tempfile.gettempdir()) / f"zenflow_compile_{os.getuid()}"


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether no other user can have written the file or folder: its code will run in this process.

    ``is_kind`` tells a plain file, or a folder, by its mode. Links are neither.
    """
    try:
        found = path.lstat()
    except OSError:
        return False
    return is_kind(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: Sequence[str], flags: Sequence[str], source: str, library: Path) -> None:
    done = _run(compiler, str(SOURCES / source), *flags, "-o", str(library))
    if done.returncode or not library.exists():
        last = "\n".join(printable(line) for line in (done.stderr or done.stdout).strip().splitlines()[-8:])
        raise BuildError(f"{printable(shlex.join(compiler))} ended with {done.returncode}:\n{last}")
    library.chmod(0o700)


def _run(compiler: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*compiler, *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_COMPILE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{printable(shlex.join(compiler))} did not run: {printable(str(error))}") from None


def library_key(compiler: Sequence[str], flags: Sequence[str] = FLAGS) -> str:
    """A hash of all that the library depends on. Machines of one home directory may have different CPUs."""
    version = _run(compiler, "--version").stdout
    texts = (shlex.join(compiler[1:]), version, processor(), " ".join(flags), torch.__version__)
    sources = (path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*")))
    return hashlib.sha256(b"\0".join([*(text.encode() for text in texts), *sources])).hexdigest()[:16]


def processor() -> str:
    """What ``-march=native`` depends on."""
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in names)


@cache  # warn once per process
def warn_once(reason: str) -> None:
    warnings.warn(
        f"the compiled host updates cannot be kept ({printable(reason)}): every process compiles them again, which "
        "takes seconds; set XDG_CACHE_HOME to a folder that can be written",
        RuntimeWarning,
        stacklevel=user_stacklevel(),
    )
