"""The graph edits and look-ups that several passes share."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


def find(graph: Graph, op: Any, engine_id: int, p: int | None = None) -> Node | None:
    """Return the node that calls this op for the engine (and for the parameter, if given); None without one."""
    wanted = (engine_id,) if p is None else (engine_id, p)
    nodes: list[Node] = graph.find_nodes(op="call_function", target=op)
    return next((node for node in nodes if node.args[-len(wanted) :] == wanted), None)


def insert(graph: Graph, op: Any, args: tuple[Any, ...], serves: Node | None = None) -> Node:
    """Insert a call of one of our ops at the graph's insertion point, with the example value that Inductor needs.

    Args:
        serves: the model's node that the call is inserted for. Its source line and module path are copied to the new
            node, so that printed graphs and generated code show them.
    """
    name = op._schema.name.removeprefix("zenflow::").rstrip("_")
    if len(args) > 1:  # named after its parameter, or the first one; tokens have none
        name += f"_{args[-1] if isinstance(args[-1], int) else args[-1][0]}"
    node = graph.create_node("call_function", op, args, name=name)
    node.meta["val"] = None
    if serves is not None:
        private.copy_origin(serves, node)
    if op._schema.returns:
        examples = torch.fx.node.map_arg(args, lambda arg: arg.meta["val"])
        with private.fake_mode_of(graph):
            node.meta["val"] = op(*examples)
    return node


def insert_after(graph: Graph, place: Node, op: Any, args: tuple[Any, ...], serves: Node) -> Node:
    """``insert`` directly after ``place``."""
    with graph.inserting_after(place):
        return insert(graph, op, args, serves)


def token(graph: Graph, engine_id: int) -> Node:
    """Return the engine's dependency token of a backward graph, which orders its ops ([Note: tokens] in ``ops``).

    Inserts it where the graph has none. It is the graph's first node, because the op also tells the engine that a
    backward runs.
    """
    if (found := find(graph, ops.BEGIN_BACKWARD, engine_id)) is not None:
        return found
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        return insert(graph, ops.BEGIN_BACKWARD, (engine_id,))


def begin_weights(graph: Graph, engine_id: int, number: int) -> Node:
    """Insert the token that orders the engine's loads and unloads. It also tells the engine which graph runs."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        return insert(graph, ops.BEGIN_WEIGHTS, (engine_id, number))


def written_inputs(graph: Graph) -> set[Node]:
    """The inputs that our nodes write to."""
    targets = (
        ops.COPY_TO_DEVICE_, ops.ADAM_COLUMNS_, ops.FETCH_PARAMETERS_, ops.UPDATE_PARAMETERS,
        ops.LOAD_WEIGHT_, ops.UNLOAD_WEIGHT_,
    )  # fmt: skip
    nodes = (node for op in targets for node in graph.find_nodes(op="call_function", target=op))
    written = (node.args[0] if isinstance(node.args[0], (list, tuple)) else (node.args[0],) for node in nodes)
    return {each for group in written for each in group if isinstance(each, Node)}


def storages_written_by(node: Node) -> set[int | None]:
    """The storages that a node writes to, as ``storage_of`` identifies them."""
    schema = private.schema_of(node)
    if schema is None or not schema.is_mutable:
        return set()
    arguments = zip(schema.arguments, node.args, strict=False)
    values = [value for each, value in arguments if each.alias_info is not None and each.alias_info.is_write]
    flat = [each for value in values for each in (value if isinstance(value, (list, tuple)) else (value,))]
    return {private.storage_of(each) for each in flat if isinstance(each, Node)} - {None}


def gradient(graph: Graph, input_index: int) -> tuple[Node, int] | None:
    """A backward graph's gradient of one of Dynamo's inputs and its position among the outputs; None without one."""
    position = private.aot_gradients(graph).get(input_index)
    if position is None:
        return None
    node = graph.output_node().args[0][position]  # type: ignore[index]
    return (node, position) if isinstance(node, Node) else None


def erase(nodes: list[Node] | tuple[Node, ...]) -> None:
    """Remove nodes, users before what they use."""
    for node in reversed(nodes):
        node.graph.erase_node(node)


def check_shape(node: Node, param: ParamPlan, role: str) -> None:
    """Guard against matching a node to the wrong parameter.

    Raises:
        RuntimeError: the node does not have the parameter's shape.
    """
    if tuple(node.meta["val"].shape) != param.whole.shape:
        raise RuntimeError(
            f"{role} of {param.name} is {tuple(node.meta['val'].shape)} in the graph and {param.whole.shape} in the "
            f"plan: AOTAutograd of torch {torch.__version__} does not number its inputs as expected; "
            "please report this, and train without torch.compile until then"
        )
