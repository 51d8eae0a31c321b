"""Calls that tests count, act at or interrupt. Nothing is replaced: the interpreter tells a thread of its calls.

An error that a test raises here is as one that a handler of signals raises: it comes at a call, or behind it. Backwards
on the CPU run in the thread that calls them; those on a device run in others.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call.

    Attributes:
        name: of the function, in its class.
        arguments: by name; none of functions that are not Python's.
        result: None before it has returned.
    """

    name: str
    arguments: dict[str, Any]
    result: Any = None


@contextmanager
def at_calls(
    act: Callable[[Call], object], *functions: Callable[..., Any], returned: bool = False, new_threads: bool = False
) -> Iterator[None]:
    """Call ``act`` at each call of ``functions`` that this thread makes in the block, before it runs.

    Args:
        act: an error of it comes out of the call. It is the last one: the interpreter tells of no further call then.
        functions: of Python, or built-in ones. Of a method that is bound only the calls of its object count.
        returned: when it has run.
        new_threads: at the calls of threads that start in the block, too.
    """
    watched = {id(_code_of(function)): function for function in functions}  # comparing code by its value takes long
    built_in, event_of = ("c_return", "return") if returned else ("c_call", "call")
    outer, watching = sys.getprofile(), True

    def watch(frame: FrameType, event: str, passed: Any) -> None:
        if outer is not None:
            outer(frame, event, passed)
        if not watching:
            return
        if event == built_in and id(passed) in watched:
            act(Call(passed.__qualname__, {}))
        elif event == event_of and (function := watched.get(id(frame.f_code))) is not None:
            arguments = _arguments_of(frame)
            owner = getattr(function, "__self__", None)
            if owner is None or isinstance(owner, type) or next(iter(arguments.values())) is owner:
                act(Call(function.__qualname__, arguments, passed))

    outer_threads = threading.getprofile()
    sys.setprofile(watch)
    if new_threads:
        threading.setprofile(watch)
    try:
        yield
    finally:
        watching = False  # threads keep what they have started with
        sys.setprofile(outer)
        threading.setprofile(outer_threads)  # type: ignore[arg-type]


def _code_of(function: Any) -> object:
    """The code of its frames; the function itself if it is a built-in one."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(plain, "__code__", plain)


def _arguments_of(frame: FrameType) -> dict[str, Any]:
    code, known = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return {name: known[name] for name in code.co_varnames[:count] if name in known}


@contextmanager
def calls_of(*functions: Callable[..., Any], returned: bool = False, new_threads: bool = False) -> Iterator[list[Call]]:
    """The calls of ``functions`` that this thread makes in the block, in order."""
    made: list[Call] = []
    with at_calls(made.append, *functions, returned=returned, new_threads=new_threads):
        yield made


@contextmanager
def interrupted(
    function: Callable[..., Any],
    error: BaseException | None = None,
    *,
    after: int = 0,
    when: Callable[[dict[str, Any]], object] = lambda arguments: True,
    returned: bool = False,
) -> Iterator[None]:
    """Let one call of ``function`` by this thread raise.

    Args:
        error: an interrupt of the user if it is None.
        after: so many good calls.
        when: which calls count, by their arguments.
        returned: when the call has run.
    """
    left = after

    def count(call: Call) -> None:
        nonlocal left
        if when(call.arguments):
            left -= 1
            if left < 0:
                raise error or KeyboardInterrupt

    with at_calls(count, function, returned=returned):
        yield
