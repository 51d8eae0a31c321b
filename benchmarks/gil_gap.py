"""Does a host update freeze the training thread?

While one worker thread updates host state, another Python thread spins and records the longest time between two of
its iterations. A kernel that holds the GIL shows as a gap as long as the kernel.

The operating system may also take the thread's core away. Linux counts that time (/proc/thread-self/schedstat): ``gap``
excludes it, ``raw gap`` includes it. Where it is not counted both are the same, and only an idle machine tells.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import Spread, Target, option_parser, write_results
from zenflow_compile.runtime.host.host_kernel import HostKernel, WindowUpdate
from zenflow_compile.runtime.update_rule import StepCoefficients

TARGET_MS = 5.0


class Gap(NamedTuple):
    """Milliseconds."""

    gap: float
    """Longest time between two iterations of a Python thread during the update, without time lost to the system"""
    raw_gap: float
    """The same, with time lost to the system"""
    raw_gap_alone: float
    """The same of that thread alone, for as long: the machine's noise"""
    update: float
    """Duration of the update next to that thread, waits for the GIL and for a core included"""
    update_alone: float


def measure(adam: HostKernel, numel: int, slots: int, dtype: torch.dtype = torch.bfloat16) -> Gap:
    """Gaps of the calling thread while another thread runs one update of ``numel`` parameters."""
    state = [torch.zeros(numel) for _ in range(3)]
    out = torch.zeros(numel, dtype=dtype)
    gradients = [torch.full((numel,), 0.01, dtype=dtype) for _ in range(slots)]
    coefficients = [StepCoefficients.known(1e-4, 0.9, 0.999, 0.01, 1.0)] * slots
    update = partial(adam, WindowUpdate(state, out, gradients, coefficients, step=slots), slice(0, numel))
    update()  # touches every page
    return spin_beside(update)


def spin_beside(update: Callable[[], None]) -> Gap:
    """Run ``update`` in this thread, then in another one while this one spins."""
    start = time.perf_counter()
    update()
    alone = time.perf_counter() - start
    _, noise = _longest_gaps(lambda: None, threading.Event(), seconds=alone)
    done = threading.Event()
    seconds = 0.0

    def work() -> None:
        nonlocal seconds
        start = time.perf_counter()
        try:
            update()
        finally:
            seconds = time.perf_counter() - start
            done.set()

    worker = threading.Thread(target=work)
    gap, raw_gap = _longest_gaps(worker.start, done, seconds=float("inf"))
    worker.join()
    return Gap(gap * 1e3, raw_gap * 1e3, noise * 1e3, seconds * 1e3, alone * 1e3)


def _longest_gaps(begin: Callable[[], None], done: threading.Event, seconds: float) -> tuple[float, float]:
    """``begin``, spin until ``done``; the longest gaps without and with this thread's waits for a core."""
    clock = time.perf_counter
    longest = longest_raw = 0.0
    queued = _seconds_in_run_queue()
    before = asked = clock()
    end = before + seconds
    begin()  # within the first gap: what it starts may take the GIL before it returns
    finished = False
    while not finished:  # one more iteration after the end: the first one, if the update kept the GIL
        finished = done.is_set() or before >= end
        now = clock()
        gap = now - before
        longest_raw = max(longest_raw, gap)
        if finished or now - asked > 1e-3:  # often, so that waits outside of this gap hardly count as its own
            queued_before, queued = queued, _seconds_in_run_queue()
            longest = max(longest, gap - (queued - queued_before))
            now = asked = clock()  # asking is no gap
        before = now
    return longest, longest_raw


def _seconds_in_run_queue() -> float:
    """How long this thread has been ready to run without a core."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:  # not Linux
        return 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks gil_gap``."""
    parser = option_parser("gil_gap", __doc__)
    parser.add_argument("--params", type=float, default=64, help="millions of parameters (default 64)")
    parser.add_argument("--slots", type=int, default=4, help="gradients in the update window (default 4)")
    parser.add_argument("--repeats", type=int, default=5, help="updates next to a spinning thread (default 5)")
    options = parser.parse_args(arguments)
    numel = round(options.params * 1e6)
    adam = HostKernel(torch.bfloat16, torch.bfloat16, options.slots)
    gaps = [measure(adam, numel, options.slots) for _ in range(options.repeats)]
    spreads = {name: Spread.of([getattr(gap, name) for gap in gaps]) for name in Gap._fields}
    longest = max(gap.gap for gap in gaps)
    print(f"{numel / 1e6:g}M parameters, {options.slots} bf16 gradients, {options.repeats} updates; ms:")
    print(f"  longest gap {longest:.2f}; " + ", ".join(f"{name} {spread}" for name, spread in spreads.items()))
    milliseconds = {name: spread.row() for name, spread in spreads.items()}
    rounded = float(f"{longest:.4g}")  # as the spreads are
    row = {"parameters": numel, "slots": options.slots, "longest_gap_ms": rounded}
    rows = [{**row, "milliseconds": milliseconds}]
    targets = [Target("longest gap in ms", longest, TARGET_MS, at_least=False)]
    print(f"  {targets[0]}")
    print(f"wrote {write_results('gil_gap', rows, out=options.out, targets=targets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
