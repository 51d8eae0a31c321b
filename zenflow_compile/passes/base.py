"""What a pass is, what it may read, and the graph edits and look-ups that several passes share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zenflow_compile.planning.plan import ParamPlan, Plan
from zenflow_compile.planning.weight_memory import OffloadedWeights
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private

SMALL_BYTES = 1 << 16
"""Only a parameter of at most this size is fetched before computation that precedes its first use, or updated after
computation that follows its last use: a link of 16 GB/s copies this much in the time of one op call."""

TOGETHER_BYTES = 1 << 18
"""At most this much of them moves to one place, because the computation that they move over no longer hides their
updates. One core updates 2^17 bf16 elements, 34 bytes each at 10 GB/s, in less than half a millisecond, and one in
``update_interval`` update windows is flushed per step."""


class Phase(StrEnum):
    """Which graph of a training step is rewritten."""

    FORWARD = "forward"
    INFERENCE = "inference"
    BACKWARD = "backward"
    STEP = "step"  # not captured: what ``step()`` does, written as a graph for ``explain``


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """Everything that a pass may read besides the graph.

    Attributes:
        plan: the plan of one engine.
        engine_id: the id of that engine, which every inserted node has as an argument.
        phase: which graph this is.
        params: ``(index in the plan, index among the inputs of Dynamo's graph)`` for each parameter of the engine that
            is one of these. A parameter that the graph was called with twice has two pairs.
        finalizes_in_backward: whether the backward graph may contain update nodes.
        forward_order: parameters by first use in the forward, as far as known.
        weight_grad_bytes: device memory that a new order of the weight gradients may keep alive; 0 keeps the order.
        weights: those that are offloaded; None: all are on the device.
        number: of this graph among those of the engine.
        weight_storages: their indices by the storage of their example values in the forward: of views that it saves.
    """

    plan: Plan
    engine_id: int
    phase: Phase
    params: tuple[tuple[int, int], ...]
    finalizes_in_backward: bool = False
    forward_order: tuple[int, ...] = ()
    weight_grad_bytes: int = 0
    weights: OffloadedWeights | None = None
    number: int = 0
    weight_storages: Mapping[int | None, int] = field(default_factory=dict)

    def inputs_of(self, p: int) -> list[int]:
        """The input indices of one parameter, in order. There are several if the graph was called with it twice."""
        return sorted(index for each, index in self.params if each == p)

    def offloaded(self) -> Iterator[tuple[ParamPlan, int]]:
        """The offloaded parameters with their input indices; passes insert no nodes for other parameters."""
        for p, index in self.params:
            if (param := self.plan.params[p]).offloaded:
                yield param, index


GraphPass = Callable[[GraphModule, PassContext], int]
"""One rewrite: a function that edits the graph in place and returns how many places it rewrote.

A second run on the same graph rewrites nothing and returns 0. ``passes.pipeline`` has the order of the passes."""


def insert(graph: Graph, op: Any, args: tuple[Any, ...], serves: Node | None = None) -> Node:
    """Insert a call of one of our ops at the graph's insertion point, with the example value that Inductor needs.

    The source line and module path of ``serves``, the model's node that the call is inserted for, are copied to the new
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


def token(graph: Graph, engine_id: int) -> Node:
    """Return the engine's dependency token of a backward graph, which orders its ops ([Note: tokens] in ``ops``).

    Inserts it where the graph has none. It is the graph's first node, because the op also tells the engine that a
    backward runs.
    """
    begun: list[Node] = graph.find_nodes(op="call_function", target=ops.BEGIN_BACKWARD)
    if found := [node for node in begun if node.args[0] == engine_id]:
        return found[0]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        return insert(graph, ops.BEGIN_BACKWARD, (engine_id,))


def written_inputs(graph: Graph) -> set[Node]:
    targets = (ops.FETCH_PARAMETERS_, ops.UPDATE_PARAMETERS, ops.LOAD_WEIGHT_, ops.UNLOAD_WEIGHT_)
    nodes = (node for op in targets for node in graph.find_nodes(op="call_function", target=op))
    return {each for node in nodes for each in node.args[0] if isinstance(each, Node)}


def computes_nothing(node: Node) -> bool:
    """Whether the node is no computation of the model: a view, an element of a tuple, one of our nodes."""
    if node.op != "call_function" or node.target is operator.getitem or str(node.target).startswith("zenflow."):
        return True
    schema = private.schema_of(node)
    if schema is None or schema.is_mutable:
        return False
    return bool(schema.returns) and all(each.alias_info for each in schema.returns)


def size_of(param: ParamPlan) -> int:
    """Bytes of a parameter in the graph: of all ranks."""
    return param.whole.numel * param.dtype.itemsize


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


def check_shape(node: Node, param: ParamPlan, role: str) -> None:
    """Raise RuntimeError if the node has another shape than the parameter: guards against a wrong match."""
    if tuple(node.meta["val"].shape) != param.whole.shape:
        raise RuntimeError(
            f"{role} of {param.name} is {tuple(node.meta['val'].shape)} in the graph and {param.whole.shape} in the "
            f"plan: AOTAutograd of torch {torch.__version__} does not number its inputs as expected; "
            "please report this, and train without torch.compile until then"
        )
