from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.passes.capture import Capture, reference_gradients
from tests.support.recording import RecordingEngine
from zenflow_compile.passes.base import Phase
from zenflow_compile.passes.order_gradients import exclusive_cone, order_gradients, written_memory
from zenflow_compile.passes.pipeline import PIPELINES
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private

pytestmark = pytest.mark.usefixtures("ungrouped")

LAYERS, WIDTH, BATCH = 5, 8, 3
PLENTY = 1 << 20


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)))


def order_of_copies(capture: Capture) -> list[int]:
    nodes = capture.after[Phase.BACKWARD].graph.find_nodes(op="call_function", target=ops.OFFLOAD_GRADIENTS)
    return [p for node in nodes for p in node.args[-1]]


def run(recording: Callable[..., RecordingEngine], weight_grad_bytes: int, **options: bool) -> Capture:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = deep(), torch.randn(BATCH, WIDTH)
    expected = reference_gradients(model, x)
    options = {"finalizes_in_backward": True, **options}
    engine = recording(model, weight_grad_bytes=weight_grad_bytes, **options)
    capture = Capture(engine, PIPELINES)
    capture.run(model, x)
    for p, name in enumerate(expected):
        assert torch.equal(engine.received[p], expected[name])
    ran = [p for op, p in engine.trace if op == "offload_gradients"]
    assert ran == order_of_copies(capture), "what ran is not what the graph says"
    return capture


def test_asap_is_the_reverse_of_the_forward(recording: Callable[..., RecordingEngine]) -> None:
    assert order_of_copies(run(recording, 0)) == [4, 3, 2, 1, 0]


def test_input_gradients_come_first(recording: Callable[..., RecordingEngine]) -> None:
    capture = run(recording, PLENTY)
    assert order_of_copies(capture) == [0, 1, 2, 3, 4]
    assert dict(capture.counts[Phase.BACKWARD])["order_gradients"] == LAYERS
    nodes = list(capture.after[Phase.BACKWARD].graph.nodes)
    gemms = [nodes.index(node) for node in nodes if node.target is torch.ops.aten.mm.default]
    received = [nodes.index(node) for node in nodes if node.target is ops.OFFLOAD_GRADIENTS]
    assert len(gemms) == 2 * LAYERS - 1, "the input of the model needs no gradient"
    assert sum(gemm < received[0] for gemm in gemms) == LAYERS, "the chain and the first layer's weight gradient"
    capture.assert_idempotent(Phase.BACKWARD)


def test_memory_bounds_the_moved_layers(recording: Callable[..., RecordingEngine]) -> None:
    """Each layer keeps its input and its output gradient; of the first layer's input nothing else would be kept."""
    per_layer = 2 * BATCH * WIDTH * 4
    assert order_of_copies(run(recording, 2 * per_layer)) == [4, 3, 2, 0, 1]
    assert order_of_copies(run(recording, per_layer - 1)) == [4, 3, 2, 1, 0]


def test_order_stays_where_step_updates(recording: Callable[..., RecordingEngine]) -> None:
    capture = run(recording, PLENTY, finalizes_in_backward=False)
    assert order_of_copies(capture) == [4, 3, 2, 1, 0]


def test_updates_follow_their_gradients(recording: Callable[..., RecordingEngine]) -> None:
    """Each update starts before the next layer's gradient is computed: that is what the order is for."""
    capture = run(recording, PLENTY)
    graph = capture.after[Phase.BACKWARD].graph
    ours = [node for node in graph.nodes if node.target in (ops.UPDATE_PARAMETERS, ops.OFFLOAD_GRADIENTS)]
    updated = [node.args[-1][0] for node in ours if node.target is ops.UPDATE_PARAMETERS]
    assert updated == [1, 2, 3, 4], "the first layer's weight is no input of this backward"
    for p in updated[:-1]:
        update = next(i for i, node in enumerate(ours) if node.target is ops.UPDATE_PARAMETERS and node.args[-1] == [p])
        assert ours[update + 1].target is ops.OFFLOAD_GRADIENTS
        assert ours[update + 1].args[-1] == [p + 1]


def test_nodes_with_other_readers_stay() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    shared = graph.call_function(torch.neg, (x,))
    own = graph.call_function(torch.abs, (shared,))
    root = graph.call_function(torch.sin, (own,))
    other = graph.call_function(torch.cos, (shared,))
    graph.output((root, other))
    assert exclusive_cone(root) == [own, root]
    assert exclusive_cone(shared) == []
    assert exclusive_cone(x) == []


def test_written_memory_is_found() -> None:
    graph = torch.fx.Graph()
    buffer, x = graph.placeholder("buffer"), graph.placeholder("x")
    buffer.meta["val"], x.meta["val"] = torch.empty(3), torch.empty(3)
    read = graph.call_function(torch.ops.aten.neg.default, (buffer,))
    read.meta["val"] = torch.empty(3)
    assert written_memory(graph) == set()
    graph.call_function(torch.ops.aten.copy_.default, (buffer, x))
    graph.output((read,))
    assert written_memory(graph) == {private.storage_of(buffer)}


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.INFERENCE])
def test_only_the_backward_is_ordered(phase: Phase) -> None:
    assert order_gradients not in PIPELINES[phase]
