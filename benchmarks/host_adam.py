"""How fast is the host update on one core, against copying memory on the same core?

GB/s counts what the update must move: fp32 master and moments read and written (24 bytes per parameter), each
stored gradient read, the upload buffer written. ``copy`` is ``Tensor.copy_`` with one thread, its bytes read
and written counted, measured between the kernels' own repetitions.

    python benchmarks/host_adam.py [--params 32] [--slots 1 4] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_results
from zenflow_compile import torch_private
from zenflow_compile.runtime.adam import SlotCoefficients
from zenflow_compile.runtime.host_adam import Kernel, make_host_adam

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KERNELS: tuple[Kernel, ...] = ("inductor", "aten")


def in_threads(threads: int, work: Callable[[int], None]) -> float:
    """Seconds until ``work(0)`` to ``work(threads - 1)``, one thread each, are all done."""
    pool = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    start = time.perf_counter()
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return time.perf_counter() - start


def measure(dtype_name: str, slots: int, numel: int, threads: int, repeats: int) -> list[dict[str, Any]]:
    """One row per kernel, and one for copying."""
    dtype = DTYPES[dtype_name]
    share = numel // threads // 64 * 64
    parts = [slice(i * share, (i + 1) * share) for i in range(threads)]
    numel = share * threads
    state = [torch.randn(numel), torch.zeros(numel), torch.zeros(numel)]
    out = torch.zeros(numel, dtype=dtype)
    gradients = [torch.randn(numel).to(dtype) for _ in range(slots)]
    coefficients = [SlotCoefficients(1e-4, 0.9, 0.999, 0.01, 0.5)] * slots

    def copy(i: int) -> None:
        with torch_private.one_intra_op_thread():
            state[2][parts[i]].copy_(state[1][parts[i]])

    works: dict[str, Callable[[int], None]] = {"copy": copy}
    for kernel in KERNELS:
        adam = make_host_adam(kernel, gradient_dtype=dtype, out_dtype=dtype, max_slots=slots)

        def update(i: int, adam: Any = adam) -> None:
            part = parts[i]
            window = [gradient[part] for gradient in gradients]
            adam(*(s[part] for s in state), window, coefficients, step=slots, eps=1e-8, out=out[part])

        works[kernel] = update
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            elapsed = in_threads(threads, work)
            if repeat:  # the first touches pages
                seconds[name].append(elapsed)
    rows = []
    for name, measured in seconds.items():
        moved = 8 if name == "copy" else 24 + (slots + 1) * dtype.itemsize
        best, median = min(measured), statistics.median(measured)
        rows.append(
            {
                "kernel": name,
                "dtype": dtype_name,
                "slots": slots,
                "threads": threads,
                "parameters": numel,
                "bytes_per_parameter": moved,
                "million_parameters_per_s": round(numel / median / 1e6, 1),
                "gb_per_s": round(moved * numel / median / 1e9, 2),
                "gb_per_s_best": round(moved * numel / best / 1e9, 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, default=32, help="millions of parameters (default 32)")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4], help="window lengths (default 1 4)")
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["bf16", "fp16", "fp32"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="workers at once (default 1)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = []
    print(f"{'kernel':9} {'dtype':5} {'slots':>5} {'threads':>7} {'M params/s':>11} {'GB/s':>7} {'best':>7}")
    for threads in options.threads:
        for dtype in options.dtype:
            for slots in options.slots:
                for row in measure(dtype, slots, round(options.params * 1e6), threads, options.repeats):
                    rows.append(row)
                    print(
                        f"{row['kernel']:9} {row['dtype']:5} {row['slots']:5} {row['threads']:7} "
                        f"{row['million_parameters_per_s']:11.0f} {row['gb_per_s']:7.2f} "
                        f"{row['gb_per_s_best']:7.2f}"
                    )
    print(f"wrote {write_results('host_adam', rows)}")


if __name__ == "__main__":
    main()
