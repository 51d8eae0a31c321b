"""Everything a run needs to go on as if it had never stopped, in a file that a weights-only load reads."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from examples.settings import TrainConfig
from zenflow_compile import ZenFlowAdamW

_KEPT = 2  # the newest, and one before it should the machine have died while the newest was being written


def save_checkpoint(
    config: TrainConfig, step: int, model: nn.Module, optimizer: ZenFlowAdamW, scheduler: LRScheduler
) -> Path:
    """Write ``step-NNNNNN.pt`` into ``config.out`` after ``step`` finished steps, and drop the oldest ones.

    The step is also the position in the data (see ``stdlib_text.training_batch``).
    """
    assert config.out is not None
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    # Weights are read here outside of the compiled graphs: what the host has updated must land first.
    optimizer.synchronize()
    state = {
        "config": asdict(config),
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    path = folder / f"step-{step:06d}.pt"
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)  # atomic: a reader sees a whole checkpoint or none
    for old in sorted(folder.glob("step-*.pt"))[:-_KEPT]:
        old.unlink()
    return path


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint into host memory.

    Raises:
        FileNotFoundError: if there is none at ``path``.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no checkpoint at {path}; checkpoints are files named step-NNNNNN.pt below --out"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set the random number generators as they were."""
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda_rng"])
