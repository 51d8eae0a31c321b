"""Names for the timeline of ``torch.profiler``: phases of the runtime, with the parameters that they are for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from torch.profiler import record_function

from zenflow_compile.torch_internals.torch_private import profiler_active

P = ParamSpec("P")
R = TypeVar("R")

MOST_NAMES = 8
"""An event of more parameters names only the first ones."""


def event_name(phase: str, names: Sequence[str]) -> str:
    """``zenflow::phase (first, second, +7)``."""
    shown = [*names[:MOST_NAMES], *([f"+{len(names) - MOST_NAMES}"] if len(names) > MOST_NAMES else [])]
    return f"zenflow::{phase} ({', '.join(shown)})" if shown else f"zenflow::{phase}"


def annotated(phase: str, names_of: Callable[..., Sequence[str]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show calls as ``zenflow::phase (names)`` in the profile, if ``torch.profiler`` or ``emit_nvtx`` is active.

    Without a profiler this adds one call and one look at a flag. Python's workers show where the profiler records all
    threads (``profile_all_threads``), native ones never.

    Args:
        names_of: returns the parameters' names for the function's arguments; called only if a profiler is active.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **keywords: P.kwargs) -> R:
            if not profiler_active():
                return function(*args, **keywords)
            with record_function(event_name(phase, names_of(*args, **keywords))):
                return function(*args, **keywords)

        return run

    return decorate
