"""The backend ``"zenflow"`` of ``torch.compile``: it rewrites AOTAutograd's graphs and compiles them with Inductor."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from zenflow_compile.checks.validate import check_choice, user_stacklevel
from zenflow_compile.compiler.ownership import OWNER_ATTRIBUTE, Claimed, OwnedInputs, claim, refuse_ddp
from zenflow_compile.explanation import rewrite_and_record
from zenflow_compile.options.deepspeed import read_deepspeed_config
from zenflow_compile.options.options import ADAM_KEYWORDS, OPTION_NAMES, Options, no_option
from zenflow_compile.passes.base import PassContext, Phase
from zenflow_compile.passes.fetch_parameters import fetch_order
from zenflow_compile.passes.load_weights import loads_of, storages_of_weights, weights_to_keep
from zenflow_compile.passes.offload_gradients import gradient_places
from zenflow_compile.passes.pipeline import source_hash
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private
from zenflow_compile.torch_internals import torch_private_compiler as private

if TYPE_CHECKING:
    from zenflow_compile.runtime.engine import Engine


def zenflow(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs for training with offloaded optimizer state.

    ``torch.compile(model, backend="zenflow")`` calls this. It inserts nodes into forward and backward for parameters
    that a ``ZenFlowAdamW`` owns. With optimizer keywords among ``options``, it makes an optimizer for parameters
    without an owner, whose updates run in the backward. All other parameters train as under Inductor, with a warning
    if no ZenFlowAdamW exists.

    Args:
        gm: Dynamo's graph.
        example_inputs: its real inputs, among them the parameters themselves.
        options: keywords of ``ZenFlowAdamW``, ``"config"``, ``"inner"`` (``"inductor"`` or ``"eager"``), ``"mode"``
            and Inductor's own settings; see ``split_backend_options``.
        mode: Inductor's mode.

    Raises:
        ValueError: a bad option, or a model wrapped in DistributedDataParallel.
        TypeError: an unknown option.
        RuntimeError: the optimizer that this backend made was closed.
    """
    try:
        refuse_ddp(private.compile_call())
        chosen = split_backend_options(options, mode)
        graph = ServedGraph(gm, example_inputs, chosen)
        claimed = graph.claim(example_inputs)
        if not ops.any_owner() and torch.is_grad_enabled():
            warn_of_no_optimizer(example_inputs)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise private.backend_error(error) from error
    try:  # apart from the block above: Dynamo uses exceptions for control flow
        graph.compile(example_inputs, claimed.owned, gm)
    except BaseException as error:
        if private.traces_again(error):
            # Dynamo compares its traces: the next one must find the modules as this one did, without new hooks.
            for hook in claimed.hooks:
                hook.remove()
        raise
    return graph


def warn_of_no_optimizer(inputs: Sequence[Any]) -> None:
    if any(isinstance(value, nn.Parameter) and value.requires_grad for value in inputs):
        warnings.warn(
            'backend="zenflow" offloads nothing here: there is no ZenFlowAdamW yet, and the model trains as under '
            "Inductor. Create a ZenFlowAdamW over its parameters before the first batch (in the Hugging Face Trainer: "
            "optimizer_cls_and_kwargs=(ZenFlowAdamW, {...})), or pass its keywords in options=",
            stacklevel=user_stacklevel(),
        )


