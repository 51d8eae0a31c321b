from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.passes.capture import OFFLOADED, Capture, Small, inputs, reference_gradients
from tests.support.recording import RecordingEngine
from zenflow_compile.passes.base import Phase
from zenflow_compile.passes.select_columns import select_columns
from zenflow_compile.runtime import ops

PASSES = {Phase.BACKWARD: (select_columns,)}


def test_selection_follows_each_gradient(recording: Callable[..., RecordingEngine]) -> None:
    model, x = Small(), inputs()
    expected = reference_gradients(model, x)
    engine = recording(model)
    capture = Capture(engine, PASSES)
    capture.run(model, x)

    assert "zenflow" not in capture.before[Phase.BACKWARD]
    assert capture.counts[Phase.BACKWARD] == (("select_columns", 3),)
    assert capture.count(Phase.BACKWARD, ops.COLUMN_NORMS) == 3
    graph = capture.after[Phase.BACKWARD].graph
    for norms in graph.find_nodes(op="call_function", target=ops.COLUMN_NORMS):
        assert norms.args[0] is norms.prev, "not directly after its gradient"
        assert norms.next.target is ops.SELECT_COLUMNS
    first = next(node for node in graph.nodes if node.op != "placeholder")
    assert first.target is ops.BEGIN_BACKWARD

    assert engine.runs("select_columns") == dict.fromkeys(OFFLOADED, 1), "in the graph, but did not run"
    assert engine.runs("begin_backward") == {None: 1}
    for name, param in model.named_parameters():  # a selection alone changes nothing
        torch.testing.assert_close(param.grad, expected[name])


def test_is_idempotent(recording: Callable[..., RecordingEngine]) -> None:
    model = Small()
    capture = Capture(recording(model), PASSES)
    capture.run(model, inputs())
    capture.assert_idempotent(Phase.BACKWARD)


def test_graphs_without_our_gradients_stay(recording: Callable[..., RecordingEngine]) -> None:
    model = Small()
    for param in (model.down, model.up.weight, model.up.bias, model.conv.bias):
        param.requires_grad_(False)
    capture = Capture(recording(nn.Linear(2, 2)), PASSES)
    capture.run(model, inputs())
    assert str(capture.after[Phase.BACKWARD].graph) == capture.before[Phase.BACKWARD]


def test_resident_gradients_announce_the_backward(recording: Callable[..., RecordingEngine]) -> None:
    model = nn.LayerNorm(4)
    engine = recording(model)
    capture = Capture(engine, PASSES)
    capture.run(model, torch.randn(2, 4))
    assert engine.executed == {("begin_backward", None): 1}
    assert capture.count(Phase.BACKWARD, ops.COLUMN_NORMS) == 0


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
    assert engine.runs("column_norms") == {0: 1}
