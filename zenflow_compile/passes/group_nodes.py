"""Last in every pipeline: replace groups of the inserted nodes by the few ops that run."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, GraphModule, Node

from zenflow_compile.passes.base import PassContext
from zenflow_compile.passes.graph_edits import erase, insert, storages_written_by
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private

SMALL_BYTES = 1 << 16
"""Only a parameter of at most this size is fetched before computation that precedes its first use, or updated after
computation that follows its last use: a link of 16 GB/s copies this much in the time of one op call."""

TOGETHER_BYTES = 1 << 18
"""At most this much of them moves to one place, because the computation that they move over no longer hides their
updates. One core updates 2^17 bf16 elements, 34 bytes each at 10 GB/s, in less than half a millisecond, and one in
``update_interval`` update windows is flushed per step."""

OFFLOAD_BYTES = 1 << 20
"""Gradients of up to this size in total are offloaded by one op; a larger gradient has its own op. The first gradient
of a group lives until the last one is computed, so this is also the device memory that grouping may cost. A link of
16 GB/s copies this much in 66 us, the time of a few op calls: the link loses no time that larger copies could use."""

Chain = tuple[Node, ...]
"""The nodes of one parameter's gradient: ``column_norms``, ``select_columns``, ``split_columns`` and ``copy_to_host``,
or ``reduce_gradient`` alone."""


def group_nodes(gm: GraphModule, ctx: PassContext) -> int:
    """Replace groups of inserted nodes by fused ops: offloads, updates, and fetches.

    Before::

        norms = zenflow.column_norms(grad, engine, p)
        selected = zenflow.select_columns(norms, engine, p)
        zenflow.split_columns(grad, token, selected, engine, p)
        zenflow.copy_to_host(token, engine, p)

        zenflow.adam_columns_(a, token, engine, 0)
        zenflow.update_on_host(token, engine, 0)
        zenflow.adam_columns_(b, token, engine, 1)
        zenflow.update_on_host(token, engine, 1)

    After::

        zenflow.offload_gradients([grad], token, engine, [p])

        zenflow.update_parameters([a, b], token, engine, [0, 1])

    Successive gradients share a node, at the last one's place, up to ``OFFLOAD_BYTES``, unless a node between them
    updates one of the parameters or writes to one of the gradients; likewise those that are sent to other ranks
    (``reduce_gradient``). Updates share a node if only views lie between them, or if the first one is small
    (``SMALL_BYTES``). So do fetches in a forward, if only views lie between the first uses, or if the second parameter
    is small::

        zenflow.copy_to_device_(a, engine, 0)             zenflow.fetch_parameters_([a, b], engine, [0, 1])
        transposed = permute(a, [1, 0])              =>   transposed = permute(a, [1, 0])
        zenflow.copy_to_device_(b, engine, 1)             y = addmm(b, x, transposed)
        y = addmm(b, x, transposed)

    ``column_norms`` takes memory that ``copy_to_host`` gives back, and no dependency token keeps other parameters'
    nodes from moving between the two. Within one op nothing can. A chain with other readers stays as it is.
    """
    # Updates before offloads: an update that moves back no longer separates gradients.
    return group_fetches(gm.graph, ctx) + group_updates(gm.graph, ctx) + group_offloads(gm.graph, ctx)


def is_node(node: Node, engine_id: int, *targets: Any) -> bool:
    """Whether the node calls one of these ops for the engine."""
    return node.op == "call_function" and node.target in targets and bool(node.args[-2] == engine_id)


def index_of(node: Node) -> int:
    """The parameter that a node of one parameter is for."""
    p = node.args[-1]
    assert isinstance(p, int)
    return p


def bytes_of(p: int, ctx: PassContext) -> int:
    """Size of a parameter."""
    param = ctx.plan.params[p]
    return param.whole.numel * param.dtype.itemsize


def computes_nothing(node: Node) -> bool:
    """Whether the node is no computation of the model: a view, an element of a tuple, one of our nodes."""
    if node.op != "call_function" or node.target is operator.getitem or str(node.target).startswith("zenflow."):
        return True
    schema = private.schema_of(node)
    if schema is None or schema.is_mutable:
        return False
    return bool(schema.returns) and all(each.alias_info for each in schema.returns)


# Offloads.


def group_offloads(graph: Graph, ctx: PassContext) -> int:
    """Replace chains by one op per group."""
    groups = offload_groups(graph, ctx)
    for group in groups:
        place, last = group[-1][0], group[-1][-1]
        grads = [first.args[0] for first, *_ in group]
        ps = [index_of(first) for first, *_ in group]
        reduces = last.target is ops.REDUCE_GRADIENT
        op, start = (ops.REDUCE_GRADIENTS, last.args[1]) if reduces else (ops.OFFLOAD_GRADIENTS, last.args[0])
        with graph.inserting_before(place):
            insert(graph, op, (grads, start, ctx.engine_id, ps), serves=place)
        for chain in group:
            erase(chain)
    return len(groups)


def offload_groups(graph: Graph, ctx: PassContext) -> list[list[Chain]]:
    """Gradients to offload at the last one's place: see ``group_nodes`` and ``OFFLOAD_BYTES``."""
    chains = {chain[0]: chain for chain in gradient_chains(graph, ctx.engine_id)}
    groups: list[list[Chain]] = []
    # Of the last group, while it may still grow: its parameters, their bytes, and the storages of their gradients.
    ps: set[int] = set()
    total_bytes = 0
    storages: set[int | None] = set()
    for node in graph.nodes:
        if (chain := chains.get(node)) is None:
            # Hazard: an update before its gradient's offload would find no gradient, and an offload after a write to
            # the gradient's memory would copy something else.
            if not ps.isdisjoint(updated_by(node, ctx.engine_id)) or not storages.isdisjoint(storages_written_by(node)):
                ps, storages = set(), set()
            continue
        p, grad = index_of(node), node.args[0]
        assert isinstance(grad, Node)
        total_bytes += bytes_of(p, ctx)
        if not ps or total_bytes > OFFLOAD_BYTES:
            groups.append([])
            ps, total_bytes, storages = set(), bytes_of(p, ctx), set()
        groups[-1].append(chain)
        ps.add(p)
        storages.add(private.storage_of(grad))
    return groups