class ServedGraph:
    """One of Dynamo's graphs, compiled once for every set of parameters that it is called with.

    Dynamo reuses a compiled graph for all parameters of the same shapes: a second model of a class, a repeated block
    after graph breaks. Our nodes name an engine and a parameter, so parameters with other owners need other code.
    Guards could tell Dynamo, but each set of parameters, also of dead models, would then recompile the frame, and after
    Dynamo's limit of 8 the frame runs uncompiled. Instead, the owners of the parameters, which are attributes of the
    graph's inputs, choose the code at every call. So the graph also follows owners that change: a late optimizer, a
    closed one, a new one.
    """

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any], options: BackendOptions) -> None:
        self._options = options
        self._captured = private.capture(gm, example_inputs)
        self._params = tuple(
            i
            for i, value in enumerate(example_inputs)
            if isinstance(value, Tensor) and (isinstance(value, nn.Parameter) or value.requires_grad)
        )
        self._variants: dict[tuple[object, ...], Variant] = {}

    def __call__(self, *args: Any) -> Any:
        variant = self._variants.get(self._owners(args))
        if variant is None:
            variant = self.compile(args, self.claim(args).owned)
        if variant.engines and private.inside_ddp(None):
            refuse_ddp()
        return variant.code(*args)

    def _owners(self, args: Sequence[Any]) -> tuple[object, ...]:
        """The owner object of each parameter, which distinguishes sets of parameters."""
        return tuple([getattr(args[i], OWNER_ATTRIBUTE, None) for i in self._params])

    def claim(self, args: Sequence[Any]) -> Claimed:
        """Find the owners of the parameters among ``args``. Raises: see ``zenflow``."""
        claimed = claim(self._captured, args, self._options.optimizer)
        if claimed.owned and self._options.inductor.get("freezing"):
            raise ValueError(
                "freezing=True makes the weights constants of compiled inference graphs, which then never see an "
                "update; leave it at False"
            )
        return claimed

    def compile(self, args: Sequence[Any], owned: OwnedInputs, gm: GraphModule | None = None) -> Variant:
        """Compile for the parameters among ``args``, of which ``claim`` found the ``owned`` ones.

        Args:
            gm: Dynamo's own graph while Dynamo compiles, so that it gets the guards of this compilation; else None.
        """
        options = self._options
        rewrite = rewriter(owned, self._captured.compile_id) if owned else None

        def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            # The backward recomputes everything that is computed from offloaded weights and other parameters.
            weights: set[int] = set()
            for engine_id, params in owned.items():
                if (offloaded := cast("Engine", ops.engine(engine_id)).access.offloaded_weights) is not None:
                    weights |= {index for p, index in params if p in offloaded.ps}
            present = weights | {i for i, value in enumerate(args) if isinstance(value, nn.Parameter)}
            recomputed = private.Recomputed(frozenset(weights), frozenset(present))
            if options.inner == "eager":
                return private.compile_with_aot(graph, inputs, rewrite, recomputed)
            if rewrite is not None:
                private.register_write_lowerings(ops.MUTATING)
            return private.compile_with_inductor(graph, inputs, rewrite, options.inductor, source_hash(), recomputed)

        code = private.compile_again(self._captured, compiler) if gm is None else compiler(gm, args)
        variant = Variant(code, frozenset(owned))
        alive = {engine.id for engine in ops.live_engines()}
        self._variants = {key: old for key, old in self._variants.items() if old.engines <= alive}
        self._variants[self._owners(args)] = variant
        return variant


@dataclass(frozen=True, slots=True)
class Variant:
    code: Callable[..., Any]
    engines: frozenset[int]


