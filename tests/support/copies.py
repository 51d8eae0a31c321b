"""The copies of the CPU's lanes, which tests watch, delay and break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from zenflow_compile.runtime.device import thread_lane
from zenflow_compile.runtime.device.thread_lane import copy_without_gil

Copy = Callable[[Tensor, Tensor], object]
"""Makes a copy, given its target and its source."""


class Copies:
    """What lanes call to copy.

    Attributes:
        make: makes a copy; a test may replace it.
    """

    def __init__(self) -> None:
        self.make: Copy = copy_without_gil

    def __call__(self, target: Tensor, source: Tensor) -> None:
        self.make(target, source)


@contextmanager
def copied_by(make: Copy) -> Iterator[None]:
    """Let the threads of lanes copy by ``make``."""
    with mock.patch.object(thread_lane, "copy_without_gil", make):
        yield
