"""Where a compiled model holds the parameters of an engine, to notice that it does not hold them any more.

An optimizer goes on to update a parameter that ``load_state_dict(assign=True)``, a resized embedding or an assignment
took out of the model, and nothing else would tell: the new parameter has no owner and is not trained.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from torch import nn
from torch.nn import Parameter

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.ops import is_owned

_REMEDY = "close() the optimizer, create it anew over model.parameters() after the change, and compile the model again"


class _Place(NamedTuple):
    """An attribute of a module."""

    module: weakref.ref[nn.Module]
    name: str


class _Root(NamedTuple):
    """A compiled module, with the names under which it holds each parameter, by index."""

    module: weakref.ref[nn.Module]
    names: dict[int, set[str]]


class Holders:
    """Modules and names under which compiled models hold parameters. Refers to modules weakly.

    A parameter counts as replaced if no module holds it where it was, and one holds a parameter without an owner in its
    place. Modules that were deleted, attributes that were, parameters that moved to another name, and weights that were
    tied to another owned parameter are no replacement.

    Args:
        params: of the engine, by index; the list may grow.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = params
        self._places: dict[int, list[_Place]] = {}
        self._roots: dict[int, _Root] = {}

    def remember(self, roots: Iterable[nn.Module], indices: Mapping[int, int]) -> None:
        """Note where ``roots`` hold parameters now.

        Args:
            indices: index in the plan by ``id(param)``.
        """
        for root in roots:
            known = self._roots.get(id(root))
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
                        places.append(_Place(weakref.ref(module), name))

    def check(self, plans: Sequence[ParamPlan]) -> None:
        """Check the modules that held parameters directly: cheap enough for every step.

        Raises:
            RuntimeError: a parameter was replaced.
        """
        for index, places in self._places.items():
            param, first = self._params[index], places[0]
            if (holder := first.module()) is not None and holder._parameters.get(first.name) is param:
                continue  # the usual case, at every step
            now = [module._parameters.get(place.name) for place in places if (module := place.module()) is not None]
            if not any(each is param for each in now) and any(each is not None and not is_owned(each) for each in now):
                refuse_replaced(plans[index].name)

    def check_models(self, plans: Sequence[ParamPlan], models: Iterable[nn.Module]) -> None:
        """Check those of ``models`` that are remembered: modules that were replaced, too.

        Raises:
            RuntimeError: see ``check``.
        """
        for model in models:
            root = self._roots.get(id(model))
            if root is not None and root.module() is model:
                self._check_model(model, root.names, plans)

    def _check_model(self, model: nn.Module, names: Mapping[int, set[str]], plans: Sequence[ParamPlan]) -> None:
        now = dict(model.named_parameters(remove_duplicate=False))
        held = {id(param) for param in now.values()}
        for index, own_names in names.items():
            replaced = any(name in now and not is_owned(now[name]) for name in own_names)
            if replaced and id(self._params[index]) not in held:
                refuse_replaced(plans[index].name)


def refuse_replaced(name: str) -> NoReturn:
    """
    Raises:
        RuntimeError: always: the model has another parameter in the place of the optimizer's.
    """
    raise RuntimeError(
        f"the model holds another parameter in the place of {name}, which this optimizer updates: "
        f"load_state_dict(assign=True), a resized embedding or an assignment replaced it; {_REMEDY}"
    )
