"""Marks parameters as owned by one optimizer, from its construction to ``close()``.

The engine, with its plan, memory and threads, is built at the optimizer's first use. Until then the model may be moved
to another device or dtype. After it, ``Holders`` detects that a compiled model no longer holds the parameters:
``load_state_dict(assign=True)``, a resized embedding or an assignment replaces them. Without a check, the optimizer
would go on to update the old ones, and the new ones, which have no owner, would silently not be trained.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from threading import Thread
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.autograd_hooks import listen_to_grad
from zenflow_compile.runtime.ops import is_owned
from zenflow_compile.runtime.sharding import refuse_exchanged


class Owner:
    """Identifies an owned parameter to compiled graphs: equal to no other object.

    Parameters are pickled with their attributes, and a saved file must not claim an owner: an empty ``torch.Size`` is
    saved instead, which ``torch.load(weights_only=True)`` can read.
    """

    def __reduce__(self) -> tuple[type[torch.Size], tuple[()]]:
        return torch.Size, ()


class Claim:
    """Marks the parameters of one optimizer as owned, and tells its engine of gradients that reach ``.grad``.

    Attributes:
        closing: closes the engine of a collected optimizer, where the thread that collected it cannot.
    """

    def __init__(self, optimizer: Any) -> None:
        self.params: list[Parameter] = []
        self._groups = optimizer.param_groups
        self._owners: list[Owner] = []
        self._position: dict[int, int] = {}
        self._hooks: dict[int, RemovableHandle] = {}
        self._unhooked: list[int] = []  # which were frozen
        self._optimizer: weakref.ref[Any] = weakref.ref(optimizer)
        self.serving: weakref.ref[Any] | None = None  # the engine, once it is built
        self.closing: Thread | None = None
        ops.register_claim(self)

    @property
    def optimizer(self) -> Any:
        """The optimizer that made the claim; None if it was garbage-collected."""
        return self._optimizer()

    @property
    def engine(self) -> ops.EngineOps:
        """The optimizer's engine; the first use builds it."""
        engine: ops.EngineOps = self._optimizer().engine  # type: ignore[union-attr]
        return engine

    def add(self, params: Sequence[Parameter]) -> None:
        """Claim further parameters: all, or none if it raises."""
        before = len(self.params)
        try:
            for param in params:
                self._position[id(param)] = len(self.params)
                self._owners.append(Owner())
                self._unhooked.append(len(self.params))
                self.params.append(param)
                param._zenflow_owner = self._owners[-1]  # type: ignore[attr-defined]
            self.listen()
        except BaseException:
            self.keep(before)
            raise

    def keep(self, count: int) -> None:
        """Give up all parameters but the first ``count``."""
        for p in range(count, len(self.params)):
            if (hook := self._hooks.pop(p, None)) is not None:
                hook.remove()
            if getattr(self.params[p], "_zenflow_owner", None) is self._owners[p]:
                del self.params[p]._zenflow_owner  # type: ignore[attr-defined]
        del self.params[count:], self._owners[count:]
        self._unhooked = [p for p in self._unhooked if p < count]
        # Made anew: an interrupt in ``add`` may have left a position without its parameter.
        self._position = {id(param): p for p, param in enumerate(self.params)}

    def listen(self) -> list[int]:
        """Hook the parameters that have no hook yet, and return them. PyTorch refuses hooks on frozen parameters.

        Hazard: if such a parameter has a gradient, no hook has reported it.
        """
        if not (new := [p for p in self._unhooked if self.params[p].requires_grad]):
            return new
        for p in new:
            self._hooks[p] = listen_to_grad(self.params[p], p, weakref.ref(self))
        self._unhooked = [p for p in self._unhooked if p not in self._hooks]
        return new

    def holds(self, param: Tensor) -> bool:
        position = self._position.get(id(param))
        return position is not None and self.params[position] is param

    def accept_grad(self, p: int) -> None:
        """Pass on that a gradient of ``p`` has reached ``.grad``. Raises as ``GradientIntake.accept_grad``."""
        if (optimizer := self._optimizer()) is None:
            return  # it was collected, and its engine may still be closing in another thread
        engine = None if self.serving is None else self.serving()
        if engine is not None and engine.core.used and not engine.core.closed:
            engine.intake.accept_grad(p)
        else:
            optimizer.engine.intake.accept_grad(p)  # builds the engine, or replaces an outdated one

    def check_params(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that the optimizer's current ``param_groups`` still have the claimed parameters.

        Raises:
            ValueError: the list was replaced, or has other parameters.
            TypeError: a strategy put shards into it, as Accelerate does for FSDP2.
        """
        ids = [id(param) for group in groups for param in group["params"]]
        if groups is not self._groups or ids != list(self._position):
            refuse_exchanged(param for group in groups for param in group["params"] if not self.holds(param))
            raise ValueError(
                "the parameters in param_groups were changed by hand, which the optimizer does not follow: add "
                "parameters with add_param_group(); to train fewer, set requires_grad=False or create a new optimizer"
            )

    def release(self) -> None:
        """Give up all parameters. Idempotent."""
        ops.unregister_claim(self)
        self.keep(0)


_REMEDY = "close() the optimizer, create it anew over model.parameters() after the change, and compile the model again"


class _Attribute(NamedTuple):
    module: weakref.ref[nn.Module]
    name: str


class _Root(NamedTuple):
    """A compiled module, with the names under which it holds each parameter, by index."""

    module: weakref.ref[nn.Module]
    names: dict[int, set[str]]


class Holders:
    """The modules and names under which compiled models hold parameters. Refers to modules weakly.

    A parameter was replaced if no module holds it where it was, and one holds a parameter without an owner there.
    A deleted module or attribute, a parameter that moved to another name, and a weight that was tied to another owned
    parameter are no replacement.

    Args:
        params: of the engine, by index; the list may grow.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = params
        self._places: dict[int, list[_Attribute]] = {}
        self._roots: dict[int, _Root] = {}

    def remember(self, roots: Iterable[nn.Module], indices: Mapping[int, int]) -> None:
        """Note where ``roots`` hold parameters, whose ``indices`` in the plan are by ``id(param)``."""
        for root in roots:
            known = self._roots.get(id(root))
            # Another module may have the id of one that was deleted.
            if known is None or known.module() is not root:
                known = self._roots[id(root)] = _Root(weakref.ref(root), {})
            for prefix, module in root.named_modules():
                for name, param in module._parameters.items():
                    index = None if param is None else indices.get(id(param))
                    if index is None:
                        continue
                    known.names.setdefault(index, set()).add(f"{prefix}.{name}" if prefix else name)
                    places = self._places.setdefault(index, [])
                    if not any(place.module() is module and place.name == name for place in places):
                        places.append(_Attribute(weakref.ref(module), name))

    def check(self, plans: Sequence[ParamPlan]) -> None:
        """Check the modules that hold parameters directly. Cheap enough for every step.

        Raises:
            RuntimeError: a parameter was replaced.
        """
        for index, places in self._places.items():
            param, first = self._params[index], places[0]
            if (holder := first.module()) is not None and holder._parameters.get(first.name) is param:
                continue  # the common case
            now = [module._parameters.get(place.name) for place in places if (module := place.module()) is not None]
            if not any(each is param for each in now) and any(each is not None and not is_owned(each) for each in now):
                refuse_replaced(plans[index].name)

    def check_models(self, plans: Sequence[ParamPlan], models: Iterable[nn.Module]) -> None:
        """Check those of ``models`` that ``remember`` noted. Finds replaced modules, too.

        Raises:
            RuntimeError: a parameter was replaced.
        """
        for model in models:
            root = self._roots.get(id(model))
            if root is None or root.module() is not model:
                continue
            now = dict(model.named_parameters(remove_duplicate=False))
            present = {id(param) for param in now.values()}
            for index, own_names in root.names.items():
                replaced = any(name in now and not is_owned(now[name]) for name in own_names)
                if replaced and id(self._params[index]) not in present:
                    refuse_replaced(plans[index].name)


def refuse_replaced(name: str) -> NoReturn:
    """Raise RuntimeError because the model holds another parameter in the place of the optimizer's."""
    raise RuntimeError(
        f"the model holds another parameter in the place of {name}, which this optimizer updates: "
        f"load_state_dict(assign=True), a resized embedding or an assignment replaced it; {_REMEDY}"
    )
