"""What the disk below a directory reaches, measured as the store of files uses it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from zenflow_compile.runtime.file_store import PAGE_BYTES, PIECE_BYTES, ScratchDirectory, memory_of

_PIECES = 32
_BUDGET_S = 0.5  # each way: no further piece begins after it


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes per second that one thread reads and writes, past the page cache where the file system allows it.

    Attributes:
        free_bytes: on the file system.
    """

    read: float
    write: float
    free_bytes: int


def disk_rates(directory: str) -> DiskRates:
    """Measure in at most a second or so; nothing is left behind.

    Args:
        directory: as the option ``nvme_path`` takes it.

    Raises:
        ValueError: it cannot be used; see ``ScratchDirectory``.
    """
    pieces = torch.ones(PIECE_BYTES + PAGE_BYTES, dtype=torch.uint8, device="cpu")
    aligned = pieces[-pieces.data_ptr() % PAGE_BYTES :][:PIECE_BYTES]
    scratch = ScratchDirectory(directory)
    try:
        stats = os.statvfs(directory)
        file = scratch.create(_PIECES * PIECE_BYTES, {"holds": "nothing: a measurement"})
        memory = memory_of(aligned)
        written, write_s = 0, 0.0
        while written < _PIECES and write_s < _BUDGET_S:
            begin = time.perf_counter()
            file.write(written * PIECE_BYTES, memory)
            write_s += time.perf_counter() - begin
            written += 1
        read, read_s = 0, 0.0
        while read < written and read_s < _BUDGET_S:
            begin = time.perf_counter()
            file.read(read * PIECE_BYTES, memory)
            read_s += time.perf_counter() - begin
            read += 1
    finally:
        scratch.close()
    return DiskRates(
        read=read * PIECE_BYTES / read_s,
        write=written * PIECE_BYTES / write_s,
        free_bytes=stats.f_bavail * stats.f_frsize,
    )
