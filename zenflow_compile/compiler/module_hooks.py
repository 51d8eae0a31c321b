"""Module hooks: apply due updates before code outside of our graphs reads or loads weights.

Our graphs fetch each weight before its first use. The hooks serve all other accesses through a module: an uncompiled
forward, a graph of another backend, a copy, a pickle, a state dict.

Hooks name their engine by number, so that modules keep no engine alive. ``close()`` removes them; hooks of copied
modules stay and do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zenflow_compile.runtime import ops
from zenflow_compile.runtime.shard_hooks import Removable, synchronize_before_state_dict
from zenflow_compile.torch_internals import torch_private_compiler as private
from zenflow_compile.torch_internals.torch_private import skipped_by_dynamo

if TYPE_CHECKING:
    from zenflow_compile.runtime.engine import Engine

BACKEND = "zenflow"


def live_engine(engine_id: int | None) -> Engine | None:
    return None if engine_id is None else cast("Engine | None", ops.find_engine(engine_id))


def _show_host_weights(engine_id: int, module: nn.Module, found: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put copies of weights that are in host memory into a state dict."""
    if (engine := live_engine(engine_id)) is None:
        return
    for name, param in module.named_parameters(recurse=False):
        if prefix + name in found and (values := engine.access.weight_on_host(param)) is not None:
            found[prefix + name] = values


def _apply_before_load(engine_id: int, module: nn.Module, *loading: Any) -> None:
    if (engine := live_engine(engine_id)) is not None:
        engine.access.before_load()
        engine.access.hold_weights(module.parameters(recurse=False), to_write=True)


def _release_after_load(engine_id: int, module: nn.Module, incompatible: Any) -> None:
    if (engine := live_engine(engine_id)) is not None:
        engine.access.release_weights(module.parameters(recurse=False))


@dataclass(frozen=True, slots=True)
class ApplyBeforeForward:
    """A module's forward pre-hook: due updates are applied before uncompiled code reads the module's weights.

    Copying and pickling a module also copies and pickles its hooks: so copies get current weights.

    Attributes:
        engine_id: None in copies, whose parameters no engine owns.
    """

    engine_id: int | None

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            # This leaves nothing in the graph: Dynamo runs ``_traced`` while it traces. Our graphs fetch.
            private.while_tracing(_traced)
            return
        _apply_before_forward(self.engine_id, module, private.get_eval_frame_callback())

    def __reduce__(self) -> tuple[type[ApplyBeforeForward], tuple[None]]:
        """What ``copy.deepcopy``, ``pickle`` and ``torch.save`` call. See [Note: hooks before weights]."""
        if (engine := live_engine(self.engine_id)) is not None:
            engine.access.apply_due()
            engine.access.hold_weights()
        return ApplyBeforeForward, (None,)


# Where eager code calls the hook, Dynamo would compile it separately, with guards and a limit of recompilations.
skipped_by_dynamo(ApplyBeforeForward.__call__, with_callees=False)


@skipped_by_dynamo
def _apply_before_forward(engine_id: int | None, module: nn.Module, callback: Any) -> None:
    """Apply due updates: a forward of ``module`` begins outside of graphs. See ``backend_of`` for ``callback``."""
    if (engine := live_engine(engine_id)) is None:
        return
    if private.backend_of(callback) == BACKEND:
        # The forward runs or is part of one of our graphs, which fetches the others later; or Dynamo has given it up.
        engine.access.apply_due(_read_directly(module))
        engine.access.hold_weights(module.parameters(recurse=False))
    else:
        engine.access.apply_due()
        engine.access.hold_weights()


def _read_directly(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that the module's own code may read: its own, and those of its children (a tied head)."""
    for each in (module, *module.children()):
        yield from each.parameters(recurse=False)


class ReadBeforeApply:
    """``module._apply``, which moves or casts parameters: due updates are applied, and weights loaded, first.

    It shadows the method in each hooked module's ``__dict__``: PyTorch calls no hook before ``.to()`` and ``.half()``.
    Copies and pickles of the module have the method of its class.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @staticmethod
    def attach(module: nn.Module) -> ReadBeforeApply:
        """Put one in front of the module's own method. It serves all engines that have parameters of the module."""
        found = ReadBeforeApply(module)
        module.__dict__["_apply"] = found
        return found

    def __call__(self, *args: Any, **keywords: Any) -> nn.Module:
        params = [*self._module.parameters(recurse=False)]
        owners = {owner[0].id for param in params if (owner := ops.owner_of(param)) is not None}
        for engine in filter(None, map(live_engine, owners)):
            engine.access.apply_due(params)
            engine.access.hold_weights(params)
        moved: nn.Module = type(self._module)._apply(self._module, *args, **keywords)  # type: ignore[no-untyped-call]
        return moved

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo[id(self._module)]._apply

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, (self._module, "_apply")

    def remove(self) -> None:
        """Idempotent."""
        if self._module.__dict__.get("_apply") is self:
            del self._module.__dict__["_apply"]


def add_module_hooks(roots: Sequence[nn.Module], engine_id: int) -> list[Removable]:
    """Hook every module of ``roots`` that has a parameter of the engine in it, and the roots, which may read others.

    The hooks run before the forward pre-hooks of users, which may read weights (``weight_norm``, observers).

    Returns the hooks that are new.

    [Note: hooks before weights] Copies and pickles take a module's attributes in the order of its ``__dict__``. This
    moves the parameters to the end, so that they are copied after the hook, which applies due updates.
    """
    if (engine := live_engine(engine_id)) is None:
        return []
    reads = ApplyBeforeForward(engine_id)
    handles: list[Removable] = []
    for root in roots:
        for module in (root, *_holding(root, engine_id)):
            if reads in module._forward_pre_hooks.values():
                continue
            handles += [
                module.register_forward_pre_hook(reads, prepend=True),
                module.register_state_dict_pre_hook(partial(synchronize_before_state_dict, engine_id)),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(partial(_apply_before_load, engine_id)),  # type: ignore[no-untyped-call]
                ReadBeforeApply.attach(module),
            ]
            if engine.access.offloaded_weights is not None:
                handles += [
                    module.register_state_dict_post_hook(partial(_show_host_weights, engine_id)),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_post_hook(partial(_release_after_load, engine_id)),  # type: ignore[no-untyped-call]
                ]
            # Hazard: between the pop and the assignment, a forward in another thread finds no parameters.
            module.__dict__["_parameters"] = module.__dict__.pop("_parameters")
    if handles:
        engine.keep_hooks(handles)
        private.forget_graphs_of_others(BACKEND)
    return handles


def _holding(root: nn.Module, engine_id: int) -> list[nn.Module]:
    """The modules of ``root`` that have a parameter of the engine, or a module with one."""
    found: dict[nn.Module, bool] = {}

    def holds(module: nn.Module) -> bool:
        if module not in found:
            found[module] = False  # for modules that contain themselves
            owners = map(ops.owner_of, module.parameters(recurse=False))
            own = any(owner is not None and owner[0].id == engine_id for owner in owners)
            found[module] = any([own, *map(holds, module.children())])
        return found[module]

    holds(root)
    return [module for module, held in found.items() if held]


def _traced(context: Any) -> None:
    """Have ``step()`` apply updates if Dynamo traces the module for another backend, whose graphs do not fetch."""
    hook, callback = private.traced_call(context)
    if private.backend_of(callback) == BACKEND or not isinstance(hook, ApplyBeforeForward):
        return
    if (engine := live_engine(hook.engine_id)) is not None:
        # Code without a fetch, and without a hook of ours, reads the weights.
        engine.uploads.read_elsewhere = True
        engine.access.apply_due()
