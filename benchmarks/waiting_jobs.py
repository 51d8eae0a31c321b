"""How much do host jobs that wait for gradients slow the training thread?

The thread runs a loop of small operators while queued jobs wait for inputs that do not arrive, and without jobs, in
turns. Two runs without jobs are compared, too: the machine's noise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

import torch

from benchmarks.common import Spread, Target, interleaved, option_parser, ratios, write_results
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.host.workers import Job, Workers, bounds_of
from zenflow_compile.runtime.parameters.state_exchange import ExchangeWork
from zenflow_compile.runtime.recorder import Recorder

INPUTS = 4  # of each job
SLOWDOWN = 1.3

Kind = Literal["alone", "alone again", "waiting"]


def _waiting_job(inputs: Sequence[ThreadTicket], pool: Workers) -> Job:
    state = [torch.zeros(1, 1) for _ in range(3)]
    work = ExchangeWork(state, torch.zeros(1, dtype=torch.int32), state, bounds_of([slice(0, 1)]))
    return Job(work, inputs, (), pool.handle, deadline=0, step=0, param="")


def loop_seconds(operators: int) -> float:
    """Seconds of a loop of small operators in the calling thread."""
    values = torch.ones(16)
    begin = time.perf_counter()
    for _ in range(operators):
        values = values * 1.0
    return time.perf_counter() - begin


def beside(kind: Kind, jobs: int, workers: int, operators: int) -> float:
    """``loop_seconds`` beside ``jobs`` waiting jobs of ``workers`` threads."""
    inputs = [[ThreadTicket() for _ in range(INPUTS)] for _ in range(jobs)]
    if kind in ("alone", "alone again"):
        return loop_seconds(operators)
    pool = Workers(workers, Recorder())
    pool.start()
    pool.submit(*[_waiting_job(each, pool) for each in inputs])
    try:
        return loop_seconds(operators)
    finally:
        for each in inputs:
            for ticket in each:
                ticket.set()
        pool.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks waiting_jobs``."""
    parser = option_parser("waiting_jobs", __doc__, rounds=12)
    parser.add_argument("--jobs", type=int, nargs="+", default=[47, 189], help="jobs that wait (default 47 189)")
    parser.add_argument("--workers", type=int, default=14, help="threads of the pool (default 14)")
    parser.add_argument("--operators", type=int, default=50_000, help="operators of the loop (default 50000)")
    options = parser.parse_args(arguments)
    kinds: tuple[Kind, ...] = ("alone", "waiting", "alone again")
    rows, targets = [], []
    for jobs in options.jobs:

        def work(kind: Kind, jobs: int = jobs) -> Callable[[], float]:
            return lambda: beside(kind, jobs, options.workers, options.operators)

        seconds = interleaved(options.rounds, {kind: work(kind) for kind in kinds})
        row: dict[str, object] = {"jobs": jobs, "inputs": INPUTS, "workers": options.workers}
        print(f"{jobs} jobs with {INPUTS} inputs, {options.workers} workers; seconds over those without jobs:")
        for kind in kinds[1:]:
            spread = Spread.of(ratios(seconds[kind], seconds["alone"]))
            row[kind] = spread.row()
            print(f"  {kind}: {spread}")
        rows.append(row)
        slowdown = median(ratios(seconds["waiting"], seconds["alone"]))
        targets.append(Target(f"slowdown by {jobs} jobs", slowdown, SLOWDOWN, at_least=False))
        print(f"  {targets[-1]}")
    print(f"wrote {write_results('waiting_jobs', rows, out=options.out, targets=targets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
