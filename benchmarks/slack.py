"""Does the device wait for a slow host? Measured on an emulated device, whose work is sleeping for a known time.

A stack of layers trains with the optimizer in the backward. The host is made slow until its work takes 60% of a
step without clipping, or 30% with it (where no update can start before the whole gradient is known). The runs:

* ``planned``: the first layers on the device, the rest in windows of 4 steps, weight gradients as soon as possible;
* ``planned, ordered``: the same with weight gradients in forward order;
* ``ordered``: nothing on the device; the host updates the first layers at every step; forward order;
* ``naive``: the same with weight gradients as soon as possible.

With the first layers on the device, forward order only takes time from the last layers; without them it helps.

All runs update the same parameters at the same steps, so that their weights must agree bit for bit.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zenflow_compile as zf
from benchmarks.common import Target, option_parser, write_results
from benchmarks.emulated import EmulatedModel, SlowHost
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.planning.planners import Kinds, Side

WIDTH = 128
BATCH = 8
INTERVAL = 4
KEPT = 8  # layers whose state the planned runs keep on the device
LIMIT = 0.03
WARM_UP = 2 * INTERVAL


@dataclass(frozen=True, slots=True)
class Run:
    """One way of training.

    Attributes:
        naive: nothing stays on the device; the layers that would are updated by the host at every step.
        host_share: the host's work as a share of a step's device work.
    """

    name: str
    order: str
    naive: bool
    clipping: bool
    host_share: float


@contextmanager
def every_step_on_the_host(active: bool) -> Iterator[None]:
    """While entered, what the zenflow planner would keep on the device gets host windows of one step."""
    planned = Kinds.planned

    def on_host(kinds: Kinds, kind: int, side: Side, cut: int) -> ParamPlan:
        if side is not Side.DEVICE:
            return planned(kinds, kind, side, cut)
        return replace(planned(kinds, kind, Side.HOST, cut), placement=Placement.HOST, k=0, interval=1)

    with patch.object(Kinds, "planned", on_host) if active else nullcontext():
        yield


def train(
    run: Run, layers: int, seconds: float, steps: int, width: int = WIDTH
) -> tuple[dict[str, float], list[Tensor]]:
    """Train; returns what was measured and the final weights."""
    with SlowHost() as host:
        return _train(host, run, layers, seconds, steps, width)


def _train(
    host: SlowHost, run: Run, layers: int, seconds: float, steps: int, width: int
) -> tuple[dict[str, float], list[Tensor]]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = EmulatedModel(layers, width, seconds)
    options: dict[str, Any] = {
        "inner": "eager",
        "lr": 1e-3,
        "topk_ratio": 0.1,
        "update_interval": INTERVAL,
        "device_share": KEPT * 8 * width * width,  # two moments of each fp32 layer
        "min_offload_size": 0,
        "weight_grad_bytes": "auto" if run.order == "forward" else 0,
        "workers": 1,
    }
    if run.clipping:
        options["max_grad_norm"] = 0.5
    compiled = torch.compile(model, backend="zenflow", options=options)
    batches = [torch.randn(BATCH, width) for _ in range(8)]
    data = itertools.cycle(batches)
    with every_step_on_the_host(run.naive):
        compiled(next(data)).square().mean().backward()
    optimizer = zf.optimizer_of(compiled)
    for _ in range(WARM_UP - 1):
        compiled(next(data)).square().mean().backward()
    plans = [each.plan for each in optimizer.engine.offloaded.values()]
    elements = sum(plan.deferred * plan.length / plan.interval for plan in plans)  # per step
    host.seconds_per_element = run.host_share * step_seconds(compiled, data) / elements
    for _ in range(WARM_UP):
        compiled(next(data)).square().mean().backward()
    busy, begin = host.busy_seconds, time.perf_counter()
    with zf.profile(optimizer) as profile:
        for _ in range(steps):
            compiled(next(data)).square().mean().backward()
    elapsed = time.perf_counter() - begin
    summary = profile.summary()
    optimizer.close()
    measured = {
        "step_ms": elapsed / steps * 1e3,
        "device_ms": 3 * layers * seconds * 1e3,
        "host_share": (host.busy_seconds - busy) / elapsed,
        "stall_share": summary["stall_share"] or 0.0,
        "stall_ms": summary["stall_ms_per_step"] or 0.0,
    }
    return measured, [param.detach().clone() for param in model.parameters()]


def step_seconds(compiled: Callable[..., Tensor], data: Iterator[Tensor]) -> float:
    """Length of a step that waits for nothing, waits of the emulated device and all that comes with them included."""
    begin = time.perf_counter()
    for _ in range(WARM_UP):
        compiled(next(data)).square().mean().backward()
    return (time.perf_counter() - begin) / WARM_UP


def runs() -> list[Run]:
    """What is compared, the same four without clipping and with it."""
    found = []
    for clipping, host_share in ((False, 0.6), (True, 0.3)):
        found += [
            Run("planned", "asap", False, clipping, host_share),
            Run("planned, ordered", "forward", False, clipping, host_share),
            Run("ordered", "forward", True, clipping, host_share),
            Run("naive", "asap", True, clipping, host_share),
        ]
    return found


def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """What the emulation has to show."""
    stall = {(row["run"], row["clipping"]): row["stall_share"] for row in rows}
    found = [
        Target(f"share of a step that 'planned' stalls, {'with' if clipping else 'without'} clipping",
               stall["planned", clipping], LIMIT, at_least=False)
        for clipping in (False, True)
    ]  # fmt: skip
    found += [
        Target(f"share of a step that 'naive' stalls, {'with' if clipping else 'without'} clipping",
               stall["naive", clipping], LIMIT, at_least=True)
        for clipping in (False, True)
    ]  # fmt: skip
    differing = sum(not row["weights_bitwise_equal"] for row in rows)
    return [*found, Target("runs whose weights differ from the first one's", differing, 0, at_least=False)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the emulation; exits with 1 if a claim does not hold."""
    parser = option_parser("slack", __doc__)
    parser.add_argument("--steps", type=int, default=40, help="measured steps per run (%(default)s)")
    parser.add_argument("--milliseconds", type=float, default=2.5, help="of each operation (%(default)s)")
    parser.add_argument("--layers", type=int, default=KEPT + 10 * INTERVAL, help="(%(default)s)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    table = Table(title=f"{given.layers} layers, {KEPT} of them kept; device work is waiting, the host is slowed down")
    for name in ("clipping", "run", "step ms", "host work", "stall ms", "stall", "weights"):
        table.add_column(name, justify="left" if name in ("clipping", "run") else "right")
    rows: list[dict[str, Any]] = []
    references: dict[bool, list[Tensor]] = {}
    for run in runs():
        measured, weights = train(run, given.layers, given.milliseconds / 1e3, given.steps)
        reference = references.setdefault(run.clipping, weights)
        same = all(torch.equal(a, b) for a, b in zip(weights, reference, strict=True))
        rows.append({"run": run.name, "clipping": run.clipping, "weights_bitwise_equal": same, **measured})
        table.add_row(
            "yes" if run.clipping else "no",
            run.name,
            f"{measured['step_ms']:.1f}",
            f"{measured['host_share']:.0%}",
            f"{measured['stall_ms']:.2f}",
            f"{measured['stall_share']:.1%}",
            "the same" if same else "DIFFER",
        )
    console.print(table)
    found = targets(rows)
    console.print(*map(str, found), sep="\n", highlight=False)
    console.print(f"wrote {write_results('slack', rows, out=given.out, seed=0, targets=found)}")
    return 0 if all(target.met for target in found) else 1


if __name__ == "__main__":
    sys.exit(main())
