"""Backward: select the slices of each gradient that the device updates itself."""

from __future__ import annotations

from torch.fx import GraphModule

from zenflow_compile.passes.base import PassContext
from zenflow_compile.passes.graph_edits import check_shape, find, gradient, insert_after, token
from zenflow_compile.runtime import ops


def select_columns(gm: GraphModule, ctx: PassContext) -> int:
    """Insert norms and selection directly after the node that computes an offloaded parameter's gradient.

    Before::

        grad = mm(...)                                    # [out, in], an output of the graph

    After::

        token = zenflow.begin_backward(engine)            # the graph's first node
        grad = mm(...)
        norms = zenflow.column_norms(grad, engine, p)     # f32[slices]
        selected = zenflow.select_columns(norms, engine, p)  # i32[k]

    The token is also inserted where all gradients of the engine stay on the device: an optimizer without ``step()``
    learns from it that a backward runs.
    """
    if ctx.plan.ranks > 1:  # ``reduce_gradients`` takes its place
        return 0
    graph = gm.graph
    if not any(gradient(graph, index) for _, index in ctx.params):
        return 0
    todo = [
        (param, found[0])
        for param, index in ctx.offloaded()
        if (found := gradient(graph, index)) and not find(graph, ops.SELECT_COLUMNS, ctx.engine_id, param.index)
    ]
    start = token(graph, ctx.engine_id)
    for param, grad in todo:
        check_shape(grad, param, "the gradient")
        place = start if grad.op == "placeholder" else grad
        norms = insert_after(graph, place, ops.COLUMN_NORMS, (grad, ctx.engine_id, param.index), grad)
        insert_after(graph, norms, ops.SELECT_COLUMNS, (norms, ctx.engine_id, param.index), grad)
    return len(todo)
