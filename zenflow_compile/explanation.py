"""The plan of a compiled model and its rewritten graphs, readably: what was inserted where, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.fx import GraphModule, Node

from zenflow_compile.checks.printable import printable
from zenflow_compile.compiler.ownership import engines_of
from zenflow_compile.passes.base import PassContext, Phase
from zenflow_compile.passes.merge_gradients import MERGED
from zenflow_compile.passes.pipeline import PassReport, run_pipeline
from zenflow_compile.passes.update_parameters import build_step_graph
from zenflow_compile.planning.plan import ParamPlan, Plan
from zenflow_compile.runtime import ops

if TYPE_CHECKING:
    from zenflow_compile.runtime.engine import Engine

WIDTH = 80

WHY: Mapping[Any, str] = {
    ops.BEGIN_BACKWARD: "the token that keeps the nodes below in order",
    ops.COLUMN_NORMS: "right after the gradient, in one read of it: squared norms of its {lines} lines, and both parts",
    ops.SELECT_COLUMNS: "the {k} lines that the device updates itself, as in force now",
    ops.SPLIT_COLUMNS: "{k} lines stay, {rest} are ready to go to the host; the gradient's memory is free after this",
    ops.COPY_TO_HOST: "as early as the gradient exists: the copy runs beside the rest of the backward",
    ops.ADAM_COLUMNS_: "AdamW on {k} lines, behind the last read of the parameter",
    ops.UPDATE_ON_HOST: "the gradient is final; {when}",
    ops.COPY_TO_DEVICE_: "the latest moment: waits for the host's lines just before their first use",
}


@dataclass(frozen=True, slots=True)
class GraphLine:
    """One node: how it reads, and for an inserted one the reason, else None."""

    text: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One rewritten graph, kept as text so that it keeps nothing else alive.

    Attributes:
        phase: which graph of the step.
        compile_id: Dynamo's "frame/recompilation".
        counts: rewrites per pass.
        lines: the nodes in order, before they were fused.
        fused: how many ops the inserted nodes run as.
    """

    phase: Phase
    compile_id: str
    counts: tuple[tuple[str, int], ...]
    lines: tuple[GraphLine, ...]
    fused: int = 0

    @property
    def inserted(self) -> int:
        """Nodes that the passes put in."""
        return sum(line.reason is not None for line in self.lines)


def rewrite_and_record(gm: GraphModule, ctx: PassContext, compile_id: str) -> GraphRecord:
    """Run the pipeline over ``gm``, and keep what ``explain`` will print of it."""
    readable: list[GraphRecord] = []

    def record(report: PassReport) -> None:
        lines = tuple(GraphLine(format_node(node), reason(node, ctx)) for node in gm.graph.nodes)
        readable.append(GraphRecord(ctx.phase, compile_id, report.counts, lines))

    run_pipeline(gm, ctx, before_grouping=record)
    return replace(readable[0], fused=sum(engine_of(node) == ctx.engine_id for node in gm.graph.nodes))


def engine_of(node: Node) -> Any:
    """The engine that a node of ours names; None for a node of the model's own."""
    if (merged := node.meta.get(MERGED)) is not None:
        return merged[0]
    if node.op != "call_function" or not str(node.target).startswith("zenflow."):
        return None
    return node.args[0] if node.target is ops.BEGIN_BACKWARD else node.args[-2]


def reason(node: Node, ctx: PassContext) -> str | None:
    """Why the node was inserted for this engine; None for the model's own nodes and other engines' ones."""
    if engine_of(node) != ctx.engine_id:
        return None
    if (merged := node.meta.get(MERGED)) is not None:
        return f"{ctx.plan.params[merged[1]].name}: the graph has it at several inputs; its gradients become one"
    template = WHY.get(node.target)
    if template is None:
        return None
    p = node.args[-1]
    if node.target is ops.BEGIN_BACKWARD or not isinstance(p, int):
        return template
    param = ctx.plan.params[p]
    why = template.format(
        lines=param.slices, k=param.k, rest=param.deferred, when=window(param, adaptive=ctx.plan.adaptive)
    )
    return f"{param.name}: {why}"


def window(param: ParamPlan, *, adaptive: bool) -> str:
    """When the host applies gradients, in words."""
    if param.blocking:
        return "the host updates now, and the step waits"
    if adaptive:
        return f"the host updates when gradients ask for it, after at most {param.interval} steps"
    return "the host updates every step" if param.interval == 1 else f"the host updates every {param.interval} steps"


