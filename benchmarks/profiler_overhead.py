"""What ``zf.profile()`` costs: steps of one training run with and without it, in alternating rounds.

    python -m benchmarks.profiler_overhead [--rounds 12] [--steps 6]
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext

import torch
from torch import nn

import zenflow_compile as zf
from benchmarks.common import machine, write_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(arguments.width, arguments.width) for _ in range(arguments.layers)))
    optimizer = zf.ZenFlowAdamW(model.named_parameters(), lr=1e-4)
    compiled = torch.compile(model, backend="zenflow", options={"inner": "eager"})
    batch = torch.randn(128, arguments.width)

    def step() -> None:
        compiled(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(8):
        step()
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * arguments.rounds):
        profiled = number % 2 == 1
        with zf.profile(optimizer) if profiled else nullcontext():
            for _ in range(arguments.steps):
                begin = time.perf_counter()
                step()
                times[profiled].append((time.perf_counter() - begin) * 1e3)
    optimizer.close()
    plain, profiled_ms = statistics.median(times[False]), statistics.median(times[True])
    row = {
        "parameters": sum(param.numel() for param in model.parameters()),
        "tensors": sum(1 for _ in model.parameters()),
        "step_ms": plain,
        "profiled_step_ms": profiled_ms,
        "overhead": profiled_ms / plain - 1.0,
        "steps_each": len(times[False]),
    }
    print(f"{plain:.2f} ms plain, {profiled_ms:.2f} ms profiled: {100 * row['overhead']:+.1f}%  ({machine()['cpu']})")
    write_results("profiler_overhead", [row])


if __name__ == "__main__":
    main()
