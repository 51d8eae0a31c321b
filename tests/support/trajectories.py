"""Trains a model of the zoo and records the run; runs of plain AdamW are cached for all tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow_compile
from tests.support.zoo import BY_NAME, MEMBERS, Member
from zenflow_compile.optimizer import ZenFlowAdamW
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient
from zenflow_compile.timeline import D2H, Timeline

ADAM = {"lr": 1e-3, "weight_decay": 0.01}

# Every matrix is offloaded, and no host kernel is compiled.
OFFLOAD_ALL = {"min_offload_size": 100, "device_share": 0.0}


@dataclass
class Trajectory:
    """The results of one training run.

    Attributes:
        losses: of every step, before its update.
        evaluations: of every step, after its update.
        weights: parameters and buffers at the end.
        offloaded: names of the parameters with state on the host.
        through_grad: names of those whose gradients came through ``.grad``, not from a graph.
        streamed: names of the parameters with streamed state.
        flushes: number of write-backs of a subgroup's state.
        windows_flushed: number of flushed update windows.
        selections: number of re-selections.
        moved_slices: number of slices that changed sides in them.
        inserted: graphs that the passes rewrote.
    """

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    offloaded: tuple[str, ...] = ()
    through_grad: tuple[str, ...] = ()
    streamed: tuple[str, ...] = ()
    flushes: int = 0
    windows_flushed: int = 0
    selections: int = 0
    moved_slices: int = 0
    inserted: int = 0


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(1)
    return build()


def compiled(model: nn.Module, inner: str | None, **options: Any) -> Callable[..., Any]:
    """The model under the backend; itself without ``inner``."""
    if inner is None:
        return model
    return torch.compile(model, backend="zenflow", options={"inner": inner, **options})


def loss_of(member: Member, model: Callable[..., Any], step: int) -> Tensor:
    """Loss on the data of a step."""
    with torch.autocast("cpu", torch.bfloat16) if member.autocast else nullcontext():
        return member.loss(model, member.inputs(step))


def train(member: Member, inner: str | None, steps: int, *, evaluate: bool = False, **options: Any) -> Trajectory:
    """Train with ``ZenFlowAdamW``, through the graphs of ``inner`` or, with None, without ``torch.compile``."""
    model = seeded(member.build)
    optimizer = ZenFlowAdamW(model.named_parameters(), **{**ADAM, **OFFLOAD_ALL, **options})
    run = compiled(model, inner)
    optimizer.engine.timeline = Timeline()
    try:
        result = Trajectory()
        before = _selected(optimizer)
        for _ in _loop(member, model, run, result, steps, evaluate):
            optimizer.step()
            optimizer.zero_grad()
            after = _selected(optimizer)
            result.moved_slices += sum(len(new - old) for old, new in zip(before, after, strict=True))
            before = after
        assert optimizer.engine.registry.gradients.dense == 0
        return describe(result, model, optimizer)
    finally:
        optimizer.close()


def grad_state(grad: Tensor) -> GradientState | None:
    """State of a gradient of an offloaded parameter; None of any other tensor."""
    return grad._record.state if isinstance(grad, OffloadedGradient) else None


def train_in_backward(member: Member, inner: str, steps: int, **options: Any) -> Trajectory:
    """Train with the optimizer in backward."""
    model = seeded(member.build)
    run = compiled(model, inner, **{**ADAM, **OFFLOAD_ALL, **options})
    result = Trajectory()
    for _ in _loop(member, model, run, result, steps, evaluate=False):
        gradients = [param.grad for param in model.parameters()]
        assert all(grad is None or grad_state(grad) is GradientState.IN_BACKWARD for grad in gradients)
    optimizer = zenflow_compile.optimizer_of(run)
    try:
        return describe(result, model, optimizer)
    finally:
        optimizer.close()


def _loop(
    member: Member, model: nn.Module, run: Callable[..., Any], result: Trajectory, steps: int, evaluate: bool
) -> Iterator[int]:
    """Run forward and backward of every step; the caller updates the weights."""
    for step in range(steps):
        loss = loss_of(member, run, step)
        loss.backward()
        result.losses.append(loss.item())
        yield step
        if evaluate:
            model.eval()
            with torch.no_grad():
                result.evaluations.append(loss_of(member, run, 10_000 + step).item())
            model.train()


def _offloaded(optimizer: ZenFlowAdamW) -> list[str]:
    return [offloaded.plan.name for offloaded in optimizer.engine.offloaded.values()]


def _selected(optimizer: ZenFlowAdamW) -> list[set[int]]:
    return [set(offloaded.device.selection.selected.tolist()) for offloaded in optimizer.engine.offloaded.values()]


def describe(result: Trajectory, model: nn.Module, optimizer: ZenFlowAdamW) -> Trajectory:
    """Apply all due updates and record the results known at the end."""
    optimizer.synchronize()
    engine = optimizer.engine
    result.weights = snapshot(model)
    result.offloaded = tuple(_offloaded(optimizer))
    result.through_grad = tuple(each.plan.name for each in engine.offloaded.values() if each.gradient.through_autograd)
    result.streamed = tuple(each.plan.name for each in engine.registry.streamed.params.values())
    if engine.timeline is not None:
        moved = [event for event in engine.timeline.events() if event.lane == D2H and event.kind == "state"]
        result.flushes = sum(event.param.startswith("subgroup") for event in moved)
    result.windows_flushed, result.selections = engine.steps.windows_flushed, engine.uploads.selections
    result.inserted = len(engine.graphs)
    return result


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copy parameters and floating-point buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().float().clone() for name, tensor in named if tensor.is_floating_point()}


@cache
def _plain_adamw(name: str, inner: str | None, evaluate: bool) -> dict[int, Trajectory]:
    member = BY_NAME[name]
    model = seeded(member.build)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    run = compiled(model, inner)
    running = Trajectory()
    kept: dict[int, Trajectory] = {}
    for step in _loop(member, model, run, running, 40, evaluate):
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (20, 40):
            kept[step + 1] = replace(running, weights=snapshot(model))
    return kept


def plain_adamw(member: Member, inner: str | None, steps: int, *, evaluate: bool = False) -> Trajectory:
    """The reference after 20 or 40 steps: ``torch.optim.AdamW`` on the same forward and backward.

    They are compiled the same way: the backend serves parameters that no ``ZenFlowAdamW`` owns as Inductor would.
    """
    return _plain_adamw(member.name, inner, evaluate)[steps]


def largest_difference(one: Trajectory, other: Trajectory, member: Member) -> float:
    """Return the largest difference of parameters and buffers, without entries whose true gradient is zero."""
    assert one.weights.keys() == other.weights.keys()
    largest = 0.0
    for name, weights in one.weights.items():
        difference = (weights - other.weights[name]).abs().nan_to_num(nan=math.inf)  # max() would drop a NaN
        for ending, entries in member.zero_gradient:
            if name.endswith(ending):
                difference[entries] = 0.0
        largest = max(largest, difference.max().item())
    return largest


def each_member(names: list[str] | None = None, long: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by ``member``: the whole zoo, or those named. Those in ``long`` are for the long run."""
    unavailable = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
    chosen = MEMBERS if names is None else [BY_NAME[name] for name in names]
    return pytest.mark.parametrize(
        "member",
        [
            pytest.param(
                each,
                id=each.name,
                marks=[unavailable] * each.needs_transformers + [pytest.mark.long] * (each.name in long),
            )
            for each in chosen
        ],
    )
