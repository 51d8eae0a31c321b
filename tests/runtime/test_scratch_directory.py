"""No link, FIFO or file of another user in a scratch directory is followed, waited for, read or written."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests.support.calls import interrupted
from zenflow_compile.runtime.nvme.state_file import MAGIC, PAGE_BYTES, ScratchDirectory

pytestmark = pytest.mark.timeout(20)

ROOT = Path(__file__).parents[2]
CONTENT = MAGIC + b"90 bytes of the user"
SPECIAL = "a link, a directory or a special file"


def socket_at(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as each:
        each.bind(str(path))


TRAPS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "symbolic_link": (lambda path, victim: path.symlink_to(victim), SPECIAL),
    "dangling_link": (lambda path, victim: path.symlink_to(victim.with_name("absent")), SPECIAL),
    "hard_link": (lambda path, victim: path.hardlink_to(victim), "a hard link"),
    "fifo": (lambda path, _: os.mkfifo(path), SPECIAL),
    "directory": (lambda path, _: path.mkdir(), SPECIAL),
    "socket": (socket_at, SPECIAL),
}


@pytest.mark.parametrize("name", ["zenflow.lock", "zenflow-9-9.state"])
@pytest.mark.parametrize("trap", TRAPS)
def test_trap_is_refused_by_name(trap: str, name: str, tmp_path: Path) -> None:
    victim, swap = tmp_path / "victim", tmp_path / "swap"
    victim.write_bytes(CONTENT)
    swap.mkdir()
    make, what = TRAPS[trap]
    with chdir(swap):  # paths of sockets are short
        make(Path(name), victim)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"nvme_path='{swap}'.*'{name}' in it is {what}.*; remove it"):
            ScratchDirectory(swap)
    assert victim.read_bytes() == CONTENT
    assert not (tmp_path / "absent").exists()
    path = swap / name
    assert os.path.lexists(path)
    path.rmdir() if trap == "directory" else path.unlink()
    ScratchDirectory(swap).close()
    assert not list(swap.iterdir())


@pytest.mark.parametrize("name", ["zenflow.lock", "zenflow-9-9.state"])
@pytest.mark.parametrize("trap", ["symbolic_link", "hard_link", "fifo"])
def test_trap_set_after_the_check_is_refused(
    trap: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "swap" / name
    victim.write_bytes(CONTENT)
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    lstat, replaced = os.lstat, [False]

    def replaced_after(checked: Path) -> os.stat_result:
        found = lstat(checked)
        if checked == path and not replaced[0]:
            replaced[0] = True
            path.unlink()
            TRAPS[trap][0](path, victim)
        return found

    monkeypatch.setattr(os, "lstat", replaced_after)
    with pytest.raises(ValueError, match=r"nvme_path=.*cannot be used: "):
        ScratchDirectory(path.parent)
    assert victim.read_bytes() == CONTENT
    assert os.path.lexists(path)


@pytest.mark.parametrize("name", ["zenflow.lock", "zenflow-9-9.state"])
def test_file_of_another_user_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(CONTENT)
    uid = os.geteuid()
    message = rf"'{name}' in it is a file of another user \(uid {uid}\)"
    with mock.patch.object(os, "geteuid", return_value=uid + 1), pytest.raises(ValueError, match=message):
        ScratchDirectory(tmp_path)
    assert (tmp_path / name).read_bytes() == CONTENT


def test_name_taken_by_another_program_is_kept(tmp_path: Path) -> None:
    directory = ScratchDirectory(tmp_path)
    taken = tmp_path / f"zenflow-{os.getpid()}-0.state"
    taken.write_text("theirs")
    with pytest.raises(ValueError, match=f"'{taken.name}' in it was not written by this optimizer; remove it"):
        directory.create(PAGE_BYTES, {}, purpose="for a test", otherwise="none")
    assert taken.read_text() == "theirs"
    directory.close()


@pytest.mark.parametrize("text", ["9" * 32, "²", "-1", "0", "1e3", "\x1b]0;\x07\x9b31m", "\u202e42", "4 2\n", ""])
def test_holder_text_is_shown_printable(text: str, tmp_path: Path) -> None:
    path = tmp_path / "zenflow.lock"
    path.write_text(text)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"nvme_path.*in use by another optimizer, of process") as caught:
            ScratchDirectory(tmp_path)
    assert str(caught.value).isprintable()
    ScratchDirectory(tmp_path).close()


def test_full_disk_unlocks_the_directory(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    message = f"nvme_path={re.escape(repr(str(tmp_path)))} cannot be used: No space left.*space left$"
    for call in (os.pwrite, os.ftruncate, os.open):
        # The error's traceback keeps all frames alive.
        with interrupted(call, full), pytest.raises(ValueError, match=message) as caught:
            ScratchDirectory(tmp_path)
        assert psutil.Process().num_fds() == before
        assert not list(tmp_path.iterdir())
        ScratchDirectory(tmp_path).close()
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize(("mode", "warned"), [(0o777, True), (0o1777, False), (0o775, False), (0o700, False)])
def test_directory_writable_by_others_warns(mode: int, warned: bool, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ScratchDirectory(tmp_path).close()
    assert [f"nvme_path='{tmp_path}' lets every user" in str(each.message) for each in caught] == [True] * warned


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/tmp/with\0null", r"nvme_path='/tmp/with\\x00null' has a null character; name a directory"),
        ("/" + "a" * 5000, r"nvme_path='/a+\.\.\.a+' cannot be used: File name too long; name a directory"),
        ("/tmp/\x1b[31m\u202e", r"nvme_path='/tmp/\\x1b\[31m\\u202e' does not exist; create it"),
    ],
)
def test_impossible_path_is_refused(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ScratchDirectory(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


ORPHAN = """
import os, sys
from zenflow_compile.runtime.nvme.state_file import ScratchDirectory
directory = ScratchDirectory(sys.argv[1])
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_lock_inherited_by_a_child_is_kept(tmp_path: Path) -> None:
    """A child that was forked past Python's hooks has inherited the lock."""
    command = [sys.executable, "-W", "ignore", "-c", ORPHAN, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid, child = process.stdout.readline().decode().split()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(ValueError, match=rf"of process {pid}; .*children that it left behind"):
            ScratchDirectory(tmp_path)
        os.kill(int(child), signal.SIGKILL)
        process.stdin.close()
    while psutil.pid_exists(int(child)) and psutil.Process(int(child)).status() != psutil.STATUS_ZOMBIE:
        pass
    ScratchDirectory(tmp_path).close()
