"""Marks parameters as owned by one optimizer, from its construction to ``close()``.

The engine, with its plan, memory and threads, is built at the optimizer's first use. Until then the model may be moved
to another device or dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zenflow_compile.runtime import autograd_hooks, ops
from zenflow_compile.runtime.sharding import refuse_exchanged


class Owner:
    """Identifies an owned parameter to compiled graphs: equal to no other object.

    Parameters are pickled with their attributes, and a saved file must not claim an owner: an empty ``torch.Size`` is
    saved instead, which ``torch.load(weights_only=True)`` can read.
    """

    def __reduce__(self) -> tuple[type[torch.Size], tuple[()]]:
        return torch.Size, ()


class Claim:
    """Marks the parameters of one optimizer as owned, and tells its engine of gradients that reach ``.grad``.

    Attributes:
        params: the parameters, in the order of the plan.
        closing: closes the engine of a collected optimizer, where the thread that collected it cannot.
    """

    def __init__(self, optimizer: Any) -> None:
        self.params: list[Parameter] = []
        self._groups = optimizer.param_groups
        self._owners: list[Owner] = []
        self._position: dict[int, int] = {}
        self._hooks: dict[int, RemovableHandle] = {}
        self._optimizer: weakref.ref[Any] = weakref.ref(optimizer)
        self.serving: weakref.ref[Any] | None = None  # the engine, once it is built
        self.closing: Thread | None = None
        ops.register_claim(self)

    @property
    def optimizer(self) -> Any:
        """The optimizer that made the claim; None if it was garbage-collected."""
        return self._optimizer()

    @property
    def engine(self) -> ops.EngineOps:
        """The optimizer's engine; the first use builds it."""
        engine: ops.EngineOps = self._optimizer().engine  # type: ignore[union-attr]
        return engine

    def add(self, params: Sequence[Parameter]) -> None:
        """Claim further parameters: all, or none if it raises."""
        before = len(self.params)
        try:
            for param in params:
                self._position[id(param)] = len(self.params)
                self._owners.append(Owner())
                self.params.append(param)
                param._zenflow_owner = self._owners[-1]  # type: ignore[attr-defined]
            self.listen()
        except BaseException:
            self.keep(before)
            raise

    def keep(self, count: int) -> None:
        """Give up all parameters but the first ``count``."""
        for p in range(count, len(self.params)):
            if (hook := self._hooks.pop(p, None)) is not None:
                hook.remove()
            if getattr(self.params[p], "_zenflow_owner", None) is self._owners[p]:
                del self.params[p]._zenflow_owner  # type: ignore[attr-defined]
        del self.params[count:], self._owners[count:]
        # Made anew: an interrupt in ``add`` may have left a position without its parameter.
        self._position = {id(param): p for p, param in enumerate(self.params)}

    def listen(self) -> None:
        """Hook parameters that have no hook yet. A frozen parameter can only be hooked after it is unfrozen."""
        for p, param in enumerate(self.params):
            if param.requires_grad and p not in self._hooks:
                self._hooks[p] = autograd_hooks.listen_to_grad(param, p, weakref.ref(self))

    def holds(self, param: Tensor) -> bool:
        """Whether ``param`` is claimed."""
        position = self._position.get(id(param))
        return position is not None and self.params[position] is param

    def accept_grad(self, p: int) -> None:
        """Pass on that a gradient of parameter ``p`` has reached ``.grad``. Raises: see ``Engine.accept_grad``."""
        if (optimizer := self._optimizer()) is None:
            return  # it was collected, and its engine may still be closing in another thread
        engine = None if self.serving is None else self.serving()
        if engine is not None and engine.used and not engine.closed:
            engine.accept_grad(p)
        else:
            optimizer.engine.accept_grad(p)  # builds the engine, or replaces an outdated one

    def check_params(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that the optimizer's ``param_groups`` still have the claimed parameters.

        Args:
            groups: the current ``param_groups``.

        Raises:
            ValueError: the list was replaced, or has other parameters.
            TypeError: a strategy put shards into it, as Accelerate does for FSDP2.
        """
        ids = [id(param) for group in groups for param in group["params"]]
        if groups is not self._groups or ids != list(self._position):
            refuse_exchanged(param for group in groups for param in group["params"] if not self.holds(param))
            raise ValueError(
                "the parameters in param_groups were changed by hand, which the optimizer does not follow: add "
                "parameters with add_param_group(); to train fewer, set requires_grad=False or create a new optimizer"
            )

    def release(self) -> None:
        """Give up all parameters. Idempotent."""
        ops.unregister_claim(self)
        self.keep(0)
