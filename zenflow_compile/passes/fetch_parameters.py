"""Forward: apply host-computed updates just before the weights are read."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from zenflow_compile.passes.base import PassContext
from zenflow_compile.passes.graph_edits import check_shape, insert, written_inputs
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


def fetch_parameters(gm: GraphModule, ctx: PassContext) -> int:
    """Wait for the deferred slices of each parameter, and merge them, before its first use: a view, a read or a save.

    Before::

        transposed = permute(weight, [1, 0])
        y = mm(x, transposed)

    After::

        zenflow.copy_to_device_(weight, engine, p)
        transposed = permute(weight, [1, 0])
        y = mm(x, transposed)

    A parameter at two inputs of the graph is fetched before the first use of each: the compiler does not know that both
    are the same memory and may exchange reads of one with writes to the other. The first fetch applies the update, and
    the second finds nothing to do.
    """
    graph = gm.graph
    order = {node: position for position, node in enumerate(graph.nodes)}
    inputs = private.aot_inputs(graph)
    fetched = written_inputs(graph)
    todo: list[tuple[int, Node, Node]] = []
    for param, index in ctx.offloaded():
        node = inputs.get(index)
        if node is None or not node.users or node in fetched:
            continue
        check_shape(node, param, "the input")
        todo.append((param.index, node, min(node.users, key=order.__getitem__)))
    for p, node, first_use in todo:
        with graph.inserting_before(first_use):
            insert(graph, ops.COPY_TO_DEVICE_, (node, ctx.engine_id, p), serves=first_use)
    return len(todo)


def fetch_order(gm: GraphModule, engine_id: int) -> list[int]:
    """The engine's parameters in the order in which this graph first needs them, grouped or not."""
    order: list[int] = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in (ops.COPY_TO_DEVICE_, ops.FETCH_PARAMETERS_):
            _, engine, ps = node.args
            if engine == engine_id:
                order += ps if isinstance(ps, (list, tuple)) else [ps]
    return list(dict.fromkeys(order))
