"""The private PyTorch API of the compilers that the backend leans on: Dynamo, AOTAutograd, Inductor.

The other half of ``torch_private``, which has what the runtime needs; nothing else in the package uses private API.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback

REWRITE_VERSION = "3"
"""Part of the key of Inductor's FX graph cache. Raise it when the same nodes compile to different code: the cache sees
neither the nodes' metadata nor their lowerings, so it would load the code that an older version made."""


@dataclass(frozen=True, slots=True)
class CompileCall:
    """Who asked for a graph.

    Attributes:
        wrapper: the object that ``torch.compile`` made for this one call of it; None outside ``torch.compile``. It must
            not own anything: Dynamo keeps it until ``torch._dynamo.reset()``.
        module: the module that was compiled; None when a plain function was.
        local_scope: local variables of the frame that the graph was captured from.
        global_scope: its global variables.
        compile_id: ``"frame/recompilation"`` for people to read; empty when the graph runs, not when it is captured.
    """

    wrapper: Any = None
    module: torch.nn.Module | None = None
    local_scope: Mapping[str, Any] = field(default_factory=dict)
    global_scope: Mapping[str, Any] = field(default_factory=dict)
    compile_id: str = ""


def compile_call() -> CompileCall:
    """Find the ``torch.compile`` call behind the graph that is being captured, or is running, by walking up the stack.

    Dynamo tells a backend the graph and nothing about who asked for it. Seen in torch 2.11 and 2.13.
    """
    from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule, innermost_backend
    from torch._dynamo.output_graph import OutputGraph
    from torch._guards import CompileContext

    found: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if "local_scope" not in found:
            if isinstance(owner, OutputGraph):  # capturing
                found.update(local_scope=owner.local_scope, global_scope=owner.global_scope)
            elif frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "zenflow_compile"):  # running
                found.update(local_scope=frame.f_locals, global_scope=frame.f_globals)
        if isinstance(owner, OptimizeContext) and "wrapper" not in found:
            found["wrapper"] = innermost_backend(owner.callback)
            bound = getattr(frame.f_locals.get("fn"), "__self__", frame.f_locals.get("fn"))
            if isinstance(bound, torch.nn.Module):
                found["module"] = bound
        elif "wrapper" in found:  # torch.compile(module): its own frames are just above
            if isinstance(owner, OptimizedModule):
                found["module"] = owner._orig_mod
            if not isinstance(owner, torch.nn.Module) or isinstance(owner, OptimizedModule):
                break
        frame = frame.f_back
    context: Any = CompileContext.try_get()
    return CompileCall(**found, compile_id=str(context.compile_id) if context else "")


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Dynamo's graph with all that is needed to compile it once more, after Dynamo has finished with it.

    Attributes:
        graph: the graph; compilers get copies, since they edit what they get.
        sources: where Dynamo found each input; None where unknown.
        fakes: its inputs as fake tensors: the shapes, which may be symbolic, and no memory.
        fake_mode: their mode; None outside Dynamo.
        grad_enabled: whether gradients were on, which decides between a training and an inference graph.
        compile_context: Dynamo's name for the compilation.
    """

    graph: torch.fx.GraphModule
    sources: tuple[Any, ...]
    fakes: tuple[Any, ...]
    fake_mode: Any
    grad_enabled: bool
    compile_context: Any


def capture(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> CapturedGraph:
    """Keep what the backend was called with, but none of the tensors. Seen in torch 2.11 and 2.13."""
    from torch._guards import CompileContext, TracingContext

    context = TracingContext.try_get()
    fakes = tuple(inputs)
    if context is not None and (mode := context.fake_mode) is not None:

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            # Dynamo's own choice of what is symbolic; a tensor that it did not see has its shape for good.
            contexts: Any = context.tensor_to_context
            symbolic = contexts.get(value)
            if symbolic is None:
                return mode.from_tensor(value, static_shapes=True)
            return mode.from_tensor(
                value, static_shapes=False, symbolic_context=symbolic, source=symbolic.tensor_source, trace=False
            )

        fakes = tuple(fake(value) for value in inputs)
    return CapturedGraph(
        graph=copy.deepcopy(gm),
        sources=tuple(getattr(node, "_dynamo_source", None) for node in gm.graph.find_nodes(op="placeholder")),
        fakes=fakes,
        fake_mode=context.fake_mode if context is not None else None,
        grad_enabled=torch.is_grad_enabled(),
        compile_context=CompileContext.try_get(),
    )


def compile_again(captured: CapturedGraph, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``compiler(graph, inputs)`` on a captured graph from inside a running program.

    This is what Dynamo does for specialisations, and AOTAutograd for backwards that it compiles late. The guards that
    the first compilation added hold for this one: it is the same graph with the same shapes. Seen in 2.11 and 2.13.
    """
    from torch._guards import TracingContext, compile_context, tracing

    gm = copy.deepcopy(captured.graph)
    with (
        tracing(TracingContext(captured.fake_mode)),
        compile_context(captured.compile_context),
        torch.set_grad_enabled(captured.grad_enabled),
    ):
        compiled: Callable[..., Any] = compiler(gm, captured.fakes)
    return compiled


