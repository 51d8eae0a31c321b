"""Gradients that somebody cleared in ``.grad``, where those of offloaded parameters are not."""

from __future__ import annotations

import warnings

from zenflow_compile.runtime.roster import Roster


class ClearedGrads:
    """Notices ``model.zero_grad()`` over gradients that no step has used: it does not reach offloaded ones.

    Certain only where a backward left gradients of resident parameters, none of them is there any more although nobody
    asked the optimizer, and offloaded ones still wait. Gradients that were filled with zeros show nothing.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._had_grads: list[int] = []
        self._warned = False

    def note(self) -> None:
        """A backward is over."""
        if self._warned or not self._roster.offloaded:
            return
        self._had_grads = [p for p, param in self._roster.whole if param.grad is not None]

    def forget(self) -> None:
        """Gradients were used, or discarded by us."""
        self._had_grads = []

    def look(self, arrived: int | None = None) -> None:
        """Another backward, or the update, begins: warn, once, if gradients were cleared since the last backward.

        Args:
            arrived: the parameter whose gradient told of the backward, and says nothing of the one before.
        """
        had_grads = [p for p in self._had_grads if p != arrived]
        if self._warned or not had_grads or any(self._roster.params[p].grad is not None for p in had_grads):
            return
        if any(offloaded.contributions for offloaded in self._roster.offloaded.values()):
            self._warned = True
            warnings.warn(
                "gradients were cleared through the parameters (model.zero_grad(), or .grad = None), which does not "
                "reach those of offloaded parameters: they count in the coming step; call optimizer.zero_grad() to "
                "discard all",
                UserWarning,
                stacklevel=2,
            )
