"""Writes and reads checkpoints that survive crashes and power losses, with everything that a run needs to continue.

A checkpoint is a file that a weights-only load reads, followed by a SHA-256 of its content. PyTorch does not verify the
checksums of its own format, so that a flipped bit would load as another number.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from examples.ranks import ranks
from examples.settings import TrainConfig
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.checks.printable import printable

_KEPT = 2  # the newest, and the one before it in case the newest is damaged
_MARK = b"zenflow checkpoint, sha256:"
_TRAILER_BYTES = len(_MARK) + hashlib.sha256().digest_size
_NAME = re.compile(r"step-(\d+)-([0-9a-f]+)\.pt")
_UNFINISHED = ".unfinished"
_READ_BYTES = 1 << 22


class CheckpointError(ValueError):
    """A file is not a checkpoint, or is damaged."""


class CheckpointFolder:
    """The checkpoints ``step-NNNNNN-RUN.pt`` of one run, in a folder that other runs may share.

    Args:
        folder: is created if it does not exist.
        run: the run to continue; None starts a new one.
    """

    def __init__(self, folder: str | Path, run: str | None = None) -> None:
        self.folder = Path(folder)
        self.run = secrets.token_hex(4) if run is None else run

    def save(
        self, config: TrainConfig, step: int, model: nn.Module, optimizer: ZenFlowAdamW, scheduler: LRScheduler
    ) -> Path:
        """Write a checkpoint after ``step`` finished steps, and remove this run's older ones except for the last.

        All ranks call it, since each has a part of the optimizer's state, and the first one writes. The step is also
        the position in the data (see ``stdlib_text.training_batch``).

        Raises:
            OSError: it could not be written; the checkpoints that exist stay.
        """
        # state_dict() reads the weights outside of compiled graphs: pending host updates must be applied first.
        optimizer.synchronize()
        state = {
            "config": asdict(config),
            "run": self.run,
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        path = self.folder / f"step-{step:06d}-{self.run}.pt"
        if ranks()[0] > 0:
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(self.folder.parent)
        _remove_unfinished(self.folder)
        _write(state, path)
        # Only after the new checkpoint is on the disk.
        older = [each for number, each in _checkpoints(self.folder, self.run) if number < step]
        for old in older[: len(older) - (_KEPT - 1)]:
            old.unlink()
        return path


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint into host memory.

    Raises:
        FileNotFoundError: if there is none at ``path``.
        CheckpointError: it is damaged; the message names the last good one before it.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no checkpoint at {printable(path)}; checkpoints are files named step-NNNNNN-RUN.pt below --out"
        )
    if (damage := _damage(path)) is not None:
        raise CheckpointError(f"the checkpoint {printable(path)} is damaged: {damage}; {_remedy(path)}")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set the random number generators as they were."""
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda_rng"])


class _HashingFile:
    """A file for ``torch.save`` that computes the digest of its content."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self._file = file

    def write(self, content: Any) -> int:
        self.digest.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def _write(state: dict[str, Any], path: Path) -> None:
    """Write ``state`` to ``path`` atomically: a reader sees a complete checkpoint or none, even after a power loss."""
    unfinished = path.with_suffix(_UNFINISHED)
    try:
        with unfinished.open("xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: another run's cleaning leaves it alone
            hashing = _HashingFile(file)
            torch.save(state, cast("IO[bytes]", hashing))
            file.write(_MARK + hashing.digest.digest())
            file.flush()
            os.fsync(file.fileno())  # before the rename, which could otherwise be on the disk ahead of the content
            os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unfinished(folder: Path) -> None:
    """Remove unfinished files of killed runs; files of live runs are locked."""
    for path in folder.glob(f"step-*{_UNFINISHED}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _checkpoints(folder: Path, run: str) -> list[tuple[int, Path]]:
    """The checkpoints of a run, with their steps, in order."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*.pt"))
    return sorted((int(match[1]), path) for match, path in found if match is not None and match[2] == run)


def _damage(path: Path) -> str | None:
    """Say how the content of a checkpoint is damaged; None if it is intact."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _TRAILER_BYTES
        digest = hashlib.sha256()
        while left > 0 and (content := file.read(min(left, _READ_BYTES))):
            digest.update(content)
            left -= len(content)
        trailer = file.read(_TRAILER_BYTES)
    if not trailer.startswith(_MARK) or len(trailer) < _TRAILER_BYTES:
        return "its end is missing, or no checkpoint was written there"
    if trailer != _MARK + digest.digest():
        return "its content is not what was written"
    return None


def _remedy(path: Path) -> str:
    """Name the checkpoint to use instead of a damaged one."""
    if (match := _NAME.fullmatch(path.name)) is not None:
        for step, earlier in reversed(_checkpoints(path.parent, match[2])):
            if step < int(match[1]) and _damage(earlier) is None:
                return f"resume from the one before it, {printable(earlier)}"
    return "no good one before it is in its folder: start the run again"