def while_tracing(function: Callable[[Any], None]) -> None:
    """Where Dynamo traces this call, have it run ``function(context)`` now. It leaves nothing in the graph.

    Args:
        function: a function of a module's namespace; see ``traced_call`` for its argument.
    """
    from torch._dynamo.comptime import comptime

    comptime(function)


def traced_call(context: Any) -> tuple[Any, Any]:
    """What Dynamo is tracing, for a function that ``while_tracing`` runs. Seen in torch 2.13, written for 2.11 too.

    Returns:
        ``self`` of the method that called ``while_tracing``, and what Dynamo gives the graph to: see ``backend_of``.
    """
    translator = context._ComptimeContext__tx.parent
    owner: Any = getattr(translator.symbolic_locals.get("self"), "value", None)
    return owner, translator.output.compiler_fn


def backend_of(callback: Any) -> str:
    """The name of the backend behind a callback of Dynamo's; empty where nothing is compiled.

    ``get_eval_frame_callback()`` tells which callback Dynamo has for Python frames now. Seen in torch 2.13, written for
    2.11 too.
    """
    from torch._dynamo.eval_frame import innermost_backend

    return getattr(innermost_backend(callback), "compiler_name", "") if callable(callback) else ""


def skip_frame(function: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling ``function`` where eager code calls it, and leave what it calls to Dynamo.

    It has no effect on calls that Dynamo traces. Seen in torch 2.11 and 2.13.
    """
    from torch._C._dynamo import eval_frame

    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def forget_graphs_of_others(backend: str) -> None:
    """Have Dynamo trace again, at their next call, graphs of other backends that read parameters of modules.

    For hooks that are added to modules: Dynamo has no guards on them, so that a graph that was traced before would
    never meet them. Seen in torch 2.13, written for 2.11 too.

    Args:
        backend: the name of the one whose graphs stay.
    """
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for reference in input_codes.seen:
        if (code := reference()) is None:
            continue
        for entry in _debug_get_cache_entry_list(code):
            guards: Any = entry.guard_manager
            if isinstance(guards, DeletedGuardManagerWrapper) or not callable(entry.backend):
                continue
            if backend_of(entry.backend) != backend and any("_parameters" in part for part in guards.code_parts):
                deleted = DeletedGuardManagerWrapper("a hook was added to modules, which this graph has not traced")
                guards.extra_state.invalidate(guards.cache_entry, deleted)


def active_ddp(call: CompileCall) -> bool:
    """Whether the frame being compiled runs inside DistributedDataParallel. Seen in torch 2.11 and 2.13."""
    if not torch.distributed.is_available():
        return False
    from torch.nn.parallel import DistributedDataParallel

    candidates = (call.module, *call.local_scope.values())
    return in_ddp_forward() or any(isinstance(value, DistributedDataParallel) for value in candidates)


def in_ddp_forward() -> bool:
    """Whether a forward of DistributedDataParallel is under way. Seen in torch 2.13."""
    if not torch.distributed.is_available():
        return False
    from torch.nn.parallel import DistributedDataParallel

    ddp: Any = DistributedDataParallel
    return ddp._active_ddp_module is not None


def source_module(source: Any, call: CompileCall) -> torch.nn.Module | None:
    """The outermost module on Dynamo's way to an input. Seen in torch 2.11 and 2.13."""
    chain = [source]
    while (base := getattr(chain[-1], "base", None)) is not None:
        chain.append(base)
    scope = {"L": call.local_scope, "G": call.global_scope}
    for prefix in reversed(chain):
        try:
            value = eval(prefix.name, scope)
        except Exception:  # names may use helpers that only Dynamo's guard code has
            continue
        if isinstance(value, torch.nn.Module):
            return value
    return None


def backend_error(error: Exception) -> Exception:
    """``error`` as one that Dynamo passes on as it is: of the same type and text, not a BackendCompilerFailed.

    Seen in torch 2.11 and 2.13.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind = type(type(error).__name__, (ShortenTraceback, type(error)), {"__module__": type(error).__module__})
    made: Exception = kind(*error.args, first_useful_frame=None)
    return made


def aot_inputs(graph: torch.fx.Graph) -> dict[int, torch.fx.Node]:
    """Placeholders of an AOTAutograd graph by the index of the Dynamo graph's input that they are.

    AOTAutograd describes every input, so that tokens, symbolic sizes, saved tensors and removed duplicates cannot shift
    a count. Inputs that it replaced (the parts of a tensor subclass, the base of several views) are not in the result.
    Seen in torch 2.11 and 2.13.

    Raises:
        RuntimeError: the graph has no descriptions.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    placeholders = graph.find_nodes(op="placeholder")
    if placeholders and not any("desc" in node.meta for node in placeholders):
        raise RuntimeError(f"torch {torch.__version__} does not describe AOTAutograd's inputs; torch 2.11 to 2.13 do")
    described = ((node.meta.get("desc"), node) for node in placeholders)
    return {desc.idx: node for desc, node in described if isinstance(desc, PlainAOTInput)}


def aot_gradients(graph: torch.fx.Graph) -> dict[int, int]:
    """Positions, in a backward graph's outputs, of the gradients of the Dynamo graph's inputs, by input index.

    Seen in torch 2.11 and 2.13.
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    output = graph.output_node()
    descriptions = output.meta.get("desc") or ()
    return {
        desc.grad_of.idx: position
        for position, desc in enumerate(descriptions)
        if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput)
    }


def readers_of_memory(
    graph: torch.fx.Graph, nodes: Sequence[torch.fx.Node]
) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """For each node, the operators that read its memory, through itself or any view of it.

    Fake tensors share storages as the real ones do. Seen in torch 2.11 and 2.13.
    """
    aliases: dict[int | None, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        aliases.setdefault(storage_of(node), []).append(node)
    return {
        node: [user for alias in aliases[storage_of(node)] for user in alias.users if user.op != "output"]
        for node in nodes
    }


def schema_of(node: torch.fx.Node) -> torch.FunctionSchema | None:
    """The schema of the operator that the node calls; None for a node that calls none. Seen in torch 2.11 and 2.13."""
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def storage_of(node: torch.fx.Node) -> int | None:
    """What all nodes with the same memory have in common; None for those that are no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def graph_rewritten(graph: torch.fx.Graph, written: Iterable[torch.fx.Node]) -> None:
    """Tell Inductor what a rewrite changed that it would not see by itself.

    Inductor numbers the stretches of a graph between mutations once, before our nodes exist: with the old numbers its
    passes would move reads of a parameter over a write of ours. It converts an output that a convolution likes better
    in another layout, and if the output is an input saved for the backward, everything in the graph then uses the
    converted copy, our write to the parameter too: an output that counts as visible to the user keeps its layout.
    Seen in torch 2.11 and 2.13.

    Args:
        written: inputs that inserted nodes write to.
    """
    for node in graph.nodes:
        node.meta.pop("mutation_region_id", None)
    output = graph.output_node()
    if (visible := output.meta.get("user_visible_output_idxs")) is not None:
        values: Any = output.args[0]
        keep = set(written)
        output.meta["user_visible_output_idxs"] = [
            i for i, value in enumerate(values) if isinstance(value, torch.fx.Node) and (i in visible or value in keep)
        ]


def fake_mode_of(graph: torch.fx.Graph) -> AbstractContextManager[Any]:
    """The mode in which the graph's example values are made; a null context for a graph without any.

    Seen in torch 2.11 and 2.13.
    """
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes if node.op == "placeholder"])
    return mode if mode is not None else nullcontext()


