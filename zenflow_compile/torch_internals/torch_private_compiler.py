"""Private APIs of PyTorch's compilers that the backend uses: Dynamo, AOTAutograd, Inductor.

``torch_private`` has those that the runtime uses, and says in which versions both were seen. No other file of the
package uses private APIs.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from traceback import walk_stack
from types import FrameType
from typing import Any, cast

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback


@dataclass(frozen=True, slots=True)
class CompileCall:
    """The ``torch.compile`` call that asked for a graph.

    Attributes:
        wrapper: the object that ``torch.compile`` made for this call; None outside ``torch.compile``. It must not own
            anything: Dynamo keeps it until ``torch._dynamo.reset()``.
        module: the module that was compiled; None when a plain function was.
        local_scope: local variables of the frame that the graph was captured from.
        global_scope: its global variables.
    """

    wrapper: Any = None
    module: torch.nn.Module | None = None
    local_scope: Mapping[str, Any] = field(default_factory=dict)
    global_scope: Mapping[str, Any] = field(default_factory=dict)


def compile_call() -> CompileCall:
    """Find the ``torch.compile`` call behind the graph that is being captured or is running, by walking up the stack.

    Dynamo tells a backend the graph, but not who asked for it. The frames, innermost first::

        while capturing                                    while running
        -----------------------------------------------    -----------------------------------------------
        zenflow_compile   the backend                      zenflow_compile   ServedGraph.__call__
        torch             OutputGraph methods   (scopes)   user code         the traced function  (scopes)
        torch             the rest of Dynamo               torch, user code  modules that call it
        torch             OptimizeContext       (call)     torch             OptimizeContext      (call)
        torch             the module's own frames, up to OptimizedModule   (module)
        user code         model(x)

    ``OptimizeContext`` is ``self`` of the wrapper that ``torch.compile`` made. It compiles a function, whose ``self``
    may be a module, or is called by the ``OptimizedModule`` that stands for one.
    """
    frames = [frame for frame, _ in walk_stack(sys._getframe(1))]
    call, end = _compile_call_of(frames)
    return CompileCall(**call, **_dynamo_scopes(frames[:end]))


def inside_functional_call() -> bool:
    """Whether ``torch.func.functional_call`` has replaced a module's parameters for this call."""
    from torch.nn.utils import stateless

    code = stateless._functional_call.__code__
    return any(frame.f_code is code for frame, _ in walk_stack(sys._getframe(1)))


def _dynamo_scopes(frames: Sequence[FrameType]) -> dict[str, Any]:
    """The local and global variables of the frame that the graph was captured from; empty if it is not on the stack."""
    from torch._dynamo.output_graph import OutputGraph

    for frame in frames:
        owner = frame.f_locals.get("self")
        if isinstance(owner, OutputGraph):
            return {"local_scope": owner.local_scope, "global_scope": owner.global_scope}
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "zenflow_compile"):
            return {"local_scope": frame.f_locals, "global_scope": frame.f_globals}
    return {}


def _compile_call_of(frames: Sequence[FrameType]) -> tuple[dict[str, Any], int]:
    """``CompileCall.wrapper`` and ``.module``, as far as found, and how many frames belong to the call."""
    from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule, innermost_backend

    found: dict[str, Any] = {}
    for position, frame in enumerate(frames):
        owner = frame.f_locals.get("self")
        if "wrapper" in found:  # the frames of the compiled module, if there is one, are directly above
            if isinstance(owner, OptimizedModule):
                found["module"] = owner._orig_mod
            if not isinstance(owner, torch.nn.Module) or isinstance(owner, OptimizedModule):
                return found, position + 1
        elif isinstance(owner, OptimizeContext):
            found["wrapper"] = innermost_backend(owner.callback)
            bound = getattr(frame.f_locals.get("fn"), "__self__", frame.f_locals.get("fn"))
            if isinstance(bound, torch.nn.Module):
                found["module"] = bound
    return found, len(frames)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Dynamo's graph with everything that is needed to compile it again, after Dynamo has finished with it.

    Attributes:
        graph: the graph. Compilers edit graphs, so they get copies.
        sources: where Dynamo found each input; None where unknown.
        param_sources: the same for parameters that are attributes of the graph, by name.
        fakes: its inputs as fake tensors: the shapes, which may be symbolic, and no memory.
        fake_mode: their mode; None outside Dynamo.
        grad_enabled: whether gradients were on, which decides between a training and an inference graph.
        compile_context: Dynamo's context of the compilation; None outside Dynamo.
    """

    graph: torch.fx.GraphModule
    sources: tuple[Any, ...]
    param_sources: dict[str, Any]
    fakes: tuple[Any, ...]
    fake_mode: Any
    grad_enabled: bool
    compile_context: Any

    @property
    def compile_id(self) -> str:
        """Dynamo's ``"frame/recompilation"``; empty outside Dynamo."""
        return str(self.compile_context.compile_id) if self.compile_context else ""


