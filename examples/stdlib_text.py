"""Loads text that is on every machine, as bytes: the Python standard library's sources, PyTorch's C++ headers."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "generated"}
)
_VALIDATION_SHARE = 16  # one file in 16 is for validation
_SMALLEST_USEFUL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on and bytes held out, both ``uint8[n]`` on the CPU; no file is in both."""

    train: Tensor
    validation: Tensor


def load_text(limit_bytes: int = 20_000_000, *, root: Path | None = None, pattern: str = "*.py") -> Text:
    """Read the files named like ``pattern`` below ``root`` (the standard library) until ``limit_bytes`` are collected.

    A file goes to train or validation by a hash of its path relative to ``root``, so the split does not
    depend on where Python is installed. Tests, which would be two thirds of the text, and generated files are left out.

    Raises:
        FileNotFoundError: if ``root`` holds too little source (some distributions ship bytecode only).
        ValueError: if ``limit_bytes`` ends the reading before there is enough.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    train, validation = bytearray(), bytearray()
    for path in sorted(root.rglob(pattern)):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        if len(train) + len(validation) >= limit_bytes:
            break
        digest = hashlib.sha256(relative.as_posix().encode()).digest()
        (validation if digest[0] % _VALIDATION_SHARE == 0 else train).extend(path.read_bytes())
    if min(len(train), len(validation)) < _SMALLEST_USEFUL_BYTES:
        if len(train) + len(validation) >= limit_bytes:
            raise ValueError(
                f"text_bytes={limit_bytes} gave {len(train)} training and {len(validation)} validation bytes, at least "
                f"{_SMALLEST_USEFUL_BYTES} of each are needed; raise it"
            )
        raise FileNotFoundError(
            f"{root} gave {len(train)} training and {len(validation)} validation bytes of {pattern} text, "
            f"at least {_SMALLEST_USEFUL_BYTES} of each are needed; install the sources, some packages leave them out"
        )
    return Text(*(torch.frombuffer(part, dtype=torch.uint8) for part in (train, validation)))


def load_headers(limit_bytes: int = 20_000_000) -> Text:
    """Read the C++ headers that PyTorch brings along: another domain than the standard library, for fine-tuning.

    Split by file, as in :func:`load_text`. Their text depends on PyTorch's version.

    Raises:
        FileNotFoundError: if PyTorch was installed without its headers.
    """
    return load_text(limit_bytes, root=Path(torch.__file__).parent / "include" / "torch", pattern="*.h")


def training_batch(text: Text, *, seed: int, step: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of one step, each ``int64[batch, context]``.

    The batch is a function of ``(seed, step)`` alone: the step is the data's whole position, and a resumed
    run sees the batches that the uninterrupted one would have seen.
    """
    # The CPU generator uses the lower 32 bits only: seeds must differ there.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)
    starts = torch.randint(len(text.train) - context, (batch,), generator=generator)
    return _cut(text.train, starts, context)


def validation_batches(text: Text, *, count: int, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """Return ``count`` batches, spread evenly over the held-out text; the same for every seed and run."""
    starts = torch.linspace(0, len(text.validation) - context - 1, count * batch).long()
    return [_cut(text.validation, chunk, context) for chunk in starts.split(batch)]


def _cut(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = data[starts[:, None] + torch.arange(context + 1)].long()  # [batch, context + 1]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
