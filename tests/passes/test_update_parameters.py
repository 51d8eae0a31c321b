from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from tests.passes.capture import OFFLOADED, UNFUSED, Capture, Small, inputs, reference_gradients
from tests.support.recording import RecordingEngine
from zenflow_compile.passes.base import Phase
from zenflow_compile.passes.graph_edits import written_inputs
from zenflow_compile.passes.offload_gradients import offload_gradients
from zenflow_compile.passes.select_columns import select_columns
from zenflow_compile.passes.update_parameters import build_step_graph, update_parameters
from zenflow_compile.planning.plan import Placement
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


def nodes(graph: GraphModule, op: object) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = graph.graph.find_nodes(op="call_function", target=op)
    return found


def test_updates_come_as_early_as_possible(recording: Callable[..., RecordingEngine]) -> None:
    """An update comes after the parameter's last read and its gradient's copy, before any unrelated node."""
    model, x = Small(), inputs()
    expected = reference_gradients(model, x)
    engine = recording(model, finalizes_in_backward=True)
    capture = Capture(engine, UNFUSED)
    capture.run(model, x)
    backward = capture.after[Phase.BACKWARD]
    updates = nodes(backward, ops.UPDATE_ON_HOST)
    assert updates, "no parameter is an input of this backward: the test shows nothing"
    assert len(updates) == len(nodes(backward, ops.ADAM_COLUMNS_)) == len(written_inputs(backward.graph))
    position = {node: number for number, node in enumerate(backward.graph.nodes)}
    last_gemm = max(position[node] for node in nodes(backward, torch.ops.aten.mm.default))
    assert min(position[node] for node in updates) < last_gemm
    for write in nodes(backward, ops.ADAM_COLUMNS_):
        param, p = write.args[0], write.args[-1]
        reads = private.readers_of_memory(backward.graph, [param])[param]  # type: ignore[list-item, index]
        own_copy = next(node for node in nodes(backward, ops.COPY_TO_HOST) if node.args[-1] == p)
        assert position[own_copy] < position[write]
        assert max(position[node] for node in reads) == position[write]
    assert engine.runs("update_on_host") == {node.args[-1]: 1 for node in updates}
    assert engine.runs("adam_columns_") == engine.runs("update_on_host")
    for p, name in enumerate(expected):
        if p in OFFLOADED:
            torch.testing.assert_close(engine.received[p], expected[name])
    capture.assert_idempotent(Phase.BACKWARD)


def test_late_read_of_a_view_postpones_the_update(recording: Callable[..., RecordingEngine]) -> None:
    """The graph reads the weight's memory again after its gradient is complete, through a transposed view."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                view = self.weight.t()  # read in the backward, no gradient from here
            return torch.sin(torch.sin(x @ self.first) @ view) @ self.weight

    model, x = Twice(), torch.randn(3, 4)
    expected = reference_gradients(model, x)
    engine = recording(model, finalizes_in_backward=True)
    capture = Capture(engine, UNFUSED)
    capture.run(model, x)
    backward = capture.after[Phase.BACKWARD]
    write = next(node for node in nodes(backward, ops.ADAM_COLUMNS_) if node.args[-1] == 1)
    copy = next(node for node in nodes(backward, ops.COPY_TO_HOST) if node.args[-1] == 1)
    between = list(backward.graph.nodes)
    between = between[between.index(copy) : between.index(write)]
    assert torch.ops.aten.mm.default in {node.target for node in between}
    torch.testing.assert_close(engine.received, {0: expected["first"], 1: expected["weight"]})


def test_saved_view_postpones_the_update(recording: Callable[..., RecordingEngine]) -> None:
    """A backward that gets a weight and a view of it: the compiler does not know that they share memory."""

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gate = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x @ (self.weight * self.gate))

    model = Gated()
    passes = {Phase.BACKWARD: (select_columns, offload_gradients)}
    capture = Capture(recording(model, finalizes_in_backward=True), passes)
    capture.run(model, torch.randn(3, 4))
    backward, ctx = capture.after[Phase.BACKWARD], capture.contexts[Phase.BACKWARD]
    weight = private.aot_inputs(backward.graph)[dict(ctx.params)[0]]
    with backward.graph.inserting_after(weight):
        view = backward.graph.placeholder("saved_view")
    view.meta["val"] = weight.meta["val"].t()
    assert update_parameters(backward, ctx) == 0
    backward.graph.erase_node(view)
    assert update_parameters(backward, ctx) == 1


def test_step_keeps_its_updates(recording: Callable[..., RecordingEngine]) -> None:
    model = Small()
    engine = recording(model)
    capture = Capture(engine, UNFUSED)
    capture.run(model, inputs())
    assert dict(capture.counts[Phase.BACKWARD])["update_parameters"] == 0
    assert not engine.runs("update_on_host")


@pytest.mark.parametrize("placement", [Placement.SPLIT_COLUMNS, Placement.HOST])
def test_step_graph(placement: Placement, recording: Callable[..., RecordingEngine]) -> None:
    model = Small()
    engine = recording(model, placement=placement)
    step = build_step_graph(engine.plan, engine.id)
    params = [engine.params[p] for p in engine.offloaded()]
    assert len(step.graph.find_nodes(op="placeholder")) == len(params)
    assert step(*params) == ()
    once = dict.fromkeys(OFFLOADED, 1)
    assert engine.runs("update_on_host") == once
    assert engine.runs("adam_columns_") == (once if placement is Placement.SPLIT_COLUMNS else {})
    assert not engine.runs("begin_backward")


def test_step_graph_of_nothing(recording: Callable[..., RecordingEngine]) -> None:
    engine = recording(torch.nn.LayerNorm(3))
    assert build_step_graph(engine.plan, engine.id)() == ()
