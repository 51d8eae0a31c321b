"""Detects that a compiled model no longer holds the parameters of its optimizer.

``load_state_dict(assign=True)``, a resized embedding or an assignment replaces a parameter. Without a check, the
optimizer would go on to update the old one, and the new one, which has no owner, would silently not be trained.
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
    """The modules and names under which compiled models hold parameters. Refers to modules weakly.

    A parameter was replaced if no module holds it where it was, and one holds a parameter without an owner there.
    A deleted module or attribute, a parameter that moved to another name, and a weight that was tied to another owned
    parameter are no replacement.

    Args:
        params: of the engine, by index; the list may grow.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = params
        self._places: dict[int, list[_Place]] = {}
        self._roots: dict[int, _Root] = {}

    def remember(self, roots: Iterable[nn.Module], indices: Mapping[int, int]) -> None:
        """Note where ``roots`` hold parameters.

        Args:
            indices: index in the plan by ``id(param)``.
        """
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
                        places.append(_Place(weakref.ref(module), name))

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
            if root is not None and root.module() is model:
                self._check_model(model, root.names, plans)

    def _check_model(self, model: nn.Module, names: Mapping[int, set[str]], plans: Sequence[ParamPlan]) -> None:
        now = dict(model.named_parameters(remove_duplicate=False))
        present = {id(param) for param in now.values()}
        for index, own_names in names.items():
            replaced = any(name in now and not is_owned(now[name]) for name in own_names)
            if replaced and id(self._params[index]) not in present:
                refuse_replaced(plans[index].name)


def refuse_replaced(name: str) -> NoReturn:
    """Raise because the model holds another parameter in the place of the optimizer's.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"the model holds another parameter in the place of {name}, which this optimizer updates: "
        f"load_state_dict(assign=True), a resized embedding or an assignment replaced it; {_REMEDY}"
    )
