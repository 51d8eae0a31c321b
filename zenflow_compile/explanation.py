"""``explain``: print the plan of a compiled model and its rewritten graphs, with a reason for each inserted node."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.fx import GraphModule, Node

from zenflow_compile.checks.validate import printable
from zenflow_compile.compiler.ownership import engines_of
from zenflow_compile.passes.base import PassContext, Phase
from zenflow_compile.passes.merge_gradients import MERGED
from zenflow_compile.passes.pipeline import Counts, run_pipeline
from zenflow_compile.passes.update_parameters import build_step_graph
from zenflow_compile.planning.plan import ParamPlan, Plan
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.parameters.host_weights import HostWeights

WIDTH = 80
_NAMED = 4

PARTS: Mapping[Any, tuple[str, ...]] = {
    ops.BEGIN_WEIGHTS: ("the dependency token that keeps loads and unloads of weights in order",),
    ops.LOAD_WEIGHT_: ("{megabytes} from host memory, for the uses below",),
    ops.UNLOAD_WEIGHT_: ("gives {megabytes} of device memory back",),
    ops.BEGIN_BACKWARD: ("the dependency token that keeps the nodes below in order",),
    ops.OFFLOAD_GRADIENTS: (
        "norms: right after the gradient, in one read: squared norms of its {slices} {unit}, and both parts",
        "selection: the {k} {unit} that the device updates itself",
        "split: {k} {unit} stay, {deferred} go to the host; the gradient's memory is free after this",
        "copy: as early as the gradient exists: it overlaps with the rest of the backward",
    ),
    ops.REDUCE_GRADIENTS: (
        "averaged over ranks: of its {whole} {unit} this rank gets {slices} when the next gradient is sent; {k} of "
        "them stay, {deferred} go to the host",
    ),
    ops.UPDATE_PARAMETERS: (
        "on the device: {rule} on {k} {unit}, after the last read of the parameter",
        "on the host: the gradient is final; {when}",
    ),
    ops.FETCH_PARAMETERS_: ("as late as possible: waits for the deferred {unit} just before their first use",),
}
"""What an inserted op does for each of its parameters, in order."""


@dataclass(frozen=True, slots=True)
class GraphLine:
    """One node as text, with the reasons if a pass inserted it: for each parameter, one for each part of its work."""

    text: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One rewritten graph as text, which keeps nothing else alive; ``compile_id`` is Dynamo's "frame/recompilation"."""

    phase: Phase
    compile_id: str
    counts: Counts
    lines: tuple[GraphLine, ...]

    @property
    def inserted(self) -> int:
        return sum(bool(line.reasons) for line in self.lines)


def rewrite_and_record(gm: GraphModule, ctx: PassContext, compile_id: str) -> GraphRecord:
    return GraphRecord(ctx.phase, compile_id, run_pipeline(gm, ctx), graph_lines(gm, ctx))


def graph_lines(gm: GraphModule, ctx: PassContext) -> tuple[GraphLine, ...]:
    return tuple(GraphLine(format_node(node), reasons(node, ctx)) for node in gm.graph.nodes)


def reasons(node: Node, ctx: PassContext) -> tuple[str, ...]:
    """Why the node was inserted for this engine; empty for the model's own nodes and those of other engines."""
    if (merged := node.meta.get(MERGED)) is not None:
        engine_id, p = merged
        name = ctx.plan.params[p].name
        why = f"{name}: the graph has it at several inputs; its gradients become one"
        return (why,) if engine_id == ctx.engine_id else ()
    if node.target in (ops.BEGIN_BACKWARD, ops.BEGIN_WEIGHTS):
        return PARTS[node.target] if node.args[0] == ctx.engine_id else ()
    if node.target not in PARTS or node.args[-2] != ctx.engine_id:
        return ()
    ps: Any = node.args[-1]
    params = [ctx.plan.params[p] for p in ([ps] if isinstance(ps, int) else ps)]
    return tuple(f"{param.name}: {part}" for param in params for part in parts(node.target, param, ctx))


def parts(op: Any, param: ParamPlan, ctx: PassContext) -> list[str]:
    values = {
        "slices": param.slices,
        "whole": param.whole.slices,
        "k": param.k,
        "deferred": param.deferred,
        "unit": unit(param),
        "rule": type(param.rule).__name__,
        "megabytes": f"{param.weight_bytes / 1e6:.3g} MB",
        "when": window(param, adaptive=ctx.plan.adaptive),
    }
    on_host_only = op is ops.UPDATE_PARAMETERS and not param.k
    return [part.format(**values) for part in PARTS[op][on_host_only:]]


def unit(param: ParamPlan) -> str:
    return "columns" if param.whole.dim == 1 else "rows"


def window(param: ParamPlan, *, adaptive: bool) -> str:
    if param.blocking:
        return "the host updates now, and the step waits"
    if adaptive:
        return f"the host updates when gradients ask for it, after at most {param.interval} steps"
    return "the host updates every step" if param.interval == 1 else f"the host updates every {param.interval} steps"


def format_node(node: Node) -> str:
    """A node in one line: its name, dtype and shape, operator, and arguments."""
    if node.op == "placeholder":
        return f"{node.name}: {format_value(node.meta.get('val'))} (input)"
    if node.op == "output":
        values = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
        return f"return ({', '.join(str(value) for value in values)})"
    target = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
    if str(node.target).startswith("zenflow."):
        target = f"zenflow.{target}"
    arguments = [str(arg) for arg in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
    call = f"{target}({', '.join(arguments)})"
    value = node.meta.get("val")
    return call if value is None else f"{node.name}: {format_value(value)} = {call}"


def format_value(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(format_value(each) for each in value)})"
    return "?" if value is None else type(value).__name__


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found; ``str()`` gives what it printed.

    Attributes:
        plan: the plan of the optimizer.
        graphs: the rewritten graphs in the order in which they were compiled.
        step: what ``step()`` does, written as a graph; for the optimizer in backward, what the end of a backward does
            for parameters whose updates are not in the backward graphs.
        weights: which weights are in host memory, and why others are not, in words; empty without ``offload_weights``.
    """

    plan: Plan
    graphs: tuple[GraphRecord, ...]
    step: GraphRecord
    weights: tuple[str, ...] = ()

    def __str__(self) -> str:
        console = Console(width=WIDTH, no_color=True, force_terminal=False, legacy_windows=False)
        with console.capture() as capture:
            console.print(self.render())
        return capture.get()

    def render(self, full: bool = False) -> RenderableType:
        parts: list[RenderableType] = [plan_table(self.plan)]
        if (note := self.plan.state_note) is not None:
            parts.append(Text(f"state on the host: {note}\n"))
        if self.weights:
            parts.append(Text("\n".join(("weights in host memory", *self.weights, ""))))
        if not self.graphs:
            parts.append(Text("No graph has been compiled yet: run the model once.", style="yellow"))
        parts += [render_graph(record, full) for record in self.graphs]
        return Group(*parts, render_graph(self.step, full))


def explain(compiled_model: Any, *, full: bool = False, console: Console | None = None) -> Explanation:
    """Print the plan and the rewritten graphs of a compiled model, and return them. This compiles nothing.

    Args:
        compiled_model: what ``torch.compile(..., backend="zenflow")`` returned, or the module given to it.
        full: print every node instead of the inserted ones and their neighbors.
        console: where to print; by default the terminal, or 80 columns if the output is no terminal.

    Raises:
        ValueError: no optimizer, or more than one, owns parameters of the model.
    """
    engines = engines_of(compiled_model)
    if len(engines) != 1:
        raise ValueError(
            f"explain: {len(engines)} optimizers own parameters of this model, one is needed; "
            "create a ZenFlowAdamW over them or compile with options for it, and run one forward first"
        )
    (engine,) = engines
    ctx = PassContext(plan=engine.plan, engine_id=engine.id, phase=Phase.STEP, params=())
    lines = graph_lines(build_step_graph(engine.plan, engine.id), ctx)
    step = GraphRecord(Phase.STEP, "", (), lines)
    explanation = Explanation(engine.plan, tuple(engine.graphs), step, weight_lines(engine.plan, engine.weights))
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDTH, no_color=True)
    console.print(explanation.render(full))
    return explanation


def weight_lines(plan: Plan, weights: HostWeights) -> tuple[str, ...]:
    """Which weights are in host memory, and which stay on the device for what reason, in words."""
    if not weights.weights and not weights.kept:
        return ()
    moved = sum(each.nbytes for each in weights.weights.values())
    lines = [
        f"  {len(weights.weights)} weights of {moved / 1e6:.3g} MB, loaded around their uses within "
        f"{weights.ring_bytes / 1e6:.3g} MB"
    ]
    in_files = sum(plan.params[p].weight_in_file for p in weights.weights)
    if in_files:
        lines.append(f"  {in_files} of them in files")
    if (count := len(weights.weights) - in_files) and in_files:
        lines.append(f"  {count} of them in host memory, because their state is on the device")
    by_reason: dict[str, list[str]] = {}
    for p, reason in weights.kept.items():
        by_reason.setdefault(reason.partition(":")[0], []).append(plan.params[p].name)
    for reason, names in by_reason.items():
        listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        lines.append(f"  {len(names)} stay on the device, because {reason}: {listed}")
    return tuple(lines)


def plan_table(plan: Plan) -> Table:
    table = Table(title=f"plan: policy {plan.policy}", box=box.SIMPLE, pad_edge=False, title_justify="left")
    table.add_column("parameter", overflow="fold", ratio=1)
    for name in ("shape", "state", "device", "host"):
        table.add_column(name, justify="left" if name in ("shape", "state") else "right")
    for param in plan.params:
        shape = "x".join(map(str, param.shape)) or "scalar"
        where = placement(param, adaptive=plan.adaptive)
        table.add_row(param.name, shape, where, megabytes(param.device_bytes), megabytes(param.host_bytes))
    if plan.pool_bytes:
        table.add_row("gradient buffers", "", "shared", "", megabytes(plan.pool_bytes))
    table.add_section()
    table.add_row("all", "", "", megabytes(plan.device_bytes), megabytes(plan.host_bytes), style="bold")
    return table


def placement(param: ParamPlan, *, adaptive: bool) -> str:
    """Where the optimizer state is stored and when it is updated, short enough for a table."""
    if param.streamed:
        return f"host, streamed, {param.subgroup}"
    if not param.offloaded:
        return "device"
    where = f"{param.k}/{param.slices} {unit(param)}" if param.k else "host"
    if param.blocking:
        return f"{where}, blocking"
    if adaptive:
        return f"{where}, within {param.interval}"
    return f"{where}, every {param.interval}, at {param.phase}"


def megabytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def render_graph(record: GraphRecord, full: bool) -> RenderableType:
    title = f"{record.phase} graph"
    if record.phase is Phase.STEP:
        title += " (no graph runs: what step(), or the end of a backward, does for parameters not updated above)"
    if record.compile_id:
        title += f" [{record.compile_id}]"
    text = Text()
    title = textwrap.fill(f"{title}: {record.inserted} of {len(record.lines)} nodes inserted", WIDTH - 1)
    text.append(f"{title}\n", style="bold")
    if counts := [f"{name} {count}" for name, count in record.counts if count]:
        text.append(f"  passes: {', '.join(counts)}\n", style="dim")

    def is_shown(position: int) -> bool:
        return full or any(bool(line.reasons) for line in record.lines[max(position - 1, 0) : position + 2])

    for shown, positions in groupby(range(len(record.lines)), is_shown):
        lines = [record.lines[position] for position in positions]
        if not shown:
            text.append(f"    ... {len(lines)} more nodes\n", style="dim")
            continue
        for line in lines:
            if line.reasons:
                text.append(f"  + {shorten(line.text)}\n", style="green")
            else:
                text.append(f"    {shorten(line.text)}\n", style="dim")
            for reason in line.reasons:
                why = textwrap.fill(reason, WIDTH - 1, initial_indent="      # ", subsequent_indent="      # ")
                text.append(f"{why}\n", style="cyan")
    return text


def shorten(text: str) -> str:
    text, longest = printable(text), WIDTH - 5
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
