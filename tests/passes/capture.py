"""A model's AOT graphs, before and after passes of one's choice, still runnable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.support.recording import RecordingEngine, plan_of
from zenflow_compile.passes.base import SMALL_BYTES, GraphPass, PassContext, Phase
from zenflow_compile.passes.pipeline import Counts, run_pipeline
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.torch_internals import torch_private_compiler as private


class Small(nn.Module):
    """A convolution, two matrices (one read through a view), biases: what passes have to tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3, padding=1)
        self.up = nn.Linear(12, 6)
        self.down = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(torch.relu(self.conv(x)).flatten(1))) @ self.down


OFFLOADED = [0, 1, 3]  # of Small: down, conv.weight, up.weight, in the order of named_parameters()


def inputs() -> Tensor:
    return torch.randn(5, 2, 4)


@dataclass
class Capture:
    """A backend that runs the given passes per phase and keeps the graphs.

    Attributes:
        before: the printed graph of each phase; after: the rewritten graph; counts: what the runner said.
    """

    engine: RecordingEngine
    passes: Mapping[Phase, Sequence[GraphPass]]
    before: dict[Phase, str] = field(default_factory=dict)
    after: dict[Phase, GraphModule] = field(default_factory=dict)
    contexts: dict[Phase, PassContext] = field(default_factory=dict)
    counts: dict[Phase, Counts] = field(default_factory=dict)

    def backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return self.compile(gm, example_inputs, example_inputs)

    def backend_per_call(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles Dynamo's graph at every call, for the parameters of that call, which may be one at two inputs."""
        captured = private.capture(gm, example_inputs)

        def call(*args: Any) -> Any:
            code = private.compile_again(captured, lambda graph, fakes: self.compile(graph, fakes, args))
            return code(*args)

        return call

    def compile(self, gm: GraphModule, inputs: Sequence[Any], args: Sequence[Any]) -> Callable[..., Any]:
        """Compile for ``args``; ``inputs`` are the same, or fake."""
        pairs = [(self.engine.index_of(v), i) for i, v in enumerate(args) if isinstance(v, Tensor)]
        params = tuple((p, i) for p, i in pairs if p is not None)

        def rewrite(graph: GraphModule, phase: str) -> None:
            ctx = PassContext(
                plan=self.engine.plan,
                engine_id=self.engine.id,
                phase=Phase(phase),
                params=params,
                finalizes_in_backward=self.engine.core.finalizes_in_backward,
                weight_grad_bytes=self.engine.weight_grad_bytes,
            )
            self.before[ctx.phase] = str(graph.graph)
            self.counts[ctx.phase] = run_pipeline(graph, ctx, self.passes.get(ctx.phase, ()))
            self.after[ctx.phase] = graph
            self.contexts[ctx.phase] = ctx

        return private.compile_with_aot(gm, inputs, rewrite)

    def run(self, model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = torch.compile(model, backend=self.backend)(x)
        if out.requires_grad:
            out.pow(2).sum().backward()
        return out

    def count(self, phase: Phase, op: Any) -> int:
        return len(self.after[phase].graph.find_nodes(op="call_function", target=op))

    def assert_idempotent(self, phase: Phase) -> None:
        graph = self.after[phase]
        once = str(graph.graph)
        counts = run_pipeline(graph, self.contexts[phase], self.passes[phase])
        assert not any(count for _, count in counts)
        assert str(graph.graph) == once


def reference_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Eager's gradients; leaves no gradients behind."""
    grads = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    return {name: grad for (name, _), grad in zip(model.named_parameters(), grads, strict=True)}


def assert_taken(engine: RecordingEngine, model: nn.Module, expected: Mapping[str, Tensor]) -> None:
    """The engine has the gradients of the offloaded parameters of ``Small``, and ``.grad`` those of the others."""
    for p, (name, param) in enumerate(model.named_parameters()):
        if p in OFFLOADED:
            assert param.grad is None
            torch.testing.assert_close(engine.received[p], expected[name])
        else:
            torch.testing.assert_close(param.grad, expected[name])


def matrices(count: int) -> nn.ParameterList:
    """Matrices of 64 bytes."""
    return nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(count)])


LARGE = SMALL_BYTES + 4
"""Bytes of a parameter that is not small, by one element."""


def params_of(size: int, count: int) -> list[ParamPlan]:
    """Plans of matrices of ``size`` bytes."""
    matrix = torch.empty(1, size // 4, device="meta")
    return [plan_of(p, f"p{p}", matrix, 0.5, Placement.SPLIT_COLUMNS) for p in range(count)]
