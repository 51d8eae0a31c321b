"""The order of the passes, and the runner that checks what they claim."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from zenflow_compile.passes.context import GraphPass, PassContext, Phase, written_inputs
from zenflow_compile.passes.fetch_parameters import FetchParameters
from zenflow_compile.passes.fuse_nodes import FuseNodes
from zenflow_compile.passes.merge_gradients import MergeGradients
from zenflow_compile.passes.offload_gradients import OffloadGradients
from zenflow_compile.passes.order_gradients import OrderGradients
from zenflow_compile.passes.select_columns import SelectColumns
from zenflow_compile.passes.update_parameters import UpdateParameters, build_step_graph
from zenflow_compile.planning.plan import Plan
from zenflow_compile.torch_internals import torch_private_compiler as private

PIPELINES: Mapping[Phase, tuple[GraphPass, ...]] = {
    Phase.FORWARD: (FetchParameters(), FuseNodes()),
    Phase.INFERENCE: (FetchParameters(), FuseNodes()),
    Phase.BACKWARD: (
        MergeGradients(),
        OrderGradients(),
        SelectColumns(),
        OffloadGradients(),
        UpdateParameters(),
        FuseNodes(),
    ),
    Phase.STEP: (FuseNodes(),),
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassReport:
    """How many places each pass rewrote, in the order in which they ran."""

    phase: Phase
    counts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """Rewrites of all passes."""
        return sum(count for _, count in self.counts)


def run_pipeline(
    gm: GraphModule,
    ctx: PassContext,
    passes: Sequence[GraphPass] | None = None,
    readable: Callable[[PassReport], None] | None = None,
) -> PassReport:
    """Run the passes of ``ctx.phase`` over ``gm``, in place, for one engine.

    Every pass is logged with its count; at DEBUG level the graph is logged after each pass that changed it.

    Args:
        readable: is called when one node stands for each thing that is done, before the last pass fuses them.

    Raises:
        ValueError: a pass is in the wrong phase or in front of one that it needs.
    """
    passes = PIPELINES[ctx.phase] if passes is None else passes
    check_order(passes, ctx.phase)
    fusing = next((i for i, each in enumerate(passes) if "fused nodes" in each.provides), len(passes))
    counts = _run(passes[:fusing], gm, ctx)
    if readable is not None:
        readable(PassReport(ctx.phase, counts))
    counts += _run(passes[fusing:], gm, ctx)
    private.graph_rewritten(gm.graph, written_inputs(gm.graph))
    gm.graph.lint()
    gm.recompile()
    report = PassReport(ctx.phase, counts)
    log.info("engine %d, %s graph: %s", ctx.engine_id, ctx.phase, report.counts)
    return report


def _run(passes: Sequence[GraphPass], gm: GraphModule, ctx: PassContext) -> tuple[tuple[str, int], ...]:
    counts: list[tuple[str, int]] = []
    for graph_pass in passes:
        count = graph_pass(gm, ctx)
        counts.append((graph_pass.name, count))
        if count and log.isEnabledFor(logging.DEBUG):
            log.debug("%s, %s: %d rewrites\n%s", ctx.phase, graph_pass.name, count, gm.graph)
    return tuple(counts)


def fused_step_graph(plan: Plan, engine_id: int) -> GraphModule:
    """The optimizer step as it runs: from the offloaded parameters, in the plan's order, to nothing."""
    gm = build_step_graph(plan, engine_id)
    run_pipeline(gm, PassContext(plan=plan, engine_id=engine_id, phase=Phase.STEP, params=()))
    return gm


def check_order(passes: Sequence[GraphPass], phase: Phase) -> None:
    """Check that every pass runs in a phase it knows, behind those that provide what it requires, before the fusing.

    Raises:
        ValueError: it does not; names the pass and what is missing.
    """
    have: set[str] = set()
    for graph_pass in passes:
        if phase not in graph_pass.phases:
            known = ", ".join(sorted(graph_pass.phases))
            raise ValueError(f"pass {graph_pass.name} rewrites {known} graphs, not {phase} graphs")
        if "fused nodes" in have:
            raise ValueError(
                f"pass {graph_pass.name} comes behind the one that fuses the nodes it would look for; "
                f"put it before that one, which is the last of the {phase} pipeline"
            )
        if missing := graph_pass.requires - have:
            raise ValueError(
                f"pass {graph_pass.name} needs {', '.join(sorted(missing))} first and finds {sorted(have)}: "
                f"put a pass that provides it before {graph_pass.name} in the {phase} pipeline"
            )
        have |= graph_pass.provides
