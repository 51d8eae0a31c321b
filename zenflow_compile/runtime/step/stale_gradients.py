"""Gradients that a failed backward leaves in the optimizer-in-backward form, where no ``zero_grad()`` clears them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zenflow_compile.runtime import autograd_hooks, errors
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.parameters.registry import ParamRegistry


class StaleGradients:
    """Tells gradients of a backward that raised, or whose step was interrupted, from those of the next one.

    The next backward may become known by its first gradient, which is in ``.grad`` by then and must be kept.
    """

    def __init__(self, registry: ParamRegistry) -> None:
        self._registry = registry
        self._in_grad: set[int] = set()

    def note(self, p: int) -> None:
        """A gradient of ``p``, a resident parameter, has reached ``.grad`` and stays there."""
        self._in_grad.add(p)

    def forget(self) -> None:
        """All gradients in ``.grad`` were discarded."""
        self._in_grad.clear()

    def updated(self) -> list[str]:
        """The names of the parameters that were updated in a failed backward."""
        offloaded = self._registry.offloaded.values()
        return [each.plan.name for each in offloaded if each.state is GradientState.CONSUMED]

    @contextmanager
    def dropped(self, arrived: int | None) -> Iterator[None]:
        """Discard all gradients in ``.grad``, except the first one of the new backward, of parameter ``arrived``.

        That gradient is taken out of ``.grad`` inside the block, and put back only if the block succeeds: on an error
        its backward fails too.

        Raises:
            RuntimeError: the new gradient was added to a stale one. Both are dropped, after the block.
        """
        if arrived is None:
            self._registry.drop_grads()
            yield
            return
        param, name = self._registry.params[arrived], self._registry.plan.params[arrived].name
        mixed = arrived in self._in_grad
        grad = autograd_hooks.take_grad(param, name)
        self._registry.drop_grads()
        yield
        if mixed:
            errors.refuse_mixed_grad(name)
        param.grad = grad