def capture(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> CapturedGraph:
    """Keep the backend's arguments, with fake tensors for tensors."""
    from torch._guards import CompileContext, TracingContext

    context = TracingContext.try_get()
    fakes = tuple(inputs)
    if context is not None and (mode := context.fake_mode) is not None:

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            # Dynamo chose which sizes are symbolic; a tensor that it did not see has a static shape.
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
        param_sources=getattr(gm, "_param_name_to_source", {}),
        fakes=fakes,
        fake_mode=context.fake_mode if context is not None else None,
        grad_enabled=torch.is_grad_enabled(),
        compile_context=CompileContext.try_get(),
    )


def compile_again(captured: CapturedGraph, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``compiler(graph, inputs)`` on a captured graph from inside a running program.

    Dynamo does the same for specializations, and AOTAutograd for backwards that it compiles late. The guards of the
    first compilation also hold for this one, which has the same graph and shapes.
    """
    from torch._guards import TracingContext, compile_context, tracing

    gm = copy.deepcopy(captured.graph)
    # What a copy lacks of Dynamo's graph. Without it AOTAutograd takes no weight for a static input, and on a GPU
    # Inductor's code reads the address of each at every call: weights in host memory have none.
    gm._param_name_to_source = captured.param_sources  # type: ignore[assignment]
    for node, source in zip(gm.graph.find_nodes(op="placeholder"), captured.sources, strict=True):
        node._dynamo_source = source
    with (
        tracing(TracingContext(captured.fake_mode)),
        compile_context(captured.compile_context),
        torch.set_grad_enabled(captured.grad_enabled),
    ):
        compiled: Callable[..., Any] = compiler(gm, captured.fakes)
    return compiled


def while_tracing(function: Callable[[Any], None]) -> None:
    """Have Dynamo run ``function(context)`` while it traces this call. The graph does not contain the call.

    ``function`` is of a module's namespace; see ``traced_call`` for its argument.
    """
    from torch._dynamo.comptime import comptime

    comptime(function)


def traced_call(context: Any) -> tuple[Any, Any]:
    """Find out what Dynamo traces, from a function that ``while_tracing`` runs.

    Seen in torch 2.13, written for 2.11 too.

    Returns:
        ``self`` of the method that called ``while_tracing``, and the callback that gets the graph: see ``backend_of``.
    """
    translator = context._ComptimeContext__tx.parent
    owner: Any = getattr(translator.symbolic_locals.get("self"), "value", None)
    return owner, translator.output.compiler_fn


def backend_of(callback: Any) -> str:
    """The name of the backend behind a Dynamo callback; empty if nothing is compiled.

    ``get_eval_frame_callback()`` tells which callback Dynamo has for Python frames now. Seen in torch 2.13, written for
    2.11 too.
    """
    from torch._dynamo.eval_frame import innermost_backend

    return getattr(innermost_backend(callback), "compiler_name", "") if callable(callback) else ""


def announce_backend(name: str, place: str) -> None:
    """Add an entry point of a backend to those that Dynamo has found, unless it has one of this name.

    Seen in torch 2.13, written for 2.11 too.
    """
    from importlib.metadata import EntryPoint

    from torch._dynamo.backends import registry

    registry._BACKENDS.setdefault(name, EntryPoint(name, place, "torch_dynamo_backends"))


def watch_compilations(begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call ``begin`` and ``end`` around each compilation of Dynamo, and of a backward. Returns what ends that."""
    handler = torch._dynamo.callback.callback_handler
    started = handler.register_start_callback(lambda _: begin())
    ended = handler.register_end_callback(lambda _: end())

    def stop() -> None:
        handler.remove_start_callback(started)
        handler.remove_end_callback(ended)

    return stop


def traces_again(error: BaseException) -> bool:
    """Return whether Dynamo traces the frame again after this error of a backend.

    ``dynamic=True`` has a pass that turns Python numbers into tensors, and may find that Dynamo has to trace others of
    them as constants. Seen in torch 2.13, written for 2.11 too.
    """
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def forget_graphs_of_others(backend: str) -> None:
    """Have Dynamo trace graphs of backends other than ``backend`` again if they read parameters of modules.

    Dynamo has no guards on module hooks: a graph that was traced before a hook was added would never call it. Seen in
    torch 2.13, written for 2.11 too.
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


def inside_ddp(call: CompileCall | None) -> bool:
    """Whether a forward of DistributedDataParallel runs; that of ``call``, a compilation, may have such a module."""
    if not torch.distributed.is_available():
        return False
    from torch.nn.parallel import DistributedDataParallel

    ddp: Any = DistributedDataParallel
    candidates = () if call is None else (call.module, *call.local_scope.values())
    return ddp._active_ddp_module is not None or any(isinstance(value, ddp) for value in candidates)


def source_module(source: Any, call: CompileCall) -> torch.nn.Module | None:
    """The outermost module through which Dynamo found an input."""
    chain = [source]
    while (base := getattr(chain[-1], "base", None)) is not None:
        chain.append(base)
    scope = {"L": call.local_scope, "G": call.global_scope}
    for prefix in reversed(chain):
        try:
            value = eval(prefix.name, scope)
        except Exception:  # the name may use helpers of Dynamo's guard code
            continue
        if isinstance(value, torch.nn.Module):
            return value
    return None


def backend_error(error: Exception) -> Exception:
    """Return an error of the same type and text that Dynamo does not turn into ``BackendCompilerFailed``."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(type(error).__name__, (ShortenTraceback, type(error)), {"__module__": type(error).__module__})
    return cast(Exception, kind(*error.args, first_useful_frame=None))


def aot_inputs(graph: torch.fx.Graph) -> dict[int, torch.fx.Node]:
    """Placeholders of an AOTAutograd graph, by the index of the corresponding input of Dynamo's graph.

    AOTAutograd describes every input, so tokens, symbolic sizes, saved tensors and removed duplicates shift no index.
    Inputs that it replaced (the parts of a tensor subclass, the base of several views) are not in the result.

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
    """Positions, in a backward graph's outputs, of the gradients of the Dynamo graph's inputs, by input index."""
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

    Fake tensors share storages as the real ones do.
    """
    aliases: dict[int | None, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        aliases.setdefault(storage_of(node), []).append(node)
    return {
        node: [user for alias in aliases[storage_of(node)] for user in alias.users if user.op != "output"]
        for node in nodes
    }


def schema_of(node: torch.fx.Node) -> torch.FunctionSchema | None:
    """The schema of the operator that the node calls; None for a node that calls none."""
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def storage_of(node: torch.fx.Node) -> int | None:
    """A number for the node's storage, equal for all nodes that share it; None for a node that is no tensor."""
    return storage_of_value(node.meta.get("val"))


def storage_of_value(value: Any) -> int | None:
    """As ``storage_of``, of an example value."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:  # a sparse tensor has no storage
        return None
    return cast(int, value.untyped_storage()._cdata)


def calls_subgraph(node: torch.fx.Node) -> bool:
    """Whether the node calls a nested compiled region, whose results may share memory with its inputs.

    Example values of later calls have the storages of the first one. Seen in torch 2.13.
    """
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "invoke_subgraph"


def returned_nodes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The results of a forward, without what it saves for the backward.

    AOTAutograd makes results that are views of inputs again outside of the graph, but the graph returns them, too. Seen
    in torch 2.13, written for 2.11 too.
    """
    from torch._functorch._aot_autograd import descriptors
    from torch._guards import TracingContext

    saved = (descriptors.SavedForBackwardsAOTOutput, descriptors.SavedForBackwardsNoVcCheckAOTOutput)
    output = graph.output_node()
    values: Any = output.args[0]
    if (described := output.meta.get("desc")) is not None:
        if len(described) > len(values):  # tokens of effects, which are not in Inductor's graphs
            described = [desc for desc in described if not isinstance(desc, descriptors.ForwardTokenAOTOutput)]
        values = [value for value, desc in zip(values, described, strict=True) if not isinstance(desc, saved)]
    elif (context := TracingContext.try_get()) is not None and context.fw_metadata is not None:
        # The partitioner has recomputed parts of the forward, and made the output anew.
        values = values[: len(context.fw_metadata.tokens) + context.fw_metadata.num_forward_returns]
    return [value for value in values if isinstance(value, torch.fx.Node)]


def written_by_forward(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs that the model writes to in a forward; empty outside of a compilation.

    AOTAutograd writes to inputs with gradients outside of the graph. Its metadata tells of these. It numbers the inputs
    of this graph, not of Dynamo's: where some of those are views of one tensor that is written, AOTAutograd replaces
    them by that tensor, in front of all others. Seen in torch 2.13, written for 2.11 too.
    """
    from torch._functorch._aot_autograd.descriptors import ForwardTokenAOTInput
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return []
    placeholders = graph.find_nodes(op="placeholder")
    inputs = [node for node in placeholders if not isinstance(node.meta.get("desc"), ForwardTokenAOTInput)]
    return [node for node, info in zip(inputs, context.fw_metadata.input_info, strict=False) if info.mutates_data]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What ``recompute_in_backward`` starts from: indices of inputs of Dynamo's graph.

    Attributes:
        weights: what is computed from them is recomputed.
        params: inputs that are there in the backward without being saved, among them ``weights``.
    """

    weights: frozenset[int] = frozenset()
    params: frozenset[int] = frozenset()


def recompute_in_backward(graph: torch.fx.Graph, chosen: Recomputed) -> int:
    """Have the partitioner recompute in the backward whatever a joint graph computes from weights.

    Casts and scaled copies of a weight would be saved for the backward, as large as the weight. Only operators with
    inputs that the backward has anyway (weights, other parameters, constants) are recomputed, and only those of
    PyTorch: an operator of the user's may return something else the next time. Seen in torch 2.13, written for 2.11
    too.

    Returns:
        How many operators are recomputed.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    if not any("desc" in node.meta for node in graph.find_nodes(op="placeholder")):
        return 0  # the branch of a torch.cond, for which Inductor calls joint passes, too
    inputs = aot_inputs(graph)
    available = {node for index, node in inputs.items() if index in chosen.params}
    derived = {node for index, node in inputs.items() if index in chosen.weights}
    for node in graph.nodes:
        if available.issuperset(node.all_input_nodes) and _repeatable(node):
            available.add(node)
            if not derived.isdisjoint(node.all_input_nodes):
                derived.add(node)
    # Of regions that a user checkpoints, the partitioner saves what a later region reads, by these numbers.
    region = max((node.meta.get("ac_graph_id", 0) for node in graph.nodes), default=0)
    marked: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node not in available:
            continue
        if node in derived or not marked.isdisjoint(node.users):
            marked.add(node)
            node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, region
    return len(marked)


def _repeatable(node: torch.fx.Node) -> bool:
    """Whether a node of the forward returns the same when it runs again."""
    if node.meta.get("partitioner_tag") == "is_backward":
        return False
    if node.target is operator.getitem:
        return True
    schema = schema_of(node)
    if schema is None or schema.is_mutable:
        return False
    op: Any = node.target
    return op.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in op.tags


def graph_rewritten(graph: torch.fx.Graph, written: Iterable[torch.fx.Node]) -> None:
    """Tell Inductor about changes of a rewrite that it would not notice.

    Inductor numbers the regions between mutations before our nodes exist. With the old numbers, its passes would move
    reads of a parameter over our writes. Inductor also changes the layout of outputs for convolutions. If the output is
    an input that is saved for the backward, the whole graph then uses the converted copy, and our write to the
    parameter goes to that copy. Outputs that are visible to the user keep their layout.
    Inserted nodes write to the inputs ``written``.
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
    """The fake mode of the graph's example values; a null context for a graph without example values."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes if node.op == "placeholder"])
    return mode if mode is not None else nullcontext()


def copy_origin(source: torch.fx.Node, node: torch.fx.Node) -> None:
    """Give ``node`` the source line, the module path and the provenance of ``source``, for which it was inserted.

    Printed graphs, ``TORCH_TRACE`` and Inductor's comments show these. Seen in torch 2.13, written for 2.11 too.
    """
    from torch.fx.traceback import NodeSource, NodeSourceAction

    for key in ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr"):
        if key in source.meta:
            node.meta[key] = source.meta[key]
    node.meta["from_node"] = [NodeSource(source, "zenflow", NodeSourceAction.CREATE)]


def printed_graph(gm: torch.fx.GraphModule) -> str:
    """The graph as Python code, with shapes and source lines."""
    return gm.print_readable(print_output=False)


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a text artifact to the structured trace (``TORCH_TRACE``); ``payload`` is not called without one."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)


def register_write_lowerings(written_by: Iterable[torch._ops.OpOverload]) -> None:
    """Make Inductor finish every read of an argument before one of our ops writes to it.

    Inductor keeps pointwise reads of an input lazy: casts, products, gathers. Its fallback for a mutating custom op
    registers the op first and realizes the lazy readers of its arguments afterwards. The scheduler then orders these
    readers after the write, and they read the new value. This lowering realizes the readers first, as Inductor does
    for ``resize_storage_bytes_``. Idempotent. Run in torch 2.13, written for 2.11 too.
    Each of the ops ``written_by`` writes to at least one argument, a tensor or a list of tensors.
    """
    from torch._inductor import lowering

    constraint = lowering.tag_to_layout_constraint(torch.Tag.needs_fixed_stride_order)
    for op in written_by:
        # Inductor sets both itself when it makes a fallback for an op without a lowering.
        lowering.add_needs_realized_inputs(op)
        lowering.add_layout_constraint(op, constraint)
        lowering.register_lowering(op, type_promotion_kind=None)(_write_lowering(op))


def _write_lowering(op: torch._ops.OpOverload) -> Callable[..., Any]:
    from torch._inductor.lowering import fallback_handler

    fallback: Callable[..., Any] = fallback_handler(op, add_to_fallback_set=False)

    def lower(*args: Any) -> Any:
        realize_readers(op, args)  # Hazard: after ``fallback``, the scheduler would order them behind the write.
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


def cache_note(graph: torch.fx.Graph, version: str) -> dict[str, str]:
    """Values for an Inductor setting that Inductor does not read here, but hashes into the key of its FX graph cache.

    The cache sees neither the nodes' metadata nor their lowerings. The shapes of our nodes' results depend on the plan
    (``topk_ratio``), which the nodes only refer to by number; nodes that were grouped have no results.
    ``version`` identifies the code that rewrites graphs and lowers their nodes.
    """
    values = (node.meta.get("val") for node in graph.nodes if str(node.target).startswith("zenflow."))
    shapes = ";".join(str(tuple(value.shape)) for value in values if isinstance(value, torch.Tensor))
    return {"zenflow": version, "shapes": shapes}


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps the code of a graph, which takes a list of arguments."""

Rewrite = Callable[[torch.fx.GraphModule, str], Wrap]
"""Rewrites the graph of a phase in place and returns the wrapper of its code."""


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    rewrite: Rewrite | None,
    config_patches: dict[str, Any],
    version: str,
    recomputed: Recomputed = Recomputed(),
) -> Callable[..., Any]:
    """Compile with Inductor and call ``rewrite(graph, phase)``, if given, on each AOTAutograd graph.

    AOTAutograd's cache does not know of ``rewrite`` and would load graphs of a plain compilation: it is off for ours.
    The FX graph cache sees the rewritten graph and stays on. The backward is compiled lazily, outside of any
    ``config.patch`` around this call: ``config_patches`` reaches it, a patch here would not.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if rewrite is None:
        return cast(Callable[..., Any], compile_fx(gm, inputs, config_patches=config_patches))

    def inner_compile(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Any:
        flagged = (phase for phase in ("backward", "inference") if keywords.get(f"is_{phase}"))
        wrap = rewrite(graph, next(flagged, "forward"))
        with inductor_config.patch({"aot_inductor.metadata": cache_note(graph.graph, version)}):
            return wrap(compile_fx_inner(graph, example_inputs, **keywords))

    settings = {
        # Inductor would move all weight gradients, and what follows them, to the end of the backward: no overlap left.
        "reorder_for_peak_memory": False,
        **config_patches,
    }
    if recomputed.weights:
        others = settings.get("joint_custom_post_pass", inductor_config.joint_custom_post_pass)
        settings["joint_custom_post_pass"] = _joint_pass(recomputed, version, others)
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Callable[..., Any] = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=settings)
    return compiled


def _joint_pass(chosen: Recomputed, version: str, others: Any) -> Any:
    """``recompute_in_backward`` as Inductor and its FX graph cache take it, behind ``others``, which a user has set."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class JointPass(CustomGraphPass):  # type: ignore[misc]
        def __call__(self, graph: torch.fx.Graph) -> None:
            recompute_in_backward(graph, chosen)

        def uuid(self) -> str:
            return f"zenflow {version} {sorted(chosen.weights)} {sorted(chosen.params)}"

    if others is None:
        return JointPass()
    return [*(others if isinstance(others, (list, tuple)) else [others]), JointPass()]


def compile_with_aot(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    rewrite: Rewrite | None,
    recomputed: Recomputed = Recomputed(),
) -> Callable[..., Any]:
    """Run AOTAutograd's graphs, rewritten, node by node, without code generation.

    It uses Inductor's partitioner, which saves weights themselves. AOTAutograd's default would save transposed views of
    them: the passes could not tell which parameter's memory these read.
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

    def partition(joint: torch.fx.GraphModule, *arguments: Any, **keywords: Any) -> Any:
        recompute_in_backward(joint.graph, recomputed)
        return min_cut_rematerialization_partition(joint, *arguments, **keywords)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition if recomputed.weights else min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled
