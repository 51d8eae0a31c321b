"""What ``zf.profile()`` and ``zf.live()`` cost: steps of one training run with and without, in alternating rounds."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from rich.console import Console
from torch import nn

import zenflow_compile as zf
from benchmarks.common import Spread, interleaved, option_parser, ratios, write_results


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks profiler_overhead``."""
    parser = option_parser("profiler_overhead", __doc__, rounds=12)
    parser.add_argument("--steps", type=int, default=50, help="of a round, in which the view is drawn (%(default)s)")
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

    def shown() -> AbstractContextManager[object]:
        terminal = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
        return zf.live(optimizer, console=terminal)

    def turn(recorded: Callable[[], AbstractContextManager[object]]) -> float:
        """Mean step of one round, ms."""
        with recorded():
            begin = time.perf_counter()
            for _ in range(given.steps):
                step()
            return (time.perf_counter() - begin) * 1e3 / given.steps

    recorded: dict[str, Callable[[], AbstractContextManager[object]]]
    recorded = {"plain": nullcontext, "profiled": lambda: zf.profile(optimizer), "live": shown}
    times = interleaved(given.rounds, {name: partial(turn, each) for name, each in recorded.items()})
    optimizer.close()
    profiled, live = (
        Spread.of([ratio - 1.0 for ratio in ratios(times[name], times["plain"])]) for name in ("profiled", "live")
    )
    view = Spread.of([ratio - 1.0 for ratio in ratios(times["live"], times["profiled"])])
    row = {
        "parameters": sum(param.numel() for param in model.parameters()),
        "tensors": sum(1 for _ in model.parameters()),
        "step_ms": Spread.of(times["plain"]).row(),
        "profiled_step_ms": Spread.of(times["profiled"]).row(),
        "live_step_ms": Spread.of(times["live"]).row(),
        "overhead": profiled.row(),
        "live_overhead": live.row(),
        "live_over_profiled": view.row(),
        "steps_of_a_round": given.steps,
    }
    print(f"{Spread.of(times['plain'])} ms plain, {Spread.of(times['profiled'])} ms profiled: {profiled.median:+.1%}")
    print(f"{Spread.of(times['live'])} ms live: {live.median:+.1%}, {view.median:+.1%} over profiled")
    print(f"wrote {write_results('profiler_overhead', [row], out=given.out, seed=0)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
