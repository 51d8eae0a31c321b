"""Forward: what the host computed arrives just before it is read."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from zenflow_compile.passes.context import PassContext, Phase, check_shape, insert, written_inputs
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


@dataclass(frozen=True, slots=True)
class FetchParameters:
    """Wait for and merge the deferred slices of a parameter before its first use, be it a view, a read or a save.

    Before::

        transposed = permute(weight, [1, 0])
        y = mm(x, transposed)

    After::

        zenflow.copy_to_device_(weight, engine, p)
        transposed = permute(weight, [1, 0])
        y = mm(x, transposed)

    A parameter at two inputs of the graph is fetched in front of the first use of each: the compiler does not know that
    both are the same memory and may exchange reads of one with writes to the other. The first fetch applies what is
    due, so that the second finds nothing to do.
    """

    name: str = "fetch_parameters"
    phases: frozenset[Phase] = frozenset({Phase.FORWARD, Phase.INFERENCE})
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"fetched parameters"})

    def __call__(self, gm: GraphModule, ctx: PassContext) -> int:
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
                insert(graph, ops.COPY_TO_DEVICE_, (node, ctx.engine_id, p))
        return len(todo)


def fetch_order(gm: GraphModule, engine_id: int) -> list[int]:
    """The engine's parameters in the order in which this graph needs them first, fused or not."""
    order: list[int] = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in (ops.COPY_TO_DEVICE_, ops.FETCH_PARAMETERS_):
            _, engine, ps = node.args
            if engine == engine_id:
                order += ps if isinstance(ps, (list, tuple)) else [ps]
    return list(dict.fromkeys(order))
