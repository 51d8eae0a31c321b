"""What the runtime's Python costs per step: models of 300 small tensors, where an op's time is nearly all fixed.

Every row comes from one process that runs these in turns: the model compiled without any optimizer, ``resident``
AdamW, and zenflow. *Ours* is the time of the training thread inside the engine's entry points, which graph nodes and
autograd's hooks call, and inside ``optimizer.step()``, less what measuring it cost. Of that, *operators* is what the
device does or launches: norms and split, AdamW, merges, scores and top-k; the CPU runs it at once with a handful of
PyTorch's operators. The rest is Python, which the targets are for. CPU time leaves out waits for a worker, a lane or
the GIL; wall time has them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zenflow_compile as zf
from benchmarks.common import Spread, Target, option_parser, write_results
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.resident_updates import ResidentUpdates
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.step import schedule, slice_updates

TARGET_OP_US, TARGET_STEP_MS = 10.0, 4.0

NODES = {
    "fetch_parameters_": "access", "begin_backward": "intake", "offload_gradients": "intake",
    "update_parameters": "steps",
}  # fmt: skip
"""What graph nodes call, by the engine's stage that has it."""

ENTRIES = {**NODES, "accept_grad": "intake", "end_backward": "intake"}  # hooks and callbacks of autograd, too
OPERATORS = (
    (column_ops, "norms_and_split"), (column_ops, "update_columns_"), (column_ops, "merge_columns"),
    (ResidentUpdates, "update"), (slice_updates, "feed_scores"),
    (schedule, "count_leaving"), (DeviceState, "best_slices"), (DeviceState, "better_slices"),
)  # fmt: skip
_OPERATOR_NAMES = frozenset(name for _, name in OPERATORS)


class Block(nn.Module):
    """The twelve tensors of a Transformer block in their order, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(q * torch.sigmoid(k) + v)
        down: Tensor = self.down(torch.relu(self.up(self.norm2(x))))
        return x + down


def linear_layers(tensors: int, width: int) -> nn.Module:
    """As many weights, which are offloaded, as biases, which are not."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(tensors // 2)))


