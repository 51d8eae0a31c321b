"""A process that applies one update window per request with DeepSpeed's CPUAdam; runs in DeepSpeed's environment.

    python -m benchmarks.systems.cpu_adam_worker DTYPE SLOTS PARAMETERS THREADS

``{"command": "update", "whole": true}`` is answered with ``{"seconds": ...}``: casts and sum of the gradients,
``adam_update``, cast into the upload buffer, zeroing. ``"whole": false`` times ``adam_update`` alone. Threads are
OpenMP's, as DeepSpeed has them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch


class CPUAdamWindow:
    """The counterpart of ``benchmarks.host_adam.Window``, around ``adam_update``."""

    def __init__(self, dtype: torch.dtype, slots: int, numel: int) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        generator = torch.Generator().manual_seed(0)
        self._master = torch.randn(numel, generator=generator).requires_grad_()
        self._gradients = [torch.randn(numel, generator=generator).to(dtype) for _ in range(slots)]
        self._master.grad = torch.zeros(numel)
        self._out = torch.zeros(numel, dtype=dtype)
        self._adam: Any = DeepSpeedCPUAdam([self._master], lr=1e-4, weight_decay=0.01)

    @torch.no_grad()
    def update(self, whole: bool) -> dict[str, float]:
        """Apply the window; seconds it took."""
        begin = time.perf_counter()
        total = self._master.grad
        assert total is not None
        if whole:
            total.copy_(self._gradients[0])
            for gradient in self._gradients[1:]:
                total.add_(gradient)
        self._adam.step()
        if whole:
            self._out.copy_(self._master)
            for gradient in self._gradients:
                gradient.zero_()
        return {"seconds": time.perf_counter() - begin}


def main() -> None:
    """Entry point. Standard output is for answers alone."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dtype, slots, numel, threads = sys.argv[1], *map(int, sys.argv[2:])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    torch.set_num_threads(threads)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where ninja is
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        window = CPUAdamWindow(
            {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype], slots, numel
        )
        window.update(True)  # touches pages
        print(json.dumps({"ready": True}), file=replies, flush=True)
        for request in map(json.loads, sys.stdin):
            if request["command"] == "close":
                break
            print(json.dumps(window.update(request["whole"])), file=replies, flush=True)
    except Exception as error:  # the parent decides; the traceback is in this process's log
        kind = "missing" if isinstance(error, ImportError) else "failure"
        print(json.dumps({"error": f"{type(error).__name__}: {error}", "kind": kind}), file=replies, flush=True)
        raise


if __name__ == "__main__":
    main()
