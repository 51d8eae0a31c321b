"""What a backward that was cut short leaves, in the implicit form, where nobody else discards it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zenflow_compile.runtime import entry
from zenflow_compile.runtime.gradient import GradientState
from zenflow_compile.runtime.roster import Roster


class Leftovers:
    """Tells gradients of a backward that raised, or whose step was interrupted, from those of the next one.

    The next one may be known only by its first gradient, which is in ``.grad`` by then: it must not go with the others.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._in_grad: set[int] = set()

    def note(self, p: int) -> None:
        """A gradient of ``p``, which the device updates whole, has reached ``.grad`` and stays there."""
        self._in_grad.add(p)

    def forget(self) -> None:
        """What was in ``.grad`` is discarded."""
        self._in_grad.clear()

    @contextmanager
    def dropped(self, arrived: int | None) -> Iterator[bool]:
        """Discard what is in ``.grad``, but for the gradient of the new backward that has ``arrived`` there.

        That one is out of the way within the block, and not put back if the block raises: so does its backward then.

        Yields:
            Whether parameters were updated in the backward that was cut short.

        Raises:
            RuntimeError: the new gradient was added to one that is dropped. It is dropped, too, after the block.
        """
        updated = any(each.state is GradientState.CONSUMED for each in self._roster.offloaded.values())
        if arrived is None:
            self._roster.drop_grads()
            yield updated
            return
        param, name = self._roster.params[arrived], self._roster.plan.params[arrived].name
        mixed = arrived in self._in_grad
        grad = entry.take_grad(param, name)
        self._roster.drop_grads()
        yield updated
        if mixed:
            entry.refuse_mixed_grad(name)
        param.grad = grad
