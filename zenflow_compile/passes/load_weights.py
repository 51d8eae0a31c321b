"""All graphs: weights in host memory are on the device around their uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from zenflow_compile.passes.base import PassContext, Phase, insert
from zenflow_compile.planning.weight_memory import GraphLoads, schedule_weights
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


def load_weights(gm: GraphModule, ctx: PassContext) -> int:
    """Load each offloaded weight in front of its uses, and unload it behind them, within a byte budget.

    Before::

        transposed = permute(w, [1, 0])
        y = mm(x, transposed)
        ...
        z = mm(y, w)

    After::

        token = zenflow.begin_weights(engine, graph)
        zenflow.load_weight_([w], token, engine, p)
        transposed = permute(w, [1, 0])
        y = mm(x, transposed)
        zenflow.unload_weight_([w], token, engine, p)     # if the budget is needed for others until the next use
        ...
        zenflow.load_weight_([w], token, engine, p)
        z = mm(y, w)
        zenflow.unload_weight_([w], token, engine, p)

    A use is an operator that reads the weight's memory, directly or through views, and whose result has memory of its
    own. Each use gets its own views, behind the load: eager operators make no view of an empty storage.
    """
    graph = gm.graph
    begun = graph.find_nodes(op="call_function", target=ops.BEGIN_WEIGHTS)
    if ctx.weights is None or any(node.args[0] == ctx.engine_id for node in begun):
        return 0
    inputs = inputs_by_weight(graph, ctx)
    of_storage = weights_by_storage(inputs)
    found = {node: ps for node in graph.nodes if (ps := weights_read_by(node, of_storage))}
    if not found:
        return 0
    sizes = {p: ctx.plan.params[p].weight_bytes for p in inputs}
    if ctx.weights.strict:
        check_together(found, sizes, ctx)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        # The token that orders the loads and unloads. It also tells the engine which graph runs.
        start = insert(graph, ops.BEGIN_WEIGHTS, (ctx.engine_id, ctx.number))
    turns = schedule_weights(list(found.values()), sizes, ctx.weights.ring_bytes)
    count = 0
    for node, turn in zip(found, turns, strict=True):
        before = [(ops.UNLOAD_WEIGHT_, turn.evicted), (ops.LOAD_WEIGHT_, turn.loaded)]
        with graph.inserting_before(node):
            count += insert_calls(graph, before, inputs, start, ctx.engine_id, node)
            sink_views(graph, node, of_storage)
        with graph.inserting_before(node.next):
            count += insert_calls(graph, [(ops.UNLOAD_WEIGHT_, turn.ended)], inputs, start, ctx.engine_id, node)
    for node in reversed(graph.nodes):  # views that only uses with their own had read
        if not node.users and is_view(node, of_storage):
            graph.erase_node(node)
    return count


def loads_of(gm: GraphModule, ctx: PassContext) -> GraphLoads:
    """What the graph loads, in order, and its most bytes of loaded weights."""
    order: list[int] = []
    now = peak = 0
    for node in gm.graph.nodes:
        if node.target not in (ops.LOAD_WEIGHT_, ops.UNLOAD_WEIGHT_) or node.args[2] != ctx.engine_id:
            continue
        size = ctx.plan.params[p := node.args[3]].weight_bytes
        if node.target is ops.LOAD_WEIGHT_:
            order.append(p)
            peak = max(peak, now := now + size)
        else:
            now -= size
    return GraphLoads(tuple(order), peak, reads_updates=ctx.phase is not Phase.BACKWARD)


def check_together(uses: Mapping[Node, frozenset[int]], sizes: Mapping[int, int], ctx: PassContext) -> None:
    """Raise ValueError if an operator reads more weights together than the budget has room for."""
    assert ctx.weights is not None
    for node, ps in uses.items():
        if (needed := sum(sizes[p] for p in ps)) > ctx.weights.ring_bytes:
            names = ", ".join(ctx.plan.params[p].name for p in sorted(ps))
            raise ValueError(
                f"offload_weights={ctx.weights.ring_bytes} bytes must be at least {needed}: {node.target} reads "
                f"{names} together; pass more, or a share such as 1.0, which loads as few weights at a time as "
                "operators read"
            )


def insert_calls(
    graph: Graph,
    calls: list[tuple[Any, tuple[int, ...]]],
    inputs: Mapping[int, list[Node]],
    start: Node,
    engine_id: int,
    serves: Node,
) -> int:
    """Insert calls for the weights of each operator at the graph's insertion point. Returns how many."""
    pairs = [(op, p) for op, ps in calls for p in ps]
    for op, p in pairs:
        insert(graph, op, (inputs[p], start, engine_id, p), serves=serves)
    return len(pairs)


