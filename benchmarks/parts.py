"""What each part of a zenflow step costs: the step with one part removed in turn, beside resident AdamW.

All variants train in one process, in turns; a turn is a few whole update windows, and what is in flight at its end is
waited for outside of the timing. A removed part is a function that does nothing: weights are wrong, but the other parts
do the same work as before. The last variant has none of the parts: what is left is the model and the runtime itself,
with its threads. Device and host are the same cores here, so that a part costs time wherever it runs: the row without
the host's updates is the floor of any schedule that hides all of them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.common import Spread, Target, interleaved, option_parser, ratios, write_results
from benchmarks.systems.case import Case
from benchmarks.systems.local import Ours, Plain
from benchmarks.systems.workloads import WORKLOADS
from zenflow_compile.runtime.device import thread_lane
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.step import slice_updates
from zenflow_compile.runtime.step.schedule import Schedule

TARGET = 1.15
WINDOW = 4


def _norms_alone(matrix: torch.Tensor, dim: int, *_: object) -> torch.Tensor:
    return torch.ones(matrix.shape[dim])


def _nothing(*_: object, **__: object) -> None:
    return None


PARTS: dict[str, tuple[tuple[Any, str, Callable[..., Any]], ...]] = {
    "split and norms": ((column_ops, "norms_and_split", _norms_alone),),
    "AdamW on selected slices": ((column_ops, "update_columns_", _nothing),),
    "scores and selection": ((slice_updates, "feed_scores", _nothing), (Schedule, "selection", _nothing)),
    "copies": ((thread_lane, "copy_without_gil", _nothing),),
    "merges": ((column_ops, "merge_columns", _nothing),),
    "host updates": (),  # a kernel belongs to its engine
}
ALL = "all of these"


class Variant:
    """Zenflow without some of its parts.

    Args:
        removed: names of ``PARTS``.
    """

    def __init__(self, case: Case, removed: Sequence[str]) -> None:
        torch.manual_seed(case.seed)
        self.system = Ours(case, WORKLOADS[case.model].build())
        self.removed = removed
        if "host updates" in removed:
            for offloaded in self.system.optimizer.engine.offloaded.values():
                offloaded.host.ranges = [slice(0, 0)]  # of tasks, which then update no element

    @contextmanager
    def without_parts(self) -> Iterator[None]:
        """Other variants run the same functions: they are replaced for a turn."""
        replaced = [place for part in self.removed for place in PARTS[part]]
        before = [getattr(owner, name) for owner, name, _ in replaced]
        for owner, name, function in replaced:
            setattr(owner, name, function)
        try:
            yield
            self.system.optimizer.synchronize()  # work in flight must not run the real functions
        finally:
            for (owner, name, _), function in zip(replaced, before, strict=True):
                setattr(owner, name, function)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks parts``."""
    parser = option_parser("parts", __doc__, rounds=12, seed=True)
    parser.add_argument(
        "--model", choices=("tiny", "optimizer-bound", "compute-bound"), default="optimizer-bound", help="(%(default)s)"
    )
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor", help="(%(default)s)")
    parser.add_argument("--windows", type=int, default=3, metavar="N", help="of four steps per turn (%(default)s)")
    given = parser.parse_args(arguments)
    steps = WINDOW * given.windows

    def case_of(system: str) -> Case:
        return Case(system=system, model=given.model, inner=given.inner, seed=given.seed)

    workload = WORKLOADS[given.model]
    batches = workload.batches(given.seed, torch.float32, torch.device("cpu"))

    def turn_of(step: Callable[[tuple[torch.Tensor, ...]], object]) -> float:
        began = time.perf_counter()
        for number in range(steps):
            step(batches[number % len(batches)])
        return (time.perf_counter() - began) / steps

    def plain(system: str) -> Callable[[], float]:
        torch.manual_seed(given.seed)
        trained = Plain(case_of(system), workload.build(), update=system == "adamw")
        return lambda: turn_of(trained.step)

    def zenflow(removed: Sequence[str]) -> Callable[[], float]:
        variant = Variant(case_of("zenflow"), removed)
        opened.append(variant)

        def turn() -> float:
            with variant.without_parts():
                return turn_of(variant.system.step)

        return turn

    opened: list[Variant] = []
    works = {
        "forward and backward": plain("forward_backward"),
        "resident AdamW": plain("adamw"),
        "zenflow": zenflow(()),
        **{f"without {part}": zenflow([part]) for part in PARTS},
        f"without {ALL}": zenflow(list(PARTS)),
    }
    seconds = interleaved(given.rounds, works, warm_up=2)
    for variant in opened:
        variant.system.close()
    rows: list[dict[str, Any]] = []
    for name, times in seconds.items():
        over_adamw = ratios(times, seconds["resident AdamW"])
        saved = [1e3 * (whole - part) for whole, part in zip(seconds["zenflow"], times, strict=True)]
        rows.append(
            {
                "model": given.model,
                "inner": given.inner,
                "variant": name,
                "step_ms": Spread.of([1e3 * each for each in times]).row(),
                "over_resident_adamw": Spread.of(over_adamw).row(),
                "saved_ms": Spread.of(saved).row(),
            }
        )
        print(
            f"{name:34} {1e3 * statistics.median(times):7.2f} ms  x {statistics.median(over_adamw):.2f}  "
            f"saves {statistics.median(saved):6.2f} ms"
        )
    ratio = statistics.median(ratios(seconds["zenflow"], seconds["resident AdamW"]))
    targets = [Target(f"{given.model}: step of zenflow over resident AdamW", ratio, TARGET, at_least=False)]
    print(*targets, sep="\n")
    print(f"wrote {write_results('parts', rows, out=given.out, seed=given.seed, targets=targets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