def transformer_like(tensors: int, width: int) -> nn.Module:
    """Blocks of 4 offloaded matrices among 8 vectors on the device."""
    return nn.Sequential(*(Block(width) for _ in range(tensors // 12)))


MODELS: dict[str, Callable[[int, int], nn.Module]] = {"linear": linear_layers, "transformer": transformer_like}


@dataclass
class Took:
    """What calls of one function took in a step, with what the wrappers in and around it add.

    Attributes:
        inner: calls of other wrapped functions in it.
    """

    calls: int = 0
    cpu_ns: int = 0
    wall_ns: int = 0
    inner: int = 0


@dataclass
class Spent:
    """Time of the calling thread inside wrapped functions: in the step that runs, and in those before it."""

    now: dict[str, Took] = field(default_factory=dict)
    steps: list[dict[str, Took]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._inner = [0]

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, measured."""
        cpu, wall, nested = time.thread_time_ns, time.perf_counter_ns, self._inner

        def measured(*args: Any, **keywords: Any) -> Any:
            key = name if len(nested) == 1 or name in _OPERATOR_NAMES else f"{name}, nested"
            nested.append(0)
            began = wall()
            ran = cpu()
            try:
                return function(*args, **keywords)
            finally:
                cpu_ns, wall_ns, inner = cpu() - ran, wall() - began, nested.pop()
                nested[-1] += 1 + inner
                took = self.now.get(key) or self.now.setdefault(key, Took())
                took.calls += 1
                took.cpu_ns += cpu_ns
                took.wall_ns += wall_ns
                took.inner += inner

        return measured

    def end_step(self) -> None:
        """A step is over."""
        self.steps.append(self.now)
        self.now = {}


@dataclass
class Cost:
    """What one call of a wrapper adds, in ns: to the time that it measures, and to that of a wrapper around it."""

    cpu_inside: float
    wall_inside: float
    cpu_outside: float
    wall_outside: float


def wrapper_cost(calls: int = 20_000) -> Cost:
    """Measure an empty function."""
    spent = Spent()
    empty = spent.wrap("empty", lambda p, grad: None)
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    for _ in range(calls):
        empty(0, None)
    wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
    took = spent.now["empty"]
    return Cost(took.cpu_ns / calls, took.wall_ns / calls, cpu / calls, wall / calls)


class Training:
    """One variant of a model under one policy; None has no optimizer at all."""

    def __init__(self, build: Callable[[int], nn.Module], width: int, inner: str, policy: str | None) -> None:
        torch.manual_seed(0)
        self.model = build(width)
        self.batch = torch.randn(4, width)
        self.optimizer = None
        if policy is not None:
            self.optimizer = zf.ZenFlowAdamW(
                self.model.named_parameters(), lr=1e-4, policy=policy, device_share=0.0, min_offload_size=width * width
            )
        self.call = torch.compile(self.model, backend="zenflow", options={"inner": inner})
        self.seconds: list[float] = []
        self.spent = Spent()

    def measure_ops(self) -> None:
        """Wrap the engine's entry points and the optimizer step."""
        optimizer = self.optimizer
        assert optimizer is not None
        for name, stage in ENTRIES.items():
            owner = getattr(optimizer.engine, stage)
            setattr(owner, name, self.spent.wrap(name, getattr(owner, name)))
        optimizer.step = self.spent.wrap("step", optimizer.step)  # type: ignore[method-assign]

    @contextmanager
    def measure_operators(self) -> Iterator[None]:
        """Wrap the device's operators, for all trainings."""
        before = [getattr(owner, name) for owner, name in OPERATORS]
        for (owner, name), function in zip(OPERATORS, before, strict=True):
            setattr(owner, name, self.spent.wrap(name, function))
        try:
            yield
        finally:
            for (owner, name), function in zip(OPERATORS, before, strict=True):
                setattr(owner, name, function)

    def step(self) -> None:
        """One training step."""
        self.call(self.batch).square().mean().backward()
        if self.optimizer is None:
            for param in self.model.parameters():
                param.grad = None
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def timed(self) -> None:
        """One step, timed as a whole."""
        began = time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - began)
        self.spent.end_step()


def row_of(model: str, inner: str, arguments: argparse.Namespace, cost: Cost) -> dict[str, Any]:
    """Measure one model under one compiler."""
    build = partial(MODELS[model], arguments.tensors)
    trainings = {
        name: Training(build, arguments.width, inner, policy)
        for name, policy in (("no_optimizer", None), ("resident", "resident"), ("zenflow", "zenflow"))
    }
    # The wrappers slow whole steps down: ops are measured in a run of their own.
    ops = Training(build, arguments.width, inner, "zenflow")
    ops.measure_ops()
    for training in (*trainings.values(), ops):
        for _ in range(2 * 4 + 1):  # compilation, and a full turn of all windows twice
            training.step()
    ops.spent.end_step()
    ops.spent.steps.clear()
    for _ in range(arguments.rounds):
        for training in trainings.values():
            for _ in range(arguments.steps):
                training.timed()
        with ops.measure_operators():
            for _ in range(arguments.steps):
                ops.timed()
    assert ops.optimizer is not None
    row = {
        "model": model,
        "inner": inner,
        "tensors": sum(1 for _ in ops.model.parameters()),
        "offloaded": len(ops.optimizer.engine.offloaded),
        **ours(ops.spent.steps, cost),
        "step_ms": {
            name: Spread.of([1e3 * seconds for seconds in each.seconds]).row() for name, each in trainings.items()
        },
    }
    if arguments.profile:
        show_profile(trainings["zenflow"], arguments.steps)
    for training in (*trainings.values(), ops):
        if training.optimizer is not None:
            training.optimizer.close()
    return row


def ours(steps: list[dict[str, Took]], cost: Cost) -> dict[str, Any]:
    """Medians over steps, of each function and of their sums."""
    names = sorted({name for step in steps for name in step})
    outer = [name for name in names if not name.endswith("nested") and name not in _OPERATOR_NAMES]
    cpu_ms: dict[str, list[float]] = {name: [] for name in names}
    wall_ms: dict[str, list[float]] = {name: [] for name in names}
    for step in steps:
        for name in names:
            took = step.get(name, Took())
            cpu_ms[name].append((took.cpu_ns - took.calls * cost.cpu_inside - took.inner * cost.cpu_outside) / 1e6)
            wall_ms[name].append((took.wall_ns - took.calls * cost.wall_inside - took.inner * cost.wall_outside) / 1e6)

    def total(times: dict[str, list[float]], of: list[str]) -> float:
        return statistics.median(map(sum, zip(*(times[name] for name in of), strict=True)))

    calls = {name: statistics.median(step.get(name, Took()).calls for step in steps) for name in names}
    parts = {
        name: {
            "calls": calls[name],
            "cpu_us_per_call": 1e3 * statistics.median(cpu_ms[name]) / max(1, calls[name]),
            "cpu_ms": statistics.median(cpu_ms[name]),
            "wall_ms": statistics.median(wall_ms[name]),
        }
        for name in names
    }
    cpu, operators_cpu = total(cpu_ms, outer), total(cpu_ms, [name for name in names if name in _OPERATOR_NAMES])
    return {
        "op_calls": sum(calls[name] for name in names if name.removesuffix(", nested") in NODES),
        "cpu_ms": cpu,
        "wall_ms": total(wall_ms, outer),
        "operators_cpu_ms": operators_cpu,
        "python_cpu_ms": cpu - operators_cpu,
        "parts": parts,
    }


def show_profile(training: Training, steps: int) -> None:
    """Where the time goes, by function."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        training.step()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def show(row: dict[str, Any]) -> None:
    """A few lines per row."""
    python = row["python_cpu_ms"]
    print(
        f"{row['model']}, {row['inner']}: {row['tensors']} tensors, {row['offloaded']} offloaded, "
        f"{row['op_calls']:.0f} op calls\n"
        f"    per step of ours: {python:.2f} ms of Python (target {TARGET_STEP_MS:g}), "
        f"{1e3 * python / row['tensors']:.1f} us per tensor (target {TARGET_OP_US:g}); "
        f"with operators {row['cpu_ms']:.2f} ms CPU, {row['wall_ms']:.2f} ms wall"
    )
    for name, part in row["parts"].items():
        print(
            f"    {name:18} {part['calls']:6.1f} calls  {part['cpu_us_per_call']:8.2f} us each  "
            f"{part['cpu_ms']:7.3f} ms CPU  {part['wall_ms']:7.3f} ms wall"
        )
    steps = ", ".join(f"{name} {spread['median']:.2f} ms" for name, spread in row["step_ms"].items())
    print(f"    whole step: {steps}")


def targets_of(row: dict[str, Any]) -> list[Target]:
    """What one row decides."""
    where = f"{row['model']}, {row['inner']}"
    per_tensor = 1e3 * row["python_cpu_ms"] / row["tensors"]
    return [
        Target(f"{where}: Python per tensor, us", per_tensor, TARGET_OP_US, at_least=False),
        Target(f"{where}: Python per step, ms", row["python_cpu_ms"], TARGET_STEP_MS, at_least=False),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks op_overhead``."""
    parser = option_parser("op_overhead", __doc__, rounds=20)
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="(both)")
    parser.add_argument(
        "--inner", nargs="+", choices=("eager", "inductor"), default=["eager", "inductor"], help="(both)"
    )
    parser.add_argument("--tensors", type=int, default=300, help="parameters of the model (%(default)s)")
    parser.add_argument("--width", type=int, default=32, help="features per layer (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of a round and variant: whole windows (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="print cProfile's table of the same steps, too")
    given = parser.parse_args(arguments)
    cost = wrapper_cost()
    rows: list[dict[str, Any]] = []
    for inner in given.inner:
        for model in given.model:
            rows.append(row_of(model, inner, given, cost))
            show(rows[-1])
    targets = [target for row in rows for target in targets_of(row)]
    for target in targets:
        print(target)
    print(f"wrote {write_results('op_overhead', rows, out=given.out, seed=0, targets=targets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
