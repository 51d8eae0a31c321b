"""The order in which examples are trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Epochs:
    """Epochs that follow each other, each in an order of its own: a step's examples depend on its number alone.

    Args:
        count: examples of an epoch.
        seed: of the orders.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._last: tuple[int, Sequence[int]] | None = None  # an epoch and its order

    def of_step(self, step: int, size: int) -> list[int]:
        """Indices of the ``size`` examples of a step."""
        return [self._order(at // self._count)[at % self._count] for at in range(step * size, (step + 1) * size)]

    def _order(self, epoch: int) -> Sequence[int]:
        if self._last is None or self._last[0] != epoch:
            order = list(range(self._count))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._last = epoch, order
        return self._last[1]
