"""The hook by which callbacks flush before a model is saved."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch.nn import Module


class Saving(Protocol):
    """An object that a model's ``state_dict()`` concerns."""

    def before_state_dict(self) -> None:
        """Called before the model's state is read."""
        ...


class StateDictHook:
    """A module's state_dict pre-hook. It keeps no callback alive, and copies of it do nothing.

    ``copy.deepcopy`` and ``pickle`` of the module cannot copy an optimizer, which the callback refers to.
    """

    def __init__(self, callback: Saving | None = None) -> None:
        self._callback = (lambda: None) if callback is None else weakref.ref(callback)

    def __call__(self, module: Module, prefix: str, keep_vars: bool) -> None:
        if (callback := self._callback()) is not None:
            callback.before_state_dict()

    def __reduce__(self) -> tuple[type[StateDictHook], tuple[()]]:
        return StateDictHook, ()
