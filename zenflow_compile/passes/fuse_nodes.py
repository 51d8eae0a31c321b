"""Last in every pipeline: chains of the readable nodes become the few ops that run."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from zenflow_compile.passes.context import PassContext, Phase, insert, written_by
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private

SMALL_BYTES = 1 << 16
"""Only a parameter that is not larger is fetched in front of computation that comes before its first use, or updated
behind computation that comes after its last: an op call costs about as long as a link of 16 GB/s needs for so much."""

TOGETHER_BYTES = 1 << 18
"""And only so many bytes of them are moved to one place. The computation that they are moved over hides their updates
no more: one core updates 2^17 bf16 elements, 34 bytes each at 10 GB/s, in less than half a millisecond, and windows
that close together are one in ``update_interval`` of them."""

OFFLOAD_BYTES = 1 << 20
"""Gradients are offloaded by one op up to so many bytes of them; a larger gradient has an op of its own. The first
gradient of a group lives until the last one is computed, so this is also how much more device memory gradients may
take. A link of 16 GB/s copies so much in 66 us, about as long as four op calls take: the copies lose no time that the
link could have used for anything larger."""


@dataclass(frozen=True, slots=True)
class FuseNodes:
    """One op per gradient, per block's fetches, and for all updates.

    Before::

        norms = zenflow.column_norms(grad, engine, p)
        selected = zenflow.select_columns(norms, engine, p)
        zenflow.split_columns(token, grad, selected, engine, p)
        zenflow.copy_to_host(token, engine, p)

        zenflow.adam_columns_(a, token, engine, 0)
        zenflow.update_on_host(token, engine, 0)
        zenflow.adam_columns_(b, token, engine, 1)
        zenflow.update_on_host(token, engine, 1)

    After::

        zenflow.offload_gradients(token, [grad], engine, [p])

        zenflow.update_parameters([a, b], token, engine, [0, 1])

    Successive gradients are in one node, at the last one's place, up to ``OFFLOAD_BYTES`` of them, unless a node that
    updates one of them, or writes to its memory, lies between. Updates are in one node if nothing but views lies
    between the two, or if the first one is small (``SMALL_BYTES``). Likewise in a forward, if nothing but views lies
    between the first uses, or if the second parameter is small::

        zenflow.copy_to_device_(a, engine, 0)             zenflow.fetch_parameters_([a, b], engine, [0, 1])
        transposed = permute(a, [1, 0])              =>   transposed = permute(a, [1, 0])
        zenflow.copy_to_device_(b, engine, 1)             y = addmm(b, x, transposed)
        y = addmm(b, x, transposed)

    ``column_norms`` takes memory that ``copy_to_host`` gives back, and no token holds it in its place between other
    parameters' nodes: as one op nothing can come between. A chain whose parts somebody else reads stays as it is.
    """

    name: str = "fuse_nodes"
    phases: frozenset[Phase] = frozenset(Phase)
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"fused nodes"})

    def __call__(self, gm: GraphModule, ctx: PassContext) -> int:
        # Updates first: where they move back, they no longer separate gradients.
        return fuse_fetches(gm.graph, ctx) + fuse_updates(gm.graph, ctx) + fuse_offloads(gm.graph, ctx)


def is_node(node: Node, engine_id: int, *targets: Any) -> bool:
    """Whether the node calls one of these ops for the engine."""
    return node.op == "call_function" and node.target in targets and bool(node.args[-2] == engine_id)


def index_of(node: Node) -> int:
    """Which parameter a readable node is for."""
    p = node.args[-1]
    assert isinstance(p, int)
    return p


def fuse_offloads(graph: Graph, ctx: PassContext) -> int:
    """One op for a few small gradients, or for one."""
    groups = offload_groups(graph, ctx)
    for group in groups:
        place, *_, copy = group[-1]
        grads = [norms.args[0] for norms, *_ in group]
        ps = [index_of(norms) for norms, *_ in group]
        with graph.inserting_before(place):
            insert(graph, ops.OFFLOAD_GRADIENTS, (copy.args[0], grads, ctx.engine_id, ps))
        for chain in group:
            erase(chain)
    return len(groups)


def offload_groups(graph: Graph, ctx: PassContext) -> list[list[Chain]]:
    """Gradients to be offloaded at the last one's place: see the class and ``OFFLOAD_BYTES``."""
    chains = {chain[0]: chain for chain in gradient_chains(graph, ctx.engine_id)}
    groups: list[list[Chain]] = []
    size = 0
    waiting: set[int] = set()  # the group that may grow: its parameters, and its memory
    memory: set[int | None] = set()
    for node in graph.nodes:
        if (chain := chains.get(node)) is None:
            if not waiting.isdisjoint(updated_by(node, ctx.engine_id)) or not memory.isdisjoint(written_by(node)):
                waiting, memory = set(), set()
            continue
        p, grad = index_of(node), node.args[0]
        assert isinstance(grad, Node)
        size += bytes_of(p, ctx)
        if not waiting or size > OFFLOAD_BYTES:
            groups.append([])
            waiting, memory, size = set(), set(), bytes_of(p, ctx)
        groups[-1].append(chain)
        waiting.add(p)
        memory.add(private.storage_of(grad))
    return groups


