"""Adapters for training frameworks, one module each."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.nn import Module


class StateDictHook:
    """A module's state_dict pre-hook, which calls a method of a callback. It keeps no callback alive.

    Copies of it do nothing: ``copy.deepcopy`` and ``pickle`` of the module cannot copy an optimizer, which the callback
    refers to.
    """

    def __init__(self, method: Callable[[], None] | None = None) -> None:
        self._method = (lambda: None) if method is None else weakref.WeakMethod(method)

    def __call__(self, module: Module, prefix: str, keep_vars: bool) -> None:
        if (method := self._method()) is not None:
            method()

    def __reduce__(self) -> tuple[type[StateDictHook], tuple[()]]:
        return StateDictHook, ()
