"""DeepSpeed's ZeRO-Offload and ZenFlow; runs in DeepSpeed's virtual environment.

Nothing of DeepSpeed is changed. What its version 0.19.8 needs to run alone, on the CPU too:

* ``DS_ACCELERATOR=cpu`` where there is no GPU, and the five variables of a process group of one rank (gloo, or nccl).
* ninja on ``PATH``: ``cpu_adam`` and, on the CPU, ``deepspeed_shm_comm`` compile themselves at first use.
* ZenFlow starts its optimizer process by *spawn* at the first window's end, so the main module must be importable
  without side effects; it pins that process and its own to halves of the cores then (``pt_reserved_cores_perc``). It
  never ends the process: ``close`` does.
* ZenFlow sets ``gradient_accumulation_steps`` to ``update_interval`` by itself, and wants ``step()`` after every
  backward.
"""

from __future__ import annotations

import os
import sys
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


def configuration(case: Case, rows: int) -> dict[str, Any]:
    """The DeepSpeed file of ``case``."""
    zero: dict[str, Any] = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": case.device == "cuda"},
        "overlap_comm": case.device == "cuda",
    }
    if case.system == "deepspeed_zenflow":
        zero["zenflow"] = {
            "topk_ratio": case.topk_ratio,
            "select_strategy": "step",
            "select_interval": max(SELECT_INTERVAL, case.update_interval),
            "update_interval": case.update_interval,
            "full_warm_up_rounds": 0,
            "overlap_step": True,
        }
    adam = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": zero,
        "bf16": {"enabled": case.dtype == "bf16"},
        "gradient_clipping": case.clip or 0.0,
    }


class DeepSpeed:
    """A ``deepspeed.initialize`` engine, its module compiled."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        beside_python = str(Path(sys.executable).parent)  # where ninja is
        os.environ["PATH"] = f"{beside_python}{os.pathsep}{os.environ['PATH']}"
        if case.ranks == 1:
            os.environ.update(rank_environment())
        if case.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=configuration(case, case.workload().rows)
        )
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
        """End ZenFlow's optimizer process, which DeepSpeed leaves running, and the process group."""
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
