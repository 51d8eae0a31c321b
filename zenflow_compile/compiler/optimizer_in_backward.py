"""The optimizer that the backend makes from optimizer options of ``torch.compile``; it steps in the backward."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zenflow_compile.optimizer import ZenFlowAdamW
from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private

if TYPE_CHECKING:
    from zenflow_compile.runtime.engine import Engine

KEEPER_ATTRIBUTE = "_zenflow_optimizer"
"""Attribute of modules: the ``Keeper`` of their optimizer. Attribute of the object that stands for a ``torch.compile``
call: a weak reference to the optimizer."""


@dataclass(slots=True)
class Keeper:
    """Keeps the optimizer alive as long as the module that has it as attribute. Copies and pickles of it are empty."""

    optimizer: Any = None

    def __reduce__(self) -> tuple[type[Keeper], tuple[()]]:
        return Keeper, ()


def ensure_optimizer(
    params: Sequence[nn.Parameter], roots: Sequence[nn.Module], call: private.CompileCall, keywords: Mapping[str, Any]
) -> None:
    """Make the optimizer of this ``torch.compile`` call, or give it the parameters that are new to it.

    A call has one optimizer, however many graphs, frames and recompilations it has. The optimizer lives as long as the
    modules whose parameters it updates.

    Args:
        params: the parameters among the inputs of Dynamo's graph, which were found in the modules ``roots``.
        keywords: of ``ZenFlowAdamW``.

    Raises:
        ValueError: ``keywords`` have no effect, because optimizer objects own all parameters.
        RuntimeError: the optimizer of this call was closed, and training goes on.
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
        optimizer = ZenFlowAdamW._updating_in_backward(unowned, **keywords)
        if call.wrapper is not None:
            # Hazard: Dynamo never frees this object. A strong reference would keep the optimizer and the model alive.
            setattr(call.wrapper, KEEPER_ATTRIBUTE, weakref.ref(optimizer))
    elif any(cast("Engine", engine).core.optimizer is optimizer for engine in ops.live_engines()):
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


def check_optimizer(call: private.CompileCall) -> None:
    """Raise RuntimeError if this call has no optimizer yet: ``functional_call`` passes weights, and trains none."""
    if getattr(call.wrapper, KEEPER_ATTRIBUTE, None) is None and torch.is_grad_enabled():
        raise RuntimeError(
            "the first call of a model with an optimizer among the options of torch.compile makes that optimizer, and "
            "functional_call() may pass other weights than the model's: call the compiled model directly first"
        )


def _refuse_options_without_effect(trained: Sequence[tuple[str, nn.Parameter]], keywords: Mapping[str, Any]) -> None:
    """Raise ValueError if all of ``trained`` have owners, and the backend made none of these optimizers."""
    owners = [owner for _, param in trained if (owner := ops.owner_of(param)) is not None]
    if owners and not any(cast("Engine", engine).core.in_backward for engine, _ in owners):
        named = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
        raise ValueError(
            f"options of torch.compile set up an optimizer ({named}), but a ZenFlowAdamW owns every parameter of the "
            "model already: pass them to that optimizer and leave them out of options=, or drop the optimizer object"
        )
