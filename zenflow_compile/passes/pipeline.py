"""The order of the passes, the runner that checks it, times the passes and shows PyTorch's tools what they did, and the
version of the rewrites for compile caches."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from torch.fx import GraphModule

from zenflow_compile.passes.base import GraphPass, PassContext, Phase, written_inputs
from zenflow_compile.passes.fetch_parameters import fetch_parameters
from zenflow_compile.passes.load_weights import load_weights
from zenflow_compile.passes.merge_gradients import merge_gradients
from zenflow_compile.passes.offload_gradients import offload_gradients
from zenflow_compile.passes.order_gradients import order_gradients
from zenflow_compile.passes.update_parameters import update_parameters
from zenflow_compile.torch_internals import torch_private_compiler as private

PACKAGE = Path(__file__).parents[1]

SOURCES = ("passes/*.py", "runtime/ops.py", "torch_internals/torch_private_compiler.py")
"""The passes, the schemas and fake kernels of their ops, and the lowerings of these."""

PIPELINES: Mapping[Phase, tuple[GraphPass, ...]] = {
    Phase.FORWARD: (fetch_parameters, load_weights),
    Phase.INFERENCE: (fetch_parameters, load_weights),
    Phase.BACKWARD: (merge_gradients, order_gradients, offload_gradients, update_parameters, load_weights),
}

READS_NODES_OF: Mapping[GraphPass, tuple[GraphPass, ...]] = {
    update_parameters: (offload_gradients,),
    load_weights: (fetch_parameters, update_parameters),
}
"""A pass that looks for the nodes of others, those of its phase, which must run before it. Loads have to be behind the
fetch of a weight, and an update behind the last unload: the host may write a weight when no later node loads it."""

log = logging.getLogger(__name__)


Counts = tuple[tuple[str, int], ...]
"""The passes in the order in which they ran, and how many places each of them rewrote."""


def run_pipeline(gm: GraphModule, ctx: PassContext, passes: Sequence[GraphPass] | None = None) -> Counts:
    """Run the passes of ``ctx.phase`` over ``gm``, in place, for one engine.

    The counts are logged at INFO level. ``TORCH_TRACE`` gets the graph before the first pass and after each pass, with
    the number of edits and the time in milliseconds.
    """
    passes = PIPELINES[ctx.phase] if passes is None else passes
    check_order(passes, ctx.phase)
    trace_graph(gm, ctx, "before")
    counts: list[tuple[str, int]] = []
    for graph_pass in passes:
        name = graph_pass.__name__
        begin = time.perf_counter()
        count = graph_pass(gm, ctx)
        milliseconds = (time.perf_counter() - begin) * 1e3
        counts.append((name, count))
        trace_graph(gm, ctx, f"after_{name}", f"# {name}: {count} edits in {milliseconds:.3f} ms\n")
    private.graph_rewritten(gm.graph, written_inputs(gm.graph))
    gm.graph.lint()
    gm.recompile()
    log.debug("engine %d, %s graph: %s", ctx.engine_id, ctx.phase, tuple(counts))
    return tuple(counts)


def trace_graph(gm: GraphModule, ctx: PassContext, moment: str, header: str = "") -> None:
    """Hand the graph to ``TORCH_TRACE``, if that is on, as artifact ``zenflow_<phase>_engine<id>_<moment>``."""
    private.trace_artifact(
        f"zenflow_{ctx.phase}_engine{ctx.engine_id}_{moment}", lambda: header + private.printed_graph(gm)
    )


def check_order(passes: Sequence[GraphPass], phase: Phase) -> None:
    """Raise ValueError if a pass is not in its phase, or not after the passes whose nodes it reads."""
    for position, graph_pass in enumerate(passes):
        known = sorted(each for each, pipeline in PIPELINES.items() if graph_pass in pipeline)
        if known and phase not in known:
            raise ValueError(f"pass {graph_pass.__name__} rewrites {', '.join(known)} graphs, not {phase} graphs")
        for needed in READS_NODES_OF.get(graph_pass, ()):
            if needed in PIPELINES[phase] and needed not in passes[:position]:
                raise ValueError(
                    f"pass {graph_pass.__name__} needs the nodes of {needed.__name__}: "
                    f"put {needed.__name__} before it in the {phase} pipeline"
                )


@cache
def source_hash() -> str:
    """Return a hexadecimal hash of the names and texts of ``SOURCES``; read from disk once per process."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in PACKAGE.glob(pattern)):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
