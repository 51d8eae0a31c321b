"""Backward: send gradients to the other ranks, where several train the model."""

from __future__ import annotations

from torch.fx import GraphModule

from zenflow_compile.passes.base import PassContext
from zenflow_compile.passes.graph_edits import check_shape, gradient, insert_after, token
from zenflow_compile.runtime import ops


def reduce_gradients(gm: GraphModule, ctx: PassContext) -> int:
    """Send each offloaded gradient where it is computed, and give autograd ``None`` instead.

    Before::

        grad_2 = mm(...)
        grad_1 = mm(...)
        return (grad_1, grad_2)

    After::

        grad_2 = mm(...)
        zenflow.reduce_gradient(grad_2, token, engine, 2)
        grad_1 = mm(...)
        zenflow.reduce_gradient(grad_1, token, engine, 1)
        return (None, None)

    The engine sends gradients in an order that all ranks keep, receives this rank's share of one when it sends the
    next, and selects, splits and copies that: the passes ``select_columns`` and ``offload_gradients`` insert nothing.
    The gradients of resident parameters are outputs, and are sent together when the backward is over: among the others
    they would hold up those behind them, since a compiler may compute the small ones of several layers at once.
    """
    if ctx.plan.ranks == 1:
        return 0
    graph = gm.graph
    if not any(gradient(graph, index) for _, index in ctx.params):
        return 0
    start = token(graph, ctx.engine_id)
    output = graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    count = 0
    for param, index in ctx.offloaded():
        if (found := gradient(graph, index)) is None:
            continue
        grad, position = found
        check_shape(grad, param, "the gradient")
        place = start if grad.op == "placeholder" else grad
        insert_after(graph, place, ops.REDUCE_GRADIENT, (grad, start, ctx.engine_id, param.index), grad)
        values[position] = None
        count += 1
    output.args = (tuple(values),)
    return count
