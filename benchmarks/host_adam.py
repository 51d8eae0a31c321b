"""Host Adam against the memory's bandwidth, against PyTorch's fused AdamW, and against DeepSpeed's CPUAdam.

One measurement flushes one update window over ``--params`` parameters: S gradients in the model's dtype are applied to
fp32 masters and moments, and the new weights are written in the model's dtype.

* ``ours``: the fused pass that training uses, in tasks of 2^20 elements.
* ``fused``: the same window with PyTorch's functions, in the same tasks: gradients cast and summed into an fp32
  buffer, ``torch._fused_adamw_``, a cast into the upload buffer, gradients zeroed.
* ``split``, ``bf16``, ``fp8``: the same pass over state in fewer bytes: split masters (bf16 weights only), and with
  them where possible moments in bf16 or 8 bits.
* ``deepspeed``: DeepSpeed's ``adam_update`` with the same casts, sum and zeroing around it, its own OpenMP threads;
  ``deepspeed_kernel``: ``adam_update`` alone. Only where scripts/setup_deepspeed.sh was run.
* ``copy``: ``Tensor.copy_`` of as many bytes as the window moves.

GB/s counts what a window must move: masters and moments read and written (24 bytes per parameter in fp32), S gradients
read and one upload buffer written; of split masters, the old weights read, too. Write-allocate traffic is not counted,
in ``copy`` neither. All kernels take turns in the same run, on the same cores, one thread per core.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import Spread, Target, interleaved, option_parser, ratios, write_results
from benchmarks.systems.memory import COPY_BYTES_PER_ELEMENT, PinnedThreads
from benchmarks.systems.process import DEEPSPEED_PYTHON, Worker, WorkerError, must_exist
from zenflow_compile.runtime.host.host_kernel import HostKernel, WindowUpdate
from zenflow_compile.runtime.state_forms import StateForm
from zenflow_compile.runtime.update_rule import StepCoefficients

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TASK = 2**20
"""Elements per call, as in training."""
LENGTH = 4096
"""Elements of a slice, for 8-bit moments."""
ADAM_UPDATE_BYTES = 28
COPY_SHARE, OVER_FUSED, OF_FP32 = 0.9, 1.3, 1.0  # the targets
FORMS = ("split", "bf16", "fp8")


class Window:
    """The memory of one flushed window of ``slots`` gradients, and ways to apply it."""

    def __init__(self, numel: int, slots: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.slots, self.dtype = slots, dtype
        self.state = [torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)]
        self.gradients = [torch.randn(numel, generator=generator).to(dtype) for _ in range(slots)]
        self.out = torch.zeros(numel, dtype=dtype)
        self._coefficients = [StepCoefficients.known(1e-4, 0.9, 0.999, 0.01, 0.5)] * slots

    def form(self, name: str) -> StateForm:
        """How the kernel of that name stores state."""
        split = name in FORMS and self.dtype == torch.bfloat16
        return StateForm(split, name if name in ("bf16", "fp8") else "fp32", LENGTH)

    def bytes_per_parameter(self, name: str = "ours") -> float:
        """The least bytes per parameter that a flush moves."""
        form = self.form(name)
        state = sum(elements * dtype.itemsize for elements, dtype in zip(form.row_elements, form.dtypes, strict=True))
        return 2 * state / LENGTH + (self.slots + 1 + form.split) * self.dtype.itemsize

    def host_adam(self, name: str) -> Callable[[slice], None]:
        """This project's kernel of that name."""
        adam = HostKernel(self.dtype, self.dtype, self.slots)
        form, out, state = self.form(name), self.out, self.state
        if not form.plain:
            out = self.out.clone()
            rows = form.rows(
                [torch.zeros(shape, dtype=dtype) for shape, dtype in form.tensors(len(out) // LENGTH)], out
            )
            rows.write([each.view(-1, LENGTH) for each in self.state])
            state = [each.view(-1) for each in rows.stored]
        update = WindowUpdate(
            state, out, self.gradients, self._coefficients, self.slots, form, out if form.split else None
        )
        return partial(adam, update)

    def fused(self) -> Callable[[slice], None]:
        """PyTorch's pieces: cast and sum, fused AdamW, cast, zero."""
        step = torch.tensor(float(self.slots))

        def update(part: slice) -> None:
            total = torch.empty(part.stop - part.start)  # from the allocator's cache after the first task
            total.copy_(self.gradients[0][part])
            for gradient in self.gradients[1:]:
                total.add_(gradient[part])
            master, exp_avg, exp_avg_sq = (each[part] for each in self.state)
            torch._fused_adamw_(
                [master], [total], [exp_avg], [exp_avg_sq], [], [step],
                lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            self.out[part].copy_(master)
            for gradient in self.gradients:
                gradient[part].zero_()

        return update


def measure(
    dtype_name: str, slots: int, numel: int, threads: int, rounds: int, kernels: Sequence[str], deepspeed: Path
) -> tuple[list[dict[str, Any]], list[Target]]:
    """One row per kernel, one for copying, and the targets they decide."""
    dtype = DTYPES[dtype_name]
    window = Window(numel, slots, dtype)
    works: dict[str, Callable[[], float]] = {}
    skipped: dict[str, str] = {}
    with PinnedThreads(threads) as pool, ExitStack() as stack:
        if "copy" in kernels:
            half = round(window.bytes_per_parameter() * numel) // COPY_BYTES_PER_ELEMENT
            source, destination = torch.ones(half), torch.empty(half)
            works["copy"] = partial(pool.seconds, partial(_copy, source, destination, threads))
        for name in ("ours", *FORMS, "fused"):
            if name in kernels and not (name == "split" and dtype != torch.bfloat16):
                update = window.fused() if name == "fused" else window.host_adam(name)
                works[name] = partial(pool.seconds, partial(_in_tasks, update, numel, threads))
        if "deepspeed" in kernels:
            try:
                worker = _deepspeed(stack, deepspeed, dtype_name, slots, numel, threads)
                for name, whole in (("deepspeed", True), ("deepspeed_kernel", False)):
                    works[name] = partial(_asked, worker, whole)
            except WorkerError as error:
                skipped["deepspeed"] = str(error)
        seconds = interleaved(rounds, works)

    case = {"dtype": dtype_name, "slots": slots, "threads": threads, "parameters": numel}
    made: list[dict[str, Any]] = []
    for name, times in seconds.items():
        # adam_update alone reads one fp32 gradient and has no upload buffer.
        moved = ADAM_UPDATE_BYTES if name == "deepspeed_kernel" else window.bytes_per_parameter(name)
        bandwidths = [moved * numel / each / 1e9 for each in times]
        row = {"kernel": name, **case, "bytes_per_parameter": moved}
        row["million_parameters_per_s"] = Spread.of([numel / each / 1e6 for each in times]).row()
        row["gb_per_s"] = Spread.of(bandwidths).row()
        if "copy" in seconds:
            of_copy = [moved / window.bytes_per_parameter() * ratio for ratio in ratios(seconds["copy"], times)]
            row["share_of_copy"] = Spread.of(of_copy).row()
        if "ours" in seconds:
            row["speed_of_ours_over_this"] = Spread.of(ratios(times, seconds["ours"])).row()
        made.append(row)
    made += [{"kernel": name, **case, "skipped": reason} for name, reason in skipped.items()]
    return made, _targets(f"{dtype_name}, S = {slots}, {threads} threads", seconds)


def _targets(what: str, seconds: dict[str, list[float]]) -> list[Target]:
    made = []
    if {"ours", "copy"} <= seconds.keys():
        share = statistics.median(ratios(seconds["copy"], seconds["ours"]))
        made.append(Target(f"{what}: bandwidth over that of copy_", share, COPY_SHARE, True))
    if {"ours", "fused"} <= seconds.keys():
        speed = statistics.median(ratios(seconds["fused"], seconds["ours"]))
        made.append(Target(f"{what}: speed over _fused_adamw_, casts and zeroing", speed, OVER_FUSED, True))
    for name in FORMS:
        if {"ours", name} <= seconds.keys():
            speed = statistics.median(ratios(seconds["ours"], seconds[name]))
            made.append(Target(f"{what}: speed of {name} over fp32 state", speed, OF_FP32, True))
    return made


def _share(numel: int, threads: int, number: int) -> tuple[int, int]:
    """First and last element of thread ``number``, cut at multiples of 64."""
    each = -(-numel // threads // 64) * 64
    return min(number * each, numel), min((number + 1) * each, numel)


def _copy(source: Tensor, destination: Tensor, threads: int, number: int) -> None:
    begin, end = _share(source.numel(), threads, number)
    destination[begin:end].copy_(source[begin:end])


def _in_tasks(update: Callable[[slice], None], numel: int, threads: int, number: int) -> None:
    begin, end = _share(numel, threads, number)
    for start in range(begin, end, TASK):
        update(slice(start, min(start + TASK, end)))


def _deepspeed(stack: ExitStack, python: Path, dtype: str, slots: int, numel: int, threads: int) -> Worker:
    """Start DeepSpeed's CPUAdam in its own process."""
    command = [must_exist(python), "-m", "benchmarks.systems.cpu_adam_worker", dtype, slots, numel, threads]
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    worker = stack.enter_context(Worker([str(part) for part in command], environment))
    worker.first_answer()
    return worker


def _asked(worker: Worker, whole: bool) -> float:
    seconds: float = worker.ask("update", whole=whole)["seconds"]
    return seconds


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Make the table, one line per row."""
    made = Table(title="Flushing one update window on the host", caption="median (5th to 95th percentile) over rounds")
    for column in ("kernel", "dtype", "S", "threads"):
        made.add_column(column)
    for column in ("M parameters/s", "GB/s", "of copy_", "ours is faster by"):
        made.add_column(column, justify="right")
    for row in rows:
        cells = [row["kernel"], row["dtype"], str(row["slots"]), str(row["threads"])]
        if "skipped" in row:
            made.add_row(*cells, row["skipped"])
            continue
        share, speed = row.get("share_of_copy"), row.get("speed_of_ours_over_this")
        rate = row["million_parameters_per_s"]
        made.add_row(
            *cells,
            f"{rate['median']:.0f} ({rate['p5']:.0f} to {rate['p95']:.0f})",
            f"{row['gb_per_s']['median']:.2f}",
            f"{share['median']:.2f}" if share else "",
            f"{speed['median']:.2f}" if speed else "",
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks host_adam``."""
    parser = option_parser("host_adam", __doc__, rounds=7)
    kernels = ("copy", "ours", *FORMS, "fused", "deepspeed")
    add = parser.add_argument
    add("--params", type=float, default=32, help="millions of parameters (32)")
    add("--slots", type=int, nargs="+", default=[1, 2, 4, 8], help="window lengths S (1 2 4 8)")
    add("--dtype", nargs="+", choices=sorted(DTYPES), default=["bf16", "fp32"], help="of gradients and weights")
    add("--threads", type=int, nargs="+", default=[1, 2], help="threads, one per core (1 2)")
    add("--kernel", nargs="+", choices=kernels, default=list(kernels))
    add("--deepspeed-python", type=Path, default=DEEPSPEED_PYTHON, help="interpreter that has DeepSpeed")
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    targets: list[Target] = []
    console = Console(width=None if sys.stdout.isatty() else 120)
    for threads in given.threads:
        for dtype in given.dtype:
            for slots in given.slots:
                numel = round(given.params * 1e6 / LENGTH) * LENGTH
                made, found = measure(dtype, slots, numel, threads, given.rounds, given.kernel, given.deepspeed_python)
                rows += made
                targets += found
                console.print(f"{dtype}, S = {slots}, {threads} threads done", highlight=False)
    console.print(table(rows))
    for target in targets:
        console.print(str(target), style="green" if target.met else "red", highlight=False)
    console.print(f"wrote {write_results('host_adam', rows, out=given.out, seed=0, targets=targets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
