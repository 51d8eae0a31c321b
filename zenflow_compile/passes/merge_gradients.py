"""Backward: add up the gradients of a parameter that is at several inputs of the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from zenflow_compile.passes.base import PassContext, gradient
from zenflow_compile.torch_internals import torch_private_compiler as private

MERGED = "zenflow_merged"
"""Key in the ``meta`` of an inserted addition; the value is ``(engine_id, p)``."""


def merge_gradients(gm: GraphModule, ctx: PassContext) -> int:
    """Add up the gradients of a parameter's inputs: later passes expect one gradient per parameter.

    Dynamo compiles one graph for two parameters of the same shape and calls it again when both are the same one:
    weights that are tied after the first step, or a function called with ``(w1, w2)`` and then with ``(w1, w1)``.
    Autograd would add up the two gradients, but the engine takes those of offloaded parameters before autograd does.

    Before::

        grad_1 = mm(...)
        grad_2 = mm(...)
        ...
        return (grad_1, ..., grad_2)

    After::

        grad_1 = mm(...)
        grad_2 = mm(...)
        merged_gradient = add(grad_1, grad_2)
        ...
        return (merged_gradient, ..., None)
    """
    graph = gm.graph
    output = graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    count = 0
    for p in sorted({param.index for param, _ in ctx.offloaded()}):
        found = [each for index in ctx.inputs_of(p) if (each := gradient(graph, index)) is not None]
        if len(found) < 2:
            continue
        for _, position in found:
            values[position] = None
        values[found[0][1]] = add_up(graph, [grad for grad, _ in found], (ctx.engine_id, p))
        count += 1
    if count:
        output.args = (tuple(values),)
    return count


def add_up(graph: Graph, grads: Sequence[Node], mark: tuple[int, int]) -> Node:
    """Insert the sum of ``grads`` directly after the last of them, with ``mark`` as ``meta[MERGED]``."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    place = max(grads, key=order.__getitem__).next
    while place.op == "placeholder":  # the gradient is an input of the backward; inputs stay together
        place = place.next
    add = torch.ops.aten.add.Tensor
    total = grads[0]
    with graph.inserting_before(place):
        for grad in grads[1:]:
            merged = graph.create_node("call_function", add, (total, grad), name="merged_gradient")
            with private.fake_mode_of(graph):
                merged.meta["val"] = add(total.meta["val"], grad.meta["val"])
            private.copy_origin(grad, merged)
            merged.meta[MERGED] = mark
            total = merged
    return total
