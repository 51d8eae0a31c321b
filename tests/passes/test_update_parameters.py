from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from tests.passes.capture import OFFLOADED, READABLE, Capture, Small, inputs, reference_gradients
from tests.recording import RecordingEngine
from zenflow_compile.passes.context import Phase, written_inputs
from zenflow_compile.passes.update_parameters import build_step_graph
from zenflow_compile.planning.plan import Placement
from zenflow_compile.runtime import ops


def nodes(graph: GraphModule, op: object) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = graph.graph.find_nodes(op="call_function", target=op)
    return found


def test_updates_sit_on_the_tail(recording: Callable[..., RecordingEngine]) -> None:
    """Behind every node of the model's own, for the parameters that the backward graph has as inputs."""
    model, x = Small(), inputs()
    expected = reference_gradients(model, x)
    engine = recording(model, finalizes_in_backward=True)
    capture = Capture(engine, READABLE)
    capture.run(model, x)
    backward = capture.after[Phase.BACKWARD]
    updates = nodes(backward, ops.UPDATE_ON_HOST)
    assert updates, "no parameter is an input of this backward: the test shows nothing"
    assert len(updates) == len(nodes(backward, ops.ADAM_COLUMNS_)) == len(written_inputs(backward.graph))
    tail = list(backward.graph.nodes)[-1 - 2 * len(updates) : -1]
    assert {node.target for node in tail} == {ops.ADAM_COLUMNS_, ops.UPDATE_ON_HOST}
    assert engine.runs("update_on_host") == {node.args[-1]: 1 for node in updates}
    assert engine.runs("adam_columns_") == engine.runs("update_on_host")
    for p, name in enumerate(expected):
        if p in OFFLOADED:
            torch.testing.assert_close(engine.received[p], expected[name])
    capture.assert_idempotent(Phase.BACKWARD)


def test_leaves_updates_to_step(recording: Callable[..., RecordingEngine]) -> None:
    model = Small()
    engine = recording(model)
    capture = Capture(engine, READABLE)
    capture.run(model, inputs())
    assert capture.reports[Phase.BACKWARD].counts[-1] == ("update_parameters", 0)
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