def updated_by(node: Node, engine_id: int) -> set[int]:
    """The parameters of the engine that the node updates."""
    if not is_node(node, engine_id, ops.ADAM_COLUMNS_, ops.UPDATE_ON_HOST, ops.UPDATE_PARAMETERS):
        return set()
    ps: Any = node.args[-1]
    return {ps} if isinstance(ps, int) else set(ps)


Chain = tuple[Node, Node, Node, Node]
"""``column_norms`` to ``copy_to_host`` of one parameter."""


def gradient_chains(graph: Graph, engine_id: int) -> list[Chain]:
    """``column_norms`` to ``copy_to_host`` of each parameter whose chain nobody else reads."""
    chains = []
    copies = {index_of(node): node for node in graph.nodes if is_node(node, engine_id, ops.COPY_TO_HOST)}
    for norms in graph.nodes:
        if not is_node(norms, engine_id, ops.COLUMN_NORMS):
            continue
        select = only_user(norms, ops.SELECT_COLUMNS)
        split = only_user(select, ops.SPLIT_COLUMNS) if select else None
        copy = copies.get(index_of(norms))
        if select is not None and split is not None and copy is not None and split.args[1] is norms.args[0]:
            chains.append((norms, select, split, copy))
    return chains


def only_user(node: Node, target: Any) -> Node | None:
    """The node's user, if there is one alone and it calls ``target``."""
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and user is not None and user.target is target else None


def fuse_updates(graph: Graph, ctx: PassContext) -> int:
    """One op for updates that lose nothing by coming together; none of them depends on another parameter's."""
    count = 0
    for group in update_groups(graph, ctx):
        columns = [node for node in group if node.target is ops.ADAM_COLUMNS_]
        ps = [index_of(node) for node in group if node.target is ops.UPDATE_ON_HOST]
        if not ps or [index_of(node) for node in columns] != [p for p in ps if ctx.plan.params[p].k]:
            continue  # half of some parameter's update stands elsewhere
        with graph.inserting_before(group[-1]):
            params = [node.args[0] for node in columns]
            insert(graph, ops.UPDATE_PARAMETERS, (params, group[-1].args[0], ctx.engine_id, ps))
        erase(group)
        count += 1
    return count


def update_groups(graph: Graph, ctx: PassContext) -> list[list[Node]]:
    """Updates to be done at the last one's place: see the class and the two constants."""
    groups: list[list[Node]] = []
    computed = False  # since the last update
    for node in graph.nodes:
        if not is_node(node, ctx.engine_id, ops.ADAM_COLUMNS_, ops.UPDATE_ON_HOST):
            computed = computed or not computes_nothing(node)
            continue
        sizes = [bytes_of(p, ctx) for p in {index_of(each) for each in groups[-1]}] if groups else []
        if groups and (not computed or (max(sizes) <= SMALL_BYTES and sum(sizes) <= TOGETHER_BYTES)):
            groups[-1].append(node)
        else:
            groups.append([node])
        computed = False
    return groups


def fuse_fetches(graph: Graph, ctx: PassContext) -> int:
    """One op for fetches that lose nothing by coming together; also a single one, so that one form alone runs."""
    groups = fetch_groups(graph, ctx)
    for group in groups:
        with graph.inserting_before(group[0]):
            params = [node.args[0] for node in group]
            insert(graph, ops.FETCH_PARAMETERS_, (params, ctx.engine_id, [index_of(node) for node in group]))
        erase(group)
    return len(groups)


def fetch_groups(graph: Graph, ctx: PassContext) -> list[list[Node]]:
    """Fetches to be done at the first one's place: see the class and the two constants."""
    groups: list[list[Node]] = []
    computed = False  # since the place of the last group
    ahead = 0
    for node in graph.nodes:
        if not is_node(node, ctx.engine_id, ops.COPY_TO_DEVICE_):
            computed = computed or not computes_nothing(node)
            continue
        size = bytes_of(index_of(node), ctx)
        moved = size if computed else 0
        if groups and (not moved or (size <= SMALL_BYTES and ahead + moved <= TOGETHER_BYTES)):
            groups[-1].append(node)
            ahead += moved
        else:
            groups.append([node])
            computed, ahead = False, 0
    return groups


def bytes_of(p: int, ctx: PassContext) -> int:
    """Size of a parameter."""
    param = ctx.plan.params[p]
    return param.numel * param.dtype.itemsize


def computes_nothing(node: Node) -> bool:
    """Whether the node is none of the model's computation: a view, a part of a tuple, one of ours."""
    if node.op != "call_function" or node.target is operator.getitem or str(node.target).startswith("zenflow."):
        return True
    schema = private.schema_of(node)
    if schema is None or schema.is_mutable:
        return False
    return bool(schema.returns) and all(each.alias_info for each in schema.returns)


def erase(nodes: list[Node] | tuple[Node, ...]) -> None:
    """Remove nodes, users before what they use."""
    for node in reversed(nodes):
        node.graph.erase_node(node)