def inputs_by_weight(graph: Graph, ctx: PassContext) -> dict[int, list[Node]]:
    """The inputs that have the memory of each offloaded weight: the parameter, and views that a forward has saved."""
    assert ctx.weights is not None
    storages = dict(ctx.weight_storages)
    placeholders = private.aot_inputs(graph)
    for p, index in ctx.params:
        if p in ctx.weights.ps and (node := placeholders.get(index)) is not None:
            storages[private.storage_of(node)] = p
    found: dict[int, list[Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        of_weight = storages.get(private.storage_of(node))
        if of_weight is not None and of_weight in ctx.weights.ps:
            found.setdefault(of_weight, []).append(node)
    return found


def weights_read_by(node: Node, of_storage: Mapping[int | None, int]) -> frozenset[int]:
    """The weights whose memory an operator reads for a result with memory of its own.

    A view that leaves the graph counts, too: it must be made while the weight is there.
    """
    if node.op != "call_function" or str(node.target).startswith("zenflow."):
        return frozenset()
    read = {p for each in node.all_input_nodes if (p := of_storage.get(private.storage_of(each))) is not None}
    if not read or not is_view(node, of_storage) or any(user.op == "output" for user in node.users):
        return frozenset(read)
    return frozenset()


def is_view(node: Node, of_storage: Mapping[int | None, int]) -> bool:
    """Whether all results of an operator are views of a weight."""
    if node.op != "call_function":
        return False
    value = node.meta.get("val")
    results = value if isinstance(value, (list, tuple)) else (value,)
    storages = [private.storage_of_value(each) for each in results]
    return bool(storages) and all(storage is not None and storage in of_storage for storage in storages)


def sink_views(graph: Graph, node: Node, of_storage: Mapping[int | None, int]) -> None:
    """Give ``node`` views of weights of its own, made at the graph's insertion point."""
    made: dict[Node, Node] = {}

    def own(each: Node) -> Node:
        if not is_view(each, of_storage):
            return each
        if each not in made:
            args, kwargs = map_arg((each.args, each.kwargs), own)
            made[each] = graph.create_node(each.op, each.target, args, kwargs)
            made[each].meta = dict(each.meta)
        return made[each]

    node.args, node.kwargs = map_arg((node.args, node.kwargs), own)


def weights_to_keep(graph: Graph, ctx: PassContext) -> dict[int, str]:
    """Weights that must stay on the device because of this graph, with the reason."""
    if ctx.weights is None:
        return {}
    regions = [node for node in graph.nodes if private.calls_subgraph(node)]
    found = [(read, "a nested compiled region reads it") for node in regions for read in node.all_input_nodes]
    if ctx.phase is not Phase.BACKWARD:
        found += [(node, "the forward returns a view of it") for node in private.returned_nodes(graph)]
        found += [(node, "the forward writes it") for node in private.written_by_forward(graph)]
    of_storage = storages_of_weights(graph, ctx)
    pairs = [(of_storage.get(private.storage_of(node)), reason) for node, reason in found]
    return {p: reason for p, reason in pairs if p is not None}


def storages_of_weights(graph: Graph, ctx: PassContext) -> dict[int | None, int]:
    """The storages of the offloaded weights' example values, by which the backward knows saved views of them."""
    return weights_by_storage(inputs_by_weight(graph, ctx))


def weights_by_storage(inputs: Mapping[int, list[Node]]) -> dict[int | None, int]:
    """The weights by the storages of their inputs' example values.

    Hazard: the inputs of one weight may have different ones. A graph that Dynamo captured with two weights may be
    called with one weight for both.
    """
    return {private.storage_of(node): p for p, nodes in inputs.items() for node in nodes}
