"""Compiles the simulated device with g++ at its first use, and keeps the result."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wno-unused-parameter")


def compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX`` or g++; None if there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


def missing() -> str | None:
    """Why the simulated device cannot be built here; None if it can."""
    if compiler() is None:
        return "no C++ compiler for the simulated device"
    if not (_torch() / "include" / "ATen").is_dir():
        return "this PyTorch has no C++ headers for the simulated device"
    return None


def build() -> Path:
    """Return the shared library, and compile it if these sources were not compiled before for this PyTorch.

    Raises:
        RuntimeError: the compiler fails; the text has its messages.
    """
    library = _cache() / f"simdev-{_key()}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    torch_folder = _torch()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            *(str(compiler()), *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"),
            *(f"-I{torch_folder / 'include'}", str(SOURCES / "simdev.cpp"), "-o", str(made)),
            *(f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        # Atomic: another process may compile the same sources, and load the library as soon as it has its name.
        made.replace(library)
    return library


def _torch() -> Path:
    return Path(torch.__file__).parent


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / "zenflow_compile_tests"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"zenflow_compile_tests_{os.getuid()}"
    return folder


@cache
def _key() -> str:
    """A hash of all that the library depends on."""
    version = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout
    parts = [torch.__version__, str(_torch()), version, *_FLAGS]
    parts += [path.name + path.read_text() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