def format_node(node: Node) -> str:
    """A node in one line: name, dtype and shape, operator, arguments."""
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
    """``f32[8, 4]`` and the like."""
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
        step: the optimizer step as a graph; without ``step()`` its nodes are in the backward graphs.
    """

    plan: Plan
    graphs: tuple[GraphRecord, ...]
    step: GraphRecord

    def __str__(self) -> str:
        console = Console(width=WIDTH, no_color=True, force_terminal=False, legacy_windows=False)
        with console.capture() as capture:
            console.print(self.render())
        return capture.get()

    def render(self, full: bool = False) -> RenderableType:
        """For rich; ``full`` shows every node instead of the inserted ones and their neighbours."""
        parts: list[RenderableType] = [plan_table(self.plan)]
        if not self.graphs:
            parts.append(Text("No graph has been compiled yet: run the model once.", style="yellow"))
        parts += [render_graph(record, full) for record in self.graphs]
        return Group(*parts, render_graph(self.step, full))


def explain(compiled_model: Any, *, full: bool = False, console: Console | None = None) -> Explanation:
    """Print the plan and the rewritten graphs of a compiled model, and return them. Compiles nothing.

    Args:
        compiled_model: what ``torch.compile(..., backend="zenflow")`` returned, or the module given to it.
        full: print every node instead of the inserted ones and their neighbours.
        console: where to print; the terminal by default, 80 columns where the output is none.

    Raises:
        ValueError: no optimizer, or more than one, owns parameters of the model.
    """
    engines = engines_of(compiled_model)
    if len(engines) != 1:
        raise ValueError(
            f"explain: {len(engines)} optimizers own parameters of this model, one is needed; "
            "create a ZenFlowAdamW over them or compile with options for it, and run one forward first"
        )
    explanation = explanation_of(engines[0])
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDTH, no_color=True)
    console.print(explanation.render(full))
    return explanation


def explanation_of(engine: Engine) -> Explanation:
    """The explanation of one engine's plan and of all graphs that were compiled for it."""
    gm = build_step_graph(engine.plan, engine.id)
    ctx = PassContext(plan=engine.plan, engine_id=engine.id, phase=Phase.STEP, params=())
    return Explanation(engine.plan, tuple(engine.graphs), rewrite_and_record(gm, ctx, ""))


def plan_table(plan: Plan) -> Table:
    """One row per parameter, runs of equally planned ones in one."""
    table = Table(title=f"plan: policy {plan.policy}", box=box.SIMPLE, pad_edge=False, title_justify="left")
    table.add_column("parameter", overflow="fold", ratio=1)
    for name in ("shape", "state", "device", "host"):
        table.add_column(name, justify="left" if name in ("shape", "state") else "right")
    for param in plan.params:
        shape = "x".join(str(size) for size in param.shape) or "scalar"
        table.add_row(
            param.name,
            shape,
            placement(param, adaptive=plan.adaptive),
            megabytes(param.device_bytes),
            megabytes(param.host_bytes),
        )
    table.add_section()
    table.add_row("all", "", "", megabytes(plan.device_bytes), megabytes(plan.host_bytes), style="bold")
    return table


def placement(param: ParamPlan, *, adaptive: bool) -> str:
    """Where state lives and when it is updated, short enough for a table."""
    if param.streamed:
        return f"host, streamed, {param.subgroup}"
    if not param.offloaded:
        return "device"
    unit = "columns" if param.dim == 1 else "rows"
    where = f"{param.k}/{param.slices} {unit}" if param.k else "host"
    if param.blocking:
        return f"{where}, blocking"
    if adaptive:
        return f"{where}, within {param.interval}"
    return f"{where}, every {param.interval}, at {param.phase}"


def megabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**20:.2f} MiB"


def render_graph(record: GraphRecord, full: bool) -> RenderableType:
    """Inserted nodes with their reasons among the nodes around them."""
    title = f"{record.phase} graph"
    if record.phase is Phase.STEP:
        title += " (what step(), or else the end of a backward, runs for what the graphs above do not update)"
    if record.compile_id:
        title += f" [{record.compile_id}]"
    text = Text()
    title = textwrap.fill(f"{title}: {record.inserted} of {len(record.lines)} nodes inserted", WIDTH - 1)
    text.append(f"{title}\n", style="bold")
    if record.inserted:
        text.append(f"  they run fused: {record.inserted} nodes as {record.fused}\n", style="dim")
    if counts := [f"{name} {count}" for name, count in record.counts if count]:
        text.append(f"  passes: {', '.join(counts)}\n", style="dim")
    shown = set(range(len(record.lines))) if full else neighbours(record.lines)
    last = -1
    for position in sorted(shown):
        if position > last + 1:
            text.append(f"    ... {position - last - 1} more nodes\n", style="dim")
        last = position
        line = record.lines[position]
        if line.reason is None:
            text.append(f"    {shorten(line.text)}\n", style="dim")
        else:
            text.append(f"  + {shorten(line.text)}\n", style="green")
            why = textwrap.fill(line.reason, WIDTH - 1, initial_indent="      # ", subsequent_indent="      # ")
            text.append(f"{why}\n", style="cyan")
    if last + 1 < len(record.lines):
        text.append(f"    ... {len(record.lines) - last - 1} more nodes\n", style="dim")
    return text


def neighbours(lines: Sequence[GraphLine]) -> set[int]:
    """Positions of inserted nodes and of the nodes right before and after a run of them."""
    inserted = {position for position, line in enumerate(lines) if line.reason is not None}
    around = {position + step for position in inserted for step in (-1, 1)}
    return inserted | {position for position in around if 0 <= position < len(lines)}


def shorten(text: str) -> str:
    """At most one line of 80 columns behind the margin."""
    text, room = printable(text), WIDTH - 5
    return text if len(text) <= room else f"{text[: room - 3]}..."
