"""Every policy on one machine in one run: step time, update time, stall, bytes and traffic, measured and predicted.

Three tables. *Policies*: the six, and mixtures. *Resident share*: TwinFlow and Deep Optimizer States with more and more
state on the device (Figures 10 and 11 of Deep Optimizer States). *Stride*: every k-th subgroup updated on the device
(its Figure 16), next to the stride that the performance model chooses from the rates measured here.

Systems run in turns, frozen in between, and confined to the same cores. *Update* is the time of a step in addition to
forward and backward: device updates, merges and waits. Times of parts come from a separate pass under ``zf.profile()``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import Spread, Target, interleaved, option_parser, ratios, write_results
from benchmarks.prediction import Prediction, Predictor
from benchmarks.systems.case import Case
from benchmarks.systems.process import TrainingWorker
from benchmarks.systems.workloads import WORKLOADS
from zenflow_compile.runtime.host.cores import physical_cores

WITHIN = 0.2
"""By how much predicted and measured times may differ, as a share of the measured one."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with its options, and the table that it is a row of."""

    name: str
    system: str
    table: str = "policies"
    options: dict[str, Any] = field(default_factory=dict)


_ALONE = Variant("forward and backward alone", "forward_backward")


def variants(nvme: str, tables: Sequence[str]) -> list[Variant]:
    """What is compared.

    Args:
        nvme: directory for directories with state in files: one each, since two optimizers never share one.
    """
    found = [
        Variant("resident", "resident"),
        Variant("zero_offload", "zero_offload"),
        Variant("twinflow, half", "twinflow", options={"ratio": 0.5}),
        Variant("deep_optimizer_states, stride 2", "deep_optimizer_states", options={"update_stride": 2}),
        Variant("zenflow", "zenflow"),
        Variant("zero_infinity", "zero_infinity", options={"nvme_path": _directory(nvme, "infinity")}),
        Variant("zenflow, nothing kept whole", "zenflow", options={"device_share": 0.0}),
        Variant("zenflow, every 4th streamed", "zenflow", options={"update_stride": 4}),
        Variant(
            "zenflow, host state in files",
            "zenflow",
            options={"nvme_path": _directory(nvme, "zenflow"), "offload_device": "nvme"},
        ),
    ]
    for ratio in (1.0, 0.75, 0.5, 0.25, 0.0):
        found.append(Variant(f"twinflow, {1 - ratio:.0%} resident", "twinflow", "resident share", {"ratio": ratio}))
        found.append(
            Variant(
                f"deep_optimizer_states, {1 - ratio:.0%} resident",
                "deep_optimizer_states",
                "resident share",
                {"update_stride": 2, "ratio": ratio},
            )
        )
    for stride in (1, 2, 3, 4):
        options = {"update_stride": stride}
        found.append(Variant(f"every {stride}. on the device", "deep_optimizer_states", "stride", options))
    found.append(Variant("none on the device", "zero_offload", "stride"))
    return [each for each in found if each.table in tables]


def _directory(parent: str, name: str) -> str:
    path = Path(parent) / name
    path.mkdir(exist_ok=True)
    return str(path)


def update_ms(summary: dict[str, Any]) -> float:
    """What a step takes beyond forward and backward, by the profiler."""
    parts = ("update_ms_per_step", "merge_ms_per_step", "select_ms_per_step", "stall_ms_per_step")
    return float(sum(summary[part] or 0.0 for part in parts))


def row(variant: Variant, worker: TrainingWorker, turns: list[float], over: list[float], steps: int) -> dict[str, Any]:
    """The numbers of one variant."""
    summary = worker.ask("profile", steps=steps)["summary"]
    facts = worker.ask("facts")
    return {
        "table": variant.table,
        "variant": variant.name,
        "policy": variant.system,
        "options": {name: value for name, value in variant.options.items() if name != "nvme_path"},
        "model": worker.case.model,
        "step_ms": Spread.of(turns).row(),
        "over_resident": Spread.of(over).row(),
        "update_ms": update_ms(summary),
        "stall_ms": summary["stall_ms_per_step"],
        "host_update_ms": summary["host_update_ms_per_step"],
        "hidden_fraction": summary["hidden_fraction"],
        "traffic": summary["traffic_model_sizes_per_step"],
        "state_traffic": summary["state_model_sizes_per_step"],
        "device_bytes": facts["optimizer_device_bytes"],
        "host_bytes": facts["optimizer_host_bytes"],
        "file_bytes": facts["optimizer_file_bytes"],
        "loss": worker.losses[-1],
    }


