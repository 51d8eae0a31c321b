"""What a backward that was cut short leaves, in the optimizer-in-backward form, where nobody else discards it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zenflow_compile.runtime import autograd_hooks, errors
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.parameters.registry import ParamRegistry


class StaleGradients:
    """Tells gradients of a backward that raised, or whose step was interrupted, from those of the next one.

    The next one may be known only by its first gradient, which is in ``.grad`` by then: it must not go with the others.
    """

    def __init__(self, registry: ParamRegistry) -> None:
        self._registry = registry
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
        updated = any(each.state is GradientState.CONSUMED for each in self._registry.offloaded.values())
        if arrived is None:
            self._registry.drop_grads()
            yield updated
            return
        param, name = self._registry.params[arrived], self._registry.plan.params[arrived].name
        mixed = arrived in self._in_grad
        grad = autograd_hooks.take_grad(param, name)
        self._registry.drop_grads()
        yield updated
        if mixed:
            errors.refuse_mixed_grad(name)
        param.grad = grad
