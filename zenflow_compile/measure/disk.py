"""Measures a disk below a directory, with reads and writes as the cache of files makes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from torch import Tensor, uint8

from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.nvme.state_file import FILE_THREADS, PIECE_BYTES, ScratchDirectory

_MOST_PIECES = 64  # and at most half of the free space, but at least one
_BUDGET_SECONDS = 0.5  # each way: no further piece begins after it


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes per second read and written, one direction at a time, with checksums and as many threads as the cache has,
    and the free space of the file system."""

    read: float
    write: float
    free_bytes: int


def disk_rates(directory: str) -> DiskRates:
    """Measure in about a second, past the page cache where the file system allows it; removes its file.

    Raises:
        ValueError: it cannot be used, see ``ScratchDirectory``; or a read or write failed.
    """
    arena = HostArena(FILE_THREADS * PIECE_BYTES)
    buffers = [arena.take((PIECE_BYTES,), uint8).fill_(1) for _ in range(FILE_THREADS)]
    scratch = ScratchDirectory(directory)
    try:
        free = scratch.free_bytes()
        pieces = max(1, min(_MOST_PIECES, free // 2 // PIECE_BYTES))
        file = scratch.create(
            pieces * PIECE_BYTES,
            {"holds": "nothing: a measurement"},
            purpose="to measure its rates",
            otherwise="leave nvme_path out, so that no state goes to files",
        )
        written, write_seconds = _move(file.write, buffers, pieces)
        read, read_seconds = _move(file.read, buffers, written)
    except OSError as error:
        raise scratch.unusable(error) from error
    finally:
        scratch.close()
    return DiskRates(read * PIECE_BYTES / read_seconds, written * PIECE_BYTES / write_seconds, free)


def _move(transfer: Callable[[int, Tensor], int], buffers: list[Tensor], pieces: int) -> tuple[int, float]:
    """Move up to ``pieces`` pieces until the time is over. Returns their number and the seconds."""
    numbers = count()
    begin = time.perf_counter()

    def run(buffer: Tensor) -> int:
        moved = 0
        while (number := next(numbers)) < pieces and time.perf_counter() - begin < _BUDGET_SECONDS:
            transfer(number * PIECE_BYTES, buffer)
            moved += 1
        return moved

    with ThreadPoolExecutor(len(buffers)) as pool:
        moved = sum(pool.map(run, buffers))
    return moved, time.perf_counter() - begin
