"""Forward: what the host computed arrives just before it is read."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from zenflow_compile import torch_private_compiler as private
from zenflow_compile.passes.context import PassContext, Phase, check_shape, find, insert
from zenflow_compile.runtime import ops


@dataclass(frozen=True, slots=True)
class FetchParameters:
    """Wait for and merge the host's lines of a parameter before its first use, be it a view, a read or a save.

    Before::

        transposed = permute(weight, [1, 0])
        y = mm(x, transposed)

    After::

        zenflow.copy_to_device_(weight, engine, p)
        transposed = permute(weight, [1, 0])
        y = mm(x, transposed)
    """

    name: str = "fetch_parameters"
    phases: frozenset[Phase] = frozenset({Phase.FORWARD, Phase.INFERENCE})
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"fetched parameters"})

    def __call__(self, gm: GraphModule, ctx: PassContext) -> int:
        graph = gm.graph
        order = {node: position for position, node in enumerate(graph.nodes)}
        inputs = private.aot_inputs(graph)
        todo: list[tuple[int, Node, Node]] = []
        for param, index in ctx.offloaded():
            node = inputs.get(index)
            if node is None or not node.users or find(graph, ops.COPY_TO_DEVICE_, ctx.engine_id, param.index):
                continue
            check_shape(node, param, "the input")
            todo.append((param.index, node, min(node.users, key=order.__getitem__)))
        for p, node, first_use in todo:
            with graph.inserting_before(first_use):
                insert(graph, ops.COPY_TO_DEVICE_, (node, ctx.engine_id, p))
        return len(todo)


def fetch_order(gm: GraphModule, engine_id: int) -> list[int]:
    """The engine's parameters in the order in which this graph needs them."""
    fetches = gm.graph.find_nodes(op="call_function", target=ops.COPY_TO_DEVICE_)
    in_graph = {node: position for position, node in enumerate(gm.graph.nodes)}
    mine = sorted((node for node in fetches if node.args[1] == engine_id), key=in_graph.__getitem__)
    return [p for node in mine if isinstance(p := node.args[2], int)]
