from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

from tests.passes.capture import OFFLOADED, Capture, Small, assert_taken, inputs, matrices, reference_gradients
from tests.support.recording import RecordingEngine
from zenflow_compile.passes.base import Phase
from zenflow_compile.passes.offload_gradients import offload_gradients, offload_groups
from zenflow_compile.passes.pipeline import PIPELINES
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import ops

PASSES = {Phase.BACKWARD: (offload_gradients,)}
OPS = {1: ops.OFFLOAD_GRADIENTS, 2: ops.REDUCE_GRADIENTS}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_go_to_the_engine(
    ranks: int, grouped: bool, recording: Callable[..., RecordingEngine], request: pytest.FixtureRequest
) -> None:
    if not grouped:
        request.getfixturevalue("ungrouped")
    model, x = Small(), inputs()
    expected = reference_gradients(model, x)
    engine = recording(model, ranks=ranks)
    capture = Capture(engine, PIPELINES)
    capture.run(model, x)

    assert "zenflow" not in capture.before[Phase.BACKWARD]
    assert dict(capture.counts[Phase.BACKWARD])["offload_gradients"] == 3
    graph = capture.after[Phase.BACKWARD].graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    assert first.target is ops.BEGIN_BACKWARD
    offloads = graph.find_nodes(op="call_function", target=OPS[ranks])
    assert [node.args[-1] for node in offloads] == engine.offloads == ([[0, 3, 1]] if grouped else [[0], [3], [1]])
    assert not capture.count(Phase.BACKWARD, OPS[3 - ranks])
    for node in offloads:
        grads, token, *_ = node.args
        assert token is first
        assert node.prev is grads[-1], "the last gradient is offloaded as soon as it exists"
    once = dict.fromkeys(OFFLOADED, 1)
    assert engine.runs("begin_backward") == {None: 1}
    assert engine.runs("offload_gradients") == once, "in the graph, but did not run"
    assert_taken(engine, model, expected)
    capture.assert_idempotent(Phase.BACKWARD)


def test_graphs_without_our_gradients_stay(recording: Callable[..., RecordingEngine]) -> None:
    model = Small()
    for param in (model.down, model.up.weight, model.up.bias, model.conv.bias):
        param.requires_grad_(False)
    capture = Capture(recording(nn.Linear(2, 2)), PASSES)
    capture.run(model, inputs())
    assert str(capture.after[Phase.BACKWARD].graph) == capture.before[Phase.BACKWARD]


def test_resident_gradients_announce_the_backward(recording: Callable[..., RecordingEngine]) -> None:
    model, x = nn.LayerNorm(4), torch.randn(2, 4)
    expected = reference_gradients(model, x)
    engine = recording(model)
    capture = Capture(engine, PIPELINES)
    capture.run(model, x)
    assert engine.executed == {("begin_backward", None): 1}
    assert str(capture.after[Phase.FORWARD].graph) == capture.before[Phase.FORWARD]
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, expected[name])


def test_gradient_that_is_an_input(recording: Callable[..., RecordingEngine]) -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight + x

    model = Add()
    engine = recording(model)
    capture = Capture(engine, PASSES)
    capture.run(model, torch.randn(3, 4))
    assert engine.runs("offload_gradients") == {0: 1}


@pytest.mark.usefixtures("ungrouped")
def test_one_gradient_for_two_parameters(recording: Callable[..., RecordingEngine]) -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.a + self.b)

    model, x = Sum(), torch.randn(2, 4)
    expected = reference_gradients(model, x)
    engine = recording(model)
    capture = Capture(engine, PASSES)
    capture.run(model, x)
    torch.testing.assert_close(engine.received, {0: expected["a"], 1: expected["b"]})


@pytest.mark.parametrize(
    ("steps", "bound", "grouped"),
    [
        ("cococo", 1000, "ccc[012]"),
        ("cococo", 128, "cc[01]c[2]"),  # two matrices are as much as may wait
        ("cococo", 127, "c[0]c[1]c[2]"),
        ("oco", 0, "[0]c[1]"),  # larger than the bound: a separate op
        ("owo", 1000, "[0]w[1]"),  # nothing writes to a gradient before its offload
        ("oowo", 1000, "[01]w[2]"),
    ],
)
def test_offload_groups(steps: str, bound: int, grouped: str, recording: Callable[..., RecordingEngine]) -> None:
    """A graph by hand: ``o`` computes the next gradient, ``c`` computes, ``w`` writes to the first gradient.

    Of matrices of no more than ``bound`` bytes one gradient lives longer than the next one.
    """
    params = recording(matrices(3)).plan.params
    graph = Graph()
    x = graph.placeholder("x")
    names: dict[Node, str] = {}
    arriving: dict[Node, list[tuple[ParamPlan, Node]]] = {}
    for step in steps:
        if step == "o":
            node = graph.call_function(torch.ops.aten.relu.default, (x,))
            node.meta["val"] = torch.empty(4, 4)
            arriving[node] = [(params[len(arriving)], node)]
        elif step == "w":
            names[graph.call_function(torch.ops.aten.zero_.default, (next(iter(arriving)),))] = "w"
        else:
            names[graph.call_function(torch.ops.aten.relu.default, (x,))] = "c"
    graph.output(())
    groups = dict(offload_groups(graph, arriving, bound))
    found = ""
    for node in graph.nodes:
        found += names.get(node, "")
        if node in groups:
            found += "".join(str(param.index) for param, _ in groups[node]).join("[]")
    assert found == grouped
