"""Bookkeeping of the backwards between two optimizer steps."""

from __future__ import annotations

import threading

from torch import Tensor


class BackwardPass:
    """The backward that runs, or the last one.

    Attributes:
        task: number of autograd's graph task while the backward runs, and after it has failed; None between backwards.
        contributed: it brought a gradient of the engine's parameters.
        received: its gradients were averaged over ranks.
        concurrent: it began while a backward in another thread ran, or after one had failed.
        count: backwards with gradients since the last optimizer step.
        returned: gradients that compiled backwards return to autograd, by graph task and parameter.
        lock: backwards of graphs may run in several threads; they accumulate one after the other.
    """

    __slots__ = ("_thread", "concurrent", "contributed", "count", "lock", "received", "returned", "task")

    def __init__(self) -> None:
        self.task: int | None = None
        self.contributed = False
        self.received = False
        self.concurrent = False
        self.count = 0
        self.returned: dict[tuple[int, int], Tensor] = {}
        self.lock = threading.RLock()
        self._thread = threading.get_ident()

    def enter_thread(self) -> None:
        """Note the thread of a backward that begins."""
        thread = threading.get_ident()
        self.concurrent = self.task is not None and thread != self._thread
        self._thread = thread

    def reset(self) -> None:
        """Forget contributions: an optimizer step has used them, or they were discarded."""
        self.contributed = False
        self.returned.clear()  # of backwards that failed
        self.count = 0
