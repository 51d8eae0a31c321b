"""The order of the passes, and the runner that checks it, times the passes and shows PyTorch's tools what they did."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from torch.fx import GraphModule

from zenflow_compile.passes.base import GraphPass, PassContext, Phase
from zenflow_compile.passes.fetch_parameters import fetch_parameters
from zenflow_compile.passes.graph_edits import written_inputs
from zenflow_compile.passes.group_nodes import group_nodes
from zenflow_compile.passes.load_weights import load_weights
from zenflow_compile.passes.merge_gradients import merge_gradients
from zenflow_compile.passes.offload_gradients import offload_gradients
from zenflow_compile.passes.order_gradients import order_gradients
from zenflow_compile.passes.reduce_gradients import reduce_gradients
from zenflow_compile.passes.select_columns import select_columns
from zenflow_compile.passes.update_parameters import update_parameters
from zenflow_compile.torch_internals import torch_private_compiler as private

PIPELINES: Mapping[Phase, tuple[GraphPass, ...]] = {
    Phase.FORWARD: (fetch_parameters, load_weights, group_nodes),
    Phase.INFERENCE: (fetch_parameters, load_weights, group_nodes),
    Phase.BACKWARD: (
        merge_gradients,
        order_gradients,
        reduce_gradients,
        select_columns,
        offload_gradients,
        update_parameters,
        load_weights,
        group_nodes,
    ),
}

READS_NODES_OF: Mapping[GraphPass, tuple[GraphPass, ...]] = {
    offload_gradients: (select_columns,),
    update_parameters: (offload_gradients,),
    load_weights: (fetch_parameters, update_parameters),
}
"""A pass that looks for the nodes of others, those of its phase, which must run before it. Loads have to be behind the
fetch of a weight, and an update behind the last unload: the host may write a weight when no later node loads it."""

log = logging.getLogger(__name__)


Counts = tuple[tuple[str, int], ...]
"""The passes in the order in which they ran, and how many places each of them rewrote."""


def run_pipeline(
    gm: GraphModule,
    ctx: PassContext,
    passes: Sequence[GraphPass] | None = None,
    before_grouping: Callable[[Counts], None] | None = None,
) -> Counts:
    """Run the passes of ``ctx.phase`` over ``gm``, in place, for one engine.

    The counts are logged at INFO level. ``TORCH_TRACE`` gets the graph before the first pass and after each pass, with
    the number of edits and the time in milliseconds.

    Args:
        before_grouping: called before ``group_nodes``, while the graph has one node for each thing that is done.

    Raises:
        ValueError: see ``check_order``.
    """
    passes = PIPELINES[ctx.phase] if passes is None else passes
    check_order(passes, ctx.phase)
    grouping = len(passes) - (group_nodes in passes)
    trace_graph(gm, ctx, "before")
    counts = _run(passes[:grouping], gm, ctx)
    if before_grouping is not None:
        before_grouping(counts)
    counts += _run(passes[grouping:], gm, ctx)
    private.graph_rewritten(gm.graph, written_inputs(gm.graph))
    gm.graph.lint()
    gm.recompile()
    log.info("engine %d, %s graph: %s", ctx.engine_id, ctx.phase, counts)
    return counts


def _run(passes: Sequence[GraphPass], gm: GraphModule, ctx: PassContext) -> Counts:
    counts: list[tuple[str, int]] = []
    for graph_pass in passes:
        name = graph_pass.__name__
        begin = time.perf_counter()
        count = graph_pass(gm, ctx)
        milliseconds = (time.perf_counter() - begin) * 1e3
        counts.append((name, count))
        trace_graph(gm, ctx, f"after_{name}", f"# {name}: {count} edits in {milliseconds:.3f} ms\n")
    return tuple(counts)


def trace_graph(gm: GraphModule, ctx: PassContext, moment: str, header: str = "") -> None:
    """Hand the graph to ``TORCH_TRACE``, if that is on, as artifact ``zenflow_<phase>_engine<id>_<moment>``."""
    private.trace_artifact(
        f"zenflow_{ctx.phase}_engine{ctx.engine_id}_{moment}", lambda: header + private.printed_graph(gm)
    )


def check_order(passes: Sequence[GraphPass], phase: Phase) -> None:
    """Check that every pass runs in its phase and after the pass whose nodes it reads, with ``group_nodes`` last.

    Raises:
        ValueError: a pass is in the wrong place; the message names it and what to change.
    """
    for position, graph_pass in enumerate(passes):
        known = sorted(each for each, pipeline in PIPELINES.items() if graph_pass in pipeline)
        if known and phase not in known:
            raise ValueError(f"pass {graph_pass.__name__} rewrites {', '.join(known)} graphs, not {phase} graphs")
        if group_nodes in passes[:position]:
            raise ValueError(
                f"pass {graph_pass.__name__} comes after group_nodes, which replaces the nodes that it looks for; "
                f"put it before group_nodes, the last pass of the {phase} pipeline"
            )
        for needed in READS_NODES_OF.get(graph_pass, ()):
            if needed in PIPELINES[phase] and needed not in passes[:position]:
                raise ValueError(
                    f"pass {graph_pass.__name__} needs the nodes of {needed.__name__}: "
                    f"put {needed.__name__} before it in the {phase} pipeline"
                )
