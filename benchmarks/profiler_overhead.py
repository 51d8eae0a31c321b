"""What ``zf.profile()`` costs: steps of one training run with and without it, in alternating rounds."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

import zenflow_compile as zf
from benchmarks.common import Spread, interleaved, option_parser, ratios, write_results


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks profiler_overhead``."""
    parser = option_parser("profiler_overhead", __doc__, rounds=12)
    parser.add_argument("--steps", type=int, default=6, help="of a round (%(default)s)")
    parser.add_argument("--layers", type=int, default=24, help="(%(default)s)")
    parser.add_argument("--width", type=int, default=512, help="(%(default)s)")
    given = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(given.width, given.width) for _ in range(given.layers)))
    optimizer = zf.ZenFlowAdamW(model.named_parameters(), lr=1e-4)
    compiled = torch.compile(model, backend="zenflow", options={"inner": "eager"})
    batch = torch.randn(128, given.width)

    def step() -> None:
        compiled(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(8):
        step()

    def turn(profiled: bool) -> float:
        """Mean step of one round, ms."""
        with zf.profile(optimizer) if profiled else nullcontext():
            begin = time.perf_counter()
            for _ in range(given.steps):
                step()
            return (time.perf_counter() - begin) * 1e3 / given.steps

    works = {"plain": partial(turn, False), "profiled": partial(turn, True)}
    times = interleaved(given.rounds, works)
    optimizer.close()
    overhead = Spread.of([ratio - 1.0 for ratio in ratios(times["profiled"], times["plain"])])
    row = {
        "parameters": sum(param.numel() for param in model.parameters()),
        "tensors": sum(1 for _ in model.parameters()),
        "step_ms": Spread.of(times["plain"]).row(),
        "profiled_step_ms": Spread.of(times["profiled"]).row(),
        "overhead": overhead.row(),
        "steps_of_a_round": given.steps,
    }
    print(f"{Spread.of(times['plain'])} ms plain, {Spread.of(times['profiled'])} ms profiled: {overhead.median:+.1%}")
    print(f"wrote {write_results('profiler_overhead', [row], out=given.out, seed=0)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
