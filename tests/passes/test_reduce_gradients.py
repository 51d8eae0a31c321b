from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.passes.capture import OFFLOADED, Capture, Small, assert_taken, inputs, reference_gradients
from tests.support.recording import RecordingEngine
from zenflow_compile.passes import group_nodes
from zenflow_compile.passes.base import Phase
from zenflow_compile.passes.pipeline import PIPELINES
from zenflow_compile.passes.reduce_gradients import reduce_gradients
from zenflow_compile.runtime import ops

PASSES = {Phase.BACKWARD: (reduce_gradients,)}


def test_gradients_go_to_the_ranks(recording: Callable[..., RecordingEngine]) -> None:
    model, x = Small(), inputs()
    expected = reference_gradients(model, x)
    engine = recording(model, ranks=2)
    capture = Capture(engine, PASSES)
    capture.run(model, x)

    assert capture.counts[Phase.BACKWARD][-1] == ("reduce_gradients", 3)
    nodes = capture.after[Phase.BACKWARD].graph.find_nodes(op="call_function", target=ops.REDUCE_GRADIENT)
    assert len(nodes) == 3
    for node in nodes:
        assert node.prev is node.args[0], "a gradient is sent later than it could be"
    assert engine.runs("reduce_gradients") == dict.fromkeys(OFFLOADED, 1)
    assert_taken(engine, model, expected)


def test_is_idempotent(recording: Callable[..., RecordingEngine]) -> None:
    model = Small()
    capture = Capture(recording(model, ranks=2), PASSES)
    capture.run(model, inputs())
    capture.assert_idempotent(Phase.BACKWARD)


@pytest.mark.parametrize("ranks", [1, 2])
def test_pipeline_sends_or_offloads(recording: Callable[..., RecordingEngine], ranks: int) -> None:
    model = Small()
    engine = recording(model, ranks=ranks)
    capture = Capture(engine, PIPELINES)
    capture.run(model, inputs())
    done, other = ("offload_gradients", "reduce_gradients")[:: 1 if ranks == 1 else -1]
    assert engine.runs(done) == dict.fromkeys(OFFLOADED, 1)
    assert not engine.runs(other)
    assert capture.count(Phase.FORWARD, ops.REDUCE_GRADIENTS) == 0


def test_small_gradients_share_a_node(
    recording: Callable[..., RecordingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, nodes in ((0, 3), (1 << 20, 1)):
        monkeypatch.setattr(group_nodes, "OFFLOAD_BYTES", limit)
        model = Small()
        engine = recording(model, ranks=2)
        Capture(engine, PIPELINES).run(model, inputs())
        assert len(engine.offloads) == nodes
