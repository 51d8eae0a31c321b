"""Backward: split gradients and copy their deferred slices to the host, or send gradients to the other ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, GraphModule, Node

from zenflow_compile.passes.base import (
    TOGETHER_BYTES,
    PassContext,
    check_shape,
    gradient,
    insert,
    size_of,
    storages_written_by,
    token,
)  # fmt: skip
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private

OFFLOAD_BYTES = 1 << 20
"""Gradients of up to this size in total are offloaded by one op; a larger gradient has its own op. The first gradient
of a group lives until the last one is computed, so this is also the device memory that grouping may cost. A link of
16 GB/s copies this much in 66 us, the time of a few op calls: the link loses no time that larger copies could use."""

Gradients = list[tuple[ParamPlan, Node]]


def offload_gradients(gm: GraphModule, ctx: PassContext) -> int:
    """Hand each offloaded gradient to the engine where it is computed, and give autograd ``None`` instead.

    Before::

        grad_2 = mm(...)
        grad_1 = mm(...)
        return (grad_1, grad_2)

    After::

        token = zenflow.begin_backward(engine)            # the graph's first node
        grad_2 = mm(...)
        grad_1 = mm(...)
        zenflow.offload_gradients([grad_2, grad_1], token, engine, [2, 1])
        return (None, None)

    The node splits a gradient, and starts the copy of its deferred slices. Where several ranks train the model it is
    ``reduce_gradients``: the engine sends gradients in an order that all ranks keep, receives this rank's share of one
    when it sends the next, and splits and copies that. Successive gradients share a node, at the last one's place, up
    to ``OFFLOAD_BYTES``, unless an operator between them writes to one of them.

    The gradients of resident parameters are outputs. Ranks send them together when the backward is over: among the
    others they would hold up those behind them, since a compiler may compute the small ones of several layers at once.
    The token is also inserted where all gradients of the engine stay on the device: an optimizer without ``step()``
    learns from it that a backward runs.
    """
    graph = gm.graph
    if not any(gradient(graph, index) for _, index in ctx.params):
        return 0
    start = token(graph, ctx.engine_id)
    output = graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    arriving: dict[Node, Gradients] = {}
    for param, index in ctx.offloaded():
        if (found := gradient(graph, index)) is None:
            continue
        grad, position = found
        check_shape(grad, param, "the gradient")
        arriving.setdefault(start if grad.op == "placeholder" else grad, []).append((param, grad))
        values[position] = None
    op = ops.REDUCE_GRADIENTS if ctx.plan.sums_over_ranks else ops.OFFLOAD_GRADIENTS
    # An update comes behind the offload of its gradient, so gradients wait no longer for others than updates may.
    bound = min(OFFLOAD_BYTES, TOGETHER_BYTES) if ctx.finalizes_in_backward else OFFLOAD_BYTES
    for place, group in reversed(offload_groups(graph, arriving, bound)):
        with graph.inserting_after(place):
            args = ([grad for _, grad in group], start, ctx.engine_id, [param.index for param, _ in group])
            insert(graph, op, args, serves=group[-1][1])
    output.args = (tuple(values),)
    return sum(map(len, arriving.values()))


def offload_groups(graph: Graph, arriving: Mapping[Node, Gradients], bound: int) -> list[tuple[Node, Gradients]]:
    """Gradients to offload together, of up to ``bound`` bytes, and the node of the last one."""
    groups: list[tuple[Node, Gradients]] = []
    # Of the last group: the bytes that it may still take, and the storages of its gradients.
    room = -1
    storages: set[int | None] = set()
    for node in graph.nodes:
        # Hazard: an offload after a write to the gradient's memory would copy something else.
        if not storages.isdisjoint(storages_written_by(node)):
            room = -1
        for param, grad in arriving.get(node, ()):
            if (size := size_of(param)) > room:
                groups.append((node, []))
                room, storages = bound, set()
            groups[-1] = (node, [*groups[-1][1], (param, grad)])
            room -= size
            storages.add(private.storage_of(grad))
    return groups


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
