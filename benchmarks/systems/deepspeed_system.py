"""DeepSpeed's ZeRO-Offload and ZenFlow; runs in DeepSpeed's virtual environment.

Nothing of DeepSpeed is changed. What its version 0.19.6 needs to run alone, on the CPU too:

* ``DS_ACCELERATOR=cpu`` where there is no GPU, and the five variables of a process group of one rank (gloo, or nccl).
* ninja on ``PATH``: ``cpu_adam`` and, on the CPU, ``deepspeed_shm_comm`` compile themselves at first use.
* ZenFlow starts its optimizer process by *spawn* at the first window's end, so the main module must be importable
  without side effects; it pins that process and its own to halves of the cores then (``pt_reserved_cores_perc``). It
  never ends the process: ``close`` does.
* The first process group is kept in a variable of DeepSpeed's, also after ``end``: a process trains once.
* ZenFlow sets ``gradient_accumulation_steps`` to ``update_interval`` by itself, and wants ``step()`` after every
  backward.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.systems.case import BETAS, EPS, LR, WEIGHT_DECAY, Case
from benchmarks.systems.local import rank_environment
from benchmarks.systems.workloads import Batch

SELECT_INTERVAL = 16
"""Steps between re-selections; the same number as ours. DeepSpeed's default selects once."""


def zero_optimization(device: str, windows: tuple[float, int] | None) -> dict[str, Any]:
    """ZeRO-Offload's options, and ZenFlow's if there are update ``windows``: top-k ratio and steps of one."""
    zero: dict[str, Any] = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": device == "cuda"},
        "overlap_comm": device == "cuda",
    }
    if windows is not None:
        topk_ratio, update_interval = windows
        zero["zenflow"] = {
            "topk_ratio": topk_ratio,
            "select_strategy": "step",
            "select_interval": max(SELECT_INTERVAL, update_interval),
            "update_interval": update_interval,
            "full_warm_up_rounds": 0,
            "overlap_step": True,
        }
    return zero


def configuration(case: Case, rows: int) -> dict[str, Any]:
    """The DeepSpeed file of ``case``."""
    windows = (case.topk_ratio, case.update_interval) if case.system == "deepspeed_zenflow" else None
    adam = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": zero_optimization(case.device, windows),
        "bf16": {"enabled": case.dtype == "bf16"},
        "gradient_clipping": case.clip or 0.0,
    }


def initialize(model: nn.Module, config: dict[str, Any], *, device: str, alone: bool) -> Any:
    """A ``deepspeed.initialize`` engine; ``alone``: its process is the only rank.

    Raises: see ``refuse_changed``.
    """
    beside_python = str(Path(sys.executable).parent)  # where ninja is
    os.environ["PATH"] = f"{beside_python}{os.pathsep}{os.environ['PATH']}"
    if alone:
        os.environ.update(rank_environment())
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    before = samples(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    refuse_changed(before, samples(model), deepspeed.__version__)
    return engine


def samples(model: nn.Module) -> list[Tensor]:
    """The first elements of each parameter, on the host."""
    return [param.detach().reshape(-1)[:64].to("cpu", copy=True) for param in model.parameters()]


def refuse_changed(before: Sequence[Tensor], now: Sequence[Tensor], version: str) -> None:
    """
    Raises:
        RuntimeError: DeepSpeed has changed the weights, as 0.19.7 and 0.19.8 do under ZenFlow: they lay matrices out
            transposed in one buffer, and view it as if they were not.
    """
    for old, new in zip(before, now, strict=True):
        if not torch.equal(new.to(old.dtype), old):
            raise RuntimeError(f"DeepSpeed {version} has changed the weights at its initialization; install 0.19.6")


class DeepSpeed:
    """A ``deepspeed.initialize`` engine, its module compiled."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        config = configuration(case, case.workload().rows)
        self._engine = initialize(model, config, device=case.device, alone=case.ranks == 1)
        if case.inner != "eager":
            self._engine.compile(backend=case.inner, compile_kwargs={"dynamic": False})

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, and DeepSpeed's step, which knows by itself whether a window ends."""
        loss: Tensor = self._engine(*batch)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def facts(self) -> dict[str, Any]:
        """How the processes share the cores."""
        return {"resident_share": 0.0, "training_cores": sorted(os.sched_getaffinity(0))}

    def close(self) -> None:
        """See ``end``."""
        end()


def end() -> None:
    """End ZenFlow's optimizer process, which DeepSpeed leaves running, and the process group."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
