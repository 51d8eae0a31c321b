"""Bookkeeping of the backwards between two optimizer steps, and of gradients that failed ones leave behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from zenflow_compile.runtime import errors
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.parameters.registry import ParamRegistry


class BackwardPass:
    """The backward that runs, or the last one.

    Attributes:
        task: number of autograd's graph task while the backward runs, and after it has failed; None between backwards.
        contributed: it brought a gradient of the engine's parameters.
        received: its gradients were averaged over ranks.
        concurrent: it began while a backward in another thread ran, or after one had failed.
        count: backwards with gradients since the last optimizer step.
        step_failed: an optimizer step that was to use its gradients has raised.
        returned: gradients that compiled backwards return to autograd, by graph task and parameter.
        lock: backwards of graphs may run in several threads; they accumulate one after the other.
    """

    __slots__ = ("_thread", "concurrent", "contributed", "count", "lock", "received", "returned", "step_failed", "task")

    def __init__(self) -> None:
        self.task: int | None = None
        self.contributed = False
        self.received = False
        self.concurrent = False
        self.count = 0
        self.step_failed = False
        self.returned: dict[tuple[int, int], Tensor] = {}
        self.lock = threading.RLock()
        self._thread = threading.get_ident()

    def enter_thread(self) -> None:
        thread = threading.get_ident()
        self.concurrent = self.task is not None and thread != self._thread
        self._thread = thread

    def refuse_concurrent(self) -> None:
        """Raise RuntimeError if another backward runs.

        Backwards of graphs may overlap: ``lock`` makes their gradients arrive one after the other. Not so without a
        graph, where a second one may add to ``.grad`` meanwhile; with ranks, which send in one order; and where the end
        of a backward is a step.
        """
        if self.concurrent:
            errors.refuse_concurrent_backward()

    def reset(self) -> None:
        """Forget contributions: an optimizer step has used them, or they were discarded."""
        self.contributed = False
        self.returned.clear()  # of backwards that failed
        self.count = 0
        self.step_failed = False


class StaleGradients:
    """Tells gradients of a backward that raised, or whose step was interrupted, from those of the next one.

    Only the optimizer-in-backward form needs it: there no ``zero_grad()`` clears them.
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
        offloaded = self._registry.offloaded.values()
        return [each.plan.name for each in offloaded if each.shown.state is GradientState.CONSUMED]

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
        errors.refuse_sparse_grad(param, name)
        grad, param.grad = param.grad, None
        self._registry.drop_grads()
        yield
        if mixed:
            raise RuntimeError(
                f"the gradient of {name} was added to that of an interrupted or failed backward, and the two cannot be "
                "separated, so both backwards were dropped; run this forward and backward again"
            )
        param.grad = grad
