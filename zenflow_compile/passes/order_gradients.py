"""Backward: compute weight gradients in the order in which the next forward needs the weights."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from zenflow_compile.passes.base import PassContext, gradient, storages_written_by
from zenflow_compile.torch_internals import torch_private_compiler as private


def order_gradients(gm: GraphModule, ctx: PassContext) -> int:
    """Move the weight gradients of the first layers behind the chain of input gradients, in forward order.

    Before::

        dx2 = mm(dy, w2)
        dw2 = mm(dy_t, x2)
        dw1 = mm(dx2_t, x1)
        return (dw1, dw2)

    After::

        dx2 = mm(dy, w2)
        dw1 = mm(dx2_t, x1)
        dw2 = mm(dy_t, x2)
        return (dw1, dw2)

    A weight's host update has to fit between its gradient and its next use. In the usual order the first layer's
    gradient comes last and its weight is needed first: its update has no time at all, and the last layer's has a whole
    step. In this order every update has the time of the weight gradients that follow and of the forward up to its
    weight: about a third of a step, since input gradients, weight gradients and forward take about as long each. The
    price is memory: the inputs of the moved weight gradients stay alive. ``ctx.weight_grad_bytes`` bounds it and so
    decides for how many layers, counted from the first, the order changes.
    """
    graph = gm.graph
    if not ctx.weight_grad_bytes or not ctx.finalizes_in_backward:
        return 0
    before = list(graph.nodes)
    cones = cones_to_move(graph, ctx)
    output = graph.output_node()
    for cone in cones:
        for node in cone:
            output.prepend(node)
    return len(cones) if list(graph.nodes) != before else 0


def cones_to_move(graph: Graph, ctx: PassContext) -> list[list[Node]]:
    """The operators of each weight gradient that moves, from the first layer on, as far as memory allows."""
    kept: dict[int | None, int] = {}
    cones: list[list[Node]] = []
    taken: set[Node] = set()
    written = written_memory(graph)
    inputs = private.aot_inputs(graph)
    weights = {inputs.get(index) for _, index in ctx.params}  # the graph keeps them anyway
    known = {p: position for position, p in enumerate(ctx.forward_order)}
    # Parameters of unknown use follow in the plan's order.
    for p in sorted({p for p, _ in ctx.params}, key=lambda p: (known.get(p, len(known)), p)):
        each_input = (gradient(graph, index) for index in ctx.inputs_of(p))
        found = next((each for each in each_input if each is not None), None)
        if found is None or not ctx.plan.params[p].offloaded:
            continue
        cone = [node for node in exclusive_cone(found[0]) if node not in taken]
        read = {node for member in cone for node in member.all_input_nodes} - set(cone) - weights
        if any(private.storage_of(node) in written for node in read):
            continue  # moved behind the write, it would read the new values
        kept |= {private.storage_of(node): bytes_of(node) for node in read}
        if sum(kept.values()) > ctx.weight_grad_bytes:
            break
        if cone:
            taken.update(cone)
            cones.append(cone)
    return cones


def exclusive_cone(root: Node) -> list[Node]:
    """``root`` and the operators that only ``root`` needs, in graph order; empty if other operators read ``root``."""
    if root.op != "call_function" or any(user.op != "output" for user in root.users):
        return []
    cone = {root}
    waiting = [root]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node.op == "call_function" and node not in cone and all(user in cone for user in node.users):
                cone.add(node)
                waiting.append(node)
    return [node for node in root.graph.nodes if node in cone]


def written_memory(graph: Graph) -> set[int | None]:
    """Storages that the graph's own operators write to."""
    return {storage for node in graph.nodes for storage in storages_written_by(node)}


def bytes_of(node: Node) -> int:
    """Bytes of the storage behind a node, also if the node is a view of a part; 0 if it is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0
