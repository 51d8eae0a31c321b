"""Which engine owns which input of a graph, and how the graph is kept from serving any other parameter."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from zenflow_compile.compiler.module_hooks import add_module_hooks
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private

OWNER_ATTRIBUTE = "_zenflow_owner"
"""Attribute of an owned parameter, set by its engine to an object of its own and deleted when the engine closes."""

KEEPER_ATTRIBUTE = "_zenflow_optimizer"

log = logging.getLogger(__name__)


class Engine(ops.EngineOps, Protocol):
    """What the front door uses of an engine besides its nodes."""

    in_backward: bool
    graphs: list[Any]

    @property
    def optimizer(self) -> Any: ...
    @property
    def outdated(self) -> bool: ...
    @property
    def finalizes_in_backward(self) -> bool: ...
    @property
    def weight_grad_bytes(self) -> int: ...
    def declare_forward_order(self, order: list[int]) -> None: ...
    def remember_models(self, models: Sequence[nn.Module]) -> None: ...
    def check_models(self, models: Sequence[nn.Module]) -> None: ...
    def check_unchanged(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Owned:
    """One input of Dynamo's graph that an engine owns.

    Attributes:
        engine_id: that engine; compiled graphs live long, and nothing here keeps the engine alive.
        p: index in the engine's plan.
        input_index: index among the inputs of Dynamo's graph.
    """

    engine_id: int
    p: int
    input_index: int


@dataclass(slots=True)
class Keeper:
    """Keeps an implicit optimizer alive as long as the module it hangs on; a copied or loaded module has none."""

    optimizer: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Keeper:
        return Keeper()

    def __reduce__(self) -> tuple[type[Keeper], tuple[()]]:
        return Keeper, ()


def live_engine(engine_id: int) -> Engine | None:
    """The engine, or None if it was closed or collected."""
    return cast("Engine | None", ops.find_engine(engine_id))


def claim(
    gm: GraphModule,
    inputs: Sequence[Any],
    sources: Sequence[Any],
    call: private.CompileCall,
    keywords: Mapping[str, Any] | None,
) -> tuple[Owned, ...]:
    """Match the inputs of Dynamo's graph to their engines, making the implicit optimizer where one is asked for.

    Args:
        gm: Dynamo's graph.
        inputs: what it is called with: the parameters themselves.
        sources: where Dynamo found them.
        keywords: of ``ZenFlowAdamW`` for the optimizer-in-backward form; None if the parameters have optimizers.

    Raises:
        ValueError: parameters are inside the graph instead of among its inputs, or ``keywords`` have no effect since
            optimizer objects own all parameters.
        RuntimeError: the implicit optimizer of this ``torch.compile`` call was closed, and training goes on; or the
            model was changed since the first use of its optimizer.
    """
    if any(ops.owner_of(param) is not None for param in gm.parameters()):
        raise ValueError(
            "torch._dynamo.config.inline_inbuilt_nn_modules=False makes parameters constants of the graph, which this "
            "backend cannot serve; leave it at True"
        )
    params = [(i, value) for i, value in enumerate(inputs) if isinstance(value, nn.Parameter)]
    found = [private.source_module(sources[i], call) for i, _ in params if sources[i] is not None]
    roots = unique_modules([call.module, *found])
    for live in cast(Iterator[Engine], ops.live_engines()):
        if live.outdated and live.optimizer is not None:
            live = live.optimizer.engine  # a new one
        live.check_models(roots)
    if keywords is not None:
        ensure_implicit_optimizer([param for _, param in params], roots, call, keywords)

    owned: list[Owned] = []
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor) and (owner := ops.owner_of(value)) is not None:
            owned.append(Owned(owner[0].id, owner[1], i))
    for engine_id in {each.engine_id for each in owned}:
        add_module_hooks(roots, engine_id)
        if (engine := live_engine(engine_id)) is not None:
            engine.check_unchanged()
            engine.remember_models(roots)
    return tuple(owned)


def refuse_ddp(call: private.CompileCall | None = None) -> None:
    """Raise before DistributedDataParallel waits for gradients that never come.

    Args:
        call: the compilation that is under way; None where a compiled graph runs. Dynamo reuses under
            DistributedDataParallel a graph that it compiled for the bare module.

    Raises:
        ValueError: the model is wrapped in DistributedDataParallel.
    """
    if private.in_ddp_forward() if call is None else private.active_ddp(call):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, whose reducer would wait forever for gradients that "
            'backend="zenflow" takes to the host inside the backward graph; compile and train the bare module '
            "(model.module) in one process, or train under DistributedDataParallel without torch.compile"
        )


def unique_modules(modules: Iterable[nn.Module | None]) -> list[nn.Module]:
    """Each module once, in order."""
    return list({id(module): module for module in modules if module is not None}.values())


def ensure_implicit_optimizer(
    params: Sequence[nn.Parameter],
    roots: Sequence[nn.Module],
    call: private.CompileCall,
    keywords: Mapping[str, Any],
) -> None:
    """Make the optimizer of this ``torch.compile`` call, or give it the parameters that are new to it.

    There is one per call, however many graphs, frames and recompilations it has. It hangs on the modules whose
    parameters it updates and dies with them; the object that stands for the call, which Dynamo never lets go, only
    refers to it weakly.
    """
    candidates: dict[int, tuple[str, nn.Parameter]] = {}
    for root in roots:
        for name, param in root.named_parameters():
            candidates.setdefault(id(param), (name, param))
    for position, param in enumerate(params):
        candidates.setdefault(id(param), (f"param{position}", param))
    trained = [(name, param) for name, param in candidates.values() if param.requires_grad and param.is_leaf]
    unowned = [(name, param) for name, param in trained if ops.owner_of(param) is None]
    if not unowned:
        _refuse_options_without_effect(trained, keywords)
        return
    reference = getattr(call.wrapper, KEEPER_ATTRIBUTE, None)
    optimizer = reference() if reference is not None else None
    if optimizer is None:
        from zenflow_compile.optimizer import ZenFlowAdamW

        optimizer = ZenFlowAdamW._updating_in_backward(unowned, **keywords)
        if call.wrapper is not None:
            setattr(call.wrapper, KEEPER_ATTRIBUTE, weakref.ref(optimizer))
    elif any(cast(Engine, engine).optimizer is optimizer for engine in ops.live_engines()):
        optimizer.add_param_group({"params": unowned})
    elif torch.is_grad_enabled():
        raise RuntimeError(
            "the optimizer that backend='zenflow' made for this model is closed; "
            "call torch.compile on the model again to train on with a new one"
        )
    else:
        return
    for holder in (*roots, *(() if roots else (param for _, param in unowned))):
        setattr(holder, KEEPER_ATTRIBUTE, Keeper(optimizer))


def _refuse_options_without_effect(trained: Sequence[tuple[str, nn.Parameter]], keywords: Mapping[str, Any]) -> None:
    """Raise if optimizer options are for a model whose every parameter has an optimizer object.

    Raises:
        ValueError: none of ``trained``, which all have owners, is of an optimizer that the backend made.
    """
    owners = [owner for _, param in trained if (owner := ops.owner_of(param)) is not None]
    if owners and not any(cast(Engine, engine).in_backward for engine, _ in owners):
        named = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
        raise ValueError(
            f"options of torch.compile set up an optimizer ({named}), but a ZenFlowAdamW owns every parameter of the "
            "model already: pass them to that optimizer and leave them out of options=, or drop the optimizer object"
        )


def optimizer_of(compiled_model: Any) -> Any:
    """The optimizer that serves a compiled model, also the one that the optimizer-in-backward form made.

    Args:
        compiled_model: what ``torch.compile`` returned, or the module it was given.

    Raises:
        ValueError: no optimizer of this package owns any parameter of the model, or several do.
    """
    engines = engines_of(compiled_model)
    if not engines:
        raise ValueError(
            "optimizer_of: no ZenFlowAdamW owns a parameter of this model; create one over model.parameters(), or "
            "compile with options for it, such as options={'lr': 1e-3}, and run one forward first"
        )
    if len(engines) > 1:
        raise ValueError(
            f"optimizer_of: {len(engines)} optimizers share this model's parameters; use your own references to them"
        )
    return engines[0].optimizer


def engines_of(compiled_model: Any) -> list[Engine]:
    """The live engines that own a parameter of the model, each once.

    Raises:
        TypeError: there is no module behind ``compiled_model``.
    """
    found: dict[int, Engine] = {}
    for module in modules_of(compiled_model):
        for param in module.parameters():
            if (owner := ops.owner_of(param)) is not None:
                found[owner[0].id] = cast(Engine, owner[0])
    return list(found.values())


def modules_of(compiled_model: Any) -> list[nn.Module]:
    """The modules that a compiled model or function runs: itself, what it is bound to, or what it closes over.

    Raises:
        TypeError: there are none.
    """
    function = compiled_model
    while (inner := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        function = inner
    candidates = [compiled_model, function, getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            candidates.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            continue
    code = getattr(function, "__code__", None)
    variables = getattr(function, "__globals__", {})
    candidates += [variables.get(name) for name in (code.co_names if code else ())]
    modules = unique_modules(value for value in candidates if isinstance(value, nn.Module))
    if not modules:
        raise TypeError(f"expected a module or a compiled model, got {type(compiled_model).__name__}; pass the module")
    return modules
