"""Names for the timeline of ``torch.profiler``: phases of the runtime, with the parameters that they are for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function

from zenflow_compile.torch_internals.torch_private import profiler_active

MOST_NAMES = 8
"""An event of more parameters names only the first ones."""

_NOTHING = nullcontext()


def annotate(phase: str, *names: str) -> AbstractContextManager[Any]:
    """Show the block as ``zenflow::phase (names)`` in the profile, if ``torch.profiler`` or ``emit_nvtx`` is active.

    In worker threads it shows where the profiler records all threads (``profile_all_threads``).

    Args:
        names: fully qualified names of the parameters that the block works on.
    """
    if not profiler_active():
        return _NOTHING
    return record_function(event_name(phase, names))


def event_name(phase: str, names: Sequence[str]) -> str:
    """``zenflow::phase (first, second, +7)``."""
    shown = [*names[:MOST_NAMES], *([f"+{len(names) - MOST_NAMES}"] if len(names) > MOST_NAMES else [])]
    return f"zenflow::{phase} ({', '.join(shown)})" if shown else f"zenflow::{phase}"


def annotated(phase: str, names_of: Callable[..., Sequence[str]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a function under ``annotate``. Without a profiler this adds one call and one look at a flag.

    Args:
        names_of: returns the parameters' names for the function's arguments; called only if a profiler is active.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if not profiler_active():
                return function(*args)
            with record_function(event_name(phase, names_of(*args))):
                return function(*args)

        return run

    return decorate
