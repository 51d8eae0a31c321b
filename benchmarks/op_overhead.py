"""What the runtime's Python costs per step: models of 300 small tensors, where an op's time is nearly all fixed.

    python -m benchmarks.op_overhead [--inner eager inductor] [--rounds 20] [--steps 8]

Every row comes from one process with interleaved rounds of: the model compiled without any optimizer, ``resident``
AdamW, and zenflow. *Ours* is the time of the training thread inside the engine's entry points that graph nodes call and
inside ``optimizer.step()``, less what measuring it cost. CPU time leaves out waits for a worker, a lane or the GIL;
wall time has them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zenflow_compile as zf
from benchmarks.common import machine, write_results

TENSORS = 300
TARGET_OP_US, TARGET_STEP_MS = 10.0, 4.0

FETCH = ("copy_to_device_", "fetch_parameters_")
GRADIENT = ("begin_backward", "column_norms", "select_columns", "split_columns", "copy_to_host", "offload_gradient")
UPDATE = ("adam_columns_", "update_on_host", "update_parameters")


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


def linear_layers(width: int) -> nn.Module:
    """150 weights, which are offloaded, and 150 biases, which are not."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(TENSORS // 2)))


def transformer_like(width: int) -> nn.Module:
    """25 blocks: 100 offloaded matrices among 200 vectors on the device."""
    return nn.Sequential(*(Block(width) for _ in range(TENSORS // 12)))


MODELS: dict[str, Callable[[int], nn.Module]] = {"linear": linear_layers, "transformer": transformer_like}


@dataclass
class Spent:
    """Calls and time inside wrapped functions.

    Attributes:
        now: calls, CPU ns and wall ns of the calling thread in the step that runs, by name, with what wrappers add.
        steps: those of the steps before it.
    """

    now: dict[str, list[int]] = field(default_factory=dict)
    steps: list[dict[str, list[int]]] = field(default_factory=list)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, measured."""
        cpu, wall = time.thread_time_ns, time.perf_counter_ns

        def measured(*args: Any, **keywords: Any) -> Any:
            began = wall()
            ran = cpu()
            try:
                return function(*args, **keywords)
            finally:
                took = self.now.setdefault(name, [0, 0, 0])
                took[0] += 1
                took[1] += cpu() - ran
                took[2] += wall() - began

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
    _, cpu_inside, wall_inside = spent.now["empty"]
    return Cost(cpu_inside / calls, wall_inside / calls, cpu / calls, wall / calls)


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
        """Wrap what nodes call of the engine, and the final moment."""
        optimizer = self.optimizer
        assert optimizer is not None
        for name in (*FETCH, *GRADIENT, *UPDATE, "end_backward"):
            if hasattr(optimizer.engine, name):
                setattr(optimizer.engine, name, self.spent.wrap(name, getattr(optimizer.engine, name)))
        optimizer.step = self.spent.wrap("step", optimizer.step)  # type: ignore[method-assign]

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
    trainings = {
        name: Training(MODELS[model], arguments.width, inner, policy)
        for name, policy in (("no_optimizer", None), ("resident", "resident"), ("zenflow", "zenflow"))
    }
    # The wrappers slow whole steps down: ops are measured in a run of their own.
    ops = Training(MODELS[model], arguments.width, inner, "zenflow")
    ops.measure_ops()
    for training in (*trainings.values(), ops):
        for _ in range(2 * 4 + 1):  # compilation, and a full turn of all windows twice
            training.step()
    ops.spent.end_step()
    ops.spent.steps.clear()
    for _ in range(arguments.rounds):
        for training in (*trainings.values(), ops):
            for _ in range(arguments.steps):
                training.timed()
    assert ops.optimizer is not None
    row = {
        "model": model,
        "inner": inner,
        "tensors": sum(1 for _ in ops.model.parameters()),
        "offloaded": len(ops.optimizer.engine.offloaded),
        **ours(ops.spent.steps, cost),
        "step_ms": {name: 1e3 * statistics.median(each.seconds) for name, each in trainings.items()},
    }
    if arguments.profile:
        show_profile(trainings["zenflow"], arguments.steps)
    for training in (*trainings.values(), ops):
        if training.optimizer is not None:
            training.optimizer.close()
    return row


def ours(steps: list[dict[str, list[int]]], cost: Cost) -> dict[str, Any]:
    """Medians over steps; ``step`` holds the update nodes, whose wrappers are taken off it."""
    cpu_ms: dict[str, list[float]] = {}
    wall_ms: dict[str, list[float]] = {}
    calls = {name: took[0] for name, took in steps[-1].items()}
    for step in steps:
        nested = sum(step[name][0] for name in UPDATE if name in step)
        for name, (count, cpu, wall) in step.items():
            inner = nested if name == "step" else 0
            cpu_ms.setdefault(name, []).append((cpu - count * cost.cpu_inside - inner * cost.cpu_outside) / 1e6)
            wall_ms.setdefault(name, []).append((wall - count * cost.wall_inside - inner * cost.wall_outside) / 1e6)
    outer = [name for name in calls if name not in UPDATE]
    parts = {
        name: {
            "calls": calls[name],
            "cpu_us_per_call": 1e3 * statistics.median(cpu_ms[name]) / calls[name],
            "cpu_ms": statistics.median(cpu_ms[name]),
            "wall_ms": statistics.median(wall_ms[name]),
        }
        for name in calls
    }
    return {
        "op_calls": sum(count for name, count in calls.items() if name not in ("step", "end_backward")),
        "cpu_ms": statistics.median(map(sum, zip(*(cpu_ms[name] for name in outer), strict=True))),
        "wall_ms": statistics.median(map(sum, zip(*(wall_ms[name] for name in outer), strict=True))),
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
    tensors, cpu_ms = row["tensors"], row["cpu_ms"]
    us = 1e3 * cpu_ms / tensors
    print(
        f"{row['model']}, {row['inner']}: {tensors} tensors, {row['offloaded']} offloaded, {row['op_calls']:.0f} ops; "
        f"ours {cpu_ms:.2f} ms of CPU ({row['wall_ms']:.2f} ms wall) per step, target {TARGET_STEP_MS:g}; "
        f"{us:.1f} us per tensor"
    )
    for name, part in row["parts"].items():
        mark = "" if name in ("step", "end_backward") else f", target {TARGET_OP_US:g}"
        print(
            f"    {name:18} {part['calls']:6.1f} calls  {part['cpu_us_per_call']:8.2f} us each  "
            f"{part['cpu_ms']:7.3f} ms CPU  {part['wall_ms']:7.3f} ms wall{mark}"
        )
    steps = ", ".join(f"{name} {value:.2f} ms" for name, value in row["step_ms"].items())
    print(f"    whole step: {steps}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--inner", nargs="+", choices=("eager", "inductor"), default=["eager", "inductor"])
    parser.add_argument("--width", type=int, default=32, help="features per layer (default 32)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8, help="steps per round and variant: whole windows")
    parser.add_argument("--profile", action="store_true", help="print cProfile's table of the same steps, too")
    arguments = parser.parse_args()
    cost = wrapper_cost()
    rows = []
    for inner in arguments.inner:
        for model in arguments.model:
            rows.append(row_of(model, inner, arguments, cost))
            show(rows[-1])
    print(f"{machine()['cpu']}; wrote {write_results('op_overhead', rows)}")


if __name__ == "__main__":
    main()
