"""Are steps equally long? Distribution of step times and stalls under resident, zero_offload and zenflow, in turns.

The model's host work fits into its window (compute-bound by default), so that no step has to be longer than another. A
system that flushes all windows at once has one long step per window: this shows as autocorrelation of the step times at
lag S, and in the mean of the slowest phase (step number modulo S) over the mean of all steps.

Autocorrelations are computed within turns, around each turn's mean, and pooled. Without a pattern they lie within
2 / sqrt(n) of zero, which is printed next to them. Stalls come from a separate pass under ``zf.profile()``.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import Spread, Target, interleaved, option_parser, percentile, write_results
from benchmarks.systems.case import Case
from benchmarks.systems.process import TrainingWorker
from benchmarks.systems.workloads import WORKLOADS
from zenflow_compile.runtime.host.cores import physical_cores

POLICIES = ("resident", "zero_offload", "zenflow")
P95_OVER_MEDIAN = 1.25  # the target, for zenflow


def autocorrelation(turns: Sequence[Sequence[float]], lag: int) -> float:
    """Pooled autocorrelation at ``lag`` of several series, each around its own mean.

    Returns:
        In [-1, 1]; not a number where nothing varies or no turn is longer than ``lag``.
    """
    products = squares = 0.0
    for turn in turns:
        mean = statistics.fmean(turn)
        centred = [value - mean for value in turn]
        squares += sum(value * value for value in centred)
        products += sum(a * b for a, b in zip(centred, centred[lag:], strict=False))
    return products / squares if squares and any(len(turn) > lag for turn in turns) else float("nan")


def slowest_phase(turns: Sequence[Sequence[float]], interval: int) -> float:
    """Median step of the slowest phase, position in the turn modulo ``interval``, over the median of all steps."""
    phases = [[turn[i] for turn in turns for i in range(phase, len(turn), interval)] for phase in range(interval)]
    return max(map(statistics.median, phases)) / statistics.median(itertools.chain(*turns))


def row(case: Case, turns: Sequence[Sequence[float]], profiled: dict[str, Any], interval: int) -> dict[str, Any]:
    """The numbers of one policy."""
    steps = list(itertools.chain(*turns))
    summary, stalls = profiled["summary"], profiled["stall_ms"]
    return {
        "policy": case.system,
        "model": case.model,
        "summary": case.workload().summary,
        "dtype": case.dtype,
        "cores": len(case.cores),
        "threads": case.threads,
        "update_interval": interval,
        "step_ms": Spread.of(steps).row(),
        "p95_over_median": percentile(steps, 0.95) / statistics.median(steps),
        "longest_over_median": max(steps) / statistics.median(steps),
        "autocorrelation": {str(lag): round(autocorrelation(turns, lag), 4) for lag in range(1, 2 * interval + 1)},
        "autocorrelation_noise": 2 / len(steps) ** 0.5,
        "slowest_phase_over_median": slowest_phase(turns, interval),
        "stall_ms": Spread.of(stalls).row(),
        "stall_share": summary["stall_share"],
        "host_update_ms_per_step": summary["host_update_ms_per_step"],
        "hidden_fraction": summary["hidden_fraction"],
        "profiled_step_ms": summary["step_ms"],
    }


def table(rows: Sequence[dict[str, Any]], interval: int) -> Table:
    """Make the table, one line per policy."""
    made = Table(
        title=f"Steps of {rows[0]['summary']}; windows of {interval} steps",
        caption="median (5th to 95th percentile)",
    )
    made.add_column("policy")
    columns = (
        "step ms",
        "p95 / median",
        "longest / median",
        f"autocorrelation at {interval}",
        "slowest phase",
        "stall ms",
        "host update ms",
        "hidden",
    )
    for column in columns:
        made.add_column(column, justify="right")
    for each in rows:
        step, stall, hidden = each["step_ms"], each["stall_ms"], each["hidden_fraction"]
        made.add_row(
            each["policy"],
            f"{step['median']:.1f} ({step['p5']:.1f} to {step['p95']:.1f})",
            f"{each['p95_over_median']:.2f}",
            f"{each['longest_over_median']:.2f}",
            f"{each['autocorrelation'][str(interval)]:+.2f} ± {each['autocorrelation_noise']:.2f}",
            f"{each['slowest_phase_over_median']:.2f}",
            f"{stall['median']:.2f} ({stall['p5']:.2f} to {stall['p95']:.2f})",
            f"{each['host_update_ms_per_step'] or 0.0:.1f}",
            "" if hidden is None else f"{hidden:.0%}",
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks level_steps``."""
    parser = option_parser("level_steps", __doc__, rounds=10, seed=True)
    cores = tuple(core.logical for core in physical_cores())
    add = parser.add_argument
    add("--model", choices=WORKLOADS, default="compute-bound")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--threads", type=int, default=max(1, len(cores) // 2), help="intra-op threads (half of the cores)")
    add("--update-interval", type=int, default=4, help="S (4)")
    add("--steps", type=int, default=24, help="timed steps of a turn, a multiple of S (24)")
    add("--profile", type=int, default=48, help="steps under zf.profile() (48)")
    add("--inner", choices=("inductor", "eager"), default="inductor", help="what compiles the graphs")
    given = parser.parse_args(arguments)
    interval = given.update_interval
    if given.steps % interval or given.steps < 2 * interval:
        parser.error(f"--steps {given.steps} must be a multiple of S = {interval}, and two windows at least")
    console = Console(width=None if sys.stdout.isatty() else 150)
    with ExitStack() as stack:
        workers: dict[str, TrainingWorker] = {}
        for policy in POLICIES:
            case = Case(
                system=policy,
                model=given.model,
                dtype=given.dtype,
                device=given.device,
                cores=cores,
                threads=given.threads,
                seed=given.seed,
                update_interval=interval,
                inner=given.inner,
            )
            workers[policy] = stack.enter_context(TrainingWorker(case, warm_up=3 * interval))
            workers[policy].start()
            console.print(f"{policy} is ready")
        turns: dict[str, list[list[float]]] = {policy: [] for policy in POLICIES}

        def turn(policy: str) -> float:
            mean, each = workers[policy].run(settle=interval, steps=given.steps)
            turns[policy].append(each)
            return mean

        interleaved(given.rounds, {policy: partial(turn, policy) for policy in POLICIES}, warm_up=0)
        rows = [
            row(worker.case, turns[policy], worker.ask("profile", steps=given.profile), interval)
            for policy, worker in workers.items()
        ]
    console.print(table(rows, interval))
    zenflow = rows[POLICIES.index("zenflow")]
    target = Target("zenflow: p95 over median step", zenflow["p95_over_median"], P95_OVER_MEDIAN, False)
    console.print(str(target), style="green" if target.met else "red", highlight=False)
    path = write_results("level_steps", rows, out=given.out, seed=given.seed, targets=[target])
    console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
