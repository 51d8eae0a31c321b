"""Forward: apply host-computed updates just before the weights are read."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, GraphModule, Node

from zenflow_compile.passes.base import (
    SMALL_BYTES,
    TOGETHER_BYTES,
    PassContext,
    check_shape,
    computes_nothing,
    insert,
    size_of,
    written_inputs,
)  # fmt: skip
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private

Fetches = list[tuple[ParamPlan, Node]]
"""Parameters with their inputs."""


def fetch_parameters(gm: GraphModule, ctx: PassContext) -> int:
    """Wait for the deferred slices of each parameter, and merge them, before its first use: a view, a read or a save.

    Before::

        transposed = permute(a, [1, 0])
        y = addmm(b, x, transposed)

    After::

        zenflow.fetch_parameters_([a, b], engine, [0, 1])
        transposed = permute(a, [1, 0])
        y = addmm(b, x, transposed)

    Fetches share a node if only views lie between the first uses, or if the second parameter is small
    (``SMALL_BYTES``). A parameter at two inputs of the graph is fetched before the first use of each: the compiler does
    not know that both are the same memory and may exchange reads of one with writes to the other. The first fetch
    applies the update, and the second finds nothing to do.
    """
    graph = gm.graph
    order = {node: position for position, node in enumerate(graph.nodes)}
    inputs = private.aot_inputs(graph)
    fetched = written_inputs(graph)
    by_first_use: dict[Node, Fetches] = {}
    for param, index in ctx.offloaded():
        node = inputs.get(index)
        if node is None or not node.users or node in fetched:
            continue
        check_shape(node, param, "the input")
        by_first_use.setdefault(min(node.users, key=order.__getitem__), []).append((param, node))
    for place, group in fetch_groups(graph, by_first_use):
        with graph.inserting_before(place):
            args = ([node for _, node in group], ctx.engine_id, [param.index for param, _ in group])
            insert(graph, ops.FETCH_PARAMETERS_, args, serves=place)
    return sum(map(len, by_first_use.values()))


def fetch_groups(graph: Graph, by_first_use: Mapping[Node, Fetches]) -> list[tuple[Node, Fetches]]:
    """Fetches to run in front of the first one's first use: see ``fetch_parameters`` and the constants."""
    groups: list[tuple[Node, Fetches]] = []
    computed = False  # since the place of the last group
    moved_bytes = 0  # of the last group: what is fetched before computation that precedes its first use
    for node in graph.nodes:
        for param, weight in by_first_use.get(node, ()):
            size = size_of(param)
            moved = size if computed else 0
            if groups and (not moved or (size <= SMALL_BYTES and moved_bytes + moved <= TOGETHER_BYTES)):
                groups[-1][1].append((param, weight))
                moved_bytes += moved
            else:
                groups.append((node, [(param, weight)]))
                computed, moved_bytes = False, 0
        computed = computed or not computes_nothing(node)
    return groups


def fetch_order(gm: GraphModule, engine_id: int) -> list[int]:
    """The engine's parameters in the order in which this graph first needs them."""
    nodes = gm.graph.find_nodes(op="call_function", target=ops.FETCH_PARAMETERS_)
    return list(dict.fromkeys(p for node in nodes if node.args[1] == engine_id for p in node.args[2]))
