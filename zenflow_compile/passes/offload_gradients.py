"""Backward: split gradients and copy their deferred slices to the host."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from zenflow_compile.passes.base import PassContext
from zenflow_compile.passes.graph_edits import find, gradient, insert_after, token
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


def offload_gradients(gm: GraphModule, ctx: PassContext) -> int:
    """Split each selected gradient, start its copy, and give autograd ``None`` instead.

    Before::

        selected = zenflow.select_columns(norms, engine, p)
        ...
        return (..., grad, ...)

    After::

        selected = zenflow.select_columns(norms, engine, p)
        zenflow.split_columns(grad, token, selected, engine, p)
        zenflow.copy_to_host(token, engine, p)
        ...
        return (..., None, ...)

    Since the gradient is no longer an output, its memory is free as soon as it has been split. Where autograd needs the
    gradient itself, the compiled code returns a copy: see ``runtime.ops.returning_gradients``.
    """
    graph = gm.graph
    todo: list[tuple[int, Node, int, Node]] = []
    for param, index in ctx.offloaded():
        selected = find(graph, ops.SELECT_COLUMNS, ctx.engine_id, param.index)
        found = gradient(graph, index)
        if selected is not None and found is not None:
            todo.append((param.index, *found, selected))
    if not todo:
        return 0
    start = token(graph, ctx.engine_id)
    output = graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    for p, grad, position, selected in todo:
        split = insert_after(graph, selected, ops.SPLIT_COLUMNS, (grad, start, selected, ctx.engine_id, p), grad)
        insert_after(graph, split, ops.COPY_TO_HOST, (start, ctx.engine_id, p), grad)
        values[position] = None
    output.args = (tuple(values),)
    return len(todo)


def gradient_places(graph: Graph, ctx: PassContext) -> dict[int, int]:
    """Positions among a backward graph's outputs where the gradients of offloaded parameters would be, by parameter.

    For a parameter at several inputs this is the position of the first: the gradients of the others are added there.
    """
    positions = private.aot_gradients(graph)
    places: dict[int, int] = {}
    for param, index in ctx.offloaded():
        if index in positions:
            places.setdefault(param.index, positions[index])
    return places
