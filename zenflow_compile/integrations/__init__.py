"""Adapters for training frameworks, one module each."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

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


def add_member(names: type[Enum], name: str, value: str) -> Any:
    """Add a member to an enum of text that a framework has for names. Returns it, also if it was there already."""
    if value in names._value2member_map_:
        return names(value)
    member: Any = str.__new__(names, value)  # type: ignore[type-var]
    member._name_, member._value_ = name, value
    member.__objclass__ = names
    member._sort_order_ = len(names)
    setattr(names, name, member)  # first: an enum refuses attributes that replace listed members
    names._member_names_.append(name)
    names._member_map_[name] = member
    names._value2member_map_[value] = member
    return member
