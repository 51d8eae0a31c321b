"""Which engine owns which input of a graph and which parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from zenflow_compile.compiler.module_hooks import add_module_hooks, live_engine
from zenflow_compile.compiler.optimizer_in_backward import check_optimizer, ensure_optimizer
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.shard_hooks import Removable
from zenflow_compile.torch_internals import torch_private_compiler as private

if TYPE_CHECKING:
    from zenflow_compile.runtime.engine import Engine

OWNER_ATTRIBUTE = "_zenflow_owner"
"""Attribute of an owned parameter: an object that is unique to its owner, deleted when the optimizer closes."""


OwnedInputs = dict[int, list[tuple[int, int]]]
"""``PassContext.params`` by the id of an engine. Compiled graphs outlive engines, so this keeps no engine alive."""


class Claimed(NamedTuple):
    """The owners of a graph's inputs, and the module hooks that were added to serve them."""

    owned: OwnedInputs
    hooks: list[Removable]


def claim(captured: private.CapturedGraph, inputs: Sequence[Any], keywords: Mapping[str, Any] | None) -> Claimed:
    """Match the inputs of Dynamo's graph to their engines, and make the optimizer in backward if one is asked for.

    Args:
        inputs: what the graph is called with: the parameters themselves.
        keywords: of ``ZenFlowAdamW`` for the optimizer-in-backward form; None if the parameters have optimizers.

    Raises:
        ValueError: parameters are inside the graph instead of among its inputs, or see ``ensure_optimizer``.
        RuntimeError: the model was changed since the first use of its optimizer, or see ``ensure_optimizer``.
    """
    if any(ops.owner_of(param) is not None for param in captured.graph.parameters()):
        raise ValueError(
            "torch._dynamo.config.inline_inbuilt_nn_modules=False makes parameters constants of the graph, which this "
            "backend cannot serve; leave it at True"
        )
    call = private.compile_call()
    params = [(i, value) for i, value in enumerate(inputs) if isinstance(value, nn.Parameter)]
    sources = captured.sources
    found = [private.source_module(sources[i], call) for i, _ in params if sources[i] is not None]
    roots = unique_modules([call.module, *found])
    functional = private.inside_functional_call()
    for live in cast("Iterator[Engine]", ops.live_engines()):
        if live.outdated and live.core.optimizer is not None:
            live = live.core.optimizer.engine  # a new one
        if not functional:  # there, other tensors are in the place of parameters until the call returns
            live.check_models(roots)
    if keywords is not None and functional:
        check_optimizer(call)
    elif keywords is not None:
        ensure_optimizer([param for _, param in params], roots, call, keywords)

    owned: OwnedInputs = {}
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor) and (owner := ops.owner_of(value)) is not None:
            owned.setdefault(owner[0].id, []).append((owner[1], i))
    _refuse_replaced(captured.graph.graph, {i for pairs in owned.values() for _, i in pairs})
    hooks: list[Removable] = []
    for engine_id in owned:
        hooks += add_module_hooks(roots, engine_id)
        if (engine := live_engine(engine_id)) is not None:
            if torch.is_grad_enabled():  # a model that was cast, or moved, can be evaluated and saved
                engine.registry.check_unchanged()
            engine.remember_models(roots)
    return Claimed(owned, hooks)


def _refuse_replaced(graph: torch.fx.Graph, owned: set[int]) -> None:
    """Raise ValueError if a graph gives an owned parameter other memory (``param.data = ...`` in a forward).

    Each such forward gives the parameter another node of autograd, so the backward's gradient would be lost.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    params = {inputs[i] for i in owned}
    for node in graph.nodes:
        if getattr(node.target, "__name__", node.target) == "set_" and node.args and node.args[0] in params:
            raise ValueError(
                f"the compiled forward assigns .data of the parameter {node.args[0].name}, whose gradients would be "
                "lost: write the parameter in place inside of torch.no_grad(), and create the optimizer with "
                "overlap_step=False, or train the model without torch.compile"
            )


def refuse_ddp(call: private.CompileCall | None = None) -> None:
    """Raise ValueError under DistributedDataParallel, which would wait for gradients that never come.

    Args:
        call: the compilation that is under way; None where a compiled graph runs. Under DistributedDataParallel, Dynamo
            reuses a graph that it compiled for the bare module.
    """
    if private.inside_ddp(call):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, whose reducer would wait forever for gradients that "
            'backend="zenflow" takes to the host inside the backward graph; compile and train the bare module '
            "(model.module) with process_group=torch.distributed.group.WORLD, which averages gradients over ranks, or "
            "train under DistributedDataParallel without torch.compile"
        )


def optimizer_of(compiled_model: Any) -> Any:
    """Return the optimizer of a compiled model, also the one that the optimizer-in-backward form made.

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
    return engines[0].core.optimizer


def engines_of(compiled_model: Any) -> list[Engine]:
    """The live engines that own a parameter of the model, without repetitions."""
    found: dict[int, Engine] = {}
    for module in modules_of(compiled_model):
        for param in module.parameters():
            if (owner := ops.owner_of(param)) is not None:
                found[owner[0].id] = cast("Engine", owner[0])
    return list(found.values())


def modules_of(compiled_model: Any) -> list[nn.Module]:
    """The modules that a compiled model or function runs: itself, its ``self``, or variables that it refers to."""
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


def unique_modules(modules: Iterable[nn.Module | None]) -> list[nn.Module]:
    return list({id(module): module for module in modules if module is not None}.values())