def measure(given: argparse.Namespace, chosen: Sequence[Variant]) -> tuple[float, list[dict[str, Any]]]:
    """Train all variants in turns with a forward and backward alone, whose seconds come first.

    It takes its turns with them because a prediction from another minute would predict that minute's machine.
    """
    cores = tuple(core.logical for core in physical_cores())
    with ExitStack() as stack:
        workers: dict[str, TrainingWorker] = {}
        for variant in (_ALONE, *chosen):
            case = Case(
                system=variant.system,
                model=given.model,
                cores=cores,
                threads=given.threads,
                seed=given.seed,
                inner=given.inner,
                options=variant.options,
            )
            worker = stack.enter_context(TrainingWorker(case, warm_up=12))
            worker.start()
            workers[variant.name] = worker
            print(f"{variant.name} is ready", flush=True)

        def turn(name: str) -> float:
            return workers[name].run(settle=4, steps=given.steps)[0]

        turns = interleaved(given.rounds, {name: partial(turn, name) for name in workers}, warm_up=0)
        reference = turns[chosen[0].name]
        rows = [
            row(each, workers[each.name], turns[each.name], ratios(turns[each.name], reference), given.profile)
            for each in chosen
        ]
        return statistics.median(turns[_ALONE.name]) / 1e3, rows


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Make the table, one line per variant, predicted times next to measured ones."""
    made = Table(title=title, caption="median (5th to 95th percentile) over rounds; state bytes in MB; p: predicted")
    made.add_column("variant")
    columns = (
        "step ms", "p step", "x first", "update ms", "stall ms", "p stall", "host ms", "p host",
        "device", "host", "file", "traffic", "state",
    )  # fmt: skip
    for column in columns:
        made.add_column(column, justify="right")
    for each in rows:
        said: dict[str, float] = each["predicted"]
        made.add_row(
            each["variant"],
            f"{each['step_ms']['median']:.1f} ({each['step_ms']['p5']:.1f} to {each['step_ms']['p95']:.1f})",
            f"{said['step_ms']:.1f}",
            f"{each['over_resident']['median']:.2f}",
            f"{each['update_ms']:.1f}",
            f"{each['stall_ms'] or 0.0:.1f}",
            f"{said['stall_ms']:.1f}",
            f"{each['host_update_ms'] or 0.0:.1f}",
            f"{said['host_update_ms']:.1f}",
            *(f"{each[name] / 1e6:.1f}" for name in ("device_bytes", "host_bytes", "file_bytes")),
            f"{each['traffic'] or 0.0:.2f}",
            f"{each['state_traffic'] or 0.0:.2f}",
        )
    return made


def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """Predicted against measured, per policy."""
    found = []
    for each in rows:
        if each["table"] != "policies":
            continue
        for name, measured in (("step", each["step_ms"]["median"]), ("host_update", each["host_update_ms"])):
            if not measured:
                continue
            deviation = abs(each["predicted"][f"{name}_ms"] / measured - 1.0)
            found.append(Target(f"{each['variant']}: predicted over measured {name}, off by", deviation, WITHIN, False))
    return found


def stride_said(ratio: float, stride: int) -> str:
    """What Equation 1 gives with the measured rates."""
    if math.isinf(ratio):
        return "with the measured rates the link is too slow for the device to update anything"
    return f"with the measured rates {ratio:.2f} updates on the host for each on the device, every {stride}. there"


def stride_verdict(rows: Sequence[dict[str, Any]], predictor: Predictor) -> str:
    """Whether the model's stride is the measured best."""
    by_stride = {each["options"].get("update_stride"): each["step_ms"]["median"] for each in rows}
    best = min(by_stride, key=lambda stride: by_stride[stride])
    ratio, chosen = predictor.stride()
    return (
        f"Equation 1: {stride_said(ratio, chosen)}; "
        f"measured best: {'none' if best is None else f'every {best}.'} "
        f"({by_stride[best]:.1f} ms; every {chosen}.: {by_stride.get(chosen, float('nan')):.1f} ms)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks policies``."""
    parser = option_parser("policies", __doc__, rounds=6, seed=True)
    cores = physical_cores()
    known = ("policies", "resident share", "stride")
    add = parser.add_argument
    add("--model", choices=WORKLOADS, default="compute-bound")
    add("--table", nargs="+", choices=known, default=list(known), help="(all)")
    add("--threads", type=int, default=max(1, len(cores) // 2), help="intra-op threads (half of the cores)")
    add("--steps", type=int, default=16, help="timed steps of a turn, a multiple of 4 (%(default)s)")
    add("--profile", type=int, default=24, help="steps under zf.profile() (%(default)s)")
    add("--inner", choices=("inductor", "eager"), default="inductor", help="what compiles the graphs")
    add("--nvme", help="directory for state in files (a temporary one)")
    given = parser.parse_args(arguments)
    if given.steps % 4 or given.steps < 4:
        parser.error(f"--steps {given.steps} must be a multiple of 4, whole windows")
    console = Console(width=None if sys.stdout.isatty() else 180)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=given.nvme) as nvme:
        machine = Predictor.measure(given.model, threads=given.threads, directory=nvme)
        for name in given.table:
            chosen = variants(nvme, [name])
            alone, measured = measure(given, chosen)
            predictor = machine.computing(alone)
            for each, variant in zip(measured, chosen, strict=True):
                prediction: Prediction = predictor.predict(variant.system, variant.options)
                each["predicted"] = prediction._asdict()
            console.print(table(measured, f"{name}: {WORKLOADS[given.model].summary}"))
            if name == "stride":
                console.print(stride_verdict(measured, predictor), highlight=False)
            rows += measured
    found = targets(rows)
    console.print(*map(str, found), sep="\n", highlight=False)
    off = [target.measured for target in found]
    if off:
        console.print(f"median deviation of predictions: {statistics.median(off):.0%}", highlight=False)
    ratio, stride = predictor.stride()
    # JSON knows no infinity, and None is a link that is too slow for the device to update anything.
    said = {"stride_ratio": ratio if math.isfinite(ratio) else None, "stride": stride}
    rows.append({"hardware": predictor.described(), **said})
    console.print(f"wrote {write_results('policies', rows, out=given.out, seed=given.seed, targets=found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
