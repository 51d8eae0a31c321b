"""Writes and reads checkpoints that survive crashes and power losses, with everything that a run needs to continue.

A checkpoint is a file that a weights-only load reads, followed by a SHA-256 of its content. PyTorch does not verify the
checksums of its own format, so that a flipped bit would load as another number.

That of a sharded run is a folder: the files of ``torch.distributed.checkpoint``, in which each rank writes its parts of
the model and of the optimizer's state, and such a file with the rest and the SHA-256 of the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.lr_scheduler import LRScheduler

from examples.ranks import on_first_rank
from examples.settings import TrainConfig
from zenflow_compile import ZenFlow

_KEPT = 2  # the newest, and the one before it in case the newest is damaged
_MARK = b"zenflow checkpoint, sha256:"
_TRAILER_BYTES = len(_MARK) + hashlib.sha256().digest_size
_NAME = re.compile(r"step-(\d+)-([0-9a-f]+)(\.pt)?")
_RUN = "run.pt"  # in the folder of a sharded checkpoint
_METADATA = ".metadata"  # in it, too: which file has which part
_UNFINISHED = ".unfinished"  # locked while it is written; for a sharded checkpoint an empty file beside its folders
_PARTS = ".parts"  # the folder of a sharded checkpoint that is being written
_REPLACED = ".replaced"  # the folder in whose place it comes, if the run saves a step again
_READ_BYTES = 1 << 22


class CheckpointError(ValueError):
    """A file is not a checkpoint, or a checkpoint is damaged or incomplete."""


class CheckpointFolder:
    """The checkpoints ``step-NNNNNN-RUN.pt`` of one run, in a folder that other runs may share.

    Those of a sharded run are folders, without the suffix.

    Args:
        folder: is created if it does not exist. All ranks of a sharded run write into it.
        run: the run to continue; None starts a new one, which all ranks must do then.
    """

    def __init__(self, folder: str | Path, run: str | None = None) -> None:
        self.folder = Path(folder)
        self.run = on_first_rank(lambda: secrets.token_hex(4)) if run is None else run

    def save(
        self, config: TrainConfig, step: int, model: nn.Module, optimizer: ZenFlow, scheduler: LRScheduler
    ) -> Path:
        """Write a checkpoint after ``step`` finished steps, and remove this run's older ones except for the last.

        All ranks call it, since each has a part of the optimizer's state, and the first one writes; those of a sharded
        run write a part each. The step is also the position in the data (see ``stdlib_text.training_batch``).

        Raises:
            OSError: it could not be written; the checkpoints that exist stay. All ranks raise.
            CheckpointError: the first rank does not see the parts of all ranks. All ranks raise.
        """
        state = {
            "config": asdict(config),
            "run": self.run,
            "step": step,
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        # state_dict() reads the weights outside of compiled graphs: pending host updates must be applied first.
        optimizer.synchronize()
        path = self.folder / f"step-{step:06d}-{self.run}{'' if config.fsdp else '.pt'}"
        if config.fsdp:
            self._write_sharded(state, model, optimizer, path)
        else:
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            on_first_rank(lambda: self._write_whole(state, path))
        on_first_rank(lambda: self._remove_older(step))  # only after the new checkpoint is on the disk
        return path

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(self.folder.parent)
        for unfinished in self.folder.glob(f"step-*{_UNFINISHED}"):
            _recover(unfinished, wait=False)

    def _remove_older(self, step: int) -> None:
        older = [each for number, each in _checkpoints(self.folder, self.run) if number < step]
        for old in older[: len(older) - (_KEPT - 1)]:
            _remove(old)

    def _write_whole(self, state: dict[str, Any], path: Path) -> None:
        self._prepare()
        _write(state, path)

    def _write_sharded(self, state: dict[str, Any], model: nn.Module, optimizer: ZenFlow, path: Path) -> None:
        """Write ``state`` and the parts of all ranks to the folder ``path``; a kill leaves the earlier one or this."""
        unfinished, parts = path.with_suffix(_UNFINISHED), path.with_suffix(_PARTS)
        locked = ExitStack()

        def begin() -> None:
            self._prepare()
            locked.enter_context(_create_locked(unfinished))
            parts.mkdir()
            # The name of the locked file must not be lost before those of the folders: they are found by it.
            _sync_folder(self.folder)

        def finish() -> None:
            _write({**state, "parts": _digests(parts)}, parts / _RUN)
            if path.exists():  # of the same step of the same run, which went on from an earlier one
                os.rename(path, path.with_suffix(_REPLACED))
            os.rename(parts, path)
            _tidy(unfinished)

        with locked:
            on_first_rank(begin)
            weights, moments = get_state_dict(model, optimizer)
            save({"model": weights, "optimizer": moments}, checkpoint_id=parts)
            on_first_rank(finish)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint into host memory: of a sharded run all but the model and the optimizer.

    Raises:
        FileNotFoundError: if there is none at ``path``.
        CheckpointError: it is damaged; the message names the last good one before it.
    """
    path = Path(path)
    if not path.exists() and _NAME.fullmatch(path.name):
        _recover(path.with_suffix(_UNFINISHED), wait=True)
    if not path.is_file() and not (path.is_dir() and _NAME.fullmatch(path.name)):
        raise FileNotFoundError(
            f"no checkpoint at {_shown(path)}; checkpoints are files named step-NNNNNN-RUN.pt below --out, and with "
            "--fsdp folders named step-NNNNNN-RUN"
        )
    if (damage := _damage(path)) is not None:
        raise CheckpointError(f"the checkpoint {_shown(path)} is damaged: {damage}; {_remedy(path)}")
    file = path / _RUN if path.is_dir() else path
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def load_weights(state: dict[str, Any], path: str | Path, model: nn.Module) -> None:
    """Load the weights of the checkpoint ``state``, which was read from ``path``, into a model that is not sharded."""
    if "model" in state:
        model.load_state_dict(state["model"])
        return
    weights = model.state_dict()
    load({"model": weights}, checkpoint_id=path, no_dist=True)
    model.load_state_dict(weights)


