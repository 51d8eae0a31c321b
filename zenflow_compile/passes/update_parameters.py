"""The optimizer's own nodes: one emitter, for a backward graph and for a step graph of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from zenflow_compile.passes.context import PassContext, Phase, find, insert, token
from zenflow_compile.planning.plan import Plan
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


def emit_updates(graph: Graph, start: Node, params: Sequence[tuple[int, Node]], plan: Plan, engine_id: int) -> None:
    """Write the update of ``(p, parameter node)`` pairs at the graph's insertion point.

    Everything that the engine needs beyond the parameter it has itself; the parameter is an argument, so that the
    compiler sees the write and keeps it behind every read. Host-only parameters (k = 0) have no columns to update here.

    Args:
        start: the token that orders the nodes.
    """
    for p, node in params:
        if plan.params[p].k:
            insert(graph, ops.ADAM_COLUMNS_, (node, start, engine_id, p))
        insert(graph, ops.UPDATE_ON_HOST, (start, engine_id, p))


def build_step_graph(plan: Plan, engine_id: int) -> GraphModule:
    """The optimizer step as a graph: from the offloaded parameters, in the plan's order, to nothing."""
    graph = Graph()
    inputs = [(param.index, graph.placeholder(f"param_{param.index}")) for param in plan.params if param.offloaded]
    start = graph.call_function(torch.ops.aten.zeros.default, ([1],))  # no backward runs here: a token of its own
    emit_updates(graph, start, inputs, plan, engine_id)
    graph.output(())
    graph.lint()
    return GraphModule(torch.nn.Module(), graph, class_name="ZenFlowStep")


@dataclass(frozen=True, slots=True)
class UpdateParameters:
    """Updates inside the backward graph, where no ``step()`` will come: as early as the dataflow allows.

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

    The update is behind this graph's last read of the parameter's memory, through whatever view. Whether another graph
    still has to read it, or to add to its gradient, only the engine knows: it may put the update off to the end of the
    backward. It does that as well for parameters that this graph does not have as inputs, and for those whose memory it
    has at several, because it was called with one parameter twice or gets a saved view of it: the compiler would not
    keep an update through one input behind the reads of another.
    """

    name: str = "update_parameters"
    phases: frozenset[Phase] = frozenset({Phase.BACKWARD})
    requires: frozenset[str] = frozenset({"offloaded gradients"})
    provides: frozenset[str] = frozenset({"updates"})

    def __call__(self, gm: GraphModule, ctx: PassContext) -> int:
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
                emit_updates(graph, start, [(p, param_node)], ctx.plan, ctx.engine_id)
        return len(todo)


def inputs_with_memory_of(node: Node) -> int:
    """How many inputs of the graph have the memory of ``node``: itself and views of it."""
    placeholders = node.graph.find_nodes(op="placeholder")
    return sum(private.storage_of(each) == private.storage_of(node) for each in placeholders)