def register_write_lowerings(written_by: Iterable[torch._ops.OpOverload]) -> None:
    """Make Inductor finish every read of an argument before an op of ours writes to it.

    Inductor keeps pointwise reads of an input lazy: casts, products, gathers. Its fallback for a mutating custom op
    registers the op first and realizes the lazy readers of its arguments afterwards. The scheduler then orders these
    readers behind the write, and they read the new value. This lowering realizes the readers first, as Inductor does
    for ``resize_storage_bytes_``. Idempotent: an op's lowering is replaced. Run in torch 2.13, written for 2.11 too.

    Args:
        written_by: ops that write to at least one argument, a tensor or a list of tensors.
    """
    from torch._inductor import lowering

    constraint = lowering.tag_to_layout_constraint(torch.Tag.needs_fixed_stride_order)
    for op in written_by:
        # What Inductor would set itself when it makes a fallback for an op without a lowering.
        lowering.add_needs_realized_inputs(op)
        lowering.add_layout_constraint(op, constraint)
        lowering.register_lowering(op, type_promotion_kind=None)(_write_lowering(op))


def _write_lowering(op: torch._ops.OpOverload) -> Callable[..., Any]:
    from torch._inductor.lowering import fallback_handler

    fallback: Callable[..., Any] = fallback_handler(op, add_to_fallback_set=False)

    def lower(*args: Any) -> Any:
        realize_readers(op, args)
        return fallback(*args)

    return lower


