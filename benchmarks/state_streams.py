"""Does the device wait for Muon's state? Measured on an emulated device with an emulated link.

A stack of layers, whose work is sleeping for a known time, trains by Muon with its state on the device, and in host
memory. The iterations of each matrix sleep, too: as long as one of its three operations in forward and backward, or
three times as long. State is copied to the device and back in 16 subgroups, as that of a model with 1.6e9 elements,
over a link in each direction. Their bandwidth is such that the copies of a step take 30%, 60% or 90% of the step with
state on the device. The runs, in turns:

* ``on device``: no state is copied;
* ``streamed``: copies start ahead of their updates, in three buffers;
* ``naive``: one buffer, which is filled when its subgroup's update is due.

``link`` is the least stall that three buffers have, if nothing else takes time: before the optimizer step they hold
three subgroups; the copies of the others have the time of the updates in front of them. Weights must agree bit for bit.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zenflow_compile as zf
from benchmarks.common import Spread, Target, ratios, write_results
from benchmarks.emulated import EmulatedModel, Link, Settings, link_settings, take_turns
from zenflow_compile.planning import planners
from zenflow_compile.planning.plan import STREAM_BUFFERS
from zenflow_compile.rules import Muon
from zenflow_compile.runtime.device.thread_lane import INLINE_BYTES, ThreadLane
from zenflow_compile.runtime.device_updates import streamed_updates

WIDTH = 160
BATCH = 8
SUBGROUPS = 16
WARM_UP = 4
SHARES = (0.3, 0.6, 0.9)
ITERATIONS = (1.0, 3.0)
RUNS = ("on device", "streamed", "naive")
LIMIT = 0.03

assert 4 * WIDTH * WIDTH > INLINE_BYTES  # the lane's thread makes larger copies: others would not be asynchronous


class EmulatedMuon(Muon):
    """Its iterations sleep for ``seconds`` a matrix, and change nothing else."""

    seconds = 0.0

    def on_matrices(self, values: Tensor, options: Any) -> Tensor:
        time.sleep(self.seconds * len(values))
        return values


@dataclass(frozen=True, slots=True)
class Turn:
    """Means per step over a few steps in a row: of the step, of waits for copies, and bytes that went each way."""

    step_ms: float
    stall_ms: float
    copied: float


class Trainer:
    """One way of training; ``run``: of ``RUNS``."""

    def __init__(self, run: str, given: Settings, iterations: float, subgroups: int) -> None:
        torch.manual_seed(0)
        self.model = EmulatedModel(given.layers, WIDTH, given.seconds)
        self.links = Link(), Link()
        rule = EmulatedMuon(lr=1e-3)
        rule.seconds = iterations * given.seconds
        policy = "resident" if run == "on device" else "zero_offload"
        self._buffers = 1 if run == "naive" else STREAM_BUFFERS
        self.optimizer = zf.ZenFlow(self.model.parameters(), rule, policy=policy, min_offload_size=0, workers=1)
        self._call = torch.compile(self.model, backend="zenflow", options={"inner": "eager"})
        self._data = itertools.cycle([torch.randn(BATCH, WIDTH) for _ in range(8)])
        elements = -(-given.layers // subgroups) * WIDTH**2
        with (
            mock.patch.object(planners, "LARGEST_SUB_GROUP", elements),
            mock.patch.object(streamed_updates, "STREAM_BUFFERS", self._buffers),
        ):
            self.step()
        if run != "on device":
            self._emulate(prefetches=run == "streamed")

    def _emulate(self, *, prefetches: bool) -> None:
        transport = self.optimizer.engine.registry.transport
        for link, lane in zip(self.links, (transport.to_device, transport.to_host), strict=True):
            assert isinstance(lane, ThreadLane)
            link.serve(lane)
        if not prefetches:
            vars(self.optimizer.engine.core.streamed).update(prefetch=lambda: None)
            self.optimizer.engine.core.arrange()

    def step(self) -> None:
        self._call(next(self._data)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, steps: int) -> Turn:
        """Measure some steps. The step before them is not measured: the link has had time to copy in front of it."""
        self.step()
        with zf.profile(self.optimizer) as profile:
            for _ in range(steps):
                self.step()
        summary = profile.summary()
        (recording,) = profile.recordings()
        copied = sum(event.bytes for event in recording.events if event.kind == "state")
        return Turn(summary["step_ms"] or 0.0, summary["stall_ms_per_step"] or 0.0, copied / 2 / steps)

    def weights(self) -> list[Tensor]:
        self.optimizer.synchronize()
        return [param.detach().clone() for param in self.model.parameters()]


def least_stall(copies: float, updates: float, subgroups: int = SUBGROUPS) -> float:
    """Of subgroups of equal size, in the unit of its arguments: the time of all copies one way, and of updates."""
    first = STREAM_BUFFERS
    return max(0.0, *(((k - first) * copies - (k - 1) * updates) / subgroups for k in range(first + 1, subgroups + 1)))


def compare(
    iterations: float, given: Settings, shares: Sequence[float] = SHARES, subgroups: int = SUBGROUPS
) -> list[dict[str, Any]]:
    """The rows of one duration of iterations, in durations of an operation."""
    torch.compiler.reset()
    trainers = {run: Trainer(run, given, iterations, subgroups) for run in RUNS}
    turns = {run: trainer.turn(WARM_UP) for run, trainer in trainers.items()}
    step_ms, copied = turns["on device"].step_ms, turns["streamed"].copied
    rows = []
    for share in shares:
        for trainer in trainers.values():
            for link in trainer.links:
                link.seconds_per_byte = share * step_ms / 1e3 / copied
        updates_ms = iterations * given.seconds * given.layers * 1e3
        for row in compare_at(trainers, given):
            link_ms = 0.0 if row["run"] == "on device" else least_stall(share * step_ms, updates_ms, subgroups)
            rows.append(
                {
                    **row,
                    "iterations": iterations,
                    "link_share": share,
                    "link_share_of_step": link_ms / (step_ms + link_ms),
                }
            )
    for trainer in trainers.values():
        trainer.optimizer.close()
    return rows


def compare_at(trainers: Mapping[str, Trainer], given: Settings) -> list[dict[str, Any]]:
    """The rows of one bandwidth."""
    turns, steps, equal = take_turns(trainers, given)
    return [
        {
            "run": run,
            "step_ms": Spread.of(steps[run]).row(),
            "step_over_on_device": Spread.of(ratios(steps[run], steps["on device"])).row(),
            "stall_share": Spread.of([turn.stall_ms / turn.step_ms for turn in of_run]).row(),
            "weights_bitwise_equal": equal[run],
        }
        for run, of_run in turns.items()
    ]


def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """What the emulation has to show."""
    found = []
    for row in rows:
        setting = f"of a step, copies {row['link_share']:.0%} of it, iterations of {row['iterations']:g} operations"
        if row["run"] == "streamed":
            beyond = row["stall_share"]["median"] - row["link_share_of_step"]
            found.append(Target(f"stall {setting}, less what the link needs", beyond, LIMIT, at_least=False))
    differing = sum(not row["weights_bitwise_equal"] for row in rows)
    return [*found, Target("runs whose weights differ from those on the device", differing, 0, at_least=False)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the emulation; exits with 1 if a claim does not hold."""
    settings, out = link_settings("state_streams", __doc__, arguments, milliseconds=4.0)
    torch.set_num_threads(1)
    console = Console()
    table = Table(title=f"{settings.layers} layers; device and link are emulated", padding=0)
    for name in ("iterations", "copies", "run", "step ms", "of on device", "stall", "link", "weights"):
        table.add_column(name, justify="left" if name in ("run", "weights") else "right")
    rows = [row for iterations in ITERATIONS for row in compare(iterations, settings)]
    for row in rows:
        table.add_row(
            f"{row['iterations']:g}",
            f"{row['link_share']:.0%}",
            row["run"],
            f"{row['step_ms']['median']:.0f}",
            f"{row['step_over_on_device']['median']:.2f}",
            f"{row['stall_share']['median']:.1%}",
            f"{row['link_share_of_step']:.1%}",
            "same" if row["weights_bitwise_equal"] else "DIFFER",
        )
    console.print(table)
    found = targets(rows)
    console.print(*map(str, found), sep="\n", highlight=False)
    console.print(f"wrote {write_results('state_streams', rows, out=out, seed=0, targets=found)}")
    return 0 if all(target.met for target in found) else 1


if __name__ == "__main__":
    sys.exit(main())
