"""Backward: the optimizer's updates, where no ``step()`` will run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zenflow_compile.passes.base import (
    SMALL_BYTES,
    TOGETHER_BYTES,
    PassContext,
    computes_nothing,
    insert,
    size_of,
    token,
)  # fmt: skip
from zenflow_compile.planning.plan import ParamPlan, Plan
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private

Updates = list[tuple[ParamPlan, Node]]
"""Parameters with their inputs."""


def update_parameters(gm: GraphModule, ctx: PassContext) -> int:
    """Insert updates into the backward graph as early as the dataflow allows (optimizer in backward only).

    Before::

        zenflow.offload_gradients([grad], token, engine, [p])
        ...                                               # reads param for the gradient of its input
        ...                                               # the rest of the backward
        return (...)

    After::

        zenflow.offload_gradients([grad], token, engine, [p])
        ...
        zenflow.update_parameters([param], token, engine, [p])
        ...
        return (...)

    The update follows this graph's last read of the parameter's memory, through any view. Updates share a node if only
    views lie between them, or if the first one is small (``SMALL_BYTES``). Only the engine knows whether another graph
    still reads a parameter or adds to its gradient: the engine may postpone the update to the end of the backward. It
    also updates there the parameters that are no inputs of this graph, and those whose memory is at several inputs (the
    graph was called with one parameter twice, or gets a saved view of it): the compiler would not keep an update
    through one input behind the reads of another.
    """
    if not ctx.finalizes_in_backward:
        return 0
    graph = gm.graph
    inputs = private.aot_inputs(graph)
    updated = {p for node in nodes_of(graph, ops.UPDATE_PARAMETERS, ctx) for p in parameters_of(node)}
    todo: list[tuple[ParamPlan, Node, Node]] = []
    for offload in nodes_of(graph, ops.OFFLOAD_GRADIENTS, ctx):
        for p in parameters_of(offload):
            index, *further = ctx.inputs_of(p)
            weight = inputs.get(index)
            if p not in updated and not further and weight is not None and inputs_with_memory_of(weight) == 1:
                todo.append((ctx.plan.params[p], weight, offload))
    if not todo:
        return 0
    start = token(graph, ctx.engine_id)
    order = {node: position for position, node in enumerate(graph.nodes)}
    reads = private.readers_of_memory(graph, [weight for _, weight, _ in todo])
    ready: dict[Node, Updates] = {}
    for param, weight, offload in todo:
        last = max([offload, *reads[weight]], key=order.__getitem__)
        ready.setdefault(last, []).append((param, weight))
    for place, group in update_groups(graph, ready):
        with graph.inserting_before(place.next):
            insert_update(graph, start, group, ctx.engine_id, serves=place)
    return len(todo)


def nodes_of(graph: Graph, op: Any, ctx: PassContext) -> list[Node]:
    nodes: Sequence[Node] = graph.find_nodes(op="call_function", target=op)
    return [node for node in nodes if node.args[-2] == ctx.engine_id]


def parameters_of(node: Node) -> Sequence[int]:
    ps: Sequence[int] = node.args[-1]  # type: ignore[assignment]
    return ps


def update_groups(graph: Graph, ready: Mapping[Node, Updates]) -> list[tuple[Node, Updates]]:
    """Updates to run behind one node, the last read of the last one: see ``update_parameters`` and the constants."""
    groups: list[tuple[Node, Updates]] = []
    computed = False  # since the last update
    for node in graph.nodes:
        computed = computed or not computes_nothing(node)
        for update in ready.get(node, ()):
            before = groups[-1][1] if groups else []
            sizes = [size_of(param) for param, _ in before]
            if before and (not computed or (max(sizes) <= SMALL_BYTES and sum(sizes) <= TOGETHER_BYTES)):
                groups[-1] = (node, [*before, update])
            else:
                groups.append((node, [update]))
            computed = False
    return groups


def insert_update(graph: Graph, start: Node, updates: Updates, engine_id: int, serves: Node | None = None) -> None:
    """Insert updates at the graph's insertion point. Nothing else makes update nodes, in a backward or for ``explain``.

    The weights are arguments, so that the compiler sees the writes and keeps them behind every read; the engine has
    everything else. Host-only parameters (k = 0) have no columns to update on the device.
    """
    weights = [weight for param, weight in updates if param.k]
    args = (weights, start, engine_id, [param.index for param, _ in updates])
    insert(graph, ops.UPDATE_PARAMETERS, args, serves)


def build_step_graph(plan: Plan, engine_id: int) -> GraphModule:
    """Write the optimizer step as a graph, for ``explain``: its inputs are the offloaded parameters."""
    graph = Graph()
    updates = [(param, graph.placeholder(f"param_{param.index}")) for param in plan.params if param.offloaded]
    if updates:
        insert_update(graph, graph.call_function(torch.ops.aten.zeros.default, ([1],)), updates, engine_id)
    graph.output(())
    graph.lint()
    return GraphModule(torch.nn.Module(), graph, class_name="ZenFlowStep")


def inputs_with_memory_of(node: Node) -> int:
    placeholders: Sequence[Node] = node.graph.find_nodes(op="placeholder")
    return sum(private.storage_of(each) == private.storage_of(node) for each in placeholders)
