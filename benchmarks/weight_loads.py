"""Does the device wait for offloaded weights? Measured on an emulated device with an emulated link.

A stack of layers, whose work is sleeping for a known time, trains with the optimizer in the backward, with its weights
on the device, and with ``offload_weights=1.0``, which leaves the device one weight at a time. Copies to the device then
take their bytes over the link's bandwidth, one behind the other, and no core. The bandwidth is such that the copies of
a step take 30% to 150% of the step with weights on the device. The runs, in turns:

* ``on device``: no weight is offloaded, and the link takes no time;
* ``prefetch``: copies start ahead of their loads;
* ``naive``: each copy starts at its load.

Forward and backward load each layer one time, but the forward has one operation per load and the backward two. So the
forward waits from a share of about two thirds on, also for a link that is never idle: the weights that it loads are
final at the end of the step before. ``link`` is the least stall that any order of copies has, see ``Turn.link_ms``.

All runs of a policy see the same data, so that their weights must agree bit for bit.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zenflow_compile as zf
from benchmarks.common import Spread, Target, ratios, write_results
from benchmarks.emulated import EmulatedModel, Link, Settings, link_settings, take_turns
from zenflow_compile.runtime.device.thread_lane import INLINE_BYTES, ThreadLane
from zenflow_compile.runtime.parameters.host_values import Staged
from zenflow_compile.timeline import COMPUTE

WIDTH = 160
BATCH = 8
INTERVAL = 4
TOPK_RATIO = 0.1
LIMIT = 0.03
WARM_UP = 2 * INTERVAL
SHARES = (0.3, 0.6, 0.9, 1.5)
FORWARD_IS_LINK_BOUND = 2 / 3  # share from which on the forward waits for the link
POLICIES = ("zero_offload", "zenflow")
RUNS = ("on device", "prefetch", "naive")
_FILL = (COMPUTE, "load")

# The lane's thread makes larger copies: those of the calling thread would not be asynchronous.
assert 4 * WIDTH * WIDTH * (1 - TOPK_RATIO) > INLINE_BYTES


@dataclass(frozen=True, slots=True)
class Turn:
    """Means per step over a few steps in a row.

    Attributes:
        step_ms, backward_ms: of the step; of the backward and the optimizer in it, without stalls.
        stall_ms: of waits for copies and host updates.
        load_ms: of writing what has been copied into the memory of weights.
        load_mb: that were copied for loads, in 1e6 bytes.
        loads, ahead: loads, and those whose copy had been started before.
    """

    step_ms: float
    backward_ms: float
    stall_ms: float
    load_ms: float
    load_mb: float
    loads: float
    ahead: float

    @property
    def stall_share(self) -> float:
        """Of the step."""
        return self.stall_ms / self.step_ms

    def link_ms(self, layers: int, copies_ms: float) -> float:
        """The least stall, in ms, on a link on which the copies of a step take ``copies_ms``.

        The first copy starts at the end of the step before. So load k waits until k copies have passed the link, less
        the work in front of it, whatever the number of buffers.
        """
        forward_ms = self.step_ms - self.stall_ms - self.backward_ms
        work = [layer * forward_ms / layers for layer in range(layers)]
        # The backward begins with the layer that the forward has loaded last.
        work += [forward_ms + layer * self.backward_ms / layers for layer in range(1, layers)]
        return max(0.0, *(k * copies_ms / len(work) - before for k, before in enumerate(work, 1)))


class Trainer:
    """One way of training.

    Args:
        run: of ``RUNS``.
        seconds: of each operation of the device.

    Attributes:
        loads, ahead: see ``Turn``.
    """

    def __init__(self, policy: str, run: str, layers: int, seconds: float) -> None:
        torch.manual_seed(0)
        self.model = EmulatedModel(layers, WIDTH, seconds)
        self.link = Link()
        self.loads = self.ahead = 0
        options: dict[str, Any] = {
            "policy": policy,
            "inner": "eager",
            "lr": 1e-3,
            "min_offload_size": 0,
            "workers": 1,
            "offload_weights": False if run == "on device" else 1.0,
        }
        if policy == "zenflow":
            options |= {"device_share": 0.0, "topk_ratio": TOPK_RATIO, "update_interval": INTERVAL}
        self._call = torch.compile(self.model, backend="zenflow", options=options)
        self._data = itertools.cycle([torch.randn(BATCH, WIDTH) for _ in range(8)])
        self.step()
        self.optimizer = zf.optimizer_of(self._call)
        if run != "on device":
            self._emulate(prefetches=run == "prefetch")

    def _emulate(self, *, prefetches: bool) -> None:
        """Put the link into the H2D lane, and count loads."""
        engine = self.optimizer.engine
        lane = engine.registry.transport.to_device
        assert isinstance(lane, ThreadLane)
        self.link.serve(lane)
        prefetch = engine.weights.prefetch
        take = prefetch.take

        def counted(p: int) -> Staged | None:
            staged = take(p)
            self.loads += 1
            self.ahead += staged is not None
            return staged

        # In front of the methods of this object: no other engine sees them.
        vars(prefetch).update(take=counted)
        if not prefetches:
            vars(prefetch).update(_copy_ahead=lambda: None)

    def step(self) -> None:
        """Train one step, with the optimizer in the backward."""
        self._call(next(self._data)).square().mean().backward()

    def turn(self, steps: int) -> Turn:
        """Measure some steps. The step before them is not measured: the link has had time to copy in front of it."""
        self.step()
        loads, ahead = self.loads, self.ahead
        with zf.profile(self.optimizer) as profile:
            for _ in range(steps):
                self.step()
        loads, ahead = self.loads - loads, self.ahead - ahead
        (recording,) = profile.recordings()
        summary = profile.summary()
        load_ns = sum(each.end_ns - each.start_ns for each in recording.events if (each.lane, each.kind) == _FILL)
        return Turn(
            step_ms=summary["step_ms"] or 0.0,
            backward_ms=sum(
                part or 0.0
                for part in (
                    summary["backward_ms_per_step"],
                    summary["update_ms_per_step"],
                    summary["select_ms_per_step"],
                )
            ),
            stall_ms=summary["stall_ms_per_step"] or 0.0,
            load_ms=load_ns / steps / 1e6,
            load_mb=(summary["weight_bytes_per_step"] or 0.0) / 1e6,
            loads=loads / steps,
            ahead=ahead / steps,
        )

    def weights(self) -> list[Tensor]:
        """The weights now."""
        with self.optimizer.loaded_weights():
            return [param.detach().clone() for param in self.model.parameters()]


def compare(
    policy: str, given: Settings, shares: Sequence[float] = SHARES, warm_up: int = WARM_UP
) -> list[dict[str, Any]]:
    """The rows of one policy."""
    torch.compiler.reset()
    trainers = {run: Trainer(policy, run, given.layers, given.seconds) for run in RUNS}
    for trainer in trainers.values():
        trainer.turn(warm_up)
    steady = {run: trainer.turn(warm_up) for run, trainer in trainers.items()}
    device_ms, load_mb = steady["on device"].step_ms, steady["naive"].load_mb
    rows = []
    for share in shares:
        for trainer in trainers.values():
            trainer.link.seconds_per_byte = share * device_ms / 1e3 / (load_mb * 1e6)
        rows += compare_at(share * device_ms, trainers, given)
        for row in rows[-len(RUNS) :]:
            row |= {"policy": policy, "link_share": share}
    for trainer in trainers.values():
        trainer.optimizer.close()
    return rows


def compare_at(copies_ms: float, trainers: Mapping[str, Trainer], given: Settings) -> list[dict[str, Any]]:
    """The rows of one bandwidth, with which the copies of a step take ``copies_ms``."""
    turns, steps, equal = take_turns(trainers, given)
    rows = []
    for run, of_run in turns.items():
        link = [0.0 if run == "on device" else turn.link_ms(given.layers, copies_ms) for turn in of_run]
        rows.append(
            {
                "run": run,
                "step_ms": Spread.of(steps[run]).row(),
                "step_over_on_device": Spread.of(ratios(steps[run], steps["on device"])).row(),
                "stall_ms": Spread.of([turn.stall_ms for turn in of_run]).row(),
                "stall_share": Spread.of([turn.stall_share for turn in of_run]).row(),
                "link_share_of_step": Spread.of(
                    [ms / (turn.step_ms - turn.stall_ms + ms) for ms, turn in zip(link, of_run, strict=True)]
                ).row(),
                "load_ms": Spread.of([turn.load_ms for turn in of_run]).row(),
                "load_mb_per_step": round(statistics.mean(turn.load_mb for turn in of_run), 4),
                "copies_ms": 0.0 if run == "on device" else round(copies_ms, 2),
                "loads_per_step": statistics.mean(turn.loads for turn in of_run),
                "loads_ahead_per_step": statistics.mean(turn.ahead for turn in of_run),
                "weights_bitwise_equal": equal[run],
            }
        )
    return rows


def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """What the emulation has to show."""
    found = []
    for row in rows:
        stall, link = row["stall_share"]["median"], row["link_share_of_step"]["median"]
        setting = f"of a {row['policy']} step, copies {row['link_share']:.0%} of the device's time"
        if row["run"] == "naive":
            found.append(Target(f"stall {setting}, naive", stall, LIMIT, at_least=True))
        elif row["run"] == "prefetch" and row["link_share"] < FORWARD_IS_LINK_BOUND:
            found.append(Target(f"stall {setting}, prefetch", stall, LIMIT, at_least=False))
        elif row["run"] == "prefetch":
            found.append(
                Target(f"stall {setting}, prefetch, less what the link needs", stall - link, LIMIT, at_least=False)
            )
    differing = sum(not row["weights_bitwise_equal"] for row in rows)
    return [*found, Target("runs whose weights differ from those on the device", differing, 0, at_least=False)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the emulation; exits with 1 if a claim does not hold."""
    settings, out = link_settings("weight_loads", __doc__, arguments, milliseconds=2.5)
    torch.set_num_threads(1)
    console = Console()
    table = Table(title=f"{settings.layers} layers; device and link are emulated", padding=0)
    for name in ("policy", "copies", "run", "step ms", "stall", "link", "loads", "ahead", "weights"):
        table.add_column(name, justify="left" if name in ("policy", "run", "weights") else "right")
    rows = [row for policy in POLICIES for row in compare(policy, settings)]
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['link_share']:.0%}",
            row["run"],
            f"{row['step_ms']['median']:.0f}",
            f"{row['stall_share']['median']:.1%}",
            f"{row['link_share_of_step']['median']:.1%}",
            f"{row['loads_per_step']:.0f}",
            f"{row['loads_ahead_per_step']:.0f}",
            "same" if row["weights_bitwise_equal"] else "DIFFER",
        )
    console.print(table)
    found = targets(rows)
    console.print(*map(str, found), sep="\n", highlight=False)
    console.print(f"wrote {write_results('weight_loads', rows, out=out, seed=0, targets=found)}")
    return 0 if all(target.met for target in found) else 1


if __name__ == "__main__":
    sys.exit(main())
