"""Step time of resident AdamW, of this project's policies, and of the baselines DeepSpeed, torchao and FSDP2.

Model, data, precision and cores are the same for all. Every system runs in its own process, which trains a few steps
per round and is frozen in between. Only ratios within a round are compared.

*Cores and threads.* Every process is confined to the same cores. Its intra-op threads are half of them or all,
whichever is faster when tried alone; threads and processes in addition to them (our workers, ZenFlow's optimizer
process) keep their defaults. All thread counts that were tried are in the results.

*Ranks*: with ``--ranks 2`` two processes train each system together, on the same cores: AdamW under
DistributedDataParallel, ours with a ``process_group``, and others as their names say. Bytes are those that a rank sends
through the network interface.

*Step time* is the mean over a turn, so that one long step per update window counts, and the median of that over
rounds. *Precision*: fp32 on the CPU, which all of them support; bf16 with fp32 masters on CUDA.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import common
from benchmarks.common import Spread, Target, option_parser, ratios, write_results
from benchmarks.systems.case import COMPARED_BY_POLICIES, CUDA_ONLY, OURS, SEVERAL_RANKS_ONLY, SYSTEMS, Case
from benchmarks.systems.comparison import REFERENCE, Outcome, Schedule, compare
from benchmarks.systems.memory import copy_gb_per_s
from benchmarks.systems.process import DEEPSPEED_PYTHON, TrainingWorker
from benchmarks.systems.workloads import DTYPES, WORKLOADS
from zenflow_compile.runtime.host.cores import physical_cores

CPU_MODELS = ("optimizer-bound", "compute-bound", "gpt")
CUDA_MODELS = ("qwen2.5-3b", "llama-3b-32k")
CAP = 0.8
"""Memory limit of ``--memory capped``, as a share of the 16 bytes per parameter that resident mixed-precision AdamW
needs for weights, gradients, masters and moments."""
_FEW = Schedule(warm_up=8, pilot=4, rounds=4, settle=1, steps=4, profile=4)
SCHEDULES = {"gpt": _FEW} | {model: replace(_FEW, rounds=5, steps=8, profile=8) for model in (*CUDA_MODELS, "llama-1b")}
"""Shorter schedules, for models whose steps take seconds."""

_BREAKDOWN = {
    "forward": "forward_ms_per_step",
    "backward": "backward_ms_per_step",
    "update": "update_ms_per_step",
    "merge": "merge_ms_per_step",
    "select": "select_ms_per_step",
    "stall": "stall_ms_per_step",
    "other": "other_ms_per_step",
    "host update": "host_update_ms_per_step",
    "D2H": "d2h_ms_per_step",
    "H2D": "h2d_ms_per_step",
}


def rows(outcomes: Sequence[Outcome], memory: str) -> list[dict[str, Any]]:
    """One row per system for the results file."""
    made = []
    for outcome in outcomes:
        case = outcome.case
        row: dict[str, Any] = {
            **case.described(),
            "clip": case.clip,
            "memory": memory,
            "memory_limit_bytes": case.memory_bytes,
            "system": case.system,
            "cores": len(case.cores),
            "options": case.options,
            "tried_step_ms": {str(threads): round(ms, 3) for threads, ms in outcome.tried_ms.items()},
        }
        if outcome.skipped is not None:
            made.append({**row, "skipped": outcome.skipped})
            continue
        over = outcome.rounds_over_reference
        made.append(
            row
            | {
                "threads": case.threads,
                "turns_beside": list(outcome.turns_with),
                "step_ms": Spread.of(outcome.rounds_ms).row(),
                "single_step_ms": Spread.of(list(itertools.chain(*outcome.steps_ms))).row(),
                "step_over_adamw": Spread.of(over).row() if over else None,
                "loss": {"first": outcome.losses[0], "last": outcome.losses[-1], "steps": len(outcome.losses)},
                "host_memory_mib_per_rank": round(outcome.memory_mib / case.ranks),
                "network_bytes_per_step": Spread.of(outcome.network_bytes).row() if case.ranks > 1 else None,
                "idle_cpu_share": outcome.idle_cpu_share,
                **outcome.facts,
                "breakdown": outcome.breakdown,
            }
        )
    return made


def targets(model: str, outcomes: Mapping[str, Outcome]) -> list[Target]:
    """The claims that ``model`` decides, as far as the systems they compare were measured."""

    def over(a: str, b: str) -> float | None:
        """Step time of ``a`` over that of ``b``: median of the quotients of each round."""
        first, second = outcomes.get(a), outcomes.get(b)
        if first is None or second is None or not first.rounds_ms or not second.rounds_ms:
            return None
        if b == REFERENCE:
            return statistics.median(first.rounds_over_reference)
        if b in first.turns_with:
            return statistics.median(ratios(first.rounds_ms, second.rounds_ms))
        # They took turns with the reference, not with each other.
        return statistics.median(ratios(first.rounds_over_reference, second.rounds_over_reference))

    claims = {
        "optimizer-bound": [
            ("deepspeed_zenflow", "zenflow", 1.5, True),
            ("deepspeed_zero_offload", "zenflow", 1.5, True),
            ("zenflow", REFERENCE, 1.15, False),
        ],
        "compute-bound": [("zenflow", REFERENCE, 1.05, False)],
    }
    made = []
    for slower, faster, limit, at_least in claims.get(model, []):
        if (ratio := over(slower, faster)) is not None:
            made.append(Target(f"{model}: step of {slower} over step of {faster}", ratio, limit, at_least))
    return made


def table(title: str, outcomes: Sequence[Outcome], free_reference_ms: float | None) -> Table:
    """Step times, quotients and sanity checks of one workload."""
    made = Table(title=title, caption="median (5th to 95th percentile) over rounds; x AdamW: quotient within a round")
    made.add_column("system")
    columns = ["threads", "step ms", "x AdamW", "p95 / median step", "loss", "state on device", "peak MB per rank"]
    for column in [*columns, *(["sent MB per rank"] if outcomes[0].case.ranks > 1 else [])]:
        made.add_column(column, justify="right")
    for outcome in outcomes:
        if outcome.skipped is not None:
            made.add_row(outcome.case.system, "", outcome.skipped.partition("\n")[0])
            continue
        each = Spread.of(list(itertools.chain(*outcome.steps_ms)))
        if outcome.rounds_over_reference:
            over = str(Spread.of(outcome.rounds_over_reference))
        elif free_reference_ms and outcome.case.system != REFERENCE:
            over = f"{statistics.median(outcome.rounds_ms) / free_reference_ms:.3g} of uncapped"
        else:
            over = ""
        share, peak = outcome.facts["resident_share"], outcome.facts["device_peak_mib"]
        made.add_row(
            outcome.case.system,
            str(outcome.case.threads),
            str(Spread.of(outcome.rounds_ms)),
            over,
            f"{each.p95 / each.median:.2f}",
            f"{outcome.losses[-1]:.4f}",
            "" if share is None else f"{share:.0%}",
            f"{peak or outcome.memory_mib / outcome.case.ranks:,.0f}",
            *([f"{statistics.median(outcome.network_bytes) / 1e6:.2f}"] if outcome.case.ranks > 1 else []),
        )
    return made


def breakdown_table(outcomes: Sequence[Outcome]) -> Table | None:
    """Make the table of where our policies' time went, from a pass outside of the timed rounds; None without them."""
    profiled = [outcome for outcome in outcomes if outcome.breakdown]
    if not profiled:
        return None
    floor = next((o.rounds_ms for o in outcomes if o.case.system == "forward_backward" and o.rounds_ms), None)
    made = Table(title="ms per step under zf.profile(); the last three overlap with the others where they are hidden")
    made.add_column("policy")
    for column in ("steps", *_BREAKDOWN, "hidden"):
        made.add_column(column, justify="right")
    for outcome in profiled:
        numbers = outcome.breakdown or {}
        cells = [numbers[key] for key in _BREAKDOWN.values()]
        hidden = numbers["hidden_fraction"]
        made.add_row(
            outcome.case.system,
            f"{numbers['step_ms']:.1f}",
            *("" if cell is None else f"{cell:.2f}" for cell in cells),
            "" if hidden is None else f"{hidden:.0%}",
        )
    if floor is not None:
        made.caption = f"forward and backward alone: {statistics.median(floor):.1f} ms"
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks peers``."""
    given = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    bandwidth = copy_gb_per_s(len(given.cores))
    console.print(
        f"{len(given.cores)} cores, copy_ on all of them {bandwidth:.1f} GB/s, {given.dtype} on {given.device}"
    )
    collected: list[dict[str, Any]] = []
    decided: list[Target] = []
    free_reference: dict[tuple[Any, ...], float] = {}
    for model, tokens, clip, memory in itertools.product(given.model, given.tokens, given.clip, given.memory):
        cases = [
            Case(
                system=system,
                model=model,
                tokens=tokens,
                dtype=given.dtype,
                device=given.device,
                cores=given.cores,
                seed=given.seed,
                clip=clip,
                update_interval=given.update_interval,
                memory_bytes=_capped_bytes(model) if memory == "capped" else None,
                inner=given.inner,
                options=dict(given.option) if system in OURS else {},
                ranks=given.ranks,
            )
            for system in given.system
        ]
        title = f"{cases[0].workload().summary}; clip {clip}, memory {memory}"
        console.print(f"\n{title}", style="bold")
        schedule = SCHEDULES.get(model, Schedule())
        changes = {name: getattr(given, name) for name in ("rounds", "steps", "pilot", "warm_up")}
        schedule = replace(schedule, **{name: value for name, value in changes.items() if value is not None})
        make = partial(TrainingWorker, warm_up=schedule.warm_up, deepspeed_python=given.deepspeed_python)
        outcomes = compare(cases, given.threads, schedule, make, lambda line: console.print(line))
        by_system = {outcome.case.system: outcome for outcome in outcomes}
        workload = model, tokens, clip
        if memory == "free" and REFERENCE in by_system and by_system[REFERENCE].rounds_ms:
            free_reference[workload] = statistics.median(by_system[REFERENCE].rounds_ms)
        console.print(table(title, outcomes, free_reference.get(workload)))
        if (parts := breakdown_table(outcomes)) is not None:
            console.print(parts)
        for target in (found := targets(model, by_system)):
            console.print(str(target), style="green" if target.met else "red", highlight=False)
        decided += found
        collected += [{**row, "copy_gb_per_s": bandwidth} for row in rows(outcomes, memory)]
        # After every workload: a run that is cut off keeps what it has.
        path = write_results("peers", collected, out=given.out, seed=given.seed, targets=decided)
    console.print(f"wrote {path}")
    return 0


def _capped_bytes(model: str) -> int:
    with torch.device("meta"):
        parameters = sum(param.numel() for param in WORKLOADS[model].build().parameters())
    return round(CAP * 16 * parameters)


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    systems = "systems:\n" + "\n".join(f"  {name:22}  {summary}" for name, summary in SYSTEMS.items())
    parser = option_parser("peers", __doc__, seed=True, epilog=systems)
    add = parser.add_argument
    add("--model", nargs="+", choices=WORKLOADS, default=list(CUDA_MODELS if cuda else CPU_MODELS), metavar="MODEL",
        help=f"of {', '.join(WORKLOADS)} (%(default)s)")  # fmt: skip
    add("--system", nargs="+", choices=SYSTEMS, metavar="SYSTEM",
        help="systems to compare (all but those of `policies`)")  # fmt: skip
    add("--tokens", nargs="+", type=int, default=[None], help="per step, for language models (the model's)")
    add("--clip", nargs="+", type=lambda text: None if text == "off" else float(text), default=[None],
        help="bounds on the gradient norm, or off (off)")  # fmt: skip
    add("--memory", nargs="+", choices=("free", "capped"), default=["free"],
        help="capped: below what resident AdamW needs; CUDA only (free)")  # fmt: skip
    add("--ranks", type=int, default=1, help="processes that train the model together (1)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    add("--dtype", choices=DTYPES, help="of weights and gradients (fp32 on the CPU, bf16 on CUDA)")
    add("--cores", type=int, help="cores of every process (all physical ones)")
    add("--threads", nargs="+", type=int, help="intra-op threads to try (half of the cores and all; all on CUDA)")
    add("--rounds", type=int, help="turns of every system")
    add("--steps", type=int, help="timed steps of a turn")
    add("--pilot", type=int, help="timed steps per thread count")
    add("--warm-up", type=int, help="steps before anything is timed")
    add("--update-interval", type=int, default=4, help="of zenflow, ours and DeepSpeed's (4)")
    add("--option", nargs="+", type=_option, default=[], metavar="NAME=VALUE", help="further ones of ZenFlowAdamW")
    add("--inner", choices=("inductor", "eager"), default="inductor", help="what compiles the graphs")
    add("--deepspeed-python", type=Path, default=DEEPSPEED_PYTHON, help="interpreter that has DeepSpeed")
    given = parser.parse_args(arguments)

    usable = [core.logical for core in physical_cores()]
    count = given.cores or len(usable)
    if not 1 <= count <= len(usable):
        parser.error(f"--cores {count} must be from 1 to {len(usable)}, the physical cores this process may use")
    if given.device == "cuda" and not cuda:
        parser.error("--device cuda needs a CUDA device, and there is none; leave it out")
    if "capped" in given.memory and given.device != "cuda":
        parser.error("--memory capped limits CUDA memory; on the CPU leave it out")
    given.cores = tuple(usable[:count])
    given.dtype = given.dtype or ("bf16" if given.device == "cuda" else "fp32")
    if not given.threads:
        given.threads = [count] if given.device == "cuda" else sorted({max(1, count // 2), count})
    if not given.system:
        given.system = [name for name in SYSTEMS if name not in COMPARED_BY_POLICIES]
    if given.device == "cpu" and (left_out := [name for name in CUDA_ONLY if name in given.system]):
        print(f"not run without a CUDA device: {', '.join(left_out)}", file=sys.stderr)
        given.system = [name for name in given.system if name not in left_out]
    if given.ranks == 1 and (of_several := [name for name in SEVERAL_RANKS_ONLY if name in given.system]):
        print(f"not run with one rank: {', '.join(of_several)}", file=sys.stderr)
        given.system = [name for name in given.system if name not in of_several]
    if given.ranks > 1 and given.out is None:
        given.out = common.RESULTS / f"peers_{given.ranks}_ranks.json"
    elif given.device == "cuda" and given.out is None:
        given.out = common.RESULTS / "peers_cuda.json"  # does not replace the results of the CPU
    return given


if __name__ == "__main__":
    sys.exit(main())
