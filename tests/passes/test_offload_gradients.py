from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.passes.capture import OFFLOADED, Capture, Small, assert_taken, inputs, reference_gradients
from tests.support.recording import RecordingEngine
from zenflow_compile.passes.base import Phase
from zenflow_compile.passes.offload_gradients import offload_gradients
from zenflow_compile.passes.pipeline import check_order
from zenflow_compile.passes.select_columns import select_columns
from zenflow_compile.runtime import ops

PASSES = {Phase.BACKWARD: (select_columns, offload_gradients)}


def test_gradients_go_to_the_engine(recording: Callable[..., RecordingEngine]) -> None:
    model, x = Small(), inputs()
    expected = reference_gradients(model, x)
    engine = recording(model)
    capture = Capture(engine, PASSES)
    capture.run(model, x)

    assert capture.counts[Phase.BACKWARD][-1] == ("offload_gradients", 3)
    assert capture.count(Phase.BACKWARD, ops.SPLIT_COLUMNS) == capture.count(Phase.BACKWARD, ops.COPY_TO_HOST) == 3
    for split in capture.after[Phase.BACKWARD].graph.find_nodes(op="call_function", target=ops.SPLIT_COLUMNS):
        assert split.prev.target is ops.SELECT_COLUMNS
        assert split.next.target is ops.COPY_TO_HOST
    assert engine.runs("copy_to_host") == dict.fromkeys(OFFLOADED, 1)
    assert_taken(engine, model, expected)


def test_is_idempotent(recording: Callable[..., RecordingEngine]) -> None:
    model = Small()
    capture = Capture(recording(model), PASSES)
    capture.run(model, inputs())
    capture.assert_idempotent(Phase.BACKWARD)


def test_gradients_without_selection_stay(recording: Callable[..., RecordingEngine]) -> None:
    model, x = Small(), inputs()
    expected = reference_gradients(model, x)
    capture = Capture(recording(model), {Phase.BACKWARD: ()})
    capture.run(model, x)
    graph = capture.after[Phase.BACKWARD]
    assert offload_gradients(graph, capture.contexts[Phase.BACKWARD]) == 0
    assert str(graph.graph) == capture.before[Phase.BACKWARD]
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, expected[name])


def test_needs_a_selection() -> None:
    with pytest.raises(ValueError, match="offload_gradients needs the nodes of select_columns"):
        check_order((offload_gradients, select_columns), Phase.BACKWARD)


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
