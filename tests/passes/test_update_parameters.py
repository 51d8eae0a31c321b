from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from tests.passes.capture import LARGE, OFFLOADED, Capture, Small, inputs, params_of, reference_gradients
from tests.support.recording import RecordingEngine
from zenflow_compile.passes.base import SMALL_BYTES, Phase, written_inputs
from zenflow_compile.passes.offload_gradients import offload_gradients
from zenflow_compile.passes.pipeline import PIPELINES
from zenflow_compile.passes.update_parameters import build_step_graph, update_groups, update_parameters
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


def nodes(graph: GraphModule, op: object) -> list[Node]:
    found: list[Node] = graph.graph.find_nodes(op="call_function", target=op)
    return found


@pytest.mark.parametrize("grouped", [False, True])
def test_updates_come_as_early_as_possible(
    grouped: bool, recording: Callable[..., RecordingEngine], request: pytest.FixtureRequest
) -> None:
    """An update comes after the parameter's last read and its gradient's copy, before any unrelated node."""
    if not grouped:
        request.getfixturevalue("ungrouped")
    model, x = Small(), inputs()
    expected = reference_gradients(model, x)
    engine = recording(model, finalizes_in_backward=True)
    capture = Capture(engine, PIPELINES)
    capture.run(model, x)
    backward = capture.after[Phase.BACKWARD]
    updates = nodes(backward, ops.UPDATE_PARAMETERS)
    assert updates, "no parameter is an input of this backward: the test shows nothing"
    updated = [p for node in updates for p in node.args[-1]]  # type: ignore[union-attr]
    weights = [weight for node in updates for weight in node.args[0]]  # type: ignore[union-attr]
    assert len(updated) == len(weights) == len(written_inputs(backward.graph))
    position = {node: number for number, node in enumerate(backward.graph.nodes)}
    last_gemm = max(position[node] for node in nodes(backward, torch.ops.aten.mm.default))
    assert (min(position[node] for node in updates) < last_gemm) == (not grouped)
    for write in updates:
        ps, written = write.args[-1], write.args[0]
        reads = private.readers_of_memory(backward.graph, list(written))  # type: ignore[arg-type]
        copies = [node for node in nodes(backward, ops.OFFLOAD_GRADIENTS) if set(node.args[-1]) & set(ps)]  # type: ignore[arg-type]
        assert max(position[node] for node in copies) < position[write]
        assert all(max(position[node] for node in each) == position[write] for each in reads.values())
    assert engine.runs("update_parameters") == dict.fromkeys(updated, 1)
    for p, name in enumerate(expected):
        if p in OFFLOADED:
            torch.testing.assert_close(engine.received[p], expected[name])
    capture.assert_idempotent(Phase.BACKWARD)


@pytest.mark.parametrize(
    ("steps", "size", "grouped"),
    [
        # Only later than where an update stands is behind the parameter's last read.
        ("cuuguc", LARGE, "cg(012)c"),  # nothing of the model's between them
        ("ucuuc", LARGE, "(0)c(12)c"),
        ("ucucuc", SMALL_BYTES, "cc(012)c"),  # small
        ("ucucuc", LARGE, "(0)c(1)c(2)c"),
        ("ucucucucucuc", SMALL_BYTES, "cccc(01234)c(5)c"),  # small, but not together
    ],
)
def test_update_groups(steps: str, size: int, grouped: str) -> None:
    """A graph by hand: after a view ``u`` may be updated; ``c`` computes, ``g`` is of a gradient."""
    params = params_of(size, steps.count("u"))
    graph = Graph()
    weight = graph.placeholder("weight")
    targets = {
        "u": torch.ops.aten.permute.default,
        "c": torch.ops.aten.relu.default,
        "g": ops.OFFLOAD_GRADIENTS,
    }
    names: dict[Node, str] = {}
    ready: dict[Node, list[tuple[ParamPlan, Node]]] = {}
    for step in steps:
        node = graph.call_function(targets[step], (weight,))
        if step == "u":
            ready[node] = [(params[len(ready)], weight)]
        else:
            names[node] = step
    graph.output(())
    groups = dict(update_groups(graph, ready))
    found = ""
    for node in graph.nodes:
        found += names.get(node, "")
        if node in groups:
            found += "".join(str(param.index) for param, _ in groups[node]).join("()")
    assert found == grouped


@pytest.mark.usefixtures("ungrouped")
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
    capture = Capture(engine, PIPELINES)
    capture.run(model, x)
    backward = capture.after[Phase.BACKWARD]
    write = next(node for node in nodes(backward, ops.UPDATE_PARAMETERS) if 1 in node.args[-1])  # type: ignore[operator]
    copy = next(node for node in nodes(backward, ops.OFFLOAD_GRADIENTS) if node.args[-1] == [1])
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
    passes = {Phase.BACKWARD: (offload_gradients,)}
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
    capture = Capture(engine, PIPELINES)
    capture.run(model, inputs())
    assert dict(capture.counts[Phase.BACKWARD])["update_parameters"] == 0
    assert not engine.runs("update_parameters")


@pytest.mark.parametrize("placement", [Placement.SPLIT_COLUMNS, Placement.HOST])
def test_step_graph(placement: Placement, recording: Callable[..., RecordingEngine]) -> None:
    model = Small()
    engine = recording(model, placement=placement)
    step = build_step_graph(engine.plan, engine.id)
    params = [engine.params[p] for p in engine.offloaded()]
    assert len(step.graph.find_nodes(op="placeholder")) == len(params)
    assert step(*params) == ()
    assert engine.executed == {("update_parameters", p): 1 for p in OFFLOADED}
    (update,) = step.graph.find_nodes(op="call_function", target=ops.UPDATE_PARAMETERS)
    assert len(update.args[0]) == (len(params) if placement is Placement.SPLIT_COLUMNS else 0)


def test_step_graph_of_nothing(recording: Callable[..., RecordingEngine]) -> None:
    engine = recording(torch.nn.LayerNorm(3))
    assert build_step_graph(engine.plan, engine.id)() == ()
