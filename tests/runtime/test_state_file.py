"""State files return whole chunks, serve one run per directory, and are removed after a dead run."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, chdir, nullcontext
from pathlib import Path

import pytest
import torch

from tests.support.calls import Call, at_calls, interrupted
from tests.support.host import no_direct_io
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.nvme.state_file import MAGIC, PAGE_BYTES, ScratchDirectory, whole_pages

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
HOLD = """
import os, sys, time
from zenflow_compile.runtime.nvme.state_file import ScratchDirectory
directory = ScratchDirectory(sys.argv[1])
directory.create(8192, {}, purpose="for a test", otherwise="none")
print(os.getpid(), flush=True)
time.sleep(60)
"""


def pages(count: int) -> tuple[HostArena, torch.Tensor]:
    arena = HostArena(count * PAGE_BYTES)
    return arena, arena.take((count * PAGE_BYTES,), torch.uint8)


def refusing(call: Callable[..., object], code: int) -> AbstractContextManager[None]:
    return interrupted(call, OSError(code, f"{os.strerror(code)} in {call.__name__}"))


@pytest.mark.parametrize("direct", [True, False])
def test_chunks_are_read_as_written(direct: bool, tmp_path: Path) -> None:
    directory = ScratchDirectory(tmp_path)
    with nullcontext() if direct else no_direct_io():
        file = directory.create(8 * PAGE_BYTES, {}, purpose="for a test", otherwise="none")
    if direct and not file.direct:
        pytest.skip("no direct I/O on the file system of temporary files")
    _arena, memory = pages(5)
    memory.copy_(torch.randint(0, 256, (5 * PAGE_BYTES,), dtype=torch.uint8))
    expected = memory.clone()
    written = file.write(3 * PAGE_BYTES, memory)
    memory.zero_()
    assert file.read(3 * PAGE_BYTES, memory) == written
    assert torch.equal(memory, expected)
    assert file.path.stat().st_size == 9 * PAGE_BYTES
    file.read(0, memory)
    assert not memory[: 3 * PAGE_BYTES].any()
    assert torch.equal(memory[3 * PAGE_BYTES :], expected[: 2 * PAGE_BYTES])
    directory.close()
    assert list(tmp_path.iterdir()) == []


def test_truncated_file_raises(tmp_path: Path) -> None:
    directory = ScratchDirectory(tmp_path)
    file = directory.create(4 * PAGE_BYTES, {}, purpose="for a test", otherwise="none")
    os.truncate(file.path, 3 * PAGE_BYTES)
    _arena, memory = pages(4)
    with pytest.raises(OSError, match="Input/output error"):
        file.read(0, memory)
    directory.close()


@pytest.mark.parametrize(("size", "rounded"), [(0, 0), (1, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES), (4097, 8192)])
def test_sizes_are_whole_pages(size: int, rounded: int) -> None:
    assert whole_pages(size) == rounded


def test_second_optimizer_of_this_process_is_refused(tmp_path: Path) -> None:
    first = ScratchDirectory(tmp_path)
    with pytest.raises(ValueError, match=rf"nvme_path.*in use.*{os.getpid()} \(this one\)"):
        ScratchDirectory(tmp_path)
    first.close()
    ScratchDirectory(tmp_path).close()


def test_files_of_a_dead_run_are_removed(tmp_path: Path) -> None:
    theirs = tmp_path / "zenflow-notes.state"
    theirs.write_text("not ours")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        with pytest.raises(ValueError, match=f"nvme_path.*process {pid};"):
            ScratchDirectory(tmp_path)
        left = tmp_path / f"zenflow-{pid}-0.state"
        assert left.read_bytes()[: len(MAGIC)] == MAGIC
        process.send_signal(signal.SIGKILL)
    directory = ScratchDirectory(tmp_path)
    assert not left.exists()
    directory.close()
    assert list(tmp_path.iterdir()) == [theirs]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_read_only_directory_is_refused(code: int, tmp_path: Path) -> None:
    message = r"nvme_path=.*cannot be used.*; name a directory"
    with refusing(os.open, code), pytest.raises(ValueError, match=message):
        ScratchDirectory(tmp_path)


def test_full_disk_is_refused_at_once(tmp_path: Path) -> None:
    directory = ScratchDirectory(tmp_path)
    stats = os.statvfs(tmp_path)
    with pytest.raises(ValueError, match=r"nvme_path=.*too little space.*; free some"):
        directory.create(stats.f_blocks * stats.f_frsize, {}, purpose="for a test", otherwise="none")
    for code in (errno.ENOSPC, errno.EDQUOT):
        message = r"nvme_path=.*too little space"
        with refusing(os.posix_fallocate, code), pytest.raises(ValueError, match=message):
            directory.create(PAGE_BYTES, {}, purpose="for a test", otherwise="none")
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    directory.close()


def test_lock_with_a_removed_file_is_taken_again(tmp_path: Path) -> None:
    """The holder removes it when it closes, perhaps between another's opening and locking it."""
    calls: list[Call] = []

    def removed_meanwhile(call: Call) -> None:
        calls.append(call)
        if len(calls) == 1:
            (tmp_path / "zenflow.lock").unlink()

    with at_calls(removed_meanwhile, fcntl.flock):
        first = ScratchDirectory(tmp_path)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="in use"):
        ScratchDirectory(tmp_path)
    first.close()


def test_relative_path_survives_a_change_of_directory(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    with chdir(tmp_path):
        directory = ScratchDirectory("swap")
        directory.create(PAGE_BYTES, {}, purpose="for a test", otherwise="none")
    directory.create(PAGE_BYTES, {}, purpose="for a test", otherwise="none")
    assert len(list((tmp_path / "swap").iterdir())) == 3
    directory.close()
    assert not list((tmp_path / "swap").iterdir())
