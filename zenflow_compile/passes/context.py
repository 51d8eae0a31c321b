"""What a pass is, what it may read, and the few graph edits that all passes share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from zenflow_compile.planning.plan import ParamPlan, Plan
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


class Phase(StrEnum):
    """Which graph of a training step is rewritten."""

    FORWARD = "forward"
    INFERENCE = "inference"
    BACKWARD = "backward"
    STEP = "step"  # built by the emitter of update_parameters, not captured


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """All that a pass may read besides the graph.

    Attributes:
        plan: the plan of one engine.
        engine_id: that engine; every inserted node names it.
        phase: which graph this is.
        params: ``(p, input index)`` for each parameter of the engine that Dynamo's graph has as an input: ``p`` is the
            index in the plan, the input index counts the inputs of Dynamo's graph. A parameter that the graph was
            called with twice has two pairs.
        finalizes_in_backward: the update nodes may sit in the backward graph.
        forward_order: parameters by first use in the forward, as far as known.
        weight_grad_bytes: how much the order of weight gradients may keep alive; 0 leaves the order as it is.
    """

    plan: Plan
    engine_id: int
    phase: Phase
    params: tuple[tuple[int, int], ...]
    finalizes_in_backward: bool = False
    forward_order: tuple[int, ...] = ()
    weight_grad_bytes: int = 0

    def in_forward_order(self) -> list[int]:
        """This graph's parameters by first use in the forward; those that it did not say in the plan's order."""
        known = {p: position for position, p in enumerate(self.forward_order)}
        return sorted({p for p, _ in self.params}, key=lambda p: (known.get(p, len(known)), p))

    def inputs_of(self, p: int) -> list[int]:
        """The input indices of one parameter, in order; more than one if the graph was called with it twice."""
        return sorted(index for each, index in self.params if each == p)

    def offloaded(self) -> Iterator[tuple[ParamPlan, int]]:
        """The parameters that have anything inserted for them, with their input indices."""
        for p, index in self.params:
            if (param := self.plan.params[p]).offloaded:
                yield param, index


class GraphPass(Protocol):
    """One rewrite. It edits the graph in place and returns how many places it rewrote; run twice, it rewrites none.

    Attributes:
        name: for reports and errors.
        phases: the graphs that it understands.
        requires: facts about the graph that passes before it must have provided.
        provides: facts that hold after it.
    """

    @property
    def name(self) -> str: ...
    @property
    def phases(self) -> frozenset[Phase]: ...
    @property
    def requires(self) -> frozenset[str]: ...
    @property
    def provides(self) -> frozenset[str]: ...

    def __call__(self, gm: GraphModule, ctx: PassContext) -> int: ...


def find(graph: Graph, op: Any, engine_id: int, p: int | None = None) -> Node | None:
    """The node of this op for this engine (and parameter), if there is one."""
    wanted = (engine_id,) if p is None else (engine_id, p)
    nodes: list[Node] = graph.find_nodes(op="call_function", target=op)
    return next((node for node in nodes if node.args[-len(wanted) :] == wanted), None)


def insert(graph: Graph, op: Any, args: tuple[Any, ...]) -> Node:
    """Insert a call of one of our ops at the graph's insertion point, with the example value that Inductor needs."""
    ints = [str(arg) for arg in args[1:] if isinstance(arg, int)]  # engine and p, which alone names the node
    name = "_".join((op._schema.name.removeprefix("zenflow::").rstrip("_"), *ints[-1:]))
    node = graph.create_node("call_function", op, args, name=name)
    node.meta["val"] = None
    if op._schema.returns:
        examples = torch.fx.node.map_arg(args, lambda arg: arg.meta["val"])
        with private.fake_mode_of(graph):
            node.meta["val"] = op(*examples)
    return node


def insert_after(graph: Graph, place: Node, op: Any, args: tuple[Any, ...]) -> Node:
    """``insert`` right behind ``place``."""
    with graph.inserting_after(place):
        return insert(graph, op, args)


def token(graph: Graph, engine_id: int) -> Node:
    """The engine's token of a backward graph, which orders its ops ([Note: tokens]); made where there is none yet.

    It is the graph's first node, also because making it tells the engine that a backward runs.
    """
    if (found := find(graph, ops.BEGIN_BACKWARD, engine_id)) is not None:
        return found
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        return insert(graph, ops.BEGIN_BACKWARD, (engine_id,))


def written_inputs(graph: Graph) -> set[Node]:
    """The inputs that our nodes write to."""
    targets = (ops.COPY_TO_DEVICE_, ops.ADAM_COLUMNS_, ops.FETCH_PARAMETERS_, ops.UPDATE_PARAMETERS)
    nodes = (node for op in targets for node in graph.find_nodes(op="call_function", target=op))
    written = (node.args[0] if isinstance(node.args[0], (list, tuple)) else (node.args[0],) for node in nodes)
    return {each for group in written for each in group if isinstance(each, Node)}


def written_by(node: Node) -> set[int | None]:
    """The storages that a node writes to, as ``storage_of`` identifies them."""
    schema = private.schema_of(node)
    if schema is None or not schema.is_mutable:
        return set()
    written = [
        value
        for argument, value in zip(schema.arguments, node.args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    flat = [each for value in written for each in (value if isinstance(value, (list, tuple)) else (value,))]
    return {private.storage_of(each) for each in flat if isinstance(each, Node)} - {None}


def gradient(graph: Graph, input_index: int) -> tuple[Node, int] | None:
    """A backward graph's gradient of one of Dynamo's inputs and its position among the outputs; None without one."""
    position = private.aot_gradients(graph).get(input_index)
    if position is None:
        return None
    node = graph.output_node().args[0][position]  # type: ignore[index]
    return (node, position) if isinstance(node, Node) else None


def check_shape(node: Node, param: ParamPlan, role: str) -> None:
    """Better no graph than one in which parameters changed places.

    Raises:
        RuntimeError: the node does not have the parameter's shape.
    """
    if tuple(node.meta["val"].shape) != param.shape:
        raise RuntimeError(
            f"{role} of {param.name} is {tuple(node.meta['val'].shape)} in the graph and {param.shape} in the plan: "
            f"AOTAutograd of torch {torch.__version__} does not number its inputs as expected; "
            "please report this, and train without torch.compile until then"
        )
