"""The order of the passes, and the runner that checks what they claim."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from zenflow_compile import torch_private_compiler as private
from zenflow_compile.passes.context import GraphPass, PassContext, Phase, written_inputs
from zenflow_compile.passes.fetch_parameters import FetchParameters
from zenflow_compile.passes.offload_gradients import OffloadGradients
from zenflow_compile.passes.order_gradients import OrderGradients
from zenflow_compile.passes.select_columns import SelectColumns
from zenflow_compile.passes.update_parameters import UpdateParameters

PIPELINES: Mapping[Phase, tuple[GraphPass, ...]] = {
    Phase.FORWARD: (FetchParameters(),),
    Phase.INFERENCE: (FetchParameters(),),
    Phase.BACKWARD: (OrderGradients(), SelectColumns(), OffloadGradients(), UpdateParameters()),
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


def run_pipeline(gm: GraphModule, ctx: PassContext, passes: Sequence[GraphPass] | None = None) -> PassReport:
    """Run the passes of ``ctx.phase`` over ``gm``, in place, for one engine.

    Every pass is logged with its count; at DEBUG level the graph is logged after each pass that changed it.

    Raises:
        ValueError: a pass is in the wrong phase or in front of one that it needs.
    """
    passes = PIPELINES[ctx.phase] if passes is None else passes
    check_order(passes, ctx.phase)
    counts: list[tuple[str, int]] = []
    for graph_pass in passes:
        count = graph_pass(gm, ctx)
        counts.append((graph_pass.name, count))
        if count and log.isEnabledFor(logging.DEBUG):
            log.debug("%s, %s: %d rewrites\n%s", ctx.phase, graph_pass.name, count, gm.graph)
    private.graph_rewritten(gm.graph, written_inputs(gm.graph))
    gm.graph.lint()
    gm.recompile()
    report = PassReport(ctx.phase, tuple(counts))
    log.info("engine %d, %s graph: %s", ctx.engine_id, ctx.phase, report.counts)
    return report


def check_order(passes: Sequence[GraphPass], phase: Phase) -> None:
    """Check that every pass runs in a phase it knows and behind those that provide what it requires.

    Raises:
        ValueError: it does not; names the pass and what is missing.
    """
    have: set[str] = set()
    for graph_pass in passes:
        if phase not in graph_pass.phases:
            known = ", ".join(sorted(graph_pass.phases))
            raise ValueError(f"pass {graph_pass.name} rewrites {known} graphs, not {phase} graphs")
        if missing := graph_pass.requires - have:
            raise ValueError(
                f"pass {graph_pass.name} needs {', '.join(sorted(missing))} first and finds {sorted(have)}: "
                f"put a pass that provides it before {graph_pass.name} in the {phase} pipeline"
            )
        have |= graph_pass.provides
