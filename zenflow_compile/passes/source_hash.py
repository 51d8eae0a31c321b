"""The version of the rewrites, for compile caches: a hash of the source that decides what compiled graphs contain."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

SOURCES = ("passes/*.py", "runtime/ops.py", "torch_internals/torch_private_compiler.py")
"""The passes, the schemas and fake kernels of their ops, and the lowerings of these."""


@cache
def source_hash() -> str:
    """Return a hexadecimal hash of the names and texts of ``SOURCES``; read from disk once per process."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in PACKAGE.glob(pattern)):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
