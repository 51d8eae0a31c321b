"""Replaces functions of the package inside of a block: by failing ones, or another machine's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from zenflow_compile.runtime.device import thread_lane
from zenflow_compile.runtime.host import arena

COPY = (thread_lane, "copy_without_gil")
"""What the threads of lanes copy with."""


@contextmanager
def failing(owner: Any, name: str, error: BaseException, *, after: int = 0, once: bool = False) -> Iterator[None]:
    """Let a function raise ``error``, after ``after`` good calls, at one call only if ``once``."""
    function, left = getattr(owner, name), after

    def sometimes(*args: Any, **keywords: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1 or (left < 0 and not once):
            raise error
        return function(*args, **keywords)

    with mock.patch.object(owner, name, sometimes):
        yield


def host_memory(available: int, source: str = "the machine", *, read_by: Any = arena) -> Any:
    """Let the host have so many bytes that engines may take, or that another module reads."""
    return mock.patch.object(read_by, "available_host_memory", mock.Mock(return_value=(available, source)))
