"""The measurement of a disk uses a bounded part of it, and raises clear errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zenflow_compile.measure import this_machine
from zenflow_compile.runtime.nvme import state_file
from zenflow_compile.runtime.nvme.state_file import PAGE_BYTES, PIECE_BYTES, ScratchDirectory, StateFile


def leave_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> list[int]:
    """Let the file system have so much left; returns the sizes of files that are made from then on."""
    sizes: list[int] = []
    create = ScratchDirectory.create

    def watched(directory: ScratchDirectory, size: int, *args: Any, **keywords: Any) -> StateFile:
        sizes.append(size)
        return create(directory, size, *args, **keywords)

    monkeypatch.setattr(state_file.os, "statvfs", lambda path: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))
    monkeypatch.setattr(ScratchDirectory, "create", watched)
    return sizes


@pytest.mark.parametrize(("free_bytes", "pieces"), [(105 << 20, 6), (PIECE_BYTES + PAGE_BYTES, 1), (1 << 40, 64)])
def test_at_most_half_of_the_free_space_is_used(
    free_bytes: int, pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """105 MiB: half is 52.5 MiB, six pieces of 8 MiB. At least one piece, and at most 64."""
    sizes = leave_free(monkeypatch, free_bytes)
    found = this_machine.disk_rates(str(tmp_path))
    assert sizes == [pieces * PIECE_BYTES]
    assert found.free_bytes == free_bytes
    assert min(found.read, found.write) > 0
    assert not list(tmp_path.iterdir())


def test_full_disk_is_too_small_for_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(monkeypatch, PIECE_BYTES)
    message = r"too little space: 0\.008 GB are needed to measure its rates.*leave nvme_path out"
    with pytest.raises(ValueError, match=message):
        this_machine.disk_rates(str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("direction", ["read", "write"])
def test_failed_transfer_names_the_path(direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(this_machine, "_MOST_PIECES", 1)
    monkeypatch.setattr(StateFile, direction, fail)
    with pytest.raises(ValueError, match=r"nvme_path=.* cannot be used: Input/output error"):
        this_machine.disk_rates(str(tmp_path))
    assert not list(tmp_path.iterdir())
