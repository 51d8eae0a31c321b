"""Backward: the optimizer's updates, where no ``step()`` will run them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from zenflow_compile.passes.base import PassContext
from zenflow_compile.passes.graph_edits import find, insert, token
from zenflow_compile.planning.plan import ParamPlan, Plan
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


def update_parameters(gm: GraphModule, ctx: PassContext) -> int:
    """Insert updates into the backward graph as early as the dataflow allows (optimizer in backward only).

    Before::

        zenflow.copy_to_host(token, engine, p)
        ...                                               # reads param for the gradient of its input
        ...                                               # the rest of the backward
        return (...)

    After::

        zenflow.copy_to_host(token, engine, p)
        ...
        zenflow.adam_columns_(param, token, engine, p)
        zenflow.update_on_host(token, engine, p)
        ...
        return (...)

    The update follows this graph's last read of the parameter's memory, through any view. Only the engine knows whether
    another graph still reads it or adds to its gradient: the engine may postpone the update to the end of the backward.
    It also updates there the parameters that are no inputs of this graph, and those whose memory is at several inputs
    (the graph was called with one parameter twice, or gets a saved view of it): the compiler would not keep an update
    through one input behind the reads of another.
    """
    if not ctx.finalizes_in_backward:
        return 0
    graph = gm.graph
    inputs = private.aot_inputs(graph)
    todo: list[tuple[int, Node, Node]] = []
    for copy in graph.find_nodes(op="call_function", target=ops.COPY_TO_HOST):
        _, engine_id, p = copy.args
        if engine_id != ctx.engine_id or not isinstance(p, int):
            continue
        index, *further = ctx.inputs_of(p)
        if further:
            continue
        param_node = inputs.get(index)
        if param_node is None or inputs_with_memory_of(param_node) > 1:
            continue
        if not find(graph, ops.UPDATE_ON_HOST, ctx.engine_id, p):
            todo.append((p, param_node, copy))
    if not todo:
        return 0
    start = token(graph, ctx.engine_id)
    order = {node: position for position, node in enumerate(graph.nodes)}
    reads = private.readers_of_memory(graph, [param_node for _, param_node, _ in todo])
    for p, param_node, copy in todo:
        last = max([copy, *reads[param_node]], key=order.__getitem__)
        with graph.inserting_before(last.next):
            insert_update(graph, start, param_node, ctx.plan.params[p], ctx.engine_id, serves=copy)
    return len(todo)


def insert_update(
    graph: Graph, start: Node, weight: Node, param: ParamPlan, engine_id: int, serves: Node | None = None
) -> None:
    """Insert the update of one parameter at the graph's insertion point.

    The weight is an argument, so that the compiler sees the write and keeps it behind every read; the engine has
    everything else. Host-only parameters (k = 0) have no columns to update on the device.
    """
    if param.k:
        insert(graph, ops.ADAM_COLUMNS_, (weight, start, engine_id, param.index), serves)
    insert(graph, ops.UPDATE_ON_HOST, (start, engine_id, param.index), serves)


def build_step_graph(plan: Plan, engine_id: int) -> GraphModule:
    """Write the optimizer step as a graph, for ``explain``: its inputs are the offloaded parameters."""
    graph = Graph()
    inputs = [(param, graph.placeholder(f"param_{param.index}")) for param in plan.params if param.offloaded]
    start = graph.call_function(torch.ops.aten.zeros.default, ([1],))
    for param, weight in inputs:
        insert_update(graph, start, weight, param, engine_id)
    graph.output(())
    graph.lint()
    return GraphModule(torch.nn.Module(), graph, class_name="ZenFlowStep")


def inputs_with_memory_of(node: Node) -> int:
    """How many inputs of the graph share the memory of ``node``: itself and views of it."""
    placeholders: Sequence[Node] = node.graph.find_nodes(op="placeholder")
    return sum(private.storage_of(each) == private.storage_of(node) for each in placeholders)