def rewriter(owned: OwnedInputs, compile_id: str) -> private.Rewrite:
    """Return the function that runs the passes over each AOTAutograd graph, once per engine that has parameters in it.

    The backward is compiled at the first ``.backward()``, long after the backend returned: the function then looks up
    the engines and raises if one was closed.
    """
    forward_order: dict[int, list[int]] = {}
    weight_storages: dict[int, dict[int | None, int]] = {}
    examples: list[Any] = []  # of inputs, which own these storages
    # Hazard: threads that run their first backward at the same time each compile the graph, under one fake mode, which
    # only one thread can use at a time.
    one_thread = threading.Lock()

    def rewrite(gm: GraphModule, phase: str) -> private.Wrap:
        places: dict[int, dict[int, int]] = {}
        with one_thread:
            for engine_id, params in owned.items():
                engine = cast("Engine", ops.engine(engine_id))
                ctx = PassContext(
                    plan=engine.plan,
                    engine_id=engine_id,
                    phase=Phase(phase),
                    params=tuple(params),
                    finalizes_in_backward=engine.core.finalizes_in_backward,
                    forward_order=tuple(forward_order.get(engine_id, ())),
                    weight_grad_bytes=engine.weight_grad_bytes,
                    weights=engine.access.offloaded_weights,
                    weight_storages=weight_storages.get(engine_id, {}),
                    number=len(engine.graphs),
                )
                if reasons := weights_to_keep(gm.graph, ctx):
                    engine.access.keep_weights(reasons)
                    ctx = replace(ctx, weights=engine.access.offloaded_weights)
                if ctx.phase is Phase.FORWARD and ctx.weights is not None:
                    weight_storages[engine_id] = storages_of_weights(gm.graph, ctx)
                    examples.extend(node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
                engine.graphs.append(rewrite_and_record(gm, ctx, compile_id))
                if ctx.weights is not None:
                    engine.weights.declare(ctx.number, loads_of(gm, ctx))
                if ctx.phase is Phase.FORWARD and (order := fetch_order(gm, engine_id)):
                    forward_order[engine_id] = order
                    engine.access.declare_forward_order(order)
                if ctx.phase is Phase.BACKWARD:
                    places[engine_id] = gradient_places(gm.graph, ctx)

        def wrap(code: Callable[..., Any]) -> Callable[..., Any]:
            for engine_id, of_params in places.items():
                code = ops.returning_gradients(code, engine_id, of_params)
            if phase == Phase.INFERENCE:
                for engine_id in owned:
                    code = ops.marking_inference(code, engine_id)
            return code

        return wrap

    return rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """``mode=`` and ``options=`` of ``torch.compile(backend="zenflow")``.

    Attributes:
        optimizer: Keywords for ``ZenFlowAdamW``, already checked against ``Options``, if the backend makes the
            optimizer (optimizer in backward); None if the user made one.
        inner: What compiles the rewritten graphs: ``"inductor"``, or ``"eager"`` for no code generation.
        inductor: Inductor's settings: those of the mode, overridden by explicit ones.
    """

    optimizer: dict[str, Any] | None = None
    inner: Literal["inductor", "eager"] = "inductor"
    inductor: dict[str, Any] = field(default_factory=dict)


def split_backend_options(options: Mapping[str, Any] | None = None, mode: str | None = None) -> BackendOptions:
    """Split and check the options of ``torch.compile(backend="zenflow")``, before anything is compiled.

    ``torch.compile`` refuses ``mode=`` together with ``options=``, so ``options`` may have a key ``"mode"``.

    Args:
        options: ``inner``, ``mode``, ``config`` (path or dict for ``read_deepspeed_config``), keywords of
            ``ZenFlowAdamW``, which replace those of ``config``, and Inductor's own settings.
        mode: the ``mode=`` of ``torch.compile``.

    Raises:
        TypeError: an unknown name (with the nearest valid one), or a value of the wrong type.
        ValueError: a value outside its range, CUDA graphs, or Inductor settings under ``inner="eager"``.
        FileNotFoundError: ``config`` names no file.
    """
    rest = dict(options or {})
    inner = check_choice("inner", rest.pop("inner", "inductor"), ("inductor", "eager"))
    mode = rest.pop("mode", mode)
    config = rest.pop("config", None)
    optimizer_names = (*ADAM_KEYWORDS, *OPTION_NAMES)
    optimizer = {name: rest.pop(name) for name in optimizer_names if name in rest}
    if config is not None:
        optimizer = read_deepspeed_config(config, **optimizer)
    if "process_group" in rest:
        optimizer["process_group"] = rest.pop("process_group")
    Options.from_keywords(**{name: value for name, value in optimizer.items() if name in OPTION_NAMES})

    inductor: dict[str, Any] = {}
    if mode is not None:
        modes = torch_private.inductor_modes()
        inductor.update(modes[check_choice("mode", mode, tuple(modes))])
    inductor_names = torch_private.inductor_option_names() if rest else frozenset()
    for name, value in rest.items():
        setting = str(name).replace("-", "_")  # torch.compile reads names for Inductor like this too
        if setting not in inductor_names:
            known = (*optimizer_names, "process_group", "config", "inner", "mode", *sorted(inductor_names))
            raise no_option(name, known)
        inductor[setting] = value
    if inductor.get("triton.cudagraphs"):
        raise ValueError(
            'CUDA graphs (triton.cudagraphs, and so mode="reduce-overhead" and mode="max-autotune") are not '
            "supported in this version: a replayed graph would repeat the copies that it recorded, although the "
            "engine's update windows and buffers have changed since; use "
            'mode="max-autotune-no-cudagraphs", or no mode'
        )
    if inner == "eager" and inductor:
        raise ValueError(
            f'inner="eager" generates no code, so {", ".join(sorted(inductor))} would have no effect; '
            'remove them, or use inner="inductor"'
        )
    return BackendOptions(
        optimizer=optimizer or None, inner="eager" if inner == "eager" else "inductor", inductor=inductor
    )