def load_sharded(path: str | Path, model: nn.Module, optimizer: ZenFlow) -> None:
    """Load the parts that this rank has of a sharded model and its optimizer; all ranks call it."""
    weights, moments = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": moments}
    load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


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
    with _create_locked(unfinished) as file:
        try:
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


def _create_locked(path: Path) -> BinaryIO:
    """Create the unfinished file ``path``, locked until it is closed: other runs leave it and its folders alone.

    Raises:
        FileExistsError: another process writes the same checkpoint.
    """
    while True:
        file = path.open("xb")
        # Another run may lock and remove the file before this one has locked it. It is made again then.
        fcntl.flock(file, fcntl.LOCK_EX)
        if _has_name(file, path):
            return file
        file.close()


def _recover(unfinished: Path, *, wait: bool) -> None:
    """Remove what a killed save left, and bring back the checkpoint that it was about to replace.

    Does nothing if the file is gone, and if a live run has locked it unless ``wait`` is set.
    """
    with suppress(OSError), unfinished.open("r+b") as file:  # for writing: NFS has no exclusive locks of others
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        # It may have been finished, or removed and made again by others, since it was opened.
        if _has_name(file, unfinished):
            _tidy(unfinished)


def _tidy(unfinished: Path) -> None:
    """Leave one whole checkpoint, or none, of what belongs to ``unfinished``, which this process has locked."""
    path, parts, replaced = (unfinished.with_suffix(suffix) for suffix in ("", _PARTS, _REPLACED))
    if replaced.exists() and not path.exists():
        os.rename(replaced, path)
    _sync_folder(unfinished.parent)  # before anything is removed
    for folder in (replaced, parts):
        if folder.exists():
            _remove(folder)
    # Last: what is left by a kill before is found by this name.
    unfinished.unlink()


def _has_name(file: BinaryIO, path: Path) -> bool:
    """Whether ``path`` is a name of the open ``file``."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _digests(parts: Path) -> dict[str, bytes]:
    """The digest of each file of a sharded checkpoint, by its name.

    Raises:
        CheckpointError: files that ranks have written are not there.
    """
    # Each file is opened by its name: a network file system may list a folder as it was before.
    written: dict[Any, Any] = FileSystemReader(parts).read_metadata().storage_data
    digests, missing = {}, []
    for name in sorted({each.relative_path for each in written.values()} | {_METADATA}):
        try:
            digests[name] = _digest(parts / name)
        except FileNotFoundError:
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"the first rank does not see {', '.join(missing)} in {_shown(parts)}, which other ranks have written; "
            "--out must be a folder on a file system that all nodes share"
        )
    return digests


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _checkpoints(folder: Path, run: str) -> list[tuple[int, Path]]:
    """The checkpoints of a run, with their steps, in order."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in found if match is not None and match[2] == run)


def _damage(path: Path) -> str | None:
    """Say how the content of a checkpoint is damaged; None if it is intact."""
    if path.is_dir():
        return _damage_of_sharded(path)
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


def _damage_of_sharded(path: Path) -> str | None:
    if not (path / _RUN).is_file():
        return f"its {_RUN} is missing"
    if (damage := _damage(path / _RUN)) is not None:
        return f"{_RUN}: {damage}"
    parts: dict[str, bytes] = torch.load(path / _RUN, map_location="cpu", weights_only=True)["parts"]
    for name, digest in parts.items():
        if not (path / name).is_file():
            return f"its {name} is missing"
        if _digest(path / name) != digest:
            return f"the content of {name} is not what was written"
    return None


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256).digest()


def _remedy(path: Path) -> str:
    """Name the checkpoint to use instead of a damaged one."""
    if (match := _NAME.fullmatch(path.name)) is not None:
        for step, earlier in reversed(_checkpoints(path.parent, match[2])):
            if step < int(match[1]) and _damage(earlier) is None:
                return f"resume from the one before it, {_shown(earlier)}"
    return "no good one before it is in its folder: start the run again"


def _shown(path: Path) -> str:
    """On one line, and without sequences that a terminal obeys."""
    return repr(str(path))[1:-1]
