"""Calls a function with a module as soon as it is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHook(MetaPathFinder):
    """Calls an action once with each of some modules. Other finders find and load them.

    Attributes:
        done: names of the modules whose action was called.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions
        self.done: set[str] = set()

    def install(self) -> None:
        """Call the actions of modules that are imported now, and those of others when they are imported. Idempotent."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in self._actions.keys() - self.done:
            if (module := sys.modules.get(name)) is not None:
                self._act(module)

    def uninstall(self) -> None:
        """Call no action any more."""
        sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._actions:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Loader) -> None:
        """Have the action called after the next module that ``loader`` executes."""

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the method of its class again
            loader.exec_module(module)
            self._act(module)

        with suppress(AttributeError):  # a loader without attributes: the next install() finds its module
            loader.exec_module = exec_module  # type: ignore[method-assign]

    def _act(self, module: ModuleType) -> None:
        self.done.add(module.__name__)
        self._actions[module.__name__](module)