def realize_readers(op: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    """Realize all lazy readers of the arguments that ``op`` writes to. Run in torch 2.13, written for 2.11 too."""
    from torch._inductor.virtualized import V

    for argument, value in zip(op._schema.arguments, args, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                tensor.realize()
                V.graph.mark_buffer_mutated(tensor.get_name())


def cache_note(graph: torch.fx.Graph) -> dict[str, str]:
    """What Inductor's FX graph cache must key on beside the nodes: it never reads this setting here, but hashes it.

    The shapes of our nodes' results depend on the plan (``topk_ratio``), which the nodes only refer to by number. Fused
    nodes have no results; what stays unfused still does.
    """
    values = (node.meta.get("val") for node in graph.nodes if str(node.target).startswith("zenflow."))
    shapes = ";".join(str(tuple(value.shape)) for value in values if isinstance(value, torch.Tensor))
    return {"zenflow": REWRITE_VERSION, "shapes": shapes}


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From the code of a graph, which takes a list of arguments, to code that is called in its place."""

Rewrite = Callable[[torch.fx.GraphModule, str], Wrap]
"""Rewrites a graph of a phase in place, and says how its code is to be wrapped."""


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    rewrite: Rewrite | None,
    config_patches: dict[str, Any],
) -> Callable[..., Any]:
    """Inductor, with ``rewrite(graph, phase)`` called on each AOTAutograd graph, or plain where that is None.

    AOTAutograd's cache does not know of ``rewrite`` and would load graphs of a plain compilation, so that it is off for
    ours; the FX graph cache sees the rewritten graph and stays on. The backward is compiled lazily, outside of any
    ``config.patch`` around this call: ``config_patches`` reaches it, a patch here would not. Seen in 2.11 and 2.13.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if rewrite is None:
        plain: Callable[..., Any] = compile_fx(gm, inputs, config_patches=config_patches)
        return plain

    def inner_compile(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Any:
        phase = "forward"
        if keywords.get("is_backward"):
            phase = "backward"
        elif keywords.get("is_inference"):
            phase = "inference"
        wrap = rewrite(graph, phase)
        with inductor_config.patch({"aot_inductor.metadata": cache_note(graph.graph)}):
            return wrap(compile_fx_inner(graph, example_inputs, **keywords))

    settings = {
        # Inductor would move all weight gradients, and what follows them, to the end of the backward: no overlap left.
        "reorder_for_peak_memory": False,
        **config_patches,
    }
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Callable[..., Any] = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=settings)
    return compiled


def compile_with_aot(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    rewrite: Rewrite | None,
) -> Callable[..., Any]:
    """AOTAutograd's graphs, rewritten, run node by node: no code generation. Seen in torch 2.11 and 2.13.

    The partitioner is Inductor's, so that the graphs are, too. It saves weights as such, where AOTAutograd's default
    would save transposed views of them, which hide from the passes whose memory they read.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiler(phase: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            wrap = rewrite(graph, phase) if rewrite is not None else None
            code = make_boxed_func(graph)
            return code if wrap is None else wrap(code)

        return compile_graph

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled
