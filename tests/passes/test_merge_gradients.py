from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from tests.passes.capture import Capture, Small, inputs
from tests.support.recording import RecordingEngine
from zenflow_compile.passes.base import GraphPass, Phase
from zenflow_compile.passes.merge_gradients import MERGED, merge_gradients
from zenflow_compile.passes.pipeline import PIPELINES
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private

Loss = Callable[..., Tensor]
Recording = Callable[..., RecordingEngine]

ONLY = {Phase.BACKWARD: (merge_gradients,)}


class Weights(nn.Module):
    """Matrices that a compiled function gets as arguments, and a vector, which is resident."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
        self.vector = nn.Parameter(torch.randn(4))


def chain(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.sin(torch.sin(x @ first) @ second)


def call_twice(
    function: Loss,
    distinct: Sequence[Tensor],
    same: Sequence[Tensor],
    engine: RecordingEngine,
    passes: Mapping[Phase, Sequence[GraphPass]] = PIPELINES,
) -> tuple[Capture, tuple[Tensor, ...]]:
    """Call one compiled function with distinct parameters, then with one of them at several inputs.

    Returns:
        What the second call left, and what eager's gradients of it are, in the order of ``same``.
    """
    x = torch.randn(3, 4)
    capture = Capture(engine, passes)
    compiled = torch.compile(function, backend=capture.backend_per_call)
    compiled(x, *distinct).pow(2).sum().backward()
    for param in engine.params:
        param.grad = None
    engine.received.clear()
    engine.executed.clear()
    expected = torch.autograd.grad(function(x, *same).pow(2).sum(), tuple(same))
    compiled(x, *same).pow(2).sum().backward()
    return capture, expected


def additions(capture: Capture) -> list[Node]:
    return [node for node in capture.after[Phase.BACKWARD].graph.nodes if MERGED in node.meta]


def test_two_inputs_give_one_gradient(recording: Recording) -> None:
    weights = Weights()
    engine = recording(weights)
    capture, expected = call_twice(chain, (weights.a, weights.b), (weights.a, weights.a), engine)
    assert capture.counts[Phase.BACKWARD][0] == ("merge_gradients", 1)
    assert engine.runs("offload_gradients") == {0: 1}
    assert weights.a.grad is None
    torch.testing.assert_close(engine.received, {0: expected[0]})  # eager adds up the gradients of both arguments
    capture.assert_idempotent(Phase.BACKWARD)


def test_sum_replaces_the_first_output(recording: Recording) -> None:
    weights = Weights()
    capture, expected = call_twice(chain, (weights.a, weights.b), (weights.a, weights.a), recording(weights), ONLY)
    (merged,) = additions(capture)
    graph = capture.after[Phase.BACKWARD].graph
    order = {node: position for position, node in enumerate(graph.nodes)}
    assert merged.prev is max(merged.all_input_nodes, key=order.__getitem__)
    assert [value for value in graph.output_node().args[0] if value is not None] == [merged]  # type: ignore[union-attr]
    torch.testing.assert_close(weights.a.grad, expected[0])
    capture.assert_idempotent(Phase.BACKWARD)


@pytest.mark.parametrize(
    ("function", "count"),
    [(lambda x, a, b, c: torch.sin(chain(x, a, b)) @ c, 2), (lambda x, a, b, c: x @ (a + b + c), 2)],
    ids=["three_gradients", "one_node_for_all"],
)
def test_three_inputs(function: Loss, count: int, recording: Recording) -> None:
    weights = Weights()
    engine = recording(weights)
    distinct, same = (weights.a, weights.b, weights.c), (weights.b, weights.b, weights.b)
    capture, expected = call_twice(function, distinct, same, engine)
    assert len(additions(capture)) == count
    torch.testing.assert_close(engine.received, {1: expected[0]})


def test_gradients_that_are_graph_inputs(recording: Recording) -> None:
    """The backward returns an input of its own as the gradient, so no node computes it."""
    weights = Weights()
    engine = recording(weights)

    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    capture, expected = call_twice(function, (weights.a, weights.b), (weights.a, weights.a), engine)
    graph = capture.after[Phase.BACKWARD].graph
    operators = [node.op for node in graph.nodes]
    assert "placeholder" not in operators[operators.index("call_function") :]
    torch.testing.assert_close(engine.received, {0: expected[0]})


def test_single_inputs_are_left_alone(recording: Recording) -> None:
    model = Small()
    capture = Capture(recording(model), ONLY)
    capture.run(model, inputs())
    assert not any(count for _, count in capture.counts[Phase.BACKWARD])
    assert str(capture.after[Phase.BACKWARD].graph) == capture.before[Phase.BACKWARD]


def test_resident_gradients_are_left_alone(recording: Recording) -> None:
    weights = Weights()
    other = nn.Parameter(torch.randn(4))

    def function(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.sin(x * first) * second

    capture, expected = call_twice(
        function, (weights.vector, other), (weights.vector, weights.vector), recording(weights)
    )
    assert not additions(capture)
    torch.testing.assert_close(weights.vector.grad, expected[0])


def test_weight_gradients_still_take_forward_order(recording: Recording) -> None:
    weights = Weights()

    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.sin(torch.sin(chain(x, a, b)) @ c)

    engine = recording(weights, finalizes_in_backward=True, weight_grad_bytes=1 << 20)
    distinct, same = (weights.a, weights.b, weights.c), (weights.a, weights.a, weights.c)
    capture, expected = call_twice(function, distinct, same, engine)
    assert dict(capture.counts[Phase.BACKWARD])["order_gradients"] == 2
    assert [p for op, p in engine.trace if op == "offload_gradients"][-2:] == [0, 2]
    torch.testing.assert_close(engine.received, {0: expected[0], 2: expected[2]})


def test_no_update_between_reads_of_two_inputs(recording: Recording) -> None:
    """An update through one input could come before a read through the other: the compiler thinks that they differ."""
    weights = Weights()

    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor, v: Tensor) -> Tensor:
        return torch.sin(chain(x, a * v, b * v)) @ (c * v)  # so that the backward gets a, b and c as they are

    engine = recording(weights, finalizes_in_backward=True)
    distinct = (weights.a, weights.b, weights.c, weights.vector)
    same = (weights.a, weights.a, weights.c, weights.vector)
    capture, _ = call_twice(function, distinct, same, engine)
    inputs_of_backward = private.aot_inputs(capture.after[Phase.BACKWARD].graph)
    assert {index for p, index in capture.contexts[Phase.BACKWARD].params if p in (0, 2)} <= set(inputs_of_backward)
    assert engine.runs("update_parameters") == {2: 1}
    capture.assert_idempotent(Phase.BACKWARD)


def test_each_input_is_fetched(recording: Recording) -> None:
    weights = Weights()
    engine = recording(weights)
    capture, _ = call_twice(chain, (weights.a, weights.b), (weights.a, weights.a), engine)
    graph = capture.after[Phase.FORWARD].graph
    fetched = set()
    for node in graph.nodes:
        if node.target is ops.FETCH_PARAMETERS_:
            fetched.update(node.args[0])
        elif node.op == "call_function":
            reads = {each for each in node.all_input_nodes if each.op == "placeholder"}
            assert {each for each in reads if tuple(each.meta["val"].shape) == (4, 4)} <= fetched
    assert len(fetched) == 2
    assert engine.runs("fetch_parameters_") == {0: 2}
    capture.assert_idempotent(Phase.FORWARD)
