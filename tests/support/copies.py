"""The copies of the CPU's lanes, which tests watch, delay and break."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zenflow_compile.runtime.device.thread_lane import copy_without_gil


class Copies:
    """What lanes call to copy.

    Attributes:
        make: makes a copy, given its target and its source; a test may replace it.
    """

    def __init__(self) -> None:
        self.make: Callable[[Tensor, Tensor], object] = copy_without_gil

    def __call__(self, target: Tensor, source: Tensor) -> None:
        self.make(target, source)
