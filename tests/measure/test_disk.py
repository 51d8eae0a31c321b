"""The measurement of a disk uses a bounded part of it, and raises clear errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.support.calls import Call, at_calls
from zenflow_compile.measure import disk
from zenflow_compile.runtime.nvme.state_file import PAGE_BYTES, PIECE_BYTES, ScratchDirectory, StateFile


@contextmanager
def left_free(free_bytes: int) -> Iterator[list[int]]:
    """Let the file system have so much left; yields the sizes of files that are made."""
    sizes: list[int] = []

    def note(call: Call) -> None:
        sizes.append(call.arguments["size"])

    left = SimpleNamespace(f_bavail=free_bytes, f_frsize=1)
    with mock.patch("os.statvfs", return_value=left), at_calls(note, ScratchDirectory.create):
        yield sizes


@pytest.mark.parametrize(("free_bytes", "pieces"), [(105 << 20, 6), (PIECE_BYTES + PAGE_BYTES, 1), (1 << 40, 64)])
def test_at_most_half_of_the_free_space_is_used(free_bytes: int, pieces: int, tmp_path: Path) -> None:
    """105 MiB: half is 52.5 MiB, six pieces of 8 MiB. At least one piece, and at most 64."""
    with left_free(free_bytes) as sizes:
        found = disk.disk_rates(str(tmp_path))
    assert sizes == [pieces * PIECE_BYTES]
    assert found.free_bytes == free_bytes
    assert min(found.read, found.write) > 0
    assert not list(tmp_path.iterdir())


def test_full_disk_is_too_small_for_a_measurement(tmp_path: Path) -> None:
    message = r"too little space: 0\.008 GB are needed to measure its rates.*leave nvme_path out"
    with left_free(PIECE_BYTES), pytest.raises(ValueError, match=message):
        disk.disk_rates(str(tmp_path))
    assert not list(tmp_path.iterdir())


@mock.patch.object(disk, "_MOST_PIECES", 1)
@pytest.mark.parametrize("direction", ["read", "write"])
def test_failed_transfer_names_the_path(direction: str, tmp_path: Path) -> None:

    def fail(call: Call) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    message = r"nvme_path=.* cannot be used: Input/output error"
    with at_calls(fail, getattr(StateFile, direction), new_threads=True), pytest.raises(ValueError, match=message):
        disk.disk_rates(str(tmp_path))
    assert not list(tmp_path.iterdir())