def updated_by(node: Node, engine_id: int) -> set[int]:
    """The engine's parameters that the node updates."""
    if not is_node(node, engine_id, ops.ADAM_COLUMNS_, ops.UPDATE_ON_HOST, ops.UPDATE_PARAMETERS):
        return set()
    ps: Any = node.args[-1]
    return {ps} if isinstance(ps, int) else set(ps)


def gradient_chains(graph: Graph, engine_id: int) -> list[Chain]:
    """The chain of each parameter whose intermediate values have no other readers."""
    chains: list[Chain] = [(node,) for node in graph.nodes if is_node(node, engine_id, ops.REDUCE_GRADIENT)]
    copies = {index_of(node): node for node in graph.nodes if is_node(node, engine_id, ops.COPY_TO_HOST)}
    for norms in graph.nodes:
        if not is_node(norms, engine_id, ops.COLUMN_NORMS):
            continue
        select = only_user(norms, ops.SELECT_COLUMNS)
        split = only_user(select, ops.SPLIT_COLUMNS) if select else None
        copy = copies.get(index_of(norms))
        if select is not None and split is not None and copy is not None and split.args[0] is norms.args[0]:
            chains.append((norms, select, split, copy))
    return chains


def only_user(node: Node, target: Any) -> Node | None:
    """The node's user, if there is exactly one and it calls ``target``."""
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and user is not None and user.target is target else None


# Updates.


def group_updates(graph: Graph, ctx: PassContext) -> int:
    """Replace updates by one op per group. No update depends on another parameter's."""
    count = 0
    for group in update_groups(graph, ctx):
        columns = [node for node in group if node.target is ops.ADAM_COLUMNS_]
        ps = [index_of(node) for node in group if node.target is ops.UPDATE_ON_HOST]
        if not ps or [index_of(node) for node in columns] != [p for p in ps if ctx.plan.params[p].k]:
            continue  # one half of a parameter's update is in another group
        with graph.inserting_before(group[-1]):
            params = [node.args[0] for node in columns]
            args = (params, group[-1].args[0], ctx.engine_id, ps)
            insert(graph, ops.UPDATE_PARAMETERS, args, serves=group[-1])
        erase(group)
        count += 1
    return count


def update_groups(graph: Graph, ctx: PassContext) -> list[list[Node]]:
    """Updates to run at the last one's place: see ``group_nodes`` and the constants."""
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


# Fetches.


def group_fetches(graph: Graph, ctx: PassContext) -> int:
    """Replace fetches by one op per group, also a group of one, so that only this form runs."""
    groups = fetch_groups(graph, ctx)
    for group in groups:
        with graph.inserting_before(group[0]):
            params = [node.args[0] for node in group]
            ps = [index_of(node) for node in group]
            insert(graph, ops.FETCH_PARAMETERS_, (params, ctx.engine_id, ps), serves=group[0])
        erase(group)
    return len(groups)


def fetch_groups(graph: Graph, ctx: PassContext) -> list[list[Node]]:
    """Fetches to run at the first one's place: see ``group_nodes`` and the constants."""
    groups: list[list[Node]] = []
    computed = False  # since the place of the last group
    moved_bytes = 0  # of the last group: what is fetched before computation that precedes its first use
    for node in graph.nodes:
        if not is_node(node, ctx.engine_id, ops.COPY_TO_DEVICE_):
            computed = computed or not computes_nothing(node)
            continue
        size = bytes_of(index_of(node), ctx)
        moved = size if computed else 0
        if groups and (not moved or (size <= SMALL_BYTES and moved_bytes + moved <= TOGETHER_BYTES)):
            groups[-1].append(node)
            moved_bytes += moved
        else:
            groups.append([node])
            computed, moved_bytes = False, 0
    return groups
